"""`trigram run --hosts`: ranks on several hosts, what they get, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.test_run_nodes import GROWS
from tests.support import netns, patience
from tests.support.checks import says
from tests.support.elastic_script import dies_once
from tests.support.harness import until
from trigram.cli import remote
from trigram.runtime.end_signals import EndSignals

pytestmark = pytest.mark.waits

TRAINS = """
import os, torch, trigram
model = trigram.with_bagua(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(trigram.rank()))).square().mean().backward()
    optimizer.step()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
hosts = len(trigram.new_group(range(trigram.world_size())).hosts())
print(*(os.environ[name] for name in names), hosts, os.environ["TRIGRAM_SECRET"], os.environ["MINE"])
print("arguments", __import__("sys").argv[1:])
"""


def _hosts(count: int) -> str:
    return ",".join(f"{netns.name(k)}={netns.address(k)}" for k in range(count))


def _ssh(folder: Path) -> str:
    """As ssh: a shell there, without this environment; what it writes and reads goes through."""
    fake = folder / "ssh"
    inside = 'exec env -i PATH="$PATH" ip netns exec "$host" sh -c "$*"'
    fake.write_text(f"#!/bin/sh\nhost=$1; shift; {inside}\n")
    fake.chmod(0o755)
    return str(fake)


def _run(
    folder: Path, text: str, *words: str, hosts: int = 2, ranks: int = 2, more: Sequence[str] = ()
) -> subprocess.Popen[str]:
    (folder / "my script.py").write_text(text)
    command = [sys.executable, "-m", "trigram", "run", "--hosts", _hosts(hosts), "-n", str(ranks)]
    command += ["--ssh", _ssh(folder), "--env", "MINE", *more, "my script.py", *words]
    env = {**os.environ, "TRIGRAM_SECRET": "it's $HOME, long enough", "MINE": "a b"}
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ranks_on_two_hosts_train_together(several_hosts: None, tmp_path: Path) -> None:
    process = _run(tmp_path, TRAINS, "--lr", "$X 'y'")
    out, err = process.communicate(timeout=patience.seconds(100))
    assert process.returncode == 0, err
    lines = sorted(line for line in out.splitlines() if "arguments" not in line)
    assert lines == [f"[{k}] {k} 4 {k % 2} 2 {k // 2} 2 it's $HOME, long enough a b" for k in range(4)], out
    says(out, """arguments ['--lr', "$X 'y'"]""")


def test_a_rank_of_another_host_is_started_again(several_hosts: None, tmp_path: Path) -> None:
    process = _run(tmp_path, dies_once(1), ranks=1, more=["--restarts", "2"])
    _, err = process.communicate(timeout=patience.seconds(100))
    assert process.returncode == 0, err
    assert (tmp_path / "again0").exists() and (tmp_path / "again1").exists()
    says(err, "rank 1 was ended by the signal SIGKILL; starting it again", "1 joined")


def test_a_rank_that_fails_ends_those_of_other_hosts(several_hosts: None, tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit('no luck')\ntime.sleep(100)"
    began = time.monotonic()
    process = _run(tmp_path, text)
    _, err = process.communicate(timeout=patience.seconds(60))
    assert process.returncode == 1 and time.monotonic() - began < patience.seconds(50)
    says(err, "[3] no luck", "rank 3 failed with exit code 1", f"the ranks of {netns.name(1)} have failed")


def test_who_ended_for_the_others_has_not_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """It may end first: the host whose ranks have failed prints their output, and ends the others of it."""
    scripts = ["exit 113", "sleep 1; exit 3"]
    ended = [subprocess.Popen(["sh", "-c", script]) for script in scripts]
    on = [remote.Host(name, name) for name in ("follows", "fails")]
    with ExitStack() as stack:
        assert remote._watch(on, ended, EndSignals(stack), False) == 3
    told = capfd.readouterr().err
    assert "the ranks of fails have failed (exit code 3)" in told and "follows" not in told


def test_a_job_goes_on_without_a_host(several_hosts: None, tmp_path: Path) -> None:
    """The rank of the second host fails for good."""
    process = _run(tmp_path, GROWS, "1", ranks=1, more=["--min", "1"])
    try:
        until(lambda: all((tmp_path / f"rank{k}of2").exists() for k in range(2)), 90, "both")
        (tmp_path / "fail").touch()
        until((tmp_path / "rank0of1").exists, 60, "what is left")
        (tmp_path / "over").touch()
        out, err = process.communicate(timeout=patience.seconds(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    says(err, "the job goes on with 1")
    says(out, "[0] rank 0 has finished")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_starting_host_has_gone(
    several_hosts: None, tmp_path: Path, number: signal.Signals
) -> None:
    text = (
        "import os, pathlib, time\n"
        "pathlib.Path(f'pid{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n"
        "time.sleep(100)"
    )
    process = _run(tmp_path, text)
    files = [tmp_path / f"pid{k}" for k in range(4)]
    until(lambda: all(file.exists() and file.read_text() for file in files), 60)
    pids = [int(file.read_text()) for file in files]
    process.send_signal(number)
    process.communicate(timeout=patience.seconds(60))
    until(lambda: not any(_runs(pid) for pid in pids), 30)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_host_that_cannot_be_reached_is_named(several_hosts: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(100)")
    command = [sys.executable, "-m", "trigram", "run", "--hosts", f"{netns.name(0)},nowhere", "-n", "1"]
    command += ["--ssh", "ip netns exec", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(60), check=False
    )
    assert done.returncode
    says(done.stderr, "the ranks of nowhere have failed", "Cannot open network namespace")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--hosts", " , "], "needs a host or more"),
        (["--hosts", "a,b", "--nnodes", "2", "--node-rank", "0"], "--node-rank, --nnodes is for launchers"),
        (["--env", "NAME"], "--env goes with --hosts"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, given: list[str], told: str) -> None:
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-m", "trigram", "run", *given, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(60), check=False
    )
    assert done.returncode == 2
    says(" ".join(done.stderr.replace("│", " ").split()), told)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    part = [sys.executable, "-m", "trigram", "run", "-n", "1", "--obey", "script.py"]
    for told, words in (
        ('{"environment": {}, "folder": "/no/such"}\n', ["no folder /no/such", "same place"]),
        ("x\n", ["trigram run --hosts"]),
        ("", ["trigram run --hosts"]),
    ):
        done = subprocess.run(
            part,
            input=told,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience.seconds(60),
            check=False,
        )
        assert done.returncode
        says(done.stderr, *words)
