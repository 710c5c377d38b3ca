"""The number of fragments: what a model takes, and a state that was saved with another."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import trigram
from tests.support.algorithm_run import net
from tests.support.checks import raises, says
from tests.support.harness import run
from trigram.training.compose import _fragments


def _load(rank: int, world: int) -> None:
    saved = trigram.with_bagua(net(), "local_sgd", every=4, fragments=2)
    state = trigram.algorithm_state(saved)
    other = trigram.with_bagua(net(), "local_sgd", every=4)
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, other, state), "rounds", "2", "1")
    trigram.load_algorithm_state(saved, state)


def test_another_number_of_fragments_is_refused() -> None:
    run(2, _load)


def _older(rank: int, world: int) -> None:
    """Pairs had one object of references before there were fragments."""
    name = "async_low_precision_decentralized"
    model = trigram.with_bagua(net(), name)
    state = trigram.algorithm_state(model)
    found = _holder(state)
    found["references"] = found["references"][0]
    trigram.load_algorithm_state(model, state)
    other = trigram.with_bagua(net(), name, fragments=2)
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, other, state), "fragments=1")


def _holder(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that has the references."""
    if "references" in state:
        return state
    parts = [_holder(part) for part in state.values() if isinstance(part, dict)]
    return next((part for part in parts if part), {})


def test_pairs_go_on_from_a_state_without_fragments() -> None:
    run(2, _older)


@pytest.mark.parametrize("sizes", [(100, 5, 1, 3, 10, 5, 5), (1, 100, 1), (7,), (5, 5, 5, 5), (0, 0, 9)])
def test_the_number_that_is_proposed_is_taken(sizes: tuple[int, ...]) -> None:
    tensors = [[torch.empty(1000 * size, device="cpu") for size in sizes]]
    for asked in range(1, 20):
        try:
            found = _fragments(tensors, asked)
        except trigram.MisuseError as error:
            proposed = int(re.findall(r"use fragments=(\d+)", str(error))[0])
            assert 1 <= proposed < asked
            found = _fragments(tensors, proposed)
            assert len(found) == proposed
            divides = re.findall(
                r"use fragments=(\d+)", raises(trigram.MisuseError, _fragments, tensors, asked, asked)
            )
            assert asked % int(divides[0]) == 0 and len(_fragments(tensors, int(divides[0]))) == int(
                divides[0]
            )
        else:
            assert len(found) == asked
        assert [id(t) for part in found for same in part for t in same] == [id(t) for t in tensors[0]]
