"""The thread that runs the callbacks of calls that have ended, one for each rank.

A callback never interrupts other Python code of its process, and runs under no lock of the engine: it may
make calls and wait for them, best in a group of its own, because other ranks may be elsewhere in their
programs.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable

from trigram import _core
from trigram.runtime import job, logs

_IDLE_SECONDS = 3600.0
_LINGER_SECONDS = 5.0
_lock = threading.Lock()
_started_in = 0  # the process that has the thread: a forked child has none


def when_done(work: _core.Work, callback: Callable[[], object]) -> None:
    """Runs ``callback()`` once the call has ended, in the rank's thread for callbacks; returns at once.

    The callbacks of one group's collectives run in the order in which they were asked for, those of messages
    and of different groups as the calls end. An exception of a callback is logged.
    """
    global _started_in
    if _started_in != os.getpid():
        with _lock:
            if _started_in != os.getpid():
                threading.Thread(target=_serve, name="trigram-callbacks", daemon=True).start()
                _started_in = os.getpid()
    mine = job.here()
    if mine is not job.of_process or mine.has(_OfRank) or job.is_any_other():
        callback = mine.part(_OfRank).handing_over(callback)
    work.add_done_callback(callback)


def _serve() -> None:
    while True:
        due = _core.next_done_callbacks(_IDLE_SECONDS)
        while due:
            _run(due.pop(0))  # not held any longer than it runs


def _run(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException as e:  # also SystemExit, which would end the thread for those that follow
        logs.warning(f"a callback of a collective raised {type(e).__name__}: {e}")


class _OfRank:
    """The thread for the callbacks of one of several ranks of a process. A callback may wait for one of
    another rank, which therefore needs a thread of its own. It ends when nothing has come for a while."""

    def __init__(self) -> None:
        self._job = job.here()
        self._due: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs_in = 0  # the process that has the thread: a forked child has none

    def handing_over(self, callback: Callable[[], object]) -> Callable[[], object]:
        """What hands the callback to the thread."""
        return functools.partial(self._hand_over, callback)

    def _hand_over(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._due.put(callback)
            if self._runs_in == os.getpid():
                return
            try:
                self._job.thread("trigram-callbacks", self._serve)
                self._runs_in = os.getpid()
                return
            except RuntimeError:  # the interpreter ends, and starts none any more
                callback = self._due.get()
        _run(callback)

    def _serve(self) -> None:
        while True:
            try:
                callback = self._due.get(timeout=_LINGER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._due.empty():
                        self._runs_in = 0
                        return
                continue
            _run(callback)
            del callback
