"""``trigram evict``: a rank that hangs is taken out of an elastic job, and the others go on."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
import typer
from typer.testing import CliRunner

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_run import loss_of, model, optimizer
from tests.support.harness import Ranks, free_port, say, until
from tests.support.marks import long
from trigram.cli import app, drain
from trigram.elastic import orders
from trigram.elastic.orders import Orders, Period
from trigram.elastic.replicas import Replicas
from trigram.runtime.live_store import ReconnectingStore

pytestmark = pytest.mark.waits


def hangs(rank: int, world: int, who: int, how: str, algorithm: str, size: int) -> Any:
    """A rank that trains; one of them hangs after a few steps. Returns who took part in the last step."""
    trigram.init(elastic=True, replica_size=size)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True)
    members: tuple[int, ...] = ()
    try:
        for step in range(1500 if algorithm == "async" else 500 if how == "trains" else 100):
            opt.zero_grad()
            loss_of(net, step, rank).backward()
            opt.step()
            members = tuple(trigram.stats(net)["ranks"])
            time.sleep(0.01)
            if step == 3:
                say("trains")
            if step == 5 and how != "trains" and (rank == who or (rank == 2 and os.environ.get("BOTH"))):
                if how == "gil":  # not one thread of this interpreter runs any more
                    ctypes.PyDLL(None).sleep(600)
                time.sleep(600)
    except trigram.PeerLostError as error:
        return str(error)
    return members


@pytest.mark.parametrize(
    "world, who, how, algorithm, size, out",
    [
        (3, 2, "sleeps", "gradient_allreduce", 1, [2]),
        (3, 1, "gil", "gradient_allreduce", 1, [1]),
        (2, 0, "sleeps", "gradient_allreduce", 1, [0]),
        long(2, 1, "gil", "gradient_allreduce", 1, [1]),
        (3, 1, "sleeps", "async", 1, [1]),
        (4, 3, "sleeps", "gradient_allreduce", 2, [2, 3]),
        (3, 2, "trains", "gradient_allreduce", 1, [2]),
    ],
)
def test_one_that_hangs_is_taken_out(
    world: int, who: int, how: str, algorithm: str, size: int, out: list[int]
) -> None:
    with Ranks(world, hangs, who, how, algorithm, size) as ranks:
        for rank in range(world):
            ranks.await_said(rank, "trains", 60)
        store = f"127.0.0.1:{ranks.env['MASTER_PORT']}"
        time.sleep(0.5)
        done = CliRunner().invoke(app, ["evict", str(who), "--store", store])
        if who == 0:  # it served the store too, so that nobody can say whether it is out
            assert done.exit_code in (0, 1), done.output
        else:
            assert done.exit_code == 0, done.output
            says(done.output, f"rank(s) {', '.join(map(str, out))} were evicted")
        if how == "gil":  # its process is still there, and somebody else's to end
            ranks.signal(who, signal.SIGKILL)
        results = ranks.results(60, dies=[who])
        said = ranks.log(who)
    stay = tuple(rank for rank in range(world) if rank not in out)
    for rank in stay:
        assert results[rank] == tuple(other for other in stay if other % size == rank % size)
    for rank in set(out) - {who}:
        says(results[rank], f"rank(s) {who} of the replica of rank {rank}")
    if how != "gil":
        says(said, f"trigram evict: rank {who} ends at once", "in hangs")


def test_the_leader_and_another_are_taken_out_together() -> None:
    """The leader accepts the order, and its process ends by it; the other's must end too. The store is a
    launcher's, so that it stays."""
    port = free_port()
    served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port), "BOTH": "yes"}
    with Ranks(3, hangs, 0, "sleeps", "gradient_allreduce", 1, env=env) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "trains", 60)
        time.sleep(0.5)
        assert drain.send_away(f"127.0.0.1:{port}", [0, 2], 60, True) == 0
        until(lambda: all("ends at once" in ranks.log(rank) for rank in (0, 2)), 20, "both ends")
        assert ranks.results(60, dies=[0, 2])[1] == (1,)
    del served


def test_what_orders_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to leave evicts nobody, one to evict lets nobody end its step, and neither empties a job."""
    monkeypatch.setenv("TRIGRAM_SECRET", "between us")
    store, now = ReconnectingStore(dist.HashStore(), None), Period(3, 0)
    orders.give(store, now, [1])
    orders.give(store, now, [2], evicts=True)
    orders.give(store, now, [0, 3], evicts=True)
    found = orders.found(store, now)
    mine = [Orders(rank, Replicas(1).touched) for rank in range(4)]
    accepted = mine[0].accepted(found, now, range(4), [])
    assert accepted == found[:2], "the third would leave nobody"
    assert [of.name_me(accepted, now) for of in mine] == [False, True, False, False]
    assert all(of.evicted(accepted, now) == {2} for of in mine)
    assert not mine[0].evicted(accepted, Period(4, 0))
    of_two = Orders(0, Replicas(2).touched)
    assert of_two.accepted(found[1:], now, range(4), []) == found[1:2]
    assert of_two.evicted(found[1:2], now) == {2}, "its partner leaves by itself"


def test_who_cannot_be_evicted() -> None:
    with Ranks(2, hangs, 1, "sleeps", "gradient_allreduce", 1) as ranks:
        for rank in range(2):
            ranks.await_said(rank, "trains", 60)
        store = f"127.0.0.1:{ranks.env['MASTER_PORT']}"
        says(raises(typer.BadParameter, drain.send_away, store, [5], 9, True), "5 are no members")
        says(raises(typer.BadParameter, drain.send_away, store, [0, 1], 9, True), "are all members")
        assert drain.send_away(store, [1], 0, True) == 0
        until(lambda: "ends at once" in ranks.log(1), 20)
        assert ranks.results(60, dies=[1])[0] == (0,)
