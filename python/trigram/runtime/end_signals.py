"""Signals that end a process, for one that has started others and must end them first.

A handler that raises does so between any two instructions: after a process was started and before anybody
knows it, or inside ``Popen.poll`` with its lock taken, after which that process never counts as ended. So a
handler only notes the signal here, and the loops that wait raise it where they pause.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from types import FrameType

_LATE_SECONDS = 1.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class EndSignals:
    """Notes the signals that end this process until a stack is closed.

    Signals that the process ignores, as SIGHUP under nohup, stay ignored, and a handler of SIGINT that is not
    Python's own stays. In another thread than the main one nothing is noted: it gets no signals.

    Args:
        stack: When it is closed, the handlers are as before, and a signal that nobody has looked at is raised
            again.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._noted: int | None = None
        self._since = 0.0
        if threading.current_thread() is not threading.main_thread():
            return
        stack.callback(self._again)
        for number in _NUMBERS:
            before = signal.getsignal(number)
            own = number == signal.SIGINT and before is not signal.default_int_handler
            if before not in (signal.SIG_IGN, None) and not own:
                signal.signal(number, self._note)
                stack.callback(signal.signal, number, before)

    def pause(self, seconds: float) -> None:
        """Sleeps, and raises what was noted.

        Raises:
            KeyboardInterrupt: SIGINT was noted.
            SystemExit: Another signal was, with 128 + its number.
        """
        self.look()
        time.sleep(seconds)
        self.look()

    def look(self) -> None:
        """Raises what was noted, as :meth:`pause` does, once."""
        number, self._noted = self._noted, None
        if number is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A second one that comes long after the first, and nobody has looked: what runs does not come to its
        # next pause, such as a write to a terminal that is stopped. SIGHUP and SIGTERM come together.
        now = time.monotonic()
        if self._noted is None:
            self._noted, self._since = number, now
        elif now - self._since > _LATE_SECONDS:
            self.look()

    def _again(self) -> None:
        number, self._noted = self._noted, None
        if number is not None:
            signal.raise_signal(number)
