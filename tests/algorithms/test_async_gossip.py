"""Ranks that do not wait for each other: what holds whatever the timing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trigram
from tests.reference.simulation import flatten
from tests.support.algorithm_rows import NAMES_ONCE, ROWS
from tests.support.algorithm_run import OPTIMIZERS, distance, loss, net, total
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, run, say, scratch
from tests.support.marks import long, long_unless
from tests.support.twin_training import x

CASES = Cases()

FREE: dict[str, tuple[str, dict[str, Any]]] = {
    "async": ("async", {}),
    "async_low_precision": ("async_low_precision", {}),
    "async_decentralized": ("async_decentralized", {}),
    "ring": ("async_decentralized", {"topology": "ring"}),
    "complete": ("async_decentralized", {"topology": "complete"}),
    "staleness": ("async_decentralized", {"staleness": 4}),
    "async_low_precision_decentralized": ("async_low_precision_decentralized", {}),
    "int8 on a ring": ("async_low_precision_decentralized", {"topology": "ring", "block": 64}),
    "bf16": ("gossip:complete/bf16/async", {}),
    "topk": ("gossip:ring/topk:0.2/async", {}),
    "async in fragments": ("async", {"fragments": 3}),
    "async_low_precision in fragments": ("async_low_precision", {"fragments": 3, "staleness": 3}),
    "pairs in fragments": ("async_decentralized", {"fragments": 3}),
    "pairs in fragments in int8": ("async_low_precision_decentralized", {"fragments": 2, "staleness": 4}),
}


def apart(rank: int, model: torch.nn.Module) -> None:
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.add_(x(rank, k, *p.shape, salt=5), alpha=0.1)


@CASES.over(*FREE)
def agree(rank: int, world: int, label: str) -> None:
    """Nobody trains: exchanges keep the mean, and bring the replicas together."""
    algorithm, options = FREE[label]
    torch.manual_seed(8)
    model = trigram.with_bagua(net(), algorithm, **options)
    loss(model, rank, 0).backward()
    apart(rank, model)
    before = total(model)
    far = distance(model, before / world)
    for step in range(120):
        model.zero_grad()
        loss(model, rank, step).backward()
        time.sleep(0.001 * (1 + (rank + step) % 3))
    trigram.algorithm_state(model)  # what is in flight lands
    after = total(model)
    moved = float((after - before).norm() / before.norm())
    assert moved < 1e-5, f"the mean has moved by {moved:.1e}"
    # A codec that forgets the smaller 80 % needs longer.
    left = distance(model, after / world) / far
    assert left < (0.9 if label == "topk" else 0.3), f"{left:.2f} of the distance is left"
    stats = trigram.stats(model)
    assert stats["rounds"] > 3 and stats["steps"] == 121, stats


@CASES.over(*FREE)
def learns(rank: int, world: int, label: str) -> None:
    """The average model learns what the ranks were shown."""
    algorithm, options = FREE[label]
    torch.manual_seed(8)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = trigram.with_bagua(module, algorithm, **options)
    first = sum(float(loss(model, r, 1).detach()) for r in range(world))
    for step in range(60):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        time.sleep(0.001)
    trigram.consensus(model)
    model.eval()
    last = sum(float(loss(model, r, 1).detach()) for r in range(world))
    assert last < 0.9 * first, (first, last)


@CASES.over("async_decentralized", "async_low_precision_decentralized", "ring")
def one_never_trains(rank: int, world: int, label: str) -> None:
    """A rank that is busy elsewhere keeps nobody from training, nor from ending."""
    algorithm, options = FREE[label]
    model = trigram.with_bagua(net(), algorithm, **options)
    loss(model, rank, 0).backward()
    for step in range(40 if rank else 2):
        model.zero_grad()
        loss(model, rank, step).backward()
    trigram.barrier()
    assert bool(flatten(list(model.parameters())).isfinite().all())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world, by", [long(2, "shm"), (4, "shm"), long(3, "tcp")])
def test_free_running(in_launch: Callable[..., None], by: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=by)


def _slow(
    rank: int, world: int, algorithm: str, options: dict[str, Any], alone: bool = False
) -> tuple[int, int, int]:
    """The steps that rank 1, which sleeps in each, had made when this rank ended; then waits and rounds.

    `alone`: it makes its second step when all others have made theirs.
    """
    torch.manual_seed(8)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = trigram.with_bagua(module, algorithm, **options)
    made = scratch() / "steps-of-rank-1"
    for step in range(40):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        if rank == 1:
            made.with_suffix(".new").write_text(str(step + 1))
            made.with_suffix(".new").replace(made)
        if alone and rank == 1 and step == 0:
            for other in {*range(world)} - {1}:
                await_flag(f"rank {other} has made its steps")
        time.sleep(0.05 if rank == 1 and not alone else 0.001)
    flag(f"rank {rank} has made its steps")
    stats = trigram.stats(model)
    reached = int(made.read_text()) if made.exists() else 0
    return reached, stats["waits"], stats["rounds"]  # and out, at different times


@pytest.mark.parametrize(
    "transport, label",
    [
        *[("shm", "async_decentralized"), ("shm", "async"), ("tcp", "async_low_precision_decentralized")],
        *[long("tcp", "async_decentralized"), long("tcp", "async")],
        long("shm", "async_low_precision_decentralized"),
    ],
)
def test_the_slow_do_not_slow(label: str, transport: str) -> None:
    """One rank makes its second step when the others have made all of theirs: they did not wait for it."""
    algorithm, options = FREE[label]
    results = run(3, _slow, algorithm, options, True, transport=transport, timeout=60)
    assert all(waits == 0 for _, waits, _ in results), results


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_staleness_bounds(transport: str) -> None:
    """With a bound, the fast wait for the slow."""
    results = run(3, _slow, "async", {"staleness": 2}, transport=transport, timeout=60)
    assert any(waits > 0 for _, waits, _ in results), results
    reached = [each for rank, (each, _, _) in enumerate(results) if rank != 1]
    assert min(reached) > 0.4 * 40, results  # two of their steps for one of its


@pytest.mark.parametrize("algorithm", ["async_decentralized", "async_low_precision_decentralized"])
def test_staleness_bounds_gossip(algorithm: str) -> None:
    """Every second boundary at the latest a rank has averaged: the fast stay beside the slow. Who has ended
    holds nobody up."""
    results = run(2, _slow, algorithm, {"staleness": 2}, timeout=60)
    assert min(rounds for _, _, rounds in results) >= 15, results
    assert results[0][1] > 0, results
    assert results[0][0] > 0.4 * 40, results


def _ends(rank: int, world: int, algorithm: str, **options: Any) -> int:
    """Ranks stop at different steps, and leave; nobody is told."""
    torch.manual_seed(8)
    model = trigram.with_bagua(net(), algorithm, **options)
    for step in range(20 + 10 * rank):
        model.zero_grad()
        loss(model, rank, step).backward()
        time.sleep(0.002)
    return int(trigram.stats(model)["steps"])


@pytest.mark.parametrize("algorithm", ["async_decentralized", "async_low_precision_decentralized"])
@pytest.mark.parametrize("world, transport", [(4, "shm"), (2, "tcp"), long(2, "shm"), long(4, "tcp")])
def test_ends_at_different_times(algorithm: str, world: int, transport: str) -> None:
    assert run(world, _ends, algorithm, transport=transport, timeout=40) == [
        20 + 10 * r for r in range(world)
    ]


def _ends_stale(rank: int, world: int) -> int:
    return _ends(rank, world, "async_decentralized", staleness=1)


def test_ends_at_different_times_with_a_bound() -> None:
    """Nobody waits for those that train no more."""
    assert run(3, _ends_stale, timeout=40) == [20, 30, 40]


def _idle(rank: int, world: int) -> None:
    """The last rank has no data in either epoch; the others wait for its averaging steps."""
    model = trigram.with_bagua(net(), "async", staleness=2, fragments=3)
    for _ in range(2):
        for step in range(0 if rank == world - 1 else 12):
            model.zero_grad()
            loss(model, rank, step).backward()
        trigram.consensus(model)
    mine = flatten(list(model.parameters())).detach()
    largest = mine.clone()
    trigram.all_reduce(largest, "max")
    assert torch.equal(largest, mine)


def test_a_rank_without_steps_does_not_hold_up_those_with_a_bound() -> None:
    run(3, _idle, timeout=30)


def _refused(rank: int, world: int) -> None:
    for name in ("async", "async_low_precision", "async_decentralized"):
        for more in ({}, {"fragments": 2}):
            error = raises(
                trigram.UnsupportedError, trigram.with_bagua, net(), name, sample_weight=2.0, **more
            )
            says(error, "sample_weight", name)
    error = raises(trigram.MisuseError, trigram.with_bagua, net(), "async", fragments=10**9)
    says(error, str(10**9), "too few; use fragments=")


def test_what_does_not_fit_is_refused() -> None:
    run(2, _refused)


def _until_killed(rank: int, world: int, label: str) -> str:
    """Trains until it is told that a peer is gone."""
    row = ROWS[label]
    torch.manual_seed(8)
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    options = {k: v for k, v in row.options.items() if k != "script"}
    model = trigram.with_bagua(module, row.algorithm, **given, **options)
    end = time.monotonic() + 15
    step = 0
    try:
        while time.monotonic() < end:
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            step += 1
            if step == 12:
                say("in the loop")
            if "async" in label:
                time.sleep(0.002)
    except (trigram.PeerLostError, trigram.AbortedError) as e:  # aborted: by one who was told first
        return str(e)
    return "went on"


WAYS_TO_END = [
    "gradient_allreduce sgd",
    "decentralized",
    "async third",
    "async_decentralized third",
    "local_sgd",
]


@pytest.mark.parametrize("label", long_unless(WAYS_TO_END, NAMES_ONCE))
def test_killed_peer(label: str) -> None:
    """Whoever needs it is told who is gone; nobody waits for it."""
    with Ranks(3, _until_killed, label) as ranks:
        for r in range(3):
            ranks.await_said(r, "in the loop")
        ranks.signal(1, signal.SIGKILL)
        results = ranks.results(30, dies=[1])
    assert results[1] == Died(-signal.SIGKILL)
    for r in (0, 2):
        assert "rank" in results[r], results
    assert any("rank 1" in results[r] for r in (0, 2)), results
