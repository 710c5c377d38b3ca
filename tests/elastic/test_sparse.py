"""Elastic jobs of models whose gradients are sparse: a pass is repeated with what each rank had, and ranks
that contribute nothing to a step do not count in its averages."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.elastic_run import awaited, come, weights
from tests.support.harness import Died, Ranks, flag, say

pytestmark = pytest.mark.waits

ROWS, STEPS, DIES = 40, 60, 4


class Net(nn.Module):
    """A table and a layer; the same weights at every call."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.layer = nn.EmbeddingBag(ROWS, 6, sparse=sparse, mode="sum"), nn.Linear(6, 3)
        self.double()

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        found = torch.ones(4, 6, dtype=torch.float64) if rows is None else self.table(rows)
        out: torch.Tensor = self.layer(found)
        return out


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Ranks use some rows alone and some together; rank 2 uses the table in every other step only, and nobody
    does in the seventh."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randint(ROWS, (4, 3), generator=draw)
    nothing = step == 7 or (rank == 2 and step % 2)
    return torch.nn.functional.cross_entropy(model(None if nothing else rows), torch.arange(4) % 3)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that has a sparse state, which a rank that joins must get."""
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)


def train(rank: int, world: int, weigh: bool, again: bool = False) -> dict[str, Any]:
    """Rank 1 dies in a pass, with the gradients of the layer sent; its second life joins."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    model = Net(True)
    if again:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
    opt = optimizer(model)
    more: dict[str, Any] = {"sample_weight": rank + 1.0} if weigh else {}
    wrapped = trigram.with_bagua(model, optimizer=opt, elastic=True, check_finite=True, **more)
    first = trigram.stats(wrapped)["steps"]
    flag(f"entered-{rank}")

    def dies(_gradient: torch.Tensor) -> None:
        if step == DIES:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and not again:
        model.table.weight.register_hook(dies)
    history = []
    for step in range(first, STEPS):
        opt.zero_grad()
        loss_of(wrapped, step, rank).backward()
        opt.step()
        history.append(tuple(trigram.stats(wrapped)["ranks"]))
        say(("did", step))
        time.sleep(0.5 if STEPS - step <= 50 and awaited() else 0.02)
    return {"first": first, "history": history, "weights": weights(model)}


def reference(history: list[tuple[int, ...]], joined: int, weigh: bool) -> torch.Tensor:
    """With dense gradients, in one process; rank 1 contributes nothing to the step in which it joined."""
    model = Net(False)
    opt = optimizer(model)
    for step, ranks in enumerate(history):
        opt.zero_grad()
        counted = [r for r in ranks if not (r == 1 and step == joined)]
        factors = [r + 1.0 if weigh else 1.0 for r in counted]
        for r, factor in zip(counted, factors, strict=True):
            (factor / sum(factors) * loss_of(model, step, r)).backward()
        opt.step()
    return weights(model)


@pytest.mark.parametrize("weigh", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_dies_in_a_pass_and_comes_back(transport: str, weigh: bool) -> None:
    with Ranks(3, train, weigh, transport=transport) as ranks:
        ranks.await_said(0, ("did", DIES), 60)
        come(ranks, 1, weigh, True, run=train)
        results = ranks.results(60)
    joined = results[1]["first"]
    assert DIES < joined < STEPS, results
    whole = results[0]["history"]
    assert whole[:DIES] == [(0, 1, 2)] * DIES and whole[DIES] == (0, 2) and whole[-1] == (0, 1, 2), whole
    for each in results:
        torch.testing.assert_close(each["weights"], results[0]["weights"], rtol=0, atol=0)
    expected = reference(whole, joined, weigh)
    torch.testing.assert_close(results[0]["weights"], expected, rtol=1e-9, atol=1e-12)


def trains_alone(rank: int, world: int) -> Died | torch.Tensor:
    """The last of two ranks dies; the other repeats the pass alone."""
    return train(rank, world, False)["weights"]


def test_the_last_one_goes_on_alone() -> None:
    with Ranks(2, trains_alone) as ranks:
        results = ranks.results(60, dies=[1])
    expected = reference([(0, 1)] * DIES + [(0,)] * (STEPS - DIES), -1, False)
    torch.testing.assert_close(results[0], expected, rtol=1e-9, atol=1e-12)
