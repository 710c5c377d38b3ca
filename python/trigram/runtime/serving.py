"""What this process does for other ranks while it waits for them.

Some calls of a rank are made only when calls before them have ended: second phases of averages, answers to
offers of neighbours. Other ranks may wait for them. So whoever waits, in whatever call, makes them first:
otherwise two ranks would wait for each other for ever, one of them in another call.

Waits are in the engine, which calls :func:`serve` (``rust/engine/src/sys/serving.rs``), or in :func:`until`.
Nothing else waits for ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from trigram import _core
from trigram.runtime import job
from trigram.runtime.inference_mode import kept_tensors
from trigram.runtime.job import Job

_POLL = 0.0005
"""Seconds between two looks at what :func:`until` waits for."""


class Pending(Protocol):
    """What is waited for: a collective, messages, or several of them."""

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""

    def wait(self) -> object:
        """Waits until it has ended; raises if it failed."""


class Server(Protocol):
    """Something that other ranks may wait for."""

    def serve(self, idle: bool) -> object:
        """Makes the calls that can be made without waiting.

        What raises here is raised again where its owner comes to it.

        Args:
            idle: The waiting thread trains no more, or is between two steps: weights may change.
        """


class _Thread(threading.local):
    """What this thread does.

    Attributes:
        look: See :func:`looking`.
    """

    look: Callable[[], object] | None = None


class _Servers:
    """Who is served in this process, whichever of its ranks they are of: a thread that waits in one rank's
    call may be the one that another rank's server is served by.

    Attributes:
        known: By server, the thread that serves it, None: any, and the job that it is of.
        changing: Held while one is added or removed.
        busy: Those that a thread serves now.
    """

    def __init__(self) -> None:
        self.known: dict[Server, tuple[int | None, Job]] = {}
        self.changing = threading.Lock()
        self.busy: set[Server] = set()


_servers = _Servers()
_thread = _Thread()


def add(server: Server, *, anywhere: bool = False) -> None:
    """From now on threads that wait serve it: this one only, or with ``anywhere`` any."""
    with _servers.changing:
        _servers.known[server] = (None if anywhere else threading.get_ident()), job.here()
        _core.serve_by(serve, True)


def remove(server: Server) -> None:
    """Ends :func:`add`."""
    with _servers.changing:
        _servers.known.pop(server, None)
        if not _servers.known:
            _core.serve_by(serve, False)


def serve(idle: bool = False) -> None:
    """Makes the calls for which other ranks may wait, as far as that needs no waiting.

    Args:
        idle: See :class:`Server`.
    """
    if _thread.look is not None:
        _thread.look()
    me = threading.get_ident()
    with kept_tensors(), torch.no_grad():
        for server, (thread, owner) in list(_servers.known.items()):
            if server in _servers.busy or thread not in (None, me):
                continue
            _servers.busy.add(server)  # it may wait in a call itself, and the others are served meanwhile
            try:
                with owner.here(), contextlib.suppress(Exception):  # see `Server.serve`
                    server.serve(idle)
            finally:
                _servers.busy.discard(server)


class _Nobody:
    """Has threads that wait come here now and then, where nothing else does."""

    def serve(self, idle: bool) -> None:
        """See :class:`Server`."""


def bind(server: Server) -> None:
    """If threads serve it, from now on this one does: its owner works here now."""
    with _servers.changing:
        if server in _servers.known:
            _servers.known[server] = threading.get_ident(), _servers.known[server][1]


@contextlib.contextmanager
def looking(look: Callable[[], object]) -> Iterator[None]:
    """A block in which waits of this thread call ``look`` now and then. What it raises ends them, though no
    collective."""
    before, _thread.look, nobody = _thread.look, look, _Nobody()
    add(nobody, anywhere=True)
    try:
        yield
    finally:
        _thread.look = before
        remove(nobody)


def until(done: Callable[[], bool], end: float | None = None, idle: bool = False) -> bool:
    """Waits for what is no single call.

    Args:
        done: Whether the wait is over.
        end: When it is over otherwise, by ``time.monotonic``.
        idle: See :class:`Server`.

    Returns:
        Whether ``done`` has returned True.
    """
    while not done():
        if end is not None and time.monotonic() > end:
            return False
        serve(idle)
        time.sleep(_POLL)
    return True


def rest(work: Pending) -> None:
    """Waits for a call while this rank does not train: averages may change its weights."""
    me = threading.get_ident()
    if any(thread == me for thread, _ in list(_servers.known.values())):
        until(work.is_completed, idle=True)
    work.wait()
