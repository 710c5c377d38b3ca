"""What has happened in an elastic job, as this rank has seen it; the leader publishes it in the status."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_MOST_EVENTS = 16
"""The newest that are kept: all of them are published five times a second."""


@dataclass
class History:
    """From when this rank came into the job.

    Attributes:
        began: When that was, as ``time.time()``.
        events: Who was lost, left or joined, the oldest first: ``at``, ``epoch`` (the one that ended),
            ``what`` (``left``, ``asked to leave``, ``dead``, ``silent``, ``refused``, ``joined``), ``ranks``.
        wasted: Seconds of changes of the members, and of averages that were made again.
    """

    began: float = field(default_factory=time.time)
    events: list[dict[str, Any]] = field(default_factory=list)
    wasted: float = 0.0

    def add(self, epoch: int, what: str, ranks: Iterable[int]) -> None:
        """Adds an event, if it is one of any rank."""
        ranks = sorted(ranks)
        if ranks:
            self.events.append({"at": time.time(), "epoch": epoch, "what": what, "ranks": ranks})
            del self.events[:-_MOST_EVENTS]

    @contextmanager
    def waste(self) -> Iterator[None]:
        """Time in this block is wasted."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.wasted += time.monotonic() - begun

    def summary(self) -> dict[str, Any]:
        """What is published of it."""
        passed = max(time.time() - self.began, 1e-9)
        return {
            "began": self.began,
            "wasted": self.wasted,
            "goodput": min(max(1 - self.wasted / passed, 0.0), 1.0),
            "events": list(self.events),
        }
