"""Runs the Python tests, several modules at a time, and those that fail a second time alone.

The tests start real ranks, which also wait, for each other, for silence and for restarts, so there are more
workers than cores. They take modules from one queue, the longest first (tests/support/order.py). A test that
fails fails the run. What it does alone says where to look: one that passes then has met a busy machine or a
race.

    python tools/run_tests.py
"""

from __future__ import annotations

import os
import subprocess
import sys

MOST = 12
"""With more failures than this nothing is run again."""


def _pytest(*options: str) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", "-m", "not long", *options, "tests"])


def main() -> int:
    """Runs all tests; returns the exit status."""
    # The tests start thousands of processes: compiling trigram's modules takes most of the start of each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the cores to other workers
    workers = os.environ.get("TRIGRAM_TEST_WORKERS") or str(2 * (os.cpu_count() or 1))
    queue = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    status = _pytest(*queue, f"--maxfail={MOST}")
    if status == 1:
        print("\nWhat failed beside others, again and alone:", flush=True)
        again = _pytest("--last-failed", "--last-failed-no-failures=none")
        print(
            "They fail alone too."
            if again
            else "They pass alone: look for a race, or for what needs a quiet core."
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
