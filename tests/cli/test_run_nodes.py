"""`trigram run --nnodes`: launchers of several machines that meet by themselves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checks import says
from tests.support.elastic_script import dies_once
from tests.support.harness import free_port, until
from trigram.cli import nodes as meeting

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


def _launcher(folder: Path, port: int, *words: str, nodes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trigram", "run", "--nnodes", str(nodes)]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _ended(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        return [(*launcher.communicate(timeout=90), launcher.returncode)[::-1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_launchers_meet(tmp_path: Path) -> None:
    """With other numbers of ranks; a third one is told that all are there, and nobody waits for it."""
    port, script = free_port(), _script(tmp_path, "import time; time.sleep(8)\n" + SAYS)
    two = [_launcher(tmp_path, port, "-n", str(n), script, f"of{n}") for n in (2, 1)]
    until(lambda: not _free(port), 30, "the store")
    time.sleep(5)
    code, errors, _ = _ended([_launcher(tmp_path, port, "-n", "1", script, "late")])[0]
    assert code == 2
    says(" ".join(errors.replace("│", "").split()), "2 launchers have come", "already")
    began = time.monotonic()
    found = _ended(two)
    assert time.monotonic() - began < 25
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


def test_rank_0_is_started_again(tmp_path: Path) -> None:
    """Its launcher serves the store, so the other machine's rank can be found again."""
    port, script = free_port(), _script(tmp_path, dies_once(0))
    found = _ended([_launcher(tmp_path, port, "-n", "1", "--restarts", "2", script) for _ in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found
    assert (tmp_path / "again0").exists() and (tmp_path / "again1").exists()
    assert any("starting it again" in errors for _, errors, _ in found)


def test_launchers_that_do_not_come(tmp_path: Path) -> None:
    """Nobody serves, one is missing, one is too many, and the first one ends."""
    port, script = free_port(), _script(tmp_path, "import time; time.sleep(100)")
    alone = _launcher(tmp_path, port, "-n", "1", "--rdzv-timeout", "2", script, nodes=3)
    code, errors, _ = _ended([alone])[0]
    assert code == 1
    says(errors, "1 of 3 launchers have come", "--nnodes 3 --rdzv-endpoint")
    away = [sys.executable, "-m", "trigram", "run", "--nnodes", "2", "-n", "1", "--rdzv-timeout", "1"]
    away += ["--rdzv-endpoint", "192.0.2.1:9", script]
    done = subprocess.run(away, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
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
