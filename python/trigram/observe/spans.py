"""What Python does, as spans on named tracks, and names for the engine's calls; for whoever listens.

While nobody listens and no profiler runs, a span costs two reads of the clock at most, and a name nothing.
Times are those of ``time.monotonic_ns``, as in the engine's records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from trigram.observe import profiling
from trigram.runtime import job
from trigram.runtime.group import Group


class Listener(Protocol):
    """Who is told of spans. Its methods are called in the training thread, so they only take a note."""

    def span(self, track: str, name: str, began: int, ended: int) -> None:
        """A span has ended."""

    def name_calls(self, group: int, first: int, until: int, name: str) -> None:
        """The collectives of a group from the ``first``-th to before the ``until``-th have this name."""


class Listeners:
    """Who is told of the spans of a rank."""

    def __init__(self) -> None:
        self.all: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """From now on tells ``listener`` of spans, until :meth:`remove`."""
        self.all.append(listener)

    def remove(self, listener: Listener) -> None:
        """Tells ``listener`` of no more spans."""
        if listener in self.all:
            self.all.remove(listener)


def _told() -> list[Listener]:
    return job.here().part(Listeners).all


def tell(track: str, name: str, began: int, ended: int) -> None:
    """Tells the listeners of a span."""
    for listener in _told():
        listener.span(track, name, began, ended)


class Span:
    """A span that has begun. It appears in torch's profiler too, as ``trigram:`` and its name.

    Args:
        track: Spans of one track do not overlap each other; "": for the profiler only.
        name: Its name.
    """

    __slots__ = ("_began", "_event", "_name", "_track")

    def __init__(self, track: str, name: str) -> None:
        self._track, self._name = track, name
        self._event = profiling.begin(name, ()) if profiling.enabled() else None
        self._began = time.monotonic_ns()

    def end(self) -> None:
        """Ends it."""
        if self._track:
            tell(self._track, self._name, self._began, time.monotonic_ns())
        event, self._event = self._event, None
        profiling.end(event)


def begin(track: str, name: Callable[[], str]) -> Span | None:
    """A span, if anybody looks; ``name`` is called only then."""
    return Span(track, name()) if _told() or profiling.enabled() else None


def end(span: Span | None) -> None:
    """Ends what :func:`begin` has returned."""
    if span is not None:
        span.end()


@contextlib.contextmanager
def naming(group: Group, name: Callable[[], str]) -> Iterator[None]:
    """Names the collectives of a group that are made inside, if anybody looks."""
    listeners = _told()
    if not listeners:
        yield
        return
    core, first = group.core, group.core.next()
    try:
        yield
    finally:
        for listener in listeners:
            listener.name_calls(core.id, first, core.next(), name())
