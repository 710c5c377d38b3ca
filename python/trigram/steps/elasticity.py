"""The interface between training and elastic jobs, and its implementation for jobs with fixed ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from trigram.errors import TrigramError
from trigram.steps.elastic_model import Pass


class Elasticity(Protocol):
    """What training calls when ranks may be lost or join.

    :class:`trigram.steps.elastic_model.ElasticModel` implements it for elastic jobs.

    Attributes:
        can_redo: Whether the averages of a backward pass may be repeated, so that training keeps a backup of
            the gradients.
        admitted: Ranks have made their first pass in the last one that counts.
        newcomers: Ranks of the model that joined and have no state before the end of the step under way.
    """

    can_redo: bool

    admitted: bool

    @property
    def newcomers(self) -> Sequence[int]:
        """See the class."""

    @property
    def newcomer(self) -> bool:
        """Whether this rank has joined and not received the job's state yet."""

    @property
    def silent(self) -> Sequence[int]:
        """World ranks that contribute nothing to the step under way: those that joined, and spares."""

    @property
    def is_idle(self) -> bool:
        """Whether this rank is a spare that contributes nothing to the step under way."""

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """Calls ``prepare`` with the group rank whose buffers count, usually ``src``."""

    def complete(self, a_pass: Pass) -> None:
        """Ends a backward pass; repeats its averages if a rank is lost."""

    def boundary(self, step: Callable[[], bool]) -> None:
        """Calls ``step`` at a boundary; it returns True if all ranks are at the same boundary."""

    def between_steps(self) -> None:
        """Regroups, if that is due, where the script has ended a training step and not begun the next."""

    def send_owed(self) -> None:
        """Between two steps: starts to send the training state to ranks that joined in the middle of one."""

    def is_called(self) -> bool:
        """Whether this rank must regroup with the others."""

    def has_lost(self) -> bool:
        """Whether this rank knows that another is lost."""

    def is_loss(self, error: TrigramError) -> bool:
        """Whether an error was caused by a lost rank, so that the others continue."""

    def losses(self) -> AbstractContextManager[list[TrigramError]]:
        """A block that a lost rank ends; its error is then in the list that the block gets."""

    def agreed(self, lost: bool) -> bool:
        """Whether a rank of this one's replica must regroup; all of them ask at the same places."""

    def regroup(self, boundary: bool = True) -> object:
        """Regroups with the other ranks: without lost ranks, and with ranks that join."""

    def forgiving(self) -> AbstractContextManager[None]:
        """A block that is not repeated if a rank is lost in it: all ranks regroup and continue."""


class FixedRanks:
    """A job whose ranks do not change: the loss of a rank raises an error."""

    can_redo = False
    admitted = False
    newcomer = False
    newcomers: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    is_idle = False

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """See :class:`Elasticity`."""
        prepare(src)

    def complete(self, a_pass: Pass) -> None:
        """See :class:`Elasticity`."""
        a_pass.send_rest()

    def boundary(self, step: Callable[[], bool]) -> None:
        """See :class:`Elasticity`."""
        step()

    def between_steps(self) -> None:
        """See :class:`Elasticity`."""

    def send_owed(self) -> None:
        """See :class:`Elasticity`."""

    def is_called(self) -> bool:
        """See :class:`Elasticity`."""
        return False

    def has_lost(self) -> bool:
        """See :class:`Elasticity`."""
        return False

    def is_loss(self, error: TrigramError) -> bool:
        """See :class:`Elasticity`."""
        return False

    def losses(self) -> AbstractContextManager[list[TrigramError]]:
        """See :class:`Elasticity`."""
        return contextlib.nullcontext([])

    def agreed(self, lost: bool) -> bool:
        """See :class:`Elasticity`."""
        return lost

    def regroup(self, boundary: bool = True) -> object:
        """See :class:`Elasticity`."""

    def forgiving(self) -> AbstractContextManager[None]:
        """See :class:`Elasticity`."""
        return contextlib.nullcontext()
