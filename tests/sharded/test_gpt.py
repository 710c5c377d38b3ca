"""A whole training: the GPT on real text, with a plain optimizer and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trigram
from tests.support.harness import run
from trigram.cli import workloads

pytestmark = pytest.mark.long

STEPS = 500
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "shards": {"gradients": "shards"},
    "overlap": {"gradients": "shards", "overlap": True},
    "fused": {"fused": True},
}


def trains(rank: int, world: int, ways: list[str | None]) -> list[tuple[float, list[torch.Tensor]]]:
    """The loss on held-out text and the weights, by each way; None: DDP's algorithm and a plain AdamW."""
    trigram.init()
    torch.set_num_threads(1)
    found = []
    for way in ways:
        torch.manual_seed(0)
        model = workloads.TinyGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        if way is None:
            trigram.with_bagua(model, "gradient_allreduce")
        else:
            trigram.with_bagua(model, "sharded", optimizer=optimizer, **WAYS[way])
        stream = workloads.batches("gpt", rank, world, 0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            workloads.loss_of(model, *next(stream)).backward()
            optimizer.step()
        trigram.unwrap(model)
        found.append((workloads.evaluate(model, "gpt"), [p.detach().clone() for p in model.parameters()]))
    return found if rank == 0 else []


def test_500_steps_have_the_bits_of_a_plain_optimizer() -> None:
    (loss, weights), *others = run(2, trains, [None, *WAYS], timeout=850)[0]
    assert loss < 2.6
    for way, (other, theirs) in zip(WAYS, others, strict=True):
        assert other == loss, way
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True)), way
