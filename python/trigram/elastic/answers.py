"""What this rank has learned from the last call of :func:`trigram.elastic_all_gather`, for ranks that were in
it when a rank was lost.

Such a call ends on no rank before all have begun it. So when a rank is lost, each remaining one has completed
the last call that any has, or is in it. In the new epoch those that have completed it give the others its
answer; if none has, all make it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trigram.collectives.consistency import tell_all
from trigram.runtime import job, world
from trigram.runtime.group import Group
from trigram.runtime.job import Part
from trigram.runtime.records import broadcast_bytes

_KEY = 0x616E7377
_JOINS = -1


@job.told
class Answers(Part):
    """The calls of this rank.

    Attributes:
        done: So many calls this rank has completed; with those of others before it joined.
        last: The answer of the last one.
        inside: This rank is in a call.
        alone: This rank joins: it makes calls without the others until its first step begins.
    """

    def __init__(self) -> None:
        self.done, self.last = 0, b""
        self.inside = self.alone = False
        self._made_in: world.World | None = None
        self._group: Group | None = None

    def group(self) -> Group:
        """All members, for these calls alone: no other call of the script is aborted with them."""
        now = world.current()
        if self._group is None or self._made_in is not now:
            self._made_in, self._group = now, now.beside(now.group, "elastic_all_gather", _KEY)
        return self._group

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A block in which this rank makes a call."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def complete(self, answer: bytes) -> None:
        """This rank has made one more call."""
        self.done, self.last = self.done + 1, answer

    def settle(self, group: Group, joins: bool) -> bool:
        """In a new epoch: completes the calls that others have completed. All members call it.

        Args:
            group: All members.
            joins: This rank has joined in this epoch.

        Returns:
            Whether a rank is in a call or joins, and has yet to come to what others do who are in none.
        """
        told = tell_all([_JOINS if joins else self.done, int(self.inside)], group)
        counts = [done for done, _ in told]
        most = max(counts)
        if any(_JOINS < done < most for done in counts):
            self.last = broadcast_bytes(group, self.last, counts.index(most))
        self.done = max(most, self.done)
        # Not whether one has missed an answer: it may have got it in an epoch that another loss has ended.
        return any(inside or done == _JOINS for done, inside in told)

    def left(self) -> None:
        """See the class."""
        self.__init__()  # type: ignore[misc]  # as before the job
