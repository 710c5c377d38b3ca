"""examples/elastic.py, whose steps last as long as the machine is busy.

Faults are injected for some seconds, and ranks started again. On a busy machine a start takes long: the job
must not be over by then. So what a start has taken here says how long a step pauses.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import sklearn.datasets  # noqa: F401  (what takes long to import)

import trigram  # noqa: F401

QUIET_SECONDS = 10.0
"""A start of four ranks on two quiet cores takes less."""


def age() -> float:
    """Seconds since this process began."""
    told = Path("/proc/self/stat").read_text()
    began = int(told.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


if __name__ == "__main__":
    example, pause, *arguments = sys.argv[1:]
    sys.argv = [example, "--pause", str(float(pause) * max(1.0, age() / QUIET_SECONDS)), *arguments]
    runpy.run_path(example, run_name="__main__")
