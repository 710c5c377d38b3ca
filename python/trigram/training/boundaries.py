"""The boundaries of one model whose ranks average weights: one after each training step, where averaging
steps begin."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from trigram.errors import MismatchError, MisuseError
from trigram.observe import steps
from trigram.steps.elasticity import Elasticity
from trigram.steps.fidelity import Fidelity
from trigram.steps.step_tracker import StepTracker
from trigram.steps.uneven_inputs import UnevenInputs
from trigram.steps.without_inputs import Joinable
from trigram.training.schedule import EverySteps, StepSchedule


class Bounded(Joinable, Protocol):
    """A model's hooks, as its boundaries need them."""

    tracker: StepTracker
    schedule: StepSchedule
    elastic: Elasticity
    fidelity: Fidelity | None
    times: steps.StepTimes
    trained: list[torch.Tensor]
    join: UnevenInputs | None

    def rest(self) -> None:
        """A boundary has been made."""


class Boundaries:
    """Makes the boundaries that a :class:`~trigram.steps.step_tracker.StepTracker` finds.

    Args:
        sync: The model's hooks, which this does not keep.

    Attributes:
        skip_until: The ranks have changed: up to this step boundaries are of no effect, because one rank may
            have made them already.
    """

    def __init__(self, sync: Bounded) -> None:
        self._sync = weakref.ref(sync)
        self.skip_until = -1

    @property
    def sync(self) -> Bounded:
        """The model's hooks."""
        sync = self._sync()
        assert sync is not None
        return sync

    def make(self, upto: int) -> None:
        """Makes the boundaries of all training steps up to ``upto``."""
        sync = self.sync
        while sync.tracker.last < upto:
            if sync.join is not None:
                try:
                    sync.join.announce(sync)
                except MisuseError:
                    sync.tracker.skip_boundary()
                    raise
            self.make_next()

    def make_next(self) -> None:
        """Makes the next one."""
        sync = self.sync
        sync.tracker.next_boundary()
        before = sync.times.enter(steps.WAIT)
        try:
            with self.explaining():
                sync.elastic.boundary(self._average)
        finally:
            sync.times.enter(before)
        sync.rest()

    def _average(self) -> bool:
        """What is due at a boundary; True if all ranks are at the same one."""
        sync, schedule = self.sync, self.sync.schedule
        number, in_step = sync.tracker.last, isinstance(schedule, EverySteps)
        if in_step and number <= self.skip_until:
            return False
        if sync.fidelity is not None and in_step and sync.join is None:
            sync.fidelity.weights(number, sync.trained)
        schedule.boundary(number)
        return isinstance(schedule, EverySteps) and schedule.is_due

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Adds to a ``MismatchError`` what a script may have done."""
        try:
            yield
        except MismatchError as e:
            raise MismatchError(
                f"{self.sync.groups.name}: the ranks average different weights after this training step. "
                "Either parameters were frozen, replaced, added or loaded on some ranks only, or a function "
                "given as every= says something else there, or some ranks have made more training steps than "
                "others, left the loop, or called models in another order; do the same on all ranks, or use "
                f"trigram.join where ranks have different numbers of batches ({e})"
            ) from e
