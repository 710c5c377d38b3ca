"""Models that the script drops under asynchronous algorithms: freed once no rank needs them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import trigram
from tests.support.harness import run


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
