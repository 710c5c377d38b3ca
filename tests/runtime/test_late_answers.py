"""A store that answers late, when the process that asked ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.support import patience
from tests.support.harness import Ranks, free_port, say, until

pytestmark = pytest.mark.waits

ASKS = """
import os, signal, sys, time
import torch.distributed as dist
from trigram.runtime.answers import NoAnswerError, answered

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
try:
    answered(lambda: store.get("key"), 0.3)
except NoAnswerError:
    print("no answer", flush=True)


class Late:
    def __del__(self, kill=os.kill, cont=signal.SIGCONT, sleep=time.sleep, server=int(sys.argv[2])):
        kill(server, cont)
        sleep(2)


sys.modules["late"] = Late()  # deleted while the interpreter ends
sys.exit(7)
"""


def _serves(rank: int, world: int, port: int) -> None:
    served = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    served.set("key", "value")
    say("serves")
    until(lambda: served.check(["over"]), 60)


def test_an_answer_while_the_interpreter_ends() -> None:
    """It ended the process with SIGABRT: C++ does not let its thread be ended by Python."""
    port = free_port()
    with Ranks(1, _serves, port) as server:
        server.await_said(0, "serves")
        command = [sys.executable, "-c", ASKS, str(port), str(server.pid(0))]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=patience.seconds(90)
        )
        os.kill(server.pid(0), signal.SIGCONT)
        dist.TCPStore("127.0.0.1", port, None, False).set("over", "yes")
        server.results(30)
    assert (done.returncode, done.stdout) == (7, "no answer\n"), done
    assert "terminate" not in done.stderr, done.stderr
