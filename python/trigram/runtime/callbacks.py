"""The thread that runs the callbacks of calls that have ended, one per process.

A callback never interrupts other Python code of its process, and runs under no lock of the engine: it may
make calls and wait for them, best in a group of its own, because other ranks may be elsewhere in their
programs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from trigram import _core
from trigram.runtime import logs

_IDLE_SECONDS = 3600.0
_lock = threading.Lock()
_started_in = 0  # the process that has the thread: a forked child has none


def when_done(work: _core.Work, callback: Callable[[], object]) -> None:
    """Runs ``callback()`` once the call has ended, in the process's thread for callbacks; returns at once.

    The callbacks of one group's collectives run in the order in which they were asked for, those of messages
    and of different groups as the calls end. An exception of a callback is logged.
    """
    global _started_in
    if _started_in != os.getpid():
        with _lock:
            if _started_in != os.getpid():
                threading.Thread(target=_serve, name="trigram-callbacks", daemon=True).start()
                _started_in = os.getpid()
    work.add_done_callback(callback)


def _serve() -> None:
    while True:
        due = _core.next_done_callbacks(_IDLE_SECONDS)
        while due:
            try:
                due.pop(0)()  # not held any longer than it runs
            except Exception as e:
                logs.warning(f"a callback of a collective raised {type(e).__name__}: {e}")
