"""Runs the Python tests in lanes beside each other, and those that fail a second time alone.

The tests start real ranks, which also wait, for each other, for silence and for restarts, so lanes beside
each other save time. A test that fails there and passes alone has met a busy machine or a race. It is named
at the end, so that somebody looks at it; it does not fail the run. A run in which more than ``MOST`` tests
fail is not repeated.

    python tools/run_tests.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOMS = {
    "cli": ("cli", "plan", "backend", "data", "moe", "integrations"),
    "algorithms": ("algorithms", "training", "codecs"),
    "elastic": ("elastic", "sharded", "observe", "runtime"),
}
"""The folders of each lane, which take about as long together; another lane has the rest."""
LANES = {lane: [f"tests/{room}" for room in rooms] for lane, rooms in ROOMS.items()}
LANES["rest"] = ["tests", *(f"--ignore={folder}" for folders in LANES.values() for folder in folders)]
MOST = 12
CACHE = Path(".pytest_cache")


def _command(lane: str) -> list[str]:
    report = f"--junitxml={CACHE / lane}.xml"  # says how long each test took
    cache = f"cache_dir={CACHE / lane}"
    return [sys.executable, "-m", "pytest", "-o", cache, report, "-m", "not long", *LANES[lane]]


def _failed(lane: str) -> list[str]:
    kept = CACHE / lane / "v" / "cache" / "lastfailed"
    return sorted(json.loads(kept.read_text())) if kept.exists() else []


def main() -> int:
    """Runs all lanes; returns the exit status."""
    for lane in LANES:
        (CACHE / lane / "v" / "cache" / "lastfailed").unlink(missing_ok=True)
    # The tests start thousands of processes: compiling trigram's modules takes most of the start of each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the cores to other lanes
    running = {lane: subprocess.Popen(_command(lane)) for lane in LANES}
    statuses = {lane: process.wait() for lane, process in running.items()}
    worst = max(statuses.values(), key=abs)
    failed = {lane: _failed(lane) for lane, status in statuses.items() if status}
    count = sum(map(len, failed.values()))
    if worst == 0 or any(status not in (0, 1) for status in statuses.values()) or not 0 < count <= MOST:
        return abs(worst)
    print(f"\n{count} tests failed beside others; again, alone:", flush=True)
    again = {
        lane: subprocess.call([*_command(lane), "--last-failed", f"--junitxml={CACHE / lane}-again.xml"])
        for lane in failed
    }
    still = {lane: _failed(lane) for lane, status in again.items() if status}
    for lane, names in failed.items():
        for name in names:
            verdict = "FAILED TWICE" if name in still.get(lane, []) else "FAILED ONCE, passes alone"
            print(f"{verdict}: {name}")
    return max(map(abs, again.values()))


if __name__ == "__main__":
    sys.exit(main())
