"""A state that was saved with another number of fragments."""

from __future__ import annotations

from typing import Any

import trigram
from tests.support.algorithm_run import net
from tests.support.checks import raises, says
from tests.support.harness import run


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
