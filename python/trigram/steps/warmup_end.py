"""Tells where the warm-up of an algorithm on gradients may end: when all parameters have been updated.

A warm-up averages gradients in full for its first steps; the algorithm that follows may begin between an
update and the next pass, never in the middle of an update by several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trigram.averaging.groups import ModelGroups
from trigram.errors import MisuseError
from trigram.optimizers import optimizer_hooks
from trigram.runtime import logs
from trigram.steps.passes import PassMethod


class Warming(PassMethod, Protocol):
    """A model's hooks, as the end of its warm-up needs them.

    Attributes:
        steps: The steps that were made.
    """

    groups: ModelGroups
    steps: int


_LATE = 4
"""Passes after a warm-up in which its end is waited for."""


class WarmupEnd:
    """When the warm-up of one model ends; it may have none.

    Attributes:
        limit: The steps of the warm-up.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._successor: Callable[[], PassMethod] | None = None
        self._told = False
        self._covered: set[int] = set()  # updated since the last pass
        self._managed: set[int] = set()

    def follow(self, limit: int, successor: Callable[[], PassMethod]) -> None:
        """The training is a warm-up of ``limit`` steps, and ``successor()`` makes the hooks that follow."""
        self.limit, self._successor = limit, successor

    @property
    def is_ahead(self) -> bool:
        """Whether this is a warm-up."""
        return self._successor is not None

    def begin_pass(self, sync: Warming) -> None:
        """A pass begins: the update that follows is another.

        Raises:
            MisuseError: The warm-up is over, and nothing tells where it may end: it would last for ever.
        """
        self._covered.clear()
        if self._successor is None or sync.join is not None or self._managed:
            return
        if sync.steps < self.limit + _LATE or optimizer_hooks.optimizers_of(sync.parameters.ids):
            return
        raise MisuseError(
            f"{sync.groups.name}: the warm-up of {self.limit} steps cannot end, because the weights of "
            f"{type(sync.model()).__name__} are changed without an optimizer of torch.optim and without a "
            "call of the model itself, so trigram cannot tell where a training step ends; call "
            "trigram.step(model) after each update, on all ranks"
        )

    def updated(self, mine: set[int]) -> None:
        """An optimizer has updated the parameters with these ``id()``."""
        self._covered |= mine
        self._managed |= mine

    def covers(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether this is a warm-up, and optimizers have updated all of these parameters that have gradients
        and that any optimizer updates."""
        if self._successor is None:
            return False
        return {id(p) for p in params if p.grad is not None} & self._managed <= self._covered

    def end(self, sync: Warming) -> PassMethod | None:
        """Makes the hooks that follow, if the warm-up is over: between an update and the next pass."""
        if self._successor is None or sync.steps < self.limit or sync.passes.active:
            return None
        if not any(p.requires_grad for p in sync.params):
            return None  # frozen while another model trains: what follows begins with its next step
        if sync.join is not None:  # ranks without inputs follow the others' passes as they are
            if not self._told and sync.groups.rank == 0:
                self._told = True
                logs.warning(
                    f"{sync.groups.name}: the warm-up of {self.limit} steps ends when trigram.join does"
                )
            return None
        return self._successor()
