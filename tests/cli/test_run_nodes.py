"""`trigram run --nnodes`: launchers of several machines that meet by themselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer

from tests.support import patience
from tests.support.checks import says
from tests.support.elastic_script import dies_once
from tests.support.harness import free_port, until
from trigram.cli import nodes as meeting
from trigram.runtime.answers import NoAnswerError

pytestmark = pytest.mark.waits

SAYS = """
import os, sys, trigram
trigram.init()
trigram.barrier()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print(*(os.environ[name] for name in names), *sys.argv[1:])
if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
    raise SystemExit("rank 1 has had enough")
if sys.argv[1] == "fails":
    trigram.barrier()
"""


GROWS = """
import os, pathlib, sys, time, torch, trigram
torch.set_num_threads(1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
trigram.init(elastic=True)
net = trigram.with_bagua(net, optimizer=optimizer, elastic=True)
rank = os.environ["RANK"]
for step in range(trigram.stats(net)["steps"], 100_000):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    now = trigram.world_size()
    whole = pathlib.Path(f"rank{rank}of{now}")  # whoever reads it finds all of it
    whole.with_suffix(".new").write_text(str(os.getpid()))
    whole.with_suffix(".new").replace(whole)
    if rank in sys.argv[1:] and pathlib.Path("fail").exists():
        raise SystemExit("it fails for good")
    if all(trigram.elastic_all_gather(pathlib.Path("over").exists())):
        break
    time.sleep(0.05)
print("rank", rank, "has finished", flush=True)
"""


def _launcher(folder: Path, port: int, *words: str, nodes: int | str = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trigram", "run", "--nnodes", str(nodes)]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _ended(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        return [
            (*launcher.communicate(timeout=patience.seconds(90)), launcher.returncode)[::-1]
            for launcher in launchers
        ]
    finally:
        for launcher in launchers:
            launcher.kill()


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_launchers_meet(tmp_path: Path) -> None:
    """With other numbers of ranks; a third one is told that all are there, and nobody waits for it."""
    waits = "import os, pathlib, time\npathlib.Path('up' + os.environ['RANK']).touch()\n"
    waits += "for _ in range(1200):  # it ends also if this test fails\n"
    waits += "    if not pathlib.Path('go').exists(): time.sleep(0.05)\n"
    port, script = free_port(), _script(tmp_path, waits + SAYS)
    two = [_launcher(tmp_path, port, "-n", str(n), script, f"of{n}") for n in (2, 1)]
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(3)), 60, "the ranks")
    code, errors, _ = _ended([_launcher(tmp_path, port, "-n", "1", script, "late")])[0]
    assert code == 2
    says(" ".join(errors.replace("│", "").split()), "2 launchers have come", "already")
    (tmp_path / "go").touch()
    began = time.monotonic()
    found = _ended(two)
    assert time.monotonic() - began < patience.seconds(25)
    assert [code for code, _, _ in found] == [0, 0], found
    lines = sorted(line for _, _, said in found for line in said.splitlines())
    first = next(said for _, _, said in found if "0 3 0" in said)
    if "of2" in first:
        assert lines == ["0 3 0 2 0 of2", "1 3 1 2 0 of2", "2 3 0 1 1 of1"]
    else:
        assert lines == ["0 3 0 1 0 of1", "1 3 0 2 1 of2", "2 3 1 2 1 of2"]


def test_a_rank_that_fails_ends_the_job_on_all_machines(tmp_path: Path) -> None:
    port, script = free_port(), _script(tmp_path, SAYS)
    found = _ended([_launcher(tmp_path, port, "-n", "2", script, "fails") for _ in range(2)])
    assert all(code != 0 for code, _, _ in found), found
    assert any("rank 1 has had enough" in errors for _, errors, _ in found)


def test_a_machine_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Also where its ranks make no call that the others would miss."""
    text = "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(100)"
    port, script = free_port(), _script(tmp_path, text)
    began = time.monotonic()
    found = _ended([_launcher(tmp_path, port, "-n", "1", script) for _ in range(2)])
    assert time.monotonic() - began < patience.seconds(60)
    assert sorted(code for code, _, _ in found) == [1, 3], found
    assert any("ranks of another machine have failed; ending those here" in errors for _, errors, _ in found)


def test_rank_0_is_started_again(tmp_path: Path) -> None:
    """Its launcher serves the store, so the other machine's rank can be found again."""
    port, script = free_port(), _script(tmp_path, dies_once(0))
    found = _ended([_launcher(tmp_path, port, "-n", "1", "--restarts", "2", script) for _ in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found
    assert (tmp_path / "again0").exists() and (tmp_path / "again1").exists()
    assert any("starting it again" in errors for _, errors, _ in found)


def test_machines_come_and_go(tmp_path: Path) -> None:
    """A job of one machine at least and two at most: the second comes later, and a third is told to wait. It
    takes the place of the second when that has lost its power."""
    port, script = free_port(), _script(tmp_path, GROWS)
    words = ["-n", "1", "--min", "1", script]
    first = _launcher(tmp_path, port, *words, nodes="1:2")
    launchers = [first]
    try:
        until((tmp_path / "rank0of1").exists, 60, "the first machine")
        launchers.append(_launcher(tmp_path, port, *words, nodes="1:2"))
        until((tmp_path / "rank1of2").exists, 60, "the second")
        late = _launcher(tmp_path, port, *words, nodes="1:2")
        _, errors = late.communicate(timeout=patience.seconds(60))
        assert late.returncode == 2
        says(" ".join(errors.replace("│", "").split()), "2 launchers run", "already (--nnodes 1:2)")
        (tmp_path / "rank0of1").unlink()
        launchers[1].kill()
        os.kill(int((tmp_path / "rank1of2").read_text()), signal.SIGKILL)
        until((tmp_path / "rank0of1").exists, 60, "what is left")
        launchers.append(_launcher(tmp_path, port, *words, nodes="1:2"))
        until((tmp_path / "rank2of2").exists, 90, "the third")
        (tmp_path / "over").touch()
        found = [(launcher.wait(60), *launcher.communicate()) for launcher in (first, launchers[2])]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    assert [code for code, _, _ in found] == [0, 0], found
    assert ["has finished" in said for _, said, _ in found] == [True, True]


@pytest.mark.parametrize("least", [2, 3])
def test_how_many_ranks_must_be_left_counts_for_all_machines(tmp_path: Path, least: int) -> None:
    """Machine 1 has two ranks, of which both fail for good, and machine 0 has two."""
    port, script = free_port(), _script(tmp_path, GROWS)
    words = ["-n", "2", "--min", str(least), script, "2", "3"]
    two = [_launcher(tmp_path, port, "--node-rank", str(k), *words) for k in (1, 0)]
    until(lambda: all((tmp_path / f"rank{k}of4").exists() for k in range(4)), 90, "all")
    (tmp_path / "fail").touch()
    if least == 2:
        until(lambda: all((tmp_path / f"rank{k}of2").exists() for k in range(2)), 60, "what is left")
        (tmp_path / "over").touch()
    (code1, errors1, _), (code0, errors0, said0) = _ended(two)
    assert code1 == 1
    says(errors1, "it fails for good")
    if least == 2:
        assert code0 == 0 and said0.count("has finished") == 2, errors0
        says(errors1, "the job goes on with 2")
    else:
        assert code0 == 1
        says(errors0, "ranks are left on all machines, and --min is 3; ending those here")


class _Away:
    """A store, which can be away: for a while, or for good."""

    def __init__(self, error: type[Exception] = NoAnswerError) -> None:
        self.store, self.away, self.error = dist.HashStore(), False, error

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise self.error("it is away")
        return getattr(self.store, name)


def test_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has ended without a word; not one whose store is away, or that was stopped itself."""
    monkeypatch.setattr(meeting, "_BEAT", 0.02)
    monkeypatch.setattr(meeting, "_SILENT", 10)
    store = _Away()
    store.add(meeting._COUNT, 3)
    first = meeting.Tally(store, 0, {1: 2, 2: 1}, 4, "a:1")
    second = meeting.Tally(store, 1, {0: 4, 2: 1}, 2, "a:1")
    third = meeting.Tally(store, 2, {}, 1, "a:1")  # it has come later, and knows at once
    assert (first(4), second(2), third(1)) == (3, 5, 6)
    second(1)
    until(lambda: (first(4), third(1)) == (2, 5), 20, "what the second says")
    store.away = True
    time.sleep(0.5)
    assert (first(4), third(1)) == (2, 5)
    store.away = False
    third._stop.set()  # as one whose machine has lost its power
    until(lambda: first(4) == 1, 20, "the silence of the third")
    second(0)
    second.end()
    until(lambda: first(4) == 0 and not first.awaited(), 20, "the end")
    first.end()


def test_a_store_that_is_gone_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call of a TCPStore whose server is gone prints a page."""
    monkeypatch.setattr(meeting, "_BEAT", 0.02)
    store = _Away(dist.DistNetworkError)
    tally = meeting.Tally(store, 0, {1: 2}, 4, "a:1")
    store.away = True
    tally._thread.join(20)
    assert not tally._thread.is_alive() and tally(4) == 2
    tally.end()
    said = capsys.readouterr().err
    assert said.count("the launcher at a:1, which serves the job's store, is gone") == 1, said


def test_launchers_with_other_options(tmp_path: Path) -> None:
    """They would wait for each other, or judge a machine that fails differently."""
    port, script = free_port(), _script(tmp_path, "")
    first = _launcher(tmp_path, port, "-n", "1", script)
    try:
        until(lambda: _answers(port), 60, "the first")
        for words, nodes, has in (([], 3, "--nnodes 3"), (["--min", "1"], 2, "--nnodes 2 --min 1")):
            done = _launcher(tmp_path, port, "-n", "1", *words, script, nodes=nodes)
            _, errors = done.communicate(timeout=patience.seconds(60))
            assert done.returncode == 2
            text = " ".join(errors.replace("│", "").split())
            says(text, f"this launcher has {has}", "has --nnodes 2; give all launchers of a job the same")
        found = _ended([first, _launcher(tmp_path, port, "-n", "1", script)])
        assert [code for code, _, _ in found] == [0, 0], found
    finally:
        first.kill()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_of_several_that_come_at_once_as_many_as_may() -> None:
    store = dist.HashStore()
    nodes = meeting.Nodes.parse("1:3", None)
    assert meeting._numbered(store, nodes, "a:1") == 0  # type: ignore[arg-type]
    running = meeting.Tally(store, 0, {}, 1, "a:1")
    results: list[Any] = []

    def come() -> None:
        try:
            results.append(meeting.Tally(store, meeting._numbered(store, nodes, "a:1"), {}, 1, "a:1"))  # type: ignore[arg-type]
        except typer.BadParameter as error:
            results.append(error)

    threads = [threading.Thread(target=come) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tallies = [one for one in results if isinstance(one, meeting.Tally)]
    assert 1 <= len(tallies) <= 2, results
    for tally in (running, *tallies):
        tally.end()


def test_numbers_of_machines_that_are_none(tmp_path: Path) -> None:
    script = _script(tmp_path, "")
    for words, said in (
        (["--nnodes", "0"], "neither a number"),
        (["--nnodes", "3:2"], "neither a number"),
        (["--nnodes", "2:x"], "neither a number"),
        (["--nnodes", "2", "--node-rank", "2"], "it is from 0 to 1"),
        (["--nnodes", "1:2", "--node-rank", "0"], "numbered as they come"),
        (["--nnodes", "1:2"], "needs --rdzv-endpoint"),
        (["--hosts", "a,b", "-n", "2", "--min", "5"], "--min 5 is more than the 4 ranks"),
    ):
        argv = [sys.executable, "-m", "trigram", "run", *words, script]
        done = subprocess.run(
            argv, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(60), check=False
        )
        assert done.returncode == 2, words
        says(" ".join(done.stderr.replace("│", "").split()), said)


def test_launchers_that_do_not_come(tmp_path: Path) -> None:
    """Nobody serves, one is missing, one is too many, and the first one ends."""
    port, script = free_port(), _script(tmp_path, "import time; time.sleep(100)")
    alone = _launcher(tmp_path, port, "-n", "1", "--rdzv-timeout", "2", script, nodes=3)
    code, errors, _ = _ended([alone])[0]
    assert code == 1
    says(errors, "1 of 3 launchers have come", "--nnodes 3 --rdzv-endpoint")
    away = [sys.executable, "-m", "trigram", "run", "--nnodes", "2", "-n", "1", "--rdzv-timeout", "1"]
    away += ["--rdzv-endpoint", "192.0.2.1:9", script]
    done = subprocess.run(
        away, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(60), check=False
    )
    assert done.returncode == 1
    says(done.stderr, "no launcher answers at 192.0.2.1:9", "on 192.0.2.1 too")
    first = _launcher(tmp_path, port, "-n", "1", script, nodes=3)
    until(lambda: not _free(port), 30, "the store")
    second = _launcher(tmp_path, port, "-n", "1", script, nodes=3)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    until(lambda: int(store.add(meeting._COUNT, 0)) == 2, 60, "the second launcher")
    time.sleep(0.5)  # it waits for the third
    first.terminate()
    code, errors, _ = _ended([second])[0]
    first.kill()
    first.communicate()
    assert code == 1, errors
    says(errors, "has ended while this one waited")


def _free(port: int) -> bool:
    import socket

    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0
