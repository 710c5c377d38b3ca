"""Which part of an elastic job goes on, where a network that has parted it makes ranks look dead.

A firewall that is started anew resets the connections of living ranks, and to each part of the job the other
seems to have ended. The connections do not tell, so the job's store does: it keeps who the members of the
newest epoch are, and a part of the job enters itself there before it begins another epoch. It may do so only
if it was among the members of the last entry. The first to enter excludes the other, which finds itself
missing and stops, see docs/adr/0062.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass

from trigram.runtime import logs, seals
from trigram.runtime.live_store import ReconnectingStore

KEY = "elastic/succession"
"""The newest entry: its seal, and JSON."""
_KIND = "succession"
_ANSWER_SECONDS = 2.0
"""How long the store is waited for: all members wait meanwhile."""
_TRIES = 3
_BEGIN_SECONDS = 30.0
_POLL = 0.05


@dataclass(frozen=True)
class Entry:
    """The members of an epoch.

    Attributes:
        epoch: See ``membership.py``.
        ranks: Its members, and those that leave when it begins.
    """

    epoch: int
    ranks: frozenset[int]

    def is_followed_by(self, epoch: int, survivors: Collection[int]) -> bool:
        """Whether these ranks may begin an epoch after this entry; again, if its beginning has failed."""
        return epoch >= self.epoch and self.ranks.issuperset(survivors)

    def text(self) -> bytes:
        """What is kept in the store."""
        body = json.dumps({"epoch": self.epoch, "ranks": sorted(self.ranks)}).encode()
        return seals.sealed(_KIND, body, seals.secret())

    @staticmethod
    def read(text: bytes | None) -> Entry | None:
        """The entry; None if it is not of this job: any process may write to the store."""
        body = seals.opened(_KIND, text or b"", seals.secret())
        try:
            found = json.loads(body or b"")
            return Entry(int(found["epoch"]), frozenset(map(int, found["ranks"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


class Succession:
    """The entry in the store of one job.

    Args:
        store: The job's store.
    """

    def __init__(self, store: ReconnectingStore) -> None:
        self._store = store

    def begin(self, ranks: Collection[int]) -> None:
        """Enters the first members; what an earlier job has left in the store holds no more."""
        text, end = Entry(0, frozenset(ranks)).text(), time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < end:
            reached, now = self._read()
            if reached and (now == text or (not self._replace(now, text) and self._store.reopen is None)):
                return  # it stands there; or it is one of torch's stores that cannot tell
        logs.warning(
            f"elastic: the job's store has not answered for {_BEGIN_SECONDS:.0f} s, so it cannot say which "
            "part of the job goes on if the network parts it; start again if it has served another job before"
        )

    def enter(self, epoch: int, survivors: Collection[int], joining: Collection[int], patience: float) -> str:
        """Enters the members of the next epoch.

        Args:
            epoch: Its number.
            survivors: The members of the present epoch that reach each other.
            joining: Ranks that join.
            patience: So long others, who are more, may enter themselves first, in seconds.

        Returns:
            ``entered``; ``lost``, where others have entered themselves without all of these; ``unknown``,
            where the store does not answer.
        """
        mine = Entry(epoch, frozenset([*survivors, *joining])).text()
        end: float | None = None
        failures, limit = 0, time.monotonic() + patience + _ANSWER_SECONDS
        # What has reset the ranks' connections may have reset this one too: another is opened then.
        while failures < _TRIES and time.monotonic() < limit:
            reached, now = self._read()
            if not reached:
                failures += 1
                continue
            end = time.monotonic() + patience if end is None else end
            last = Entry.read(now)
            if last is not None and not last.is_followed_by(epoch, survivors):
                return "lost"
            if now == mine:
                return "entered"
            if time.monotonic() < end:
                time.sleep(_POLL)
                continue
            failures += not self._replace(now, mine)
        return "unknown"

    def _replace(self, now: bytes | None, text: bytes) -> bool:
        """Writes a text if the store has still what was read: another may have written since. Returns whether
        the store can tell; one of torch's has no such operation."""
        return self._store(lambda s: s.compare_set(KEY, now or b"", text), _ANSWER_SECONDS) is not None

    def _read(self) -> tuple[bool, bytes | None]:
        """Whether the store answers, and the text of the newest entry."""
        found: list[bytes] | None = self._store(
            lambda s: [bytes(s.get(KEY))] if s.check([KEY]) else [], _ANSWER_SECONDS
        )
        return found is not None, found[0] if found else None
