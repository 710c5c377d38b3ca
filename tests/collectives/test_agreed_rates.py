"""Shares that follow the links: agreed upon by all ranks, right whatever they are, and after failures too."""

from __future__ import annotations

import pytest
import torch

import trigram
from tests.support.harness import run
from tests.support.marks import long

N = 2**20 // 4 * 3  # 3 MiB


def _all_reduce(rank: int, world: int, op: str, step: int) -> None:
    base = torch.arange(N, dtype=torch.float32) % 997 + step
    x = base + rank
    trigram.all_reduce(x, op)
    total = base * world + world * (world - 1) / 2
    assert torch.allclose(x, total / world if op == "avg" else total, rtol=1e-6), f"step {step}"


def _same(rank: int, world: int) -> list[float]:
    """The rates that all ranks go by, which must be the same numbers."""
    rates = trigram.stats()["rates"]
    assert len(rates) in (0, world), rates
    mine = torch.tensor(rates or [0.0] * world, dtype=torch.float64)
    everyone = torch.empty(world * world, dtype=torch.float64)
    trigram.all_gather(everyone, mine)
    assert all(torch.equal(row, mine) for row in everyone.view(world, world)), everyone
    return rates


def _agree(rank: int, world: int) -> None:
    trigram.init()
    for step in range(30):
        _all_reduce(rank, world, "avg" if step % 2 else "sum", step)
    assert len(_same(rank, world)) == world


@pytest.mark.parametrize("world", [3, long(4), 5])
def test_all_ranks_agree_on_the_rates(world: int) -> None:
    run(world, _agree, transport="tcp")


def _in_flight(rank: int, world: int) -> None:
    """More calls at once than an epoch has."""
    trigram.init()
    for _ in range(4):
        xs = [torch.full((N,), float(rank + k)) for k in range(20)]
        works = [trigram.all_reduce(x, async_op=True) for x in xs]
        for k, (x, work) in enumerate(zip(xs, works, strict=True)):
            work.wait()
            assert bool((x == world * k + world * (world - 1) / 2).all()), k
    assert len(_same(rank, world)) == world


def test_an_epoch_in_flight() -> None:
    run(3, _in_flight, transport="tcp")


def _after_failures(rank: int, world: int) -> None:
    """Calls that fail on all ranks, at any point of an epoch, leave all with the same shares."""
    trigram.init()
    for turn in range(8):
        for step in range(turn + 3):
            _all_reduce(rank, world, "sum", step)
        x = torch.ones(N + rank)
        with pytest.raises(trigram.MismatchError):
            trigram.all_reduce(x)
    for step in range(20):
        _all_reduce(rank, world, "sum", step)
    assert len(_same(rank, world)) == world


def test_after_failures() -> None:
    run(3, _after_failures, transport="tcp")
