"""`with_bagua(model, "gradient_allreduce")` trains as DistributedDataParallel on gloo does."""

from __future__ import annotations

import itertools
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.checks import fingerprint, relative
from tests.support.harness import run
from tests.support.marks import long, long_unless
from tests.support.models import History, train, workload

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


OVER_TCP = [("tcp", *w) if w[1] < 1 else long("tcp", *w) for w in WORKLOADS]


@pytest.mark.parametrize("transport, workload, bucket_mb", [*(("shm", *w) for w in WORKLOADS), *OVER_TCP])
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


def _both_in_float64(rank: int, world: int, workload: str, bucket_mb: float) -> tuple[History, History]:
    """DDP's history and ours."""

    def wrap(model: nn.Module) -> nn.Module:
        return trigram.with_bagua(model, "gradient_allreduce", bucket_mb=bucket_mb)

    with gloo(rank, world):
        theirs = train(workload, DistributedDataParallel, rank, world, STEPS, torch.float64)
    ours = train(workload, wrap, rank, world, STEPS, torch.float64)
    ours.first_gradients, theirs.first_gradients = {}, {}
    return theirs, ours


ALL = list(itertools.product(["digits", "gpt"], [3, 4], ["shm", "tcp"]))


@pytest.mark.parametrize(
    "workload, world, transport", long_unless([("digits", 3, "shm"), ("digits", 4, "tcp")], ALL)
)
def test_more_ranks_in_float64(workload: str, world: int, transport: str) -> None:
    """50 steps amplify the last bit of a sum: float64 has enough of them left, on any CPU."""
    results = run(world, _both_in_float64, workload, 0.05, transport=transport, timeout=90)
    for rank, (theirs, ours) in enumerate(results):
        for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
            assert abs(a - b) <= 1e-10, f"rank {rank}, step {step}: {a}, {b}"
    _same_weights_everywhere([ours for _, ours in results])


def _side_by_side(
    rank: int, world: int, name: str, bucket_mb: float
) -> tuple[list[dict[str, float]], list[str]]:
    """DDP's training, in which our model has DDP's weights in each step.

    How far our gradients are from DDP's in each step, and the hashes of our gradients.
    """
    apart, prints = [], []
    with gloo(rank, world):
        bare, optimizer, batches = workload(name, rank, world)
        ours_bare, _, _ = workload(name, rank, world)
        theirs = DistributedDataParallel(bare)
        ours = trigram.with_bagua(ours_bare, "gradient_allreduce", bucket_mb=bucket_mb)
        for x, y in islice(batches, STEPS):
            ours_bare.load_state_dict(bare.state_dict())
            for model in (theirs, ours):
                model.zero_grad()
                F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            expected = {k: p.grad for k, p in bare.named_parameters()}
            actual = {k: p.grad for k, p in ours_bare.named_parameters()}
            apart.append({k: relative(actual[k], e) for k, e in expected.items()})
            prints.append(fingerprint(actual.values()))
            optimizer.step()
    return apart, prints


@pytest.mark.parametrize(
    "workload, world, transport", long_unless([("gpt", 3, "tcp"), ("digits", 4, "shm")], ALL)
)
def test_more_ranks_closely(workload: str, world: int, transport: str) -> None:
    """In float32, each of 50 steps from the same weights: only the order of a sum may differ."""
    results = run(world, _side_by_side, workload, 0.05, transport=transport, timeout=90)
    for rank, (apart, prints) in enumerate(results):
        for step, far in enumerate(apart):
            assert max(far.values()) <= 1e-6, f"rank {rank}, step {step}: gradients differ: {far}"
        assert prints == results[0][1], f"ranks 0 and {rank} hold different gradients"


def _parting(a: History, b: History) -> int:
    return next(i for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)) if x != y)
