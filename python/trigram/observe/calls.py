"""Reads the engine's records of calls, with the names of their groups; follows an elastic job from one engine
to the next."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from trigram import _core
from trigram.runtime import group, job


class GroupName(NamedTuple):
    """What users know of a group.

    Attributes:
        name: Its name in messages.
        ranks: World ranks; empty: they are not known.
    """

    name: str
    ranks: tuple[int, ...]


def engine_of(present: job.World) -> _core.Engine | None:
    """The engine of a world; None: this rank has come late into an elastic job, and has not joined it yet."""
    engine: Any = present.engine
    return engine if isinstance(engine, _core.Engine) else None


class Calls:
    """The calls of this process."""

    def __init__(self) -> None:
        self._job = job.here()
        self._world: weakref.ref[job.World] | None = None
        self._reader: _core.EventReader | None = None
        self._names: dict[int, GroupName] = {}
        self.lost = 0
        """Records that were overwritten before they were read."""
        self.failures = 0
        """Failures of the present engine that somebody knows of already."""

    def _current(self) -> _core.EventReader | None:
        present = self._job.world
        if present is not None and (self._world is None or self._world() is not present):
            engine = engine_of(present)
            if engine is None:
                return None
            self._reader = _core.EventReader(engine)
            self._world, self.failures = weakref.ref(present), 0
        return self._reader

    def read(self) -> list[_core.Event]:
        """The calls that have ended since the last read."""
        before, reader = self._reader, self._current()
        found: list[_core.Event] = []
        for one in {id(r): r for r in (before, reader) if r is not None}.values():
            events, lost = one.read()
            found += events
            self.lost += lost
        return found

    def all(self, under_way: bool = False) -> list[_core.Event]:
        """The last calls, in the order in which they were made, with those under way; or only these."""
        reader = self._current()
        return reader.all(under_way) if reader is not None else []

    def wait_for_failure(self, seconds: float) -> tuple[int, list[tuple[int, int | None, str]]] | None:
        """Waits for more failures than :attr:`failures`, see ``_core.EventReader``; None if there is no
        engine."""
        reader = self._current()
        return reader.wait_for_failure(self.failures, seconds) if reader is not None else None

    def group(self, number: int) -> GroupName:
        """The group with this ``Group.id``."""
        if number not in self._names:
            for g in group.all_groups():
                if g.rank >= 0:
                    self._names[g.core.id] = GroupName(g.name, tuple(g.ranks))
        # If it had been collected before its calls were read, who its members were is not known.
        return self._names.setdefault(number, GroupName("of the job", ()))
