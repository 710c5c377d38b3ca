"""Who says what to whom before an averaging step with a quorum, without input and output.

Each rank has a *seat*: that of the leader, or of another. A seat hears the messages that have arrived, says
others, and holds what its rank knows of the ranks. Time is an argument.

HERE (a rank has reached its averaging step) is answered by a DECISION, who takes part. Each rank says HERE
once, and not again until a decision has taken it in. A rank that makes no more averaging steps says LEAVES,
and hears LEFT when no decision takes it in any more; the leader says ENDED. FLUSH is the last message before
all ranks meet.

Two more keep ranks from waiting for each other, one here and one in a collective of the script, for they are
at different steps of it: WAITS (a rank waits for a decision), to which a leader that waits elsewhere answers
GO_ON; and ASK (the leader waits for a quorum), to which a rank that waits elsewhere answers HERE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

ADAPTIVE = 0.1
"""The default grace window, as a part of the time since the leader's last averaging step."""
PATIENCE = 0.2
"""Seconds after which the leader's wait may be for ranks that wait elsewhere."""

OUT, IN, BEHIND = 0, 1, 2
"""How a rank takes part: not; having agreed on what the leader has; or on something earlier."""


class Kind(IntEnum):
    """What a message says; the number that is sent."""

    HERE = 1
    LEAVES = 2
    FLUSH = 3
    DECISION = 4
    LEFT = 5
    ENDED = 6
    WAITS = 7
    ASK = 8
    GO_ON = 9


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    Attributes:
        kind: What it says.
        fragment: Of a decision: of what.
        number: Of a decision: the averaging steps of that fragment before.
        each: Of HERE, for each fragment, the averaging steps until the rank's agreement; of a decision, for
            each rank, how it takes part.
    """

    kind: Kind
    fragment: int = 0
    number: int = 0
    each: Sequence[int] = ()


@dataclass(frozen=True)
class Decision:
    """Who takes part in an averaging step.

    Attributes:
        how: For each rank, whether and how.
        fragment: Of which fragment it is.
        number: The averaging steps of that fragment before.
    """

    how: Sequence[int]
    fragment: int
    number: int

    @property
    def is_of_several(self) -> bool:
        """Whether others than the leader take part."""
        return any(self.how[1:])


Tell = Callable[[int, Message], None]
"""Sends a message to a rank of the group, without waiting."""


class Seat(Protocol):
    """One rank's part of the protocol.

    Attributes:
        waits: It has reached its averaging step, and waits.
        has_left: It has said that it makes no more averaging steps.
    """

    waits: bool
    has_left: bool

    @property
    def waited_for_by(self) -> Collection[int]:
        """Ranks that wait for a decision of this one."""

    def hear(self, j: int, message: Message) -> Decision | None:
        """Takes a message of rank ``j``; returns a decision that it brings."""

    def come(self, now: float, agreed: Sequence[int]) -> bool:
        """This rank reaches its averaging step; returns whether it has to wait. ``agreed``: for each
        fragment, the averaging steps until its agreement."""

    def is_over(self, now: float) -> bool:
        """Whether the wait is over."""

    def lacking(self) -> tuple[Sequence[int], str]:
        """Whom it waits for, and for what."""

    def conclude(self, now: float, fragment: int, number: int) -> Decision | None:
        """The wait is over. Returns a decision that this rank makes, of this fragment."""

    def serve(self, agreed: Sequence[int], may_come: Callable[[], bool]) -> None:
        """Answers others while this rank waits elsewhere. ``agreed``: as for :meth:`come`; ``may_come``:
        whether it could come now."""

    def leave(self) -> None:
        """Says that this rank makes no more averaging steps."""

    def is_free(self) -> bool:
        """Whether it has left, and no decision takes it in any more."""

    def begin_again(self) -> None:
        """All ranks have met, and averaging steps may follow."""


class Leader:
    """The seat of the first rank of the group, which decides.

    Args:
        size: Ranks.
        quorum: Ranks, with the leader, without which it does not go on. Those that have left are not waited
            for.
        grace: Seconds that it then waits for the others; None: a part of the time since its last decision.
        tell: Sends a message.
        now: The time.
    """

    def __init__(self, size: int, quorum: int, grace: float | None, tell: Tell, now: float) -> None:
        self.size, self.quorum, self.grace, self.tell = size, quorum, grace, tell
        self.decided_at = self.came_at = now
        self.enough_at: float | None = None  # when the quorum was there
        self.begin_again()

    def begin_again(self) -> None:
        """See :class:`Seat`."""
        self.there = set(range(1, self.size))  # who has not left
        self.here: dict[int, Sequence[int]] = {}  # who has said so, and what it has agreed on
        self.waited_for_by: set[int] = set()
        self.asked: set[int] = set()
        self.waits = self.has_left = False

    def hear(self, j: int, message: Message) -> Decision | None:
        """See :class:`Seat`."""
        match message.kind:
            case Kind.HERE:
                self.here[j] = message.each
            case Kind.WAITS if j in self.here:  # else a decision for it is on its way
                self.waited_for_by.add(j)
            case Kind.LEAVES:
                self.there.discard(j)
                self.here.pop(j, None)
                self.waited_for_by.discard(j)
                if not self.has_left:  # else it has been told, and expects nothing after the flush
                    self.tell(j, Message(Kind.LEFT))
        return None

    def come(self, now: float, agreed: Sequence[int]) -> bool:
        """See :class:`Seat`."""
        self.came_at, self.enough_at, self.asked, self.waits = now, None, set(), True
        return True

    def is_over(self, now: float) -> bool:
        """A quorum is there, and the grace window is over or nobody is missing."""
        missing = self.there - self.here.keys()
        if self.enough_at is None and 1 + len(self.here) >= min(self.quorum, 1 + len(self.there)):
            self.enough_at = now
        grace = ADAPTIVE * (self.came_at - self.decided_at) if self.grace is None else self.grace
        if not missing or (self.enough_at is not None and now - self.enough_at >= grace):
            return True
        if self.enough_at is None and now - self.came_at > PATIENCE:
            for j in sorted(missing - self.asked):
                self.tell(j, Message(Kind.ASK))
            self.asked |= missing
        return False

    def lacking(self) -> tuple[Sequence[int], str]:
        """See :class:`Seat`."""
        return sorted(self.there - self.here.keys()), f"a quorum of {self.quorum}"

    def conclude(self, now: float, fragment: int, number: int) -> Decision:
        """Decides that all take part that are here, and tells all that have not left."""
        how = [OUT] * self.size
        how[0] = IN
        for j, theirs in self.here.items():
            how[j] = IN if theirs[fragment] == number else BEHIND
        for j in sorted(self.there):
            self.tell(j, Message(Kind.DECISION, fragment, number, how))
        self.here, self.waited_for_by, self.decided_at = {}, set(), now
        return Decision(how, fragment, number)

    def serve(self, agreed: Sequence[int], may_come: Callable[[], bool]) -> None:
        """Lets those go on that wait for a decision, for this rank may wait for them."""
        while self.waited_for_by:
            self.tell(self.waited_for_by.pop(), Message(Kind.GO_ON))

    def leave(self) -> None:
        """See :class:`Seat`."""
        self.has_left = True
        for j in range(1, self.size):
            self.tell(j, Message(Kind.ENDED))

    def is_free(self) -> bool:
        """See :class:`Seat`. Nobody else decides."""
        return self.has_left


class Follower:
    """The seat of another rank than the leader.

    Args:
        rank: This rank in the group.
        size: Ranks.
        tell: Sends a message.
    """

    waited_for_by: Collection[int] = ()

    def __init__(self, rank: int, size: int, tell: Tell) -> None:
        self.rank, self.size, self.tell = rank, size, tell
        self.begin_again()

    def begin_again(self) -> None:
        """See :class:`Seat`."""
        self.is_led = True  # the leader has not ended
        self.is_here = False  # it has said so, and no decision has taken it in since
        self.has_left = self.is_out = False  # it has said so; it has been told that no decision takes it in
        self.waits = False
        self.is_taken = False  # a decision has, since it came
        self.is_late = False  # its averaging step went on without it, so it does not wait for the next
        self.is_released = False  # likewise, and until a decision takes it in
        self.is_asked = False  # the leader waits for a quorum

    def hear(self, j: int, message: Message) -> Decision | None:
        """See :class:`Seat`."""
        match message.kind:
            case Kind.DECISION:
                return self._decided(Decision(message.each[: self.size], message.fragment, message.number))
            case Kind.GO_ON if self.waits:  # else it has heard of a decision meanwhile
                self.is_late = self.is_released = True
            case Kind.ASK:
                self.is_asked = not self.is_here
            case Kind.LEFT:
                self.is_out, self.is_here = True, False
            case Kind.ENDED:
                self.is_led = self.is_here = False
        return None

    def _decided(self, decision: Decision) -> Decision:
        self.is_asked = False
        if decision.how[self.rank] == OUT:
            self.is_late = True
        else:
            self.is_here = self.is_late = self.is_released = False
            self.is_taken = True
        return decision

    def come(self, now: float, agreed: Sequence[int]) -> bool:
        """See :class:`Seat`."""
        if not self.is_led or self.is_released:
            return False
        self._say_here(agreed)
        self.tell(0, Message(Kind.WAITS))
        self.is_taken, self.waits = False, True
        return True

    def _say_here(self, agreed: Sequence[int]) -> None:
        if not self.is_here:
            self.is_here = True
            self.tell(0, Message(Kind.HERE, each=agreed))

    def is_over(self, now: float) -> bool:
        """See :class:`Seat`."""
        return self.is_late or self.is_taken or not self.is_led

    def lacking(self) -> tuple[Sequence[int], str]:
        """See :class:`Seat`."""
        return [0], "the decision of the first rank"

    def conclude(self, now: float, fragment: int, number: int) -> None:
        """See :class:`Seat`. If it is late, the next decision takes it in."""
        self.is_late = False

    def serve(self, agreed: Sequence[int], may_come: Callable[[], bool]) -> None:
        """Comes if the leader waits for a quorum."""
        if self.is_asked and not self.is_here and may_come():
            self.is_asked = False
            self._say_here(agreed)

    def leave(self) -> None:
        """See :class:`Seat`."""
        self.has_left = True
        if self.is_led:
            self.tell(0, Message(Kind.LEAVES))

    def is_free(self) -> bool:
        """See :class:`Seat`."""
        return self.has_left and (self.is_out or not self.is_led)
