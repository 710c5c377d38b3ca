"""What an elastic job asks of an algorithm: how a model's steps go on when the members change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from trigram.errors import TrigramError
from trigram.runtime.group import Group


class Stateful(Protocol):
    """An object with state, such as an optimizer, a scheduler or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Replaces the state."""


class SharedState:
    """What of a model's training state all ranks have: usually all of it."""

    def state_sources(self, states: Sequence[Stateful]) -> list[Stateful]:
        """What gives, of each of these objects, the state that every rank has: usually the object."""
        return list(states)

    def most_leaving(self) -> int:
        """So many ranks may leave in one change of the membership, and all of this state is on others."""
        return sys.maxsize

    def fingerprint(self) -> int:
        """A number of at most 62 bits that all ranks must have alike when a pass counts."""
        return 0

    def fingerprints_differ(self) -> TrigramError:
        """The error if they do not."""
        raise NotImplementedError


class Arrival(Protocol):
    """What :meth:`StepRecovery.follow` needs to know of a new epoch.

    Attributes:
        everyone: The group of all members.
        is_new: This rank has joined in the present epoch.
        behind: When the last change of the membership began, some ranks had yet to complete what others had,
            a step or a call of the script's own: these do again what they do together before a pass.
    """

    everyone: Group
    is_new: bool
    behind: bool

    @property
    def newcomer(self) -> bool:
        """Whether this rank has not received the training state yet."""

    @property
    def newcomers(self) -> list[int]:
        """Those of the model's ranks that joined and contribute nothing to the step under way."""

    def receive(self) -> dict[str, Any] | None:
        """On a new rank: waits for the training state and loads it.

        Returns:
            What :meth:`StepRecovery.meta` gave there when it was sent; None: there is nothing to receive.
        """

    def has_state(self) -> None:
        """Records that all members have the training state now."""


class Counted(Protocol):
    """A model's step hooks, as :class:`StepRecovery` needs them.

    Attributes:
        in_step: Whether all ranks make the same step at the same time.
        steps: Training steps so far.
    """

    @property
    def in_step(self) -> bool:
        """See the class."""

    @property
    def steps(self) -> int:
        """See the class."""


HooksT = TypeVar("HooksT", bound=Counted)


class StepRecovery(Generic[HooksT]):
    """How the steps of one model go on when the members of an elastic job change.

    Where gradients are averaged and where weights are, what differs is overridden.

    Args:
        hooks: The model's step hooks.

    Attributes:
        takes_mean: Whether :meth:`follow` takes the mean of all weights, so that a joining rank needs those
            of nobody.
    """

    takes_mean = False

    def __init__(self, hooks: HooksT) -> None:
        self._hooks = hooks

    @property
    def in_step(self) -> bool:
        """Whether all ranks make the same step at the same time."""
        return self._hooks.in_step

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self._hooks.steps

    @property
    def warming(self) -> bool:
        """Whether they make an algorithm's warm-up."""
        return False

    @property
    def keeps_weights(self) -> bool:
        """Whether weights must not change now, as the mean of them does that a change of members takes."""
        return False

    @property
    def shared(self) -> SharedState:
        """What of the training state all ranks have."""
        return SharedState()

    def meta(self) -> dict[str, Any]:
        """The values that must be the same on all ranks in a new epoch, such as the step's number."""
        return {"steps": self.steps}

    def follow(self, meta: dict[str, Any], part: Arrival) -> None:
        """Continues in a new epoch with the ``meta`` of the rank that has the state. All members call it."""
        raise NotImplementedError

    def hand_over(self, group: Group) -> None:
        """Ranks are about to leave: the others get what only these have. All members call it, with their
        group; again if a rank is lost meanwhile."""

    def leave(self) -> None:
        """This rank has left, in good order."""
