"""`with_bagua(model, "gradient_allreduce")` trains as DistributedDataParallel on gloo does."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.checks import relative
from tests.support.harness import run
from tests.support.models import History, train

STEPS = 50


def _both(
    rank: int, world: int, workload: str, bucket_mb: float
) -> tuple[History, History, dict[str, float]]:
    """DDP's history, ours, and how far apart the first gradients are."""
    with gloo(rank, world):
        theirs = train(workload, DistributedDataParallel, rank, world, STEPS)

    def wrap(model: nn.Module) -> nn.Module:
        return trigram.with_bagua(model, "gradient_allreduce", bucket_mb=bucket_mb)

    ours = train(workload, wrap, rank, world, STEPS)
    assert ours.first_gradients.keys() == theirs.first_gradients.keys()
    apart = {k: relative(g, theirs.first_gradients[k]) for k, g in ours.first_gradients.items()}
    ours.first_gradients, theirs.first_gradients = {}, {}
    return theirs, ours, apart


def _same_weights_everywhere(histories: list[History]) -> None:
    for step in range(STEPS):
        prints = [h.weights[step] for h in histories]
        assert len(set(prints)) == 1, f"after step {step} the ranks hold different weights: {prints}"


WORKLOADS = [("digits", 25.0), ("gpt", 25.0), ("small digits", 0.01), ("tied gpt", 0.01)]


@pytest.mark.parametrize("workload, bucket_mb", WORKLOADS)
def test_two_ranks_bit_for_bit(workload: str, bucket_mb: float, transport: str) -> None:
    """Dividing by 2 is exact, so nothing may differ: losses and weights of 50 steps."""
    results = run(2, _both, workload, bucket_mb, transport=transport, timeout=90)
    for rank, (theirs, ours, apart) in enumerate(results):
        assert ours.losses == theirs.losses, f"rank {rank}: losses part at step {_parting(ours, theirs)}"
        assert ours.weights == theirs.weights, f"rank {rank}"
        assert not any(apart.values()), f"rank {rank}: first gradients differ: {apart}"
    _same_weights_everywhere([ours for _, ours, _ in results])
    losses = results[0][1].losses
    assert losses[-1] < 0.9 * losses[0], f"nothing was learnt: {losses[0]} -> {losses[-1]}"


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("workload", ["digits", "gpt"])
def test_more_ranks_closely(workload: str, world: int, transport: str) -> None:
    results = run(world, _both, workload, 0.05, transport=transport, timeout=90)
    for rank, (theirs, ours, apart) in enumerate(results):
        assert max(apart.values()) <= 1e-6, f"rank {rank}: first gradients differ: {apart}"
        assert abs(ours.losses[-1] - theirs.losses[-1]) <= 1e-3, (
            f"rank {rank}: {ours.losses[-1]}, {theirs.losses[-1]}"
        )
    _same_weights_everywhere([ours for _, ours, _ in results])


def _parting(a: History, b: History) -> int:
    return next(i for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)) if x != y)
