"""The door of an elastic job: where a rank that comes late knocks, and hears who is in.

Everything goes through the store that the ranks met in, for that is what a newcomer knows. The lowest
rank of the job keeps the door: a thread shows that the job is alive and looks who waits. A
store that went away with the process that offered it is looked for again, at the same address.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from trigram import _core

_LOOK = 0.2
"""Seconds between two looks at the store."""
FRESH = 3.0
"""Seconds after which a job that shows no life is taken to have ended."""
MOST_RANKS = 1 << 16
"""Numbers that newcomers may have."""
_MOST_CARD = 2000
_LONGEST_OFF = 60.0
"""Seconds for which a rank is not let in that could not be met again and again."""
_RECENT = 64
"""Knocks that are looked at."""
_HEX = re.compile("(?:[0-9a-f]{2})+")
_LIVE, _KNOCKS = "elastic/live", "elastic/knocks"


class Store:
    """A store that may go away and come back.

    Args:
        store: The store.
        reopen: Makes another way to it; None: there is none.
    """

    def __init__(self, store: Any, reopen: Callable[[], Any] | None) -> None:
        self.store, self.reopen = store, reopen
        self.lock = threading.Lock()

    def __call__(self, do: Callable[[Any], Any]) -> Any:
        """What ``do`` returns for the store; None while there is no store."""
        with self.lock:
            try:
                if self.store is None and self.reopen is not None:
                    self.store = self.reopen()
                return None if self.store is None else do(self.store)
            except (dist.DistError, OSError, RuntimeError):
                if self.reopen is not None:
                    self.store = None
                return None

    def get(self, key: str) -> bytes | None:
        """The value of a key, if it is there."""
        found: bytes | None = self(lambda s: bytes(s.get(key)) if s.check([key]) else None)
        return found

    def put(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self(lambda s: s.set(key, value))

    def wait(self, key: str, seconds: float, stop: Callable[[], bool] = lambda: False) -> bytes | None:
        """The value of a key, once it is there; None if it does not come, or ``stop`` says so."""
        end = time.monotonic() + seconds
        while (value := self.get(key)) is None and time.monotonic() < end and not stop():
            time.sleep(0.005)
        return value


def _parse(value: bytes) -> dict[str, Any]:
    """What a key says; nothing, if it is not ours: anybody may write to the store."""
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _read(value: bytes | None) -> dict[str, Any] | None:
    """A knock: a rank's number and its card; None if it is none."""
    said = _parse(value or b"")
    rank, card = said.get("rank"), said.get("card")
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        return None
    if not isinstance(card, str) or len(card) > _MOST_CARD or not _HEX.fullmatch(card):
        return None
    return {"rank": rank, "card": card}


class Watch:
    """Whether a value of the store goes on changing."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seen: bytes | None = None
        self.since = 0.0
        self.changed = False

    def known(self) -> bool:
        """Whether a job has ever shown itself here."""
        return self.store.get(_LIVE) is not None

    def look(self) -> dict[str, Any] | None:
        """What a living job says of itself; None while none is known to live."""
        value, now = self.store.get(_LIVE), time.monotonic()
        if value is None:
            return None
        if value != self.seen:
            self.changed = self.seen is not None
            self.seen, self.since = value, now
        live = _parse(value)
        return live if self.changed and now - self.since < FRESH else None


class JoinQueue:
    """The members' side."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self.says: dict[str, Any] = {}
        self.waiting: dict[int, dict[str, Any]] = {}
        self.answered: set[int] = set()
        self.offered: Any = None  # a store that this process offers must not go away
        self.keeps = False
        self.asked: list[int] | None = None  # epoch and turn in which members are asked to let one in
        self._heard: dict[int, bytes | None] | None = None
        self._off: dict[int, tuple[int, float]] = {}  # by rank: failures to let it in, and when to try again
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, keeps: bool, says: dict[str, Any]) -> None:
        """From now on this rank keeps the door, or does not; ``says`` describes the job."""
        if keeps and not self.keeps:
            self._heard = None  # who has knocked long ago may have gone since
        self.says, self.keeps, self.waiting = says, keeps, {}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trigram-door", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """This rank leaves."""
        self._stop.set()
        if self._thread is not None:
            # It may be waiting for a store behind a cut network; nobody waits for that.
            self._thread.join(0.5)

    def knocks(self) -> list[dict[str, Any]]:
        """Who waits at the door, and is alive; each has an ``id``, a ``rank`` and a ``card``.

        Who could not be let in before comes alone, that nobody else is kept out for its sake.
        """
        waiting = [{"id": i, **knock} for i, knock in sorted(self.waiting.items())]
        return [knock for knock in waiting if knock["rank"] not in self._off] or waiting[:1]

    def put_off(self, ranks: Sequence[int]) -> None:
        """These could not be let in. Members stand still for each attempt, so the next is later each time."""
        for rank in ranks:
            failures = self._off.get(rank, (0, 0.0))[0] + 1
            self._off[rank] = failures, time.monotonic() + min(2.0 ** (failures - 1), _LONGEST_OFF)

    def forgive(self, rank: int) -> None:
        """It has been let in."""
        self._off.pop(rank, None)

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(_LOOK):
            beat += 1
            says = self.says
            if not self.keeps:
                self.asked = _parse(self.store.get(_LIVE) or b"{}").get("asked")
                continue
            self._look()
            if self.waiting:
                # Not withdrawn when it goes: some have heard it, and wait for the others.
                self.asked = [says["epoch"], says["refused"]]
            live = {**says, "keeper": self.rank, "beat": beat, "asked": self.asked}
            if says is self.says:
                self.store.put(_LIVE, json.dumps(live))

    def _look(self) -> None:
        count = int(self.store(lambda s: s.add(_KNOCKS, 0)) or 0)
        recent = range(max(1, count - _RECENT), count + 1)
        before, heard = self._heard, {}
        for i in set(self.answered):
            if i not in recent:
                self.answered.discard(i)
        waiting = {}
        for i in recent:
            if i in self.answered:
                continue
            alive = heard[i] = self.store.get(f"elastic/alive/{i}")
            if before is None or alive is None or alive == before.get(i):
                continue
            knock = _read(self.store.get(f"elastic/knock/{i}"))
            if knock is None or knock["rank"] in self.says["ranks"]:
                continue  # a member's number: its end is not known yet, or somebody else took it
            if not _core.is_endpoint_record(bytes.fromhex(knock["card"]), knock["rank"]):
                # Members shall not even come together for it.
                why = "TRIGRAM_SECRET, TRIGRAM_TLS or the version of trigram is not the job's"
                self.answer(i, {"refused": why})
            elif self._off.get(knock["rank"], (0, 0.0))[1] < time.monotonic():
                waiting[i] = knock
        self.waiting, self._heard = waiting, heard

    def answer(self, knock: int, value: dict[str, Any]) -> None:
        """Lets one in, or tells it more; each knock is answered once."""
        self.answered.add(knock)
        self.waiting.pop(knock, None)
        self.store.put(f"elastic/answer/{knock}", json.dumps(value))


class JoinRequest:
    """A newcomer's side: one knock, and what comes of it."""

    def __init__(self, store: Store, rank: int, card: bytes) -> None:
        self.store = store
        self.id = int(store(lambda s: s.add(_KNOCKS, 1)) or 0)
        store.put(f"elastic/knock/{self.id}", json.dumps({"rank": rank, "card": card.hex()}))
        self._beat, self._beaten = 0, 0.0

    def answer(self) -> dict[str, Any] | None:
        """The answer, if it has come. To be asked again and again: it shows that this rank lives."""
        if time.monotonic() - self._beaten > _LOOK / 2:
            self._beat, self._beaten = self._beat + 1, time.monotonic()
            self.store.put(f"elastic/alive/{self.id}", str(self._beat))
        value = self.store.get(f"elastic/answer/{self.id}")
        return None if value is None else json.loads(value)
