"""Tells where the warm-up of an algorithm on gradients may end: when all parameters have been updated.

A warm-up averages gradients in full for its first steps; the algorithm that follows may begin between an
update and the next pass, never in the middle of an update by several optimizers.
"""

from __future__ import annotations

from trigram.errors import MisuseError
from trigram.training import optimizer_hooks

_LATE = 4
"""Passes after a warm-up in which its end is waited for."""


class WarmupEnd:
    """The updates of one model since its last pass."""

    def __init__(self) -> None:
        self._covered: set[int] = set()
        self._managed: set[int] = set()

    def begin_pass(self) -> None:
        """A pass begins: the update that follows is another."""
        self._covered.clear()

    def updated(self, mine: set[int]) -> None:
        """An optimizer has updated the parameters with these ``id()``."""
        self._covered |= mine
        self._managed |= mine

    def covers(self, used: set[int]) -> bool:
        """Whether optimizers have updated all of these parameters that any optimizer updates."""
        return used & self._managed <= self._covered

    def check(self, steps: int, limit: int, param_ids: set[int], name: str, model: str) -> None:
        """Checks that a warm-up of ``limit`` steps, which goes on after ``steps``, can end.

        Raises:
            MisuseError: It is over, and nothing tells where it may end: it would last for ever.
        """
        if self._managed or steps < limit + _LATE or optimizer_hooks.optimizers_of(param_ids):
            return
        raise MisuseError(
            f"{name}: the warm-up of {limit} steps cannot end, because the weights of {model} are changed "
            "without an optimizer of torch.optim and without a call of the model itself, so trigram cannot "
            "tell where a training step ends; call trigram.step(model) after each update, on all ranks"
        )
