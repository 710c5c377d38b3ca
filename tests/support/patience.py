"""Limits of tests count seconds of a machine that does nothing else: on a busy one all takes longer.

Without this a limit is either too short beside other work, or keeps a run waiting for what hangs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def _shared_by() -> tuple[float, float]:
    """Tasks that want each core: on average over a minute, and now; at least one."""
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    cores = os.cpu_count() or 1
    return max(1.0, float(average) / cores), max(1.0, int(running.partition("/")[0]) / cores)


def seconds(quiet: float) -> float:
    """The limit for a program that takes at most ``quiet`` seconds on a quiet machine."""
    return quiet * max(_shared_by())


def silence(quiet: float) -> str:
    """TRIGRAM_SILENCE for a test in which no rank may be lost because other processes have its core."""
    return f"{seconds(quiet):.2f}"


class Limit:
    """Passes as ``quiet`` seconds do on a quiet machine. Whoever waits asks it again and again."""

    def __init__(self, quiet: float) -> None:
        self._left, self._asked = quiet, time.monotonic()

    def is_over(self) -> bool:
        """Whether the time has passed."""
        now = time.monotonic()
        self._left -= (now - self._asked) / _shared_by()[1]
        self._asked = now
        return self._left < 0
