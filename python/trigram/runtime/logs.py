"""The one logger, ``logging.getLogger("trigram")``, and the thread that writes to it.

Lines come from two sides: the engine, which must never wait for a terminal or for the interpreter, and this
package. Both put a line into one bounded queue of the engine's; a daemon thread takes lines out and gives
them to the logger. So a closed or full stderr stops that thread and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from trigram import _core

logger = logging.getLogger("trigram")

_FLUSH_SECONDS = 1.0
"""How long a process that leaves waits until its last lines are written."""
_FLUSH = "\0"
"""No line of a log: the writer has come as far."""

_LONG_WAIT = re.compile(r"rank \d+ has waited \d+ s in ([^(]+)\(")
"""The engine's line about a call that takes long; it names the call."""

recent: deque[tuple[float, str]] = deque(maxlen=64)
"""The last lines that a user should see, and when they were logged, as ``time.time()``."""

_waits: dict[int, tuple[str, Callable[[], str]]] = {}
"""By thread, the call in which it waits, and what says to which model the call belongs."""
_lock = threading.Lock()
_started_in = 0  # the process that has the thread: a forked child has none
_flushed = threading.Event()


def warning(text: str) -> None:
    """Logs a line that a user should see; returns at once."""
    _core.log_line(logging.WARNING, text)


def info(text: str) -> None:
    """Logs a line about the normal course of a job; returns at once."""
    _core.log_line(logging.INFO, text)


@contextlib.contextmanager
def waiting(call: str, describe: Callable[[], str]) -> Iterator[None]:
    """While this thread waits in a model's call, the line about a long wait says what ``describe`` returns.

    Args:
        call: The name of the call, as in the engine's line.
        describe: Called in the logger's thread when the line is written.
    """
    thread = threading.get_ident()
    before = _waits.get(thread)
    _waits[thread] = call, describe
    try:
        yield
    finally:
        if before is None:
            _waits.pop(thread, None)
        else:
            _waits[thread] = before


def start() -> None:
    """Starts the thread that hands lines to the logger, once per process."""
    global _started_in
    with _lock:
        if _started_in != os.getpid():
            _started_in = os.getpid()
            threading.Thread(target=_serve, name="trigram-log", daemon=True).start()


def flush() -> None:
    """Waits until the lines logged so far are written, a second at most."""
    if _started_in == os.getpid():
        _flushed.clear()
        _core.log_line(logging.INFO, _FLUSH)
        _flushed.wait(_FLUSH_SECONDS)


def write_rest() -> None:
    """Writes what has been logged since, in this thread: at exit, when the logger's thread has ended."""
    _write(_core.next_log_lines(0.0))


def _serve() -> None:
    while True:
        _write(_core.next_log_lines(3600.0))


def _write(lines: list[tuple[int, str]]) -> None:
    for level, text in lines:
        if text == _FLUSH:
            _flushed.set()
        else:
            # A filter or a handler of the user's that raises must not end the log.
            with contextlib.suppress(Exception):
                described = _described(text)
                if level >= logging.WARNING:
                    recent.append((time.time(), described))
                _emit(level, described)


def _described(text: str) -> str:
    """The line, with the model of the call if a thread waits in a model's call of this name."""
    found = _LONG_WAIT.match(text)
    if found is None:
        return text
    # Two threads may wait in calls of one name: the engine does not say which, so the line names both models.
    kinds = found[1].split("/")  # send/recv
    names = [describe() for call, describe in list(_waits.values()) if call in kinds]
    return f"{text} ({' or '.join(names)})" if names else text


def _emit(level: int, text: str) -> None:
    if not logger.isEnabledFor(level):
        return
    if logger.hasHandlers():
        logger.log(level, "%s", text)
    elif level >= logging.WARNING and sys.stderr is not None:
        # Nobody has configured logging: as Python's handler of last resort, but saying who speaks. One
        # write, since several ranks may share the terminal.
        try:
            sys.stderr.write(f"trigram: {text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # closed: the line has no reader
