"""A state that was saved with another number of fragments."""

from __future__ import annotations

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
