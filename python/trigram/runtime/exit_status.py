"""Whether this process ends because it has failed: then it does not wait for the other ranks.

Python keeps no exit status that a function at exit could read, so :func:`watch` records what it can: the
outermost frame of the main thread, which tells whether the script was left by an exception, and the status
given to ``sys.exit``. A status that only a ``raise SystemExit(3)`` carries is gone by then and counts as 0,
since ``raise SystemExit(main())`` ends scripts that have succeeded too.
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType
from typing import NoReturn

_RETURNS = {
    code for name, code in dis.opmap.items() if name.startswith("RETURN_") and "GENERATOR" not in name
}

_outermost: FrameType | None = None
_status: object = None
"""The argument of the main thread's last ``sys.exit``."""
_exit = sys.exit


def _recording_exit(status: object = None, /) -> NoReturn:
    global _status
    if threading.current_thread() is threading.main_thread():  # in another thread it ends only that
        _status = status
    _exit(status)  # type: ignore[arg-type]  # what it refuses, it refuses here


def watch() -> None:
    """Starts to record what :func:`has_failed` needs; a second call does nothing new."""
    global _outermost, _exit
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _outermost = frame
    if sys.exit is not _recording_exit:
        _exit, sys.exit = sys.exit, _recording_exit


def has_failed() -> bool:
    """Whether this process ends, or the caller is called, because of an error.

    That is: an exception is being handled now, or has ended the script, or the script has called ``sys.exit``
    with another status than 0 or None. An exception that was printed earlier and ended nothing, as in a
    notebook, does not count.
    """
    now = sys.exc_info()[1]
    if now is not None:
        return not isinstance(now, SystemExit) or now.code not in (0, None)
    if _outermost is None or hasattr(sys, "ps1") or not _was_left_by_exception(_outermost):
        return False
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if last is not None and last.__traceback__ is not None and last.__traceback__.tb_frame is _outermost:
        return True
    return _status not in (0, None)


def _was_left_by_exception(frame: FrameType) -> bool:
    """Whether the last instruction of a frame that is no longer on the stack is another than a return."""
    running = sys._current_frames().get(threading.main_thread().ident or 0)
    while running is not None:
        if running is frame:
            return False
        running = running.f_back
    return frame.f_code.co_code[frame.f_lasti] not in _RETURNS
