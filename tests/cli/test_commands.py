"""The command line, as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import long


@pytest.mark.parametrize(("transport", "vias"), [("shm", 6), long("tcp", 5)])
def test_bench_measures_every_schedule(tmp_path: Path, transport: str, vias: int) -> None:
    """The library's choice, and then each; over TCP "shared" is skipped, and the rest is measured."""
    file = tmp_path / "rows.json"
    argv = [
        "bench",
        "all_reduce",
        "--transport",
        transport,
        "--via",
        "all",
        "--sizes",
        "4,64K,5",  # 5 bytes are measured as 4, once
        "--iters",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trigram", *argv, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert len(rows) == 2 * vias and not any(row["wrong"] for row in rows)
    assert len({row["via"] for row in rows}) == vias
    assert ("skipped" in done.stdout) == (transport == "tcp")


def test_via_is_for_all_reduce_only() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigram", "bench", "broadcast", "--via", "ring"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "only all_reduce" in done.stderr
