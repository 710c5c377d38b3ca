"""A rank of an elastic job that was asked to leave: it ends its step, hands over what only it has, and goes.

:func:`drain` asks it, and so do SIGTERM, a notice that a cloud will take the machine (``TRIGRAM_DRAIN``, see
``notices.py``), and an order from outside (``orders.py``). All members learn of it when they next agree on
something: at the end of a step, or at an averaging step. Between steps they change the membership without
this rank (``membership.py``), which then ends its process with status 0, or that of
``TRIGRAM_DRAIN_STATUS``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from trigram.elastic import notices, orders
from trigram.elastic.notices import Notice
from trigram.errors import ConfigError, MisuseError
from trigram.runtime import job, logs, world
from trigram.runtime.job import Part

_PATIENCE = 10.0
"""Seconds after which ranks that do not wait for each other should have let one go."""
_STATUS = "TRIGRAM_DRAIN_STATUS"
"""The exit status of a rank that leaves: some supervisors start only processes again that have failed."""
_FOR_GOOD = "TRIGRAM_LEFT_STATUS"
"""That of one that ``trigram drain`` has sent away, which is not to be started again."""


def check_settings() -> None:
    """Raises ``ConfigError`` if a setting of this file is wrong."""
    if where := os.environ.get(notices.VARIABLE):
        notices.check(where)
    for by in ("", orders.BY):
        exit_status(by)


def exit_status(by: str) -> int:
    """The status with which the process of a rank ends that leaves, asked to by whom."""
    variable = _FOR_GOOD if by == orders.BY else _STATUS
    text = os.environ.get(variable, "0")
    if not (text.isascii() and text.isdigit() and int(text) < 256):
        raise ConfigError(f"{variable}={text!r} is invalid; set it to a number from 0 to 255")
    return int(text)


@job.told
class Draining(Part):
    """Whether this rank was asked to leave.

    Attributes:
        asked: By whom, such as ``SIGTERM``; None: it was not.
        trains: It has a model in the job, so that it will come to the end of a step.
    """

    asked: str | None = None
    trains = False
    _since = 0.0
    _notice: Notice | None = None
    _process = 0
    _signalled = False

    def begin(self) -> None:
        """In an elastic job: watches for the signal and for notices."""
        present = world.present()
        if present is None or present.elastic is None:
            if self.asked is not None:
                self.asked = None
                logs.warning("drain: this rank was asked to leave, but the job that it joined is not elastic")
            return
        self._since, self._process = time.monotonic(), os.getpid()
        where = os.environ.get(notices.VARIABLE)
        if where:
            self._notice = Notice(where, self.ask)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and job.here() is job.of_process and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def is_asked(self) -> bool:
        """Whether this rank was asked to leave."""
        return self.asked is not None

    def ask(self, by: str) -> None:
        """Asks this rank to leave after its step; any thread may."""
        if by == orders.BY and self.asked is not None:
            self.asked = by  # for good
        elif self.asked is None:
            self.asked, self._since = by, time.monotonic()
            logs.warning(f"{by}: this rank leaves the job when its step is over; the other ranks go on")

    def is_overdue(self) -> bool:
        """Whether the others should have let this rank go, and have perhaps not been reached."""
        return self.asked is not None and time.monotonic() - self._since > _PATIENCE

    def left(self) -> None:
        """Watches no longer."""
        if self._notice is not None:
            self._notice.stop()
        if signal.getsignal(signal.SIGTERM) == self._on_signal and (
            threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The next job of this process begins anew.
        self.asked, self.trains, self._signalled, self._notice = None, False, False, None

    def _on_signal(self, number: int, _frame: FrameType | None) -> Any:
        # The second signal ends the process, as the first does if no step is to come, or in a forked child.
        if self.trains and not self._signalled and os.getpid() == self._process:
            self._signalled = True
            self.ask("SIGTERM")
        elif os.getpid() == 1:
            raise SystemExit(128 + number)  # Linux ignores for the first process what it has no handler for
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def drain() -> None:
    """Asks this rank to leave an elastic job: it ends its step, hands over what only it has, and its process
    ends, with status 0 or ``TRIGRAM_DRAIN_STATUS``. The other ranks go on, and no step is lost. Any thread
    may call it.

    It leaves by ``SystemExit``, which its script sees where the next step begins; with algorithms that
    average weights, where the step after the next averaging step begins. SIGTERM does the same, unless the
    script handles it; a second SIGTERM ends the process at once. See docs/elastic.md.

    Before ``init`` it asks for the job that this rank will join.

    Raises:
        MisuseError: The job is not elastic.
    """
    present = world.present()  # not `current`, which begins a job: this may be in a handler of a signal
    if present is not None and present.elastic is None:
        raise MisuseError("drain: the job is not elastic; call trigram.init(elastic=True) at its start")
    job.here().part(Draining).ask("trigram.drain()")


def draining() -> bool:
    """Whether this rank was asked to leave (:func:`drain`), so that its script need not begin long work."""
    return job.here().part(Draining).is_asked()
