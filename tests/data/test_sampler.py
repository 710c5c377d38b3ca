"""BalancedBatchSampler: what the plan promises, resuming, and measured speeds."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trigram
from tests.support.checks import raises, says
from tests.support.harness import run
from tests.support.marks import long
from trigram.data import BalancedBatchSampler


def _cost(batch: list[int], costs: list[float], padded: bool) -> float:
    each = [costs[i] for i in batch]
    return len(each) * max(each) if padded else sum(each)


def _all(costs: list[float], world: int, **options: Any) -> tuple[list[BalancedBatchSampler], list[Any]]:
    """The samplers and batches of all ranks."""
    samplers = [BalancedBatchSampler(costs, rank=r, num_replicas=world, **options) for r in range(world)]
    return samplers, [list(s) for s in samplers]


def _options(draw: random.Random, world: int, largest: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "window": draw.choice([1, 5, 64, 2048]),
        "padded": draw.random() < 0.5,
        "drop_last": draw.random() < 0.3,
        "seed": draw.randrange(100),
    }
    if draw.random() < 0.5:
        options["batch_size"] = draw.choice([1, 2, 3, 8])
    else:
        options["max_cost"] = max(largest, 1e-9) * draw.choice([1, 1.5, 10])
    if draw.random() < 0.4:
        options["speeds"] = [draw.choice([0.1, 0.5, 1, 2]) for _ in range(world)]
    return options


@pytest.mark.parametrize("seed", [0, long(1), long(2), long(3)])
def test_every_plan_is_fair(seed: int) -> None:
    """Equal counts of batches, none empty, each sample once, within limits. Fewer than ranks are
    repeated."""
    draw = random.Random(seed)
    for _ in range(300):
        count, world = draw.choice([1, 2, 3, 5, 7, 10, 33, 100, 257]), draw.choice([1, 2, 3, 4, 7])
        costs = [
            draw.choice([0.0, 1.0, draw.random() * 100, draw.expovariate(0.05), 1e4 * (draw.random() < 0.01)])
            for _ in range(count)
        ]
        options = _options(draw, world, max(costs))
        samplers, plans = _all(costs, world, **options)
        assert len({len(p) for p in plans} | {len(s) for s in samplers}) == 1
        assert all(batch for p in plans for batch in p)
        given = [i for p in plans for batch in p for i in batch]
        if options["drop_last"]:
            assert len(given) == len(set(given))
            assert count - len(given) < world * options.get("batch_size", 1)
        else:
            assert set(given) == set(range(count)) and len(given) - count < world
        for batch in (batch for p in plans for batch in p):
            if "max_cost" in options:
                assert _cost(batch, costs, options["padded"]) <= options["max_cost"] * (1 + 1e-9)
            elif "speeds" not in options:
                assert len(batch) <= options["batch_size"]


def test_steps_are_balanced() -> None:
    """What a step takes, its dearest batch, is near the mean; in random order it is half as much again."""
    draw = random.Random(0)
    costs = [draw.lognormvariate(3, 0.8) for _ in range(4000)]

    def lost(plans: list[list[list[int]]]) -> float:
        steps = [[_cost(batch, costs, True) for batch in step] for step in zip(*plans, strict=True)]
        return sum(map(max, steps)) / (sum(map(sum, steps)) / len(plans))

    _, ours = _all(costs, 4, batch_size=8, padded=True)
    order = draw.sample(range(4000), 4000)
    theirs = [[order[i : i + 8] for i in range(8 * r, 4000, 32)] for r in range(4)]
    assert lost(ours) < 1.06 and lost(theirs) > 1.3
    # And hardly any padding: what the batches cost over what the samples cost.
    padding = [sum(_cost(b, costs, True) for p in plans for b in p) / sum(costs) for plans in (ours, theirs)]
    assert padding[0] < 1.15 and padding[1] > 1.7
    _, slow = _all(costs, 2, batch_size=16, speeds=[3, 1])
    share = [sum(costs[i] for batch in p for i in batch) for p in slow]
    assert 2.8 < share[0] / share[1] < 3.2
    _, packed = _all(costs, 3, max_cost=500.0)
    assert sum(_cost(b, costs, False) for p in packed for b in p) / sum(map(len, packed)) > 0.85 * 500


def test_epochs_and_resuming() -> None:
    costs = [1.0 + i % 17 for i in range(500)]
    make = {"batch_size": 7, "window": 64}
    first = BalancedBatchSampler(costs, rank=0, num_replicas=2, **make)  # type: ignore[arg-type]
    epoch0 = list(first)
    assert list(first) == epoch0
    first.set_epoch(1)
    epoch1 = list(first)
    assert epoch1 != epoch0
    # In the middle of epoch 1, handed out 12: on as many ranks the same batches follow.
    asked = iter(first)
    for _ in range(12):
        next(asked)
    state = first.state_dict()
    assert state == first.state_dict(12)
    later = BalancedBatchSampler(costs, rank=0, num_replicas=2, seed=3, **make)  # type: ignore[arg-type]
    later.load_state_dict(state)
    later.set_epoch(1)  # as the loop of a script does
    assert len(later) == len(epoch1) - 12 and list(later) == epoch1[12:]
    later.set_epoch(2)
    first.set_epoch(2)
    assert list(later) == list(first)
    # On three ranks, and then on four: each sample once more.
    done = {i for r in range(2) for batch in _epoch(costs, r, 2, 1, make)[:12] for i in batch}
    for world in (3, 4):
        states, seen = [], []
        for rank in range(world):
            sampler = BalancedBatchSampler(costs, rank=rank, num_replicas=world, **make)  # type: ignore[arg-type]
            sampler.load_state_dict(state)
            batches = list(sampler)
            seen += [i for batch in batches[:5] for i in batch]
            assert {i for batch in batches for i in batch}.isdisjoint(done)
            states.append(sampler.state_dict(5))
        assert len(set(seen)) == len(seen) and all(s == states[0] for s in states)
        done, state = done | set(seen), states[0]
    says(
        raises(trigram.MisuseError, BalancedBatchSampler(costs[1:], batch_size=2).load_state_dict, state),
        "500",
    )


def _epoch(costs: list[float], rank: int, world: int, epoch: int, make: dict[str, Any]) -> list[list[int]]:
    sampler = BalancedBatchSampler(costs, rank=rank, num_replicas=world, **make)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_arguments() -> None:
    right: dict[str, Any] = {"rank": 0, "num_replicas": 2}
    for costs, word in (
        ([1, math.nan], "costs[1]"),
        ([-1, 2], "costs[0]"),
        ([1, 2, math.inf], "costs[2]"),
        ([], "shape (0,)"),
        ([[1, 2]], "shape (1, 2)"),
        (["a"], "numbers"),
        (None, "numbers"),
    ):
        says(raises(trigram.MisuseError, BalancedBatchSampler, costs, batch_size=1, **right), word)
    for wrong, word in (
        ({}, "either"),
        ({"batch_size": 1, "max_cost": 1}, "either"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_cost": 2.5}, "costs[1]"),
        ({"max_cost": math.nan}, "costs[1]"),
        ({"batch_size": 1, "window": 0}, "window"),
        ({"batch_size": 1, "speeds": [1]}, "2 positive"),
        ({"batch_size": 1, "speeds": [1, 0]}, "2 positive"),
        ({"batch_size": 1, "speeds": [1, math.nan]}, "2 positive"),
        ({"batch_size": 1, "speeds": "measured"}, "group="),
        ({"batch_size": 1, "speeds": "fast"}, "'fast'"),
        ({"batch_size": 1, "rank": 2}, "rank=2"),
        ({"batch_size": 1, "rank": None}, "neither"),
    ):
        says(raises(trigram.MisuseError, BalancedBatchSampler, [1.0, 3.0], **(right | wrong)), word)
    assert list(BalancedBatchSampler(torch.zeros(3), batch_size=2))  # a world of one


class _Step:
    """A training step that takes 20 microseconds for a unit of cost, three times as much on the last rank."""

    def __init__(self, rank: int, world: int, costs: list[float]) -> None:
        self.slow, self.costs = 3 if rank == world - 1 else 1, costs

    def __call__(self, indices: torch.Tensor) -> None:
        time.sleep(sum(self.costs[i] for i in indices.tolist()) * 2e-5 * self.slow)


def _measured(rank: int, world: int, workers: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    trigram.init()
    costs = [1.0 + i * 37 % 50 for i in range(480)]
    sampler = BalancedBatchSampler(costs, batch_size=10, window=200, speeds="measured")
    loader = DataLoader(
        TensorDataset(torch.arange(480)),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    model = torch.nn.Linear(1, 1)
    trigram.with_bagua(model, sample_weight=sampler.sample_weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    compute, speeds, gradients = _Step(rank, world, costs), [], []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        speeds.append(list(sampler.speeds))
        for (indices,) in loader:
            compute(indices)
            optimizer.zero_grad()
            model(indices[:, None].float()).mean().backward()
            optimizer.step()
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.clone())
            # The mean over all samples of the step: their indices' mean.
            whole = torch.tensor([float(indices.sum()), float(len(indices))])
            trigram.all_reduce(whole)
            assert abs(gradients[-1].item() - whole[0] / whole[1]) < 1e-3 * whole[0]
            assert whole[1] == 10 * world
    says(raises(trigram.MisuseError, sampler.sample_weight), "more than one backward")
    return speeds, gradients


@pytest.mark.waits
@pytest.mark.parametrize(("world", "workers"), [(2, 0), long(2, 2), long(3, 0)])
def test_slow_ranks_get_less(world: int, workers: int) -> None:
    """The same speeds on all ranks; the last, which needs three times as long, ends at less than two
    thirds of the others'."""
    results = run(world, _measured, workers, timeout=60)
    assert all(speeds == results[0][0] for speeds, _ in results)
    first, *_, last = results[0][0]
    assert first == [1.0] * world
    assert last[-1] < 0.66 * min(last[:-1]), results[0][0]


def _differs(rank: int, world: int) -> None:
    trigram.init()
    sampler = BalancedBatchSampler([1.0, 2.0 + rank], batch_size=1, speeds="measured")
    says(raises(trigram.MismatchError, sampler.set_epoch, 0), "ranks [1]", "rank 0")


def test_ranks_with_other_costs_are_named() -> None:
    run(2, _differs)
