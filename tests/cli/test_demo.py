"""`trigram demo`: a network that is really slow, and trainings that are compared over it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import patience
from tests.support.checks import says
from trigram.cli import app, demo, slow_network

_SHORT = """
from pathlib import Path
from trigram.cli import demo
from trigram.runtime import launch
demo.STEPS, demo.ALGORITHMS = 14, ("gradient_allreduce", "bytegrad")
demo.run(Path("out"))
launch.leave_job()
"""
_ENTERS = """
import sys
from trigram.cli import slow_network
slow_network.enter(int(sys.argv[1]), 2, sys.argv[2:])
"""
_SENDS = """
import os, socket, threading, time
size = 4 << 20
def send(to):
    with socket.create_connection(to) as s:
        s.sendall(bytes(size))
server = socket.create_server(("127.0.0.1", 0))
began, got = time.monotonic(), 0
threading.Thread(target=send, args=(server.getsockname(),)).start()
with server.accept()[0] as s:
    while part := s.recv(1 << 16):
        got += len(part)
assert got == size
print(8e-6 * size / (time.monotonic() - began), os.environ["TRIGRAM_DEMO_NETWORK"])
"""
needs_network = pytest.mark.skipif(
    bool(slow_network.why_not()), reason="no network namespace can be made here"
)


def _python(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=patience.seconds(180),
        check=False,
        cwd=cwd,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_network
def test_the_network_is_as_slow_as_it_says(tmp_path: Path) -> None:
    rates: list[float] = []
    while not rates or (max(rates) < 20 and len(rates) < 5):  # a busy machine may be slower still
        out = _python("-c", _ENTERS, "40", sys.executable, "-c", _SENDS, cwd=tmp_path)
        measured, says = out.split()
        assert says == "40"
        rates.append(float(measured))
    # One alone has what two have together, and a bucket of 128 KiB at once.
    assert 20 < max(rates) < 100, rates


def test_paced_connections_are_as_slow_as_they_say() -> None:
    """Also those that somebody else has opened, in each direction."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sends = socket.create_connection(server.getsockname())
        receives, _ = server.accept()
    slow_network.pace(40)
    with sends, receives:
        for one, other in ((sends, receives), (receives, sends)):
            began, size = time.monotonic(), 4 << 20
            thread = threading.Thread(target=one.sendall, args=(bytes(size),))
            thread.start()
            while size:
                size -= len(other.recv(1 << 16))
            thread.join()
            # At its start a connection is faster. On a busy machine it is slower.
            assert time.monotonic() - began > 0.5 * 8e-6 * (4 << 20) / 40


@pytest.mark.parametrize("paced", [pytest.param(False, marks=needs_network), True])
def test_a_short_one(tmp_path: Path, paced: bool) -> None:
    script = tmp_path / "short.py"
    script.write_text(_SHORT)
    command = ["-m", "trigram", "run", "-n", "2", str(script)]
    if paced:
        more = slow_network.paced(200)
        assert more, "the kernel paces connections everywhere"
        out = _python(*command, cwd=tmp_path, env={**os.environ, **more})
        assert "to which the kernel paces" in out
    else:
        out = _python("-c", _ENTERS, "200", sys.executable, *command, cwd=tmp_path)
    assert all(len(line) <= 80 for line in out.splitlines()), out
    assert "over 200 Mbit/s" in out and "What next" in out
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["mbit"] == 200 and found["ranks"] == 2
    ddp, ours, bytegrad = found["trainings"]
    assert ddp["losses"] == ours["losses"] and ddp["held_out"] == ours["held_out"]
    assert [len(each["seconds"]) for each in found["trainings"]] == [14] * 3
    assert bytegrad["losses"] != ddp["losses"] and abs(bytegrad["held_out"] - ddp["held_out"]) < 0.1
    assert (tmp_path / "out" / "loss_over_seconds.png").stat().st_size > 10_000


def test_when_a_training_has_a_loss() -> None:
    one = demo.Training("x", [float(i) for i in range(1, 21)], [4.0] * 5 + [2.0] * 15, 2.0)
    assert one.curve()[0] == [float(i) for i in range(10, 21)]
    assert one.reaches(3.0) == 10.0 and one.reaches(2.0) == 15.0 and one.reaches(1.0) is None


def test_a_folder_that_cannot_be_written_is_told_before_the_trainings() -> None:
    done = CliRunner().invoke(app, ["demo", "--out", "/proc/none/demo"])
    assert done.exit_code == 2
    says(" ".join(done.output.replace("│", "").split()), "--out /proc/none/demo cannot be written")
