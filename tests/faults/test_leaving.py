"""What a rank sends last arrives, however slow the link; a peer that takes nothing holds it up briefly."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

import trigram
from tests.support import netns, patience
from tests.support.checks import raises, says
from tests.support.harness import Ranks, await_flag, flag, run, say
from tests.support.marks import long

pytestmark = pytest.mark.waits

SIZE = 1_000_000
RATES = {0: "10mbit", 1: "10mbit"}
CALLS = {
    "broadcast": lambda rank, t: trigram.broadcast(t, 0),
    "reduce": lambda rank, t: trigram.reduce(t, 1),
    "send": lambda rank, t: trigram.send(t, 1) if rank == 0 else trigram.recv(t, 0),
}


def last_result(rank: int, world: int, call: str) -> list[float]:
    """Rank 0 has nothing left to do when its part of the call has left it, seconds before it has arrived."""
    trigram.init()
    t = torch.full((SIZE,), rank + 1.0)
    trigram.barrier()
    CALLS[call](rank, t)
    return [float(t.min()), float(t.max())]


@pytest.mark.parametrize(
    ("call", "tls"), [("broadcast", False), ("send", True), long("reduce", False), long("broadcast", True)]
)
def test_the_last_result_arrives_on_a_slow_link(several_hosts: None, call: str, tls: bool) -> None:
    env = {"TRIGRAM_TLS": "1", "TRIGRAM_SECRET": "f" * 32} if tls else {}
    with netns.limited(RATES):
        results = run(2, last_result, call, transport="auto", hosts=[0, 1], env=env, timeout=60)
    assert results[1] == [3.0 if call == "reduce" else 1.0] * 2


def leaves(rank: int, world: int) -> float:
    """How long rank 0 takes to leave while rank 1, which it has sent much to, is cut off."""
    trigram.init()
    t = torch.ones(SIZE)
    trigram.barrier()
    if rank == 1:
        raises(trigram.PeerLostError, trigram.recv, t, 0)
        return 0.0
    trigram.send(t, 1)
    say("sent")
    await_flag("cut")
    began = time.monotonic()
    trigram.shutdown()
    flag("left")
    return time.monotonic() - began


def test_a_peer_that_takes_nothing_holds_up_nobody_for_long(several_hosts: None) -> None:
    cable = ["ip", "-n", netns._switch(), "link", "set", "port1"]
    env = {"TRIGRAM_SILENCE": patience.silence(2)}
    with netns.limited(RATES), Ranks(2, leaves, transport="auto", hosts=[0, 1], env=env) as ranks:
        ranks.await_said(0, "sent")
        subprocess.run([*cable, "down"], check=True)
        try:
            (ranks.dir / "flag-cut").touch()
            took = ranks.results(60)[0]
            log = ranks.log(0)
        finally:
            subprocess.run([*cable, "up"], check=True)
    assert 1 < took < patience.seconds(20)
    says(log, "rank 0 leaves, and rank 1 has not received the last", "bytes")
