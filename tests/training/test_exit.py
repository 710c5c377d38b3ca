"""How scripts end under asynchronous algorithms: who succeeds waits for the others, who fails does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import patience
from tests.support.harness import free_port, until
from tests.support.marks import long

pytestmark = pytest.mark.waits

_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, trigram

rank, how, folder = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)

def steps(model, condition):
    while True:
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.005)
        if condition():
            return

def main():
    model = trigram.with_bagua(torch.nn.Linear(4, 1), "async_decentralized")
    count = iter(range(20))
    steps(model, lambda: next(count, None) is None)
    if rank == 1:  # trains until the test has seen what rank 0 does
        (folder / "trains").touch()
        try:
            steps(model, (folder / "seen").exists)
        except trigram.PeerLostError:
            (folder / "lost").touch()
            return 5
        return 0
    while not (folder / "trains").exists():
        time.sleep(0.01)
    (folder / "ends").touch()
    if how == "handled":  # as a notebook does with the error of a cell
        try:
            raise ValueError("of another cell")
        except ValueError as e:
            sys.last_type, sys.last_value, sys.last_traceback = type(e), e, e.__traceback__
            sys.last_exc = e
    if how == "caught":
        try:
            sys.exit(2)
        except SystemExit:
            pass
    if how == "raises":
        raise ValueError("the last of its errors")
    if how == "exit 3":
        sys.exit(3)
    if how == "exit with a message":
        sys.exit("no more data")
    return 0

code = main()
if code or how == "exit 0":
    sys.exit(code)
if how == "SystemExit(0)":
    raise SystemExit(0)
"""


@contextmanager
def _two(tmp_path: Path, how: str) -> Iterator[list[subprocess.Popen[Any]]]:
    """Two ranks of the script, real interpreters."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks: list[subprocess.Popen[Any]] = []
    try:
        for r in range(2):
            with (tmp_path / f"out{r}").open("w") as out:
                arguments = [sys.executable, str(script), how, str(tmp_path)]
                ranks.append(subprocess.Popen(arguments, env=env | {"RANK": str(r)}, stdout=out, stderr=out))
        yield ranks
    finally:
        for p in ranks:
            p.kill()
            p.wait()


HOW = [long("exit 3", 3), long("exit with a message", 1), ("raises", 1)]


@pytest.mark.parametrize("how, code", HOW, ids=str)
def test_who_fails_does_not_wait(how: str, code: int, tmp_path: Path) -> None:
    """Rank 0 ends while rank 1 still trains; rank 1 would train until the test has seen that."""
    with _two(tmp_path, how) as ranks:
        assert ranks[0].wait(patience.seconds(60)) == code, (tmp_path / "out0").read_text()
        until((tmp_path / "lost").exists, 60.0, "rank 1 to be told")
        assert ranks[1].wait(patience.seconds(60)) == 5


@pytest.mark.parametrize("how", ["returns", "exit 0", long("SystemExit(0)"), "handled", long("caught")])
def test_who_succeeds_waits(how: str, tmp_path: Path) -> None:
    """Rank 1 trains on after rank 0 has come to its end, and needs its messages until it has ended too."""
    with _two(tmp_path, how) as ranks:
        until((tmp_path / "ends").exists, 60.0, "rank 0 to end its training")
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[0].wait(1.0)
        (tmp_path / "seen").touch()
        codes = [p.wait(patience.seconds(60)) for p in ranks]
        assert codes == [0, 0], [(tmp_path / f"out{r}").read_text() for r in range(2)]
        assert not (tmp_path / "lost").exists()


_LATE_SCRIPT = """
import atexit

def late():  # registered before trigram's own, so it runs after them
    try:
        work.wait()
    except Exception as e:
        print(type(e).__name__, e, flush=True)
    print("the end", flush=True)

atexit.register(late)
import torch, trigram
trigram.init()
work = trigram.all_reduce(torch.ones(4), async_op=True) if trigram.rank() == 0 else None
"""


def test_a_call_that_is_awaited_at_exit_ends(tmp_path: Path) -> None:
    """The main thread comes back from a wait after the job's end, with the call's error."""
    script = tmp_path / "late.py"
    script.write_text(_LATE_SCRIPT)
    command = [sys.executable, "-m", "trigram", "run", "-n", "2", str(script)]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=patience.seconds(120)
    )
    assert ended.stdout.count("the end") == 2, ended.stdout + ended.stderr
    assert "PeerLostError" in ended.stdout or "AbortedError" in ended.stdout, ended.stdout
