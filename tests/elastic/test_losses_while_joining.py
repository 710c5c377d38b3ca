"""While ranks join an elastic job, others are lost: those that join, their source, and who trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.elastic.test_joining import late
from tests.support.checks import says
from tests.support.elastic_run import await_step, come, loss_of, model, optimizer, the_same, train
from tests.support.harness import Ranks, await_flag, flag, free_port, say, scratch
from tests.support.marks import long
from trigram import collectives
from trigram.elastic import state_transfer

pytestmark = pytest.mark.waits


def gated(rank: int, world: int, run: Any, *arguments: Any) -> Any:
    """Runs a rank that joins when others are ready to join with it."""
    say("ready")
    await_flag("gate", 60)
    return run(rank, world, *arguments)


def dies_as_it_joins(rank: int, world: int) -> None:
    """Where it would begin to receive the state."""

    def dies(*_: Any) -> None:
        flag(f"entered-{rank}")
        os.kill(os.getpid(), signal.SIGKILL)

    state_transfer.StateTransfer.expect = dies  # type: ignore[method-assign]
    train(rank, world, 150, "gradient_allreduce", None, 0.03, True)


@pytest.mark.parametrize("how", ["does not fit", "dies"])
@pytest.mark.parametrize("transport", ["shm", long("tcp")])
def test_of_several_that_join_one_does_not(how: str, transport: str) -> None:
    """The others that join are not waited for where they are not yet, nor wait there themselves."""
    steps = 150
    arguments = (steps, "gradient_allreduce", None, 0.03)
    with Ranks(2, train, *arguments, transport=transport) as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "5"
        for rank in (2, 3):
            come(ranks, rank, train, *arguments, True, run=gated)
        odd = (late, steps, "model") if how == "does not fit" else (dies_as_it_joins,)
        come(ranks, 4, *odd, run=gated)
        for rank in (2, 3, 4):
            ranks.await_said(rank, "ready")
        (ranks.dir / "flag-gate").touch()
        results = ranks.results(90, dies=[4] if how == "dies" else [])
    if how == "does not fit":
        says(results[4], "MismatchError", "another model")
    got = the_same(results, [0, 1, 2, 3])
    assert got["steps"] == steps and got["history"][-1] == (0, 1, 2, 3)


def its_source_dies(rank: int, world: int, joins: bool) -> dict[str, Any]:
    if rank == 0:

        def dies(*_: Any) -> None:
            time.sleep(0.3)  # the joining rank waits for the state
            os.kill(os.getpid(), signal.SIGKILL)

        state_transfer.StateTransfer.send = dies  # type: ignore[method-assign]
    return train(rank, world, 100, "gradient_allreduce", None, 0.03, joins)


def test_the_source_dies_when_it_would_send() -> None:
    """The joining rank waits for it in with_bagua, and the others for both in the preparation of a step."""
    port = free_port()
    served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    with Ranks(3, its_source_dies, False, env=env) as ranks:
        await_step(ranks, 1, 5)
        ranks.env["WORLD_SIZE"] = "4"
        come(ranks, 3, True, run=its_source_dies)
        results = ranks.results(90, dies=[0])
    assert the_same(results, [1, 2, 3])["history"][-1] == (1, 2, 3)
    del served


class _SlowToLoad:
    """A part of the training state that the joining rank loads only when the others have trained on."""

    def state_dict(self) -> dict[str, Any]:
        return {"told": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        say("loads")
        await_flag("trained-on", 40)


def joins_slowly(rank: int, world: int, algorithm: str, joins: bool) -> dict[str, Any]:
    trigram.init(elastic=True)
    net = model()
    net.register_parameter("count", torch.nn.Parameter(torch.tensor([3 * (rank < 2)]), requires_grad=False))
    net.register_buffer("place", torch.tensor([rank]))
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=[_SlowToLoad()])
    joined, most = None, 6000
    for step in range(most):
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        time.sleep(0.01)
        if step == 5:
            say("trains")
        if joined is None and trigram.world_size() == 3:
            joined = step
        if joined is not None and step == joined + 20 and rank == 0 and not joins:
            flag("trained-on")
        if (scratch() / "flag-over").exists():
            break
    return {"count": int(net.count), "place": int(net.place), "moments": len(opt.state), "steps": step}


@contextmanager
def third_loads(algorithm: str, waits: bool) -> Iterator[Ranks]:
    """Two ranks that train, and a third that has received the state and loads it; `waits`: until it is told
    to go on, and otherwise until the others have trained on."""
    with Ranks(2, joins_slowly, algorithm, waits) as ranks:
        for rank in range(2):
            ranks.await_said(rank, "trains")
        ranks.env["WORLD_SIZE"] = "3"
        ranks.restart(2, joins_slowly, algorithm, True)
        ranks.await_said(2, "loads", 60)
        yield ranks


@pytest.mark.parametrize("algorithm", ["async", "async_decentralized"])
def test_only_the_joining_rank_waits_for_its_state(algorithm: str) -> None:
    """Others of an asynchronous job train on meanwhile; it gets its weights from the mean that all take."""
    with third_loads(algorithm, False) as ranks:
        ranks.await_said(2, "trains", 60)
        (ranks.dir / "flag-over").touch()
        results = ranks.results(60)
    assert (results[2]["count"], results[2]["place"], results[2]["moments"]) == (3, 0, 4), results


@pytest.mark.parametrize("algorithm", ["async", "local_sgd"])
def test_a_rank_is_lost_while_another_loads(algorithm: str) -> None:
    """The others wait for the joining rank then, which has its state and goes on with them."""
    with third_loads(algorithm, True) as ranks:
        ranks.signal(1, signal.SIGKILL)
        time.sleep(1)
        (ranks.dir / "flag-trained-on").touch()
        ranks.await_said(2, "trains", 60)
        (ranks.dir / "flag-over").touch()
        results = ranks.results(60, dies=[1])
    assert (results[2]["count"], results[2]["place"], results[2]["moments"]) == (3, 0, 4), results


class _NeverSent:
    """Stands for a message that has not left when its sender dies."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("nobody waits for it")


def loses_its_source(rank: int, world: int, algorithm: str) -> dict[str, Any]:
    if rank == 0:
        broadcast = collectives.broadcast

        def keeps_the_state(t: torch.Tensor, src: int, *args: Any, **options: Any) -> Any:
            if t.dtype == torch.uint8 and options.get("async_op"):
                say("has the state to send")
                return _NeverSent()
            return broadcast(t, src, *args, **options)

        collectives.broadcast = keeps_the_state
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True)
    step = members = 0
    while not (scratch() / "flag-over").exists() and step < 6000:
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        time.sleep(0.01)
        step += 1
        if step == 5:
            members = trigram.world_size()
            say("trains")
    return {"moments": len(opt.state), "members": members}


@pytest.mark.parametrize("algorithm", ["async", "local_sgd", "gradient_allreduce"])
def test_the_source_dies_before_the_state_has_come(algorithm: str) -> None:
    """Another rank sends it; also where the others have trained on meanwhile."""
    port = free_port()
    served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    with Ranks(3, loses_its_source, algorithm, env=env) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "trains")
        ranks.extra = {"WORLD_SIZE": "4"} | ranks.extra
        ranks.restart(3, loses_its_source, algorithm)
        ranks.await_said(0, "has the state to send", 60)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGKILL)
        ranks.await_said(3, "trains", 60)
        (ranks.dir / "flag-over").touch()
        results = ranks.results(60, dies=[0])
    assert results[3] == {"moments": 4, "members": 3}, results
    del served
