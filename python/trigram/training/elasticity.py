"""What training asks of an elastic job, and the answers of a job whose ranks are fixed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from trigram.elastic.recovery import Pass
from trigram.errors import TrigramError


class Elasticity(Protocol):
    """What happens when ranks are lost or join; :class:`trigram.elastic.recovery.ElasticModel` has it.

    Attributes:
        can_redo: A backward pass may have to be done again, from the gradients that this rank has kept.
        newcomers: World ranks that contribute nothing to the step under way.
    """

    can_redo: bool

    @property
    def newcomers(self) -> Sequence[int]:
        """See the class."""

    @property
    def newcomer(self) -> bool:
        """Whether this rank has yet to get the job's state."""

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """Prepares a step, with the place of the rank whose buffers count."""

    def complete(self, a_pass: Pass) -> None:
        """Brings a backward pass to its end."""

    def boundary(self, step: Callable[[], bool]) -> None:
        """Makes an averaging step at a boundary; ``step`` tells whether all ranks are at the same one."""

    def is_called(self) -> bool:
        """Whether this rank is to meet the others."""

    def is_loss(self, error: TrigramError) -> bool:
        """Whether an error comes of a lost rank, so that the others go on."""

    def regroup(self, boundary: bool = True) -> None:
        """Meets the others."""

    def forgiving(self) -> AbstractContextManager[None]:
        """A block in which a loss means that all go on without what was done in it."""


class FixedRanks:
    """A job whose ranks are the same from beginning to end: a loss is an error."""

    can_redo = False
    newcomer = False
    newcomers: tuple[int, ...] = ()

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """See :class:`Elasticity`."""
        prepare(src)

    def complete(self, a_pass: Pass) -> None:
        """See :class:`Elasticity`."""
        a_pass.send_rest()

    def boundary(self, step: Callable[[], bool]) -> None:
        """See :class:`Elasticity`."""
        step()

    def is_called(self) -> bool:
        """See :class:`Elasticity`."""
        return False

    def is_loss(self, error: TrigramError) -> bool:
        """See :class:`Elasticity`."""
        return False

    def regroup(self, boundary: bool = True) -> None:
        """See :class:`Elasticity`."""

    def forgiving(self) -> AbstractContextManager[None]:
        """See :class:`Elasticity`."""
        return contextlib.nullcontext()
