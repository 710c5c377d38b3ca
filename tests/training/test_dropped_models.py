"""Models that the script drops: freed at once, or under asynchronous algorithms once no rank needs them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import trigram
from tests.support.harness import run
from trigram.model.wrapped import wrapped_models


def _model(algorithm: str) -> tuple[torch.nn.Module, weakref.ref[torch.Tensor]]:
    """A model that has trained a little, and a look at its weights."""
    model = trigram.with_bagua(torch.nn.Linear(4, 2), algorithm)
    for _ in range(5):
        model(torch.ones(3, 4)).sum().backward()
    return model, weakref.ref(model.weight)


def _is_there(weight: weakref.ref[torch.Tensor]) -> bool:
    gc.collect()
    return weight() is not None


def _drops(rank: int, world: int, algorithm: str) -> list[bool]:
    """Whether weights are there: of a model dropped on all ranks, and of one dropped on rank 0 first."""
    seen = []
    model, weight = _model(algorithm)
    del model
    seen.append(_is_there(weight))  # another rank may wait for its messages
    first, weight_of_first = _model(algorithm)
    seen.append(_is_there(weight))
    if rank == 0:
        del first
    second, weight_of_second = _model(algorithm)
    seen.append(_is_there(weight_of_first))
    if rank != 0:  # it trains on, whatever rank 0 has dropped
        for _ in range(5):
            first(torch.ones(3, 4)).sum().backward()
        del first
    trigram.switch(second, "gradient_allreduce")
    seen.append(_is_there(weight_of_first))
    second(torch.ones(3, 4)).sum().backward()
    seen.append(_is_there(weight_of_second))
    return seen


@pytest.mark.parametrize("algorithm", ["async", "async_decentralized", "async_low_precision_decentralized"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_model_that_all_have_dropped_is_freed(world: int, algorithm: str) -> None:
    assert run(world, _drops, algorithm, timeout=120) == [[True, False, True, False, True]] * world


WAYS: dict[str, dict[str, object]] = {
    "gradient_allreduce": {},
    "gradient_allreduce fused": {"fused": True},
    "sharded": {},
    "sharded fused": {"fused": True},
    "sharded shards": {"gradients": "shards"},
    "bytegrad": {},
    "powersgd": {"rank": 1, "warmup_steps": 0},
    "local_sgd": {"every": 2},
    "decentralized": {},
}


def _left_over(rank: int, world: int) -> list[str]:
    """What of a dropped model's hooks is there without a look of the garbage collector."""
    left = []
    for way, options in WAYS.items():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trigram.with_bagua(model, way.partition(" ")[0], optimizer=optimizer, **options)  # type: ignore[arg-type]
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        hooks = wrapped_models[model].hooks
        assert hooks is not None
        parts = {"hooks": hooks, "passes": hooks.passes, "updates": getattr(hooks, "updates", hooks)}
        looks = {name: weakref.ref(part) for name, part in parts.items()}
        gc.collect()
        gc.disable()
        del model, hooks, parts
        left += [f"{way}: {name}" for name, look in looks.items() if look() is not None]
        gc.enable()
    return left


def test_hooks_end_with_the_model() -> None:
    assert run(2, _left_over, timeout=120) == [[], []]


def _in_a_circle(rank: int, world: int) -> bool:
    """The script drops a model that refers to itself."""
    model, weight = _model("async")
    model.itself = [model]
    del model
    kept = _model("async")
    del kept
    return _is_there(weight)


def test_a_model_in_a_reference_cycle_is_freed() -> None:
    assert run(2, _in_a_circle, timeout=120) == [False, False]


def _many(rank: int, world: int) -> int:
    """A search over parameters: as many models as trials, one at a time."""
    weights = []
    for _ in range(8):
        model, weight = _model("async_decentralized")
        weights.append(weight)
        del model
    return sum(_is_there(w) for w in weights)


def test_a_search_does_not_fill_memory() -> None:
    assert run(2, _many, timeout=120) == [1, 1]
