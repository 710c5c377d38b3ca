"""Runs the Python tests, several modules at a time, and those that fail a second time alone.

The tests start real ranks, which also wait, for each other, for silence and for restarts, so there are more
workers than cores. They take modules from one queue, the longest first (tests/support/order.py). A test that
fails once fails the run, unless tests/known_flaky.txt has it and it passes alone.

    python tools/run_tests.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 12
"""With more failures than this nothing is run again."""
FLAKY = Path("tests/known_flaky.txt")
"""Tests that may pass the second time, each with its cause."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def _pytest(*options: str) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", "-m", "not long", *options, "tests"])


def _are_known(failed: list[str]) -> bool:
    """Whether all are tests that are known to be flaky."""
    lines = [line for line in FLAKY.read_text().splitlines() if line and not line.startswith("#")]
    known = {line.partition("|")[0].strip() for line in lines}
    return all(name.partition("[")[0] in known for name in failed)


def main() -> int:
    """Runs all tests; returns the exit status."""
    # The tests start thousands of processes: compiling trigram's modules takes most of the start of each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the cores to other workers
    workers = os.environ.get("TRIGRAM_TEST_WORKERS") or str(2 * (os.cpu_count() or 1))
    FAILED.unlink(missing_ok=True)
    status = _pytest("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", f"--maxfail={MOST}")
    if status != 1:
        return status
    failed = sorted(json.loads(FAILED.read_text()))
    print("\nWhat failed beside others, again and alone:", *failed, sep="\n  ", flush=True)
    if _pytest("--last-failed", "--last-failed-no-failures=none"):
        print("Fails alone too.")
    elif _are_known(failed):
        print(f"Passes alone, and is known to ({FLAKY}).")
        return 0
    else:
        print("Passes alone: look for a race, or for what needs a quiet core.")
    return status


if __name__ == "__main__":
    sys.exit(main())
