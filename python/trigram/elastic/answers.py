"""What this rank has learned from the last call of :func:`trigram.elastic_all_gather`, for ranks that were in
it when a rank was lost.

Such a call ends on no rank before all have begun it. So when a rank is lost, each remaining one has completed
the last call that any has, or is in it. In the new epoch those that have completed it give the others its
answer; if none has, all make it again.

A rank that joins takes part from that call on which its script makes as those of the others do. It has the
state of a rank between two steps, so that is the next call which that one makes. If it gets the state later,
when that rank's step is over, the others do not know when that is: the rank says so in its next call, and the
call after that is the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

from trigram.collectives.consistency import tell_all
from trigram.runtime import job, world
from trigram.runtime.group import Group
from trigram.runtime.job import Part
from trigram.runtime.records import broadcast_bytes

_KEY = 0x616E7377
_UNKNOWN = 0


class _Told(NamedTuple):
    """What a rank tells the others in a new epoch: see :class:`Answers`, and ``sends_now`` there.

    Attributes:
        apart: It makes its next call alone.
    """

    done: int
    answered: int
    inside: int
    apart: int
    sends_now: int
    first: int


@job.told
class Answers(Part):
    """The calls of this rank.

    Attributes:
        done: So many calls this rank has completed; with those of others before it joined.
        last: The answer of the last one that this rank knows.
        answered: The number of that one.
        inside: This rank is in a call.
        joins: This rank joins, and its first step has not begun: its script makes calls that the others have
            made before.
        first: The number, from 1, of the first call in which this rank takes part; 0: not known yet.
        since: The same of the others that have joined, as far as they are not in it for long.
        tells: This rank has sent its state to those of whom that is not known.
    """

    def __init__(self) -> None:
        self.done, self.answered, self.last = 0, 0, b""
        self.inside = self.joins = self.tells = False
        self.first = 1
        self.since: dict[int, int] = {}
        self._made_in: world.World | None = None
        self._all: Group | None = None
        self._group: Group | None = None

    @property
    def alone(self) -> bool:
        """Whether this rank makes its next call without the others."""
        return self.joins or self.first == _UNKNOWN or self.done + 1 < self.first

    def group(self) -> Group:
        """The ranks that take part in the next call; for these calls only, so that no other call of the
        script is aborted with them."""
        now = world.current()
        if self._all is None or self._made_in is not now:
            self._made_in, self._group = now, None
            self._all = now.beside(now.group, "elastic_all_gather", _KEY)
        apart = [r for r, first in self.since.items() if first == _UNKNOWN or self.done + 1 < first]
        here = [r for r in self._all.ranks if r not in apart]
        if self._group is None or self._group.ranks != here:
            self._group = self._all if not apart else now.among(self._all, self._all.name, here)
        return self._group

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A block in which this rank makes a call."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def complete(self, answer: bytes, told: bool) -> None:
        """This rank has made one more call; ``told``: a rank has :attr:`tells`."""
        self.done, self.last = self.done + 1, answer
        self.answered = self.done
        if told:
            self.tells = False
            self.since = {r: first or self.done + 1 for r, first in self.since.items()}

    def skip(self) -> None:
        """This rank makes a call of its script alone."""
        if not self.joins:
            self.done += 1

    def begin_at(self, done: int) -> None:
        """This rank has got the state, later, of a rank that has completed so many calls; and so have those
        that join with it."""
        self.done, self.first = done, done + 2
        self.since = {r: first or self.first for r, first in self.since.items()}

    def settle(self, group: Group, newcomers: Collection[int], source: int, sends_now: bool) -> bool:
        """In a new epoch: completes the calls that others have completed. All members call it.

        Args:
            group: All members.
            newcomers: Those of them that have no training state yet.
            source: The rank from which they get it.
            sends_now: If this rank were the source, it would send its state at once.

        Returns:
            Whether a rank is in a call or joins, and has yet to come to what others do who are in none.
        """
        me, apart = group.ranks[group.rank], self.alone
        mine = [self.done, self.answered, int(self.inside), int(apart), int(sends_now), self.first]
        told = dict(zip(group.ranks, (_Told(*row) for row in tell_all(mine, group)), strict=True))
        most = max(one.answered for one in told.values())
        # Who joins too: it may have to tell others.
        if any(one.answered < most for one in told.values()):
            holder = next(place for place, one in enumerate(told.values()) if one.answered == most)
            self.last = broadcast_bytes(group, self.last, holder)
        if not apart or me in newcomers:  # else it knows where its script is
            self.done = max(most, self.done)
        self.answered, self.tells = most, False
        joined = most + 1 if told[source].sends_now else _UNKNOWN
        begins = {r: joined if r in newcomers else one.first for r, one in told.items()}
        self.first = begins.pop(me)
        self.since = {r: first for r, first in begins.items() if first == _UNKNOWN or first > most + 1}
        # Not whether one has missed an answer: it may have got it in an epoch that another loss has ended.
        return any(one.inside or one.apart or one.done > most for one in told.values())

    def left(self) -> None:
        """See the class."""
        self.__init__()  # type: ignore[misc]  # as before the job
