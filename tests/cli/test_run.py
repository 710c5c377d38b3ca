"""`trigram run`: starts ranks, ends them, and starts ranks of elastic jobs again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import patience
from tests.support.checks import says
from tests.support.harness import free_port, until
from tests.support.marks import long
from trigram.cli import app
from trigram.runtime import launch

pytestmark = pytest.mark.waits


def _script(folder: Path, text: str) -> list[str]:
    """The command that runs this text as a script."""
    (folder / "script.py").write_text("import os, sys, time, pathlib\n" + text)
    return [sys.executable, str(folder / "script.py")]


def test_arguments_reach_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options behind the script are the script's, also those that trigram has."""
    monkeypatch.chdir(tmp_path)
    rank = "os.environ['RANK'] + os.environ['WORLD_SIZE']"
    _script(tmp_path, f"pathlib.Path({rank}).write_text(str(sys.argv[1:]))")
    argv = ["-n", "7", "--restarts", "x", "--", "-m"]
    for how in (["script.py"], ["-m", "script"]):
        assert CliRunner().invoke(app, ["run", "-n", "2", *how, *argv]).exit_code == 0
        for name in ("02", "12"):
            assert (tmp_path / name).read_text() == str(argv)
            (tmp_path / name).unlink()


def test_a_port_of_the_store_is_used(tmp_path: Path) -> None:
    """So that trigram status finds it from outside."""
    command = _script(tmp_path, "pathlib.Path(sys.argv[1]).write_text(os.environ['MASTER_PORT'])")[1:]
    said, port = tmp_path / "port", free_port()
    done = CliRunner().invoke(app, ["run", "-n", "1", "--port", str(port), *command, str(said)])
    assert done.exit_code == 0 and said.read_text() == str(port)
    done = CliRunner().invoke(app, ["run", "--port", "1", "--rdzv-endpoint", "a:2", *command])
    assert done.exit_code == 2 and "names the port already" in " ".join(done.output.split())


def test_what_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["run", "missing.py"])
    assert done.exit_code == 2 and "there is no script missing.py" in done.output
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["run", *_script(tmp_path, "")[1:]])
    assert done.exit_code == 1
    says(str(done.exception), "mpiexec", "starts the ranks here")


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    command = _script(tmp_path, "if os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(100)")
    began = time.monotonic()
    code, errors = launch.launch(3, command)[:2]
    assert code == 1 and time.monotonic() - began < patience.seconds(60)
    says(errors, "rank 1 failed with exit code 1", "no luck")


def test_a_rank_is_not_started_for_ever(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = _script(
        tmp_path, "print('started', flush=True)\nif os.environ['RANK'] == '1': os.abort()\ntime.sleep(100)"
    )
    code = launch.launch(2, command, show="all", restarts=2).code
    said = capfd.readouterr()
    assert code == 128 + signal.SIGABRT and said.out.count("started") == 4
    says(said.err, "SIGABRT; starting it again (1 restarts left)", "(0 restarts left)")


def test_a_rank_that_comes_too_late_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job finishes without the rank that was started again, which would wait for it."""
    monkeypatch.setattr(launch, "LATE_SECONDS", 0.5)
    first = f"first = pathlib.Path({str(tmp_path / 'first')!r})\nif os.environ['RANK'] == '1':\n"
    again = "    if first.exists(): time.sleep(100)\n    first.touch()\n    os.abort()\n"
    rest = "while not first.exists(): time.sleep(0.05)\ntime.sleep(1)"
    code = launch.launch(2, _script(tmp_path, first + again + rest), show="all", restarts=1).code
    assert code == 0
    says(capfd.readouterr().err, "the job has finished without rank(s) 1")


@pytest.mark.parametrize(("enters", "is_elastic"), [(False, True), (True, True), (False, False)])
def test_a_rank_that_fails_after_the_others_have_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], enters: bool, is_elastic: bool
) -> None:
    """One that was started again and has not entered the elastic job that they were in cannot; one that has
    entered it has failed, and so has one of a job that is not elastic."""
    first = f"first = pathlib.Path({str(tmp_path / 'first')!r})\nif os.environ['RANK'] == '1':\n"
    entered = "pathlib.Path(os.environ['TRIGRAM_MEMBER_FILE']).touch()"
    again = f"    if first.exists():\n        time.sleep(1.5)\n        {entered if enters else 'pass'}\n"
    fails = "        sys.exit('broken pipe')\n    first.touch()\n    os.abort()\n"
    rest = "while not first.exists(): time.sleep(0.05)\ntime.sleep(0.5)\n" + (entered if is_elastic else "")
    code, errors = launch.launch(2, _script(tmp_path, first + again + fails + rest), restarts=3)[:2]
    said = capfd.readouterr().err
    if enters or not is_elastic:
        assert code == 1
        says(errors, "rank 1 failed with exit code 1", "broken pipe")
    else:
        assert code == 0
        says(said, "the job has finished without rank 1")


SAVES = """
import signal
def save(*_):
    pathlib.Path(f"asked{os.getpid()}").touch()
    time.sleep(float(sys.argv[2]))
    pathlib.Path(f"saved{os.getpid()}").touch()
    sys.exit(0)

signal.signal(signal.Signals[sys.argv[1]], save)
signal.signal(signal.SIGTERM, save)  # what the launcher sends
pathlib.Path(f"pid{os.getpid()}").touch()
time.sleep(100)
"""


RUN, CHAOS = ["run", "-n", "2"], ["chaos", "--ranks", "2", "--"]


@pytest.mark.parametrize(
    ("how", "name", "again"),
    [
        (RUN, "SIGTERM", False),
        (RUN, "SIGTERM", True),
        (RUN, "SIGHUP", False),
        long(RUN, "SIGQUIT", False),
        long(RUN, "SIGINT", False),
        long(RUN, "SIGINT", True),
        long(CHAOS, "SIGTERM", False),
    ],
)
def test_a_signal_to_the_launcher_ends_the_ranks(
    tmp_path: Path, how: list[str], name: str, again: bool
) -> None:
    """They have time to save; a second signal ends them at once."""
    _script(tmp_path, SAVES)
    number = signal.Signals[name]
    command = [sys.executable, "-m", "trigram", *how, "script.py", name, "60" if again else "3"]
    # Under nohup SIGHUP is ignored by all that is started, and a launcher leaves that so.
    before = signal.signal(number, signal.SIG_DFL) if name == "SIGHUP" else None
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as launcher:
        try:
            if before is not None:
                signal.signal(number, before)
            until(lambda: len(list(tmp_path.glob("pid*"))) == 2, 60)
            # A terminal sends SIGINT to all processes, the ranks among them.
            (os.killpg if name == "SIGINT" else os.kill)(launcher.pid, number)
            until(lambda: len(list(tmp_path.glob("asked*"))) == 2, 60)
            if again:
                launcher.send_signal(number)
            assert launcher.wait(40) in (128 + number, -number)  # less than what was left to save takes
        finally:
            launcher.kill()
    assert len(list(tmp_path.glob("saved*"))) == (0 if again else 2)
    for file in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name[3:]), 0)


TOLD_EARLY = """
from trigram.runtime import launch
launch.launch(24, ["sh", "-c", "touch pid$$; test $RANK = 0 && kill -{} $PPID; exec sleep 100"])
"""


@pytest.mark.parametrize("signals", ["TERM", "TERM $PPID; kill -HUP"])
def test_a_signal_while_ranks_are_started_leaves_none(tmp_path: Path, signals: str) -> None:
    """The first of them sends it; or two, as a terminal that is closed."""
    with subprocess.Popen([sys.executable, "-c", TOLD_EARLY.format(signals)], cwd=tmp_path) as launcher:
        assert launcher.wait(60) in {
            sign * number + 128 * (sign > 0) for number in (1, 15) for sign in (1, -1)
        }
    started = list(tmp_path.glob("pid*"))
    for file in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name[3:]), 0)
    assert started


LINES = """
for i in range(3000):
    print(f"rank {os.environ['RANK']}", "says", i, file=(sys.stdout, sys.stderr)[i % 2])
print("and no newline", end="")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_two_ranks_do_not_mix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], unbuffered: str
) -> None:
    """Neither where a buffer is full in the midst of a line, nor where a line is written in parts."""
    command = _script(tmp_path, LINES)
    code = launch.launch(2, command, show="all", environment={"PYTHONUNBUFFERED": unbuffered}).code
    said = capfd.readouterr()
    assert code == 0 and said.out.count("and no newline") == 2
    lines = [*said.out.replace("and no newline", "").splitlines(), *said.err.splitlines()]
    assert sorted(lines) == sorted(f"rank {rank} says {i}" for rank in range(2) for i in range(3000))


RAISES = """
import atexit
FAILED = __file__ + ".failed"
rank = os.environ["RANK"]
if rank == "1":
    # It ends after the others, which begin to fail once its traceback is written.
    atexit.register(time.sleep, 1.0)
    atexit.register(open, FAILED, "w")
    try:
        [][1]
    except IndexError as error:
        raise RuntimeError("planned") from error
while not os.path.exists(FAILED):
    time.sleep(0.01)
time.sleep(0.4)
raise ValueError(f"rank 1 is gone, says {rank}")
"""


@pytest.mark.parametrize("prefix", [False, True])
def test_what_the_first_to_fail_says_comes_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], prefix: bool
) -> None:
    """Although its process ends after those of the others, which fail because of it."""
    code = launch.launch(3, _script(tmp_path, RAISES), show="all", prefix=prefix, tee=tmp_path).code
    said = capfd.readouterr().err
    reports, last = said.split("trigram: rank 1 failed first. The end of what it wrote:\n")
    assert code == 1 and all(
        f"trigram: rank {rank} failed with exit code 1\n" in reports for rank in range(3)
    )
    assert last.startswith("Traceback") and last.endswith("RuntimeError: planned\n")
    says(last, "IndexError: list index out of range", "The above exception was the direct cause")
    assert "is gone" not in last and reports.count("is gone, says") == 2 * 2  # the line, and its value
    for rank in (0, 2):
        text = (tmp_path / f"rank{rank}.log").read_text()
        assert text.startswith("Traceback") and f"is gone, says {rank}" in text


def test_a_rank_that_is_killed_and_one_that_fails_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "rank = os.environ['RANK']\nfor i in range(50): print(rank, 'says', i, flush=True)\n"
    script = "FAILED = __file__ + '.failed'\n" + script
    script += "if rank == '0':\n    open(FAILED, 'w')\n    os.abort()\n"
    script += "while not os.path.exists(FAILED):\n    time.sleep(0.01)\ntime.sleep(0.5)\nsys.exit('lost')"
    launch.launch(2, _script(tmp_path, script), show="all")
    said = capfd.readouterr().err
    says(said, "rank 0 was ended by the signal SIGABRT", "rank 1 failed with exit code 1")
    last = said.split("trigram: rank 0 failed first. The end of what it wrote:\n")[1]
    assert last.splitlines() == [f"0 says {i}" for i in range(30, 50)]
    # Nothing was written since: it is not said twice.
    code = launch.launch(2, _script(tmp_path, "if os.environ['RANK'] == '0': 1 / 0"), show="all").code
    said = capfd.readouterr().err
    assert code == 1 and said.count("ZeroDivisionError") == 1


@pytest.mark.parametrize("least, code", [(1, 0), (2, 0), (3, 3), (None, 3)])
def test_the_others_go_on_with_enough_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], least: int | None, code: int
) -> None:
    seconds = 1 if code == 0 else 100  # until they are ended
    script = f"if os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep({seconds})\npathlib.Path('done').touch()"
    command = _script(tmp_path, f"os.chdir({str(tmp_path)!r})\n{script}")
    done = launch.launch(3, command, show="all", least=least)
    said = capfd.readouterr().err
    assert done.code == code and (tmp_path / "done").exists() == (code == 0)
    assert ("rank 1 failed with exit code 3; the job goes on with 2" in said) == (code == 0)


LOSES = """
import signal, torch, trigram
trigram.init(elastic=True)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = trigram.with_bagua(net, optimizer=optimizer, elastic=True)
counted = 0
while counted < 5:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    steps, counted = trigram.stats(model)["steps"], counted + (trigram.world_size() == 2)
    if steps == 5 and trigram.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if steps >= 9 and trigram.world_size() == 3 and trigram.rank() == 2:
        trigram.drain()
print("ends", flush=True)
"""


def test_a_killed_rank_and_one_that_leaves_are_missed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = launch.launch(4, _script(tmp_path, LOSES), show="all", least=2, timeout=100).code
    said = capfd.readouterr()
    assert code == 0 and said.out.count("ends") == 2, said.err
    assert said.err.count("the job goes on with") == 1, said.err


TERMINAL = """
for i in range(400):
    (sys.stdout if i % 2 else sys.stderr).write(f"{os.environ['RANK']} {i}\\n")
size = os.get_terminal_size(2)
print(sys.stdout.isatty(), sys.stderr.isatty(), size.columns, size.lines)
"""


def test_on_a_terminal_ranks_have_terminals(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trigram", "run", "-n", "2", _script(tmp_path, TERMINAL)[1]]
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (33, 77))
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as job:
        os.close(theirs)
        said = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:
                break
            said += chunk
        assert job.wait(patience.seconds(60)) == 0
    os.close(ours)
    lines = said.decode().split("\r\n")  # which the terminal makes of a newline
    assert "\r" not in "".join(lines) and lines.count("True True 77 33") == 2
    for rank in range(2):  # in order, whichever stream
        assert [line for line in lines if line.startswith(f"{rank} ")] == [f"{rank} {i}" for i in range(400)]


DIES = """
import signal, torch, trigram
class Seen:
    lost = back = 0
    def state_dict(self): return vars(self)
    def load_state_dict(self, state): vars(self).update(state)

first, seen = not pathlib.Path("died").exists(), Seen()
trigram.init(elastic=True)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = trigram.with_bagua(net, optimizer=optimizer, elastic=[seen])
for step in range(trigram.stats(model)["steps"], 100_000):
    if step == 5 and first and os.environ["RANK"] == "1":
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.full((1, 4), step / 1e5)).sum().backward()
    optimizer.step()
    seen.lost += trigram.world_size() == 2
    seen.back += seen.lost > 0 and trigram.world_size() == 3
    if seen.back == 5: break  # the same step on all ranks
    time.sleep(0.02)
# In one write: print makes two, and lines of two ranks would mix.
sys.stdout.write(f"end: {step} {trigram.world_size()} {net.weight.tolist()}\\n")
"""


def test_an_elastic_job_survives_a_killed_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed; started again it joins, and all ranks finish with the same weights."""
    monkeypatch.chdir(tmp_path)
    code = launch.launch(3, _script(tmp_path, DIES), show="all", timeout=200, restarts=1).code
    said = capfd.readouterr()
    assert code == 0, said
    says(said.err, "rank 1 was ended by the signal SIGKILL; starting it again")
    ends = [line for line in said.out.splitlines() if line.startswith("end")]
    assert len(ends) == 3 and len(set(ends)) == 1 and " 3 [[" in ends[0], said
