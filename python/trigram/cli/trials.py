"""Trials of two ranks on this machine, for `trigram doctor`: `trigram bench` in a word or two."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from trigram.cli import launch

SECONDS = 60.0
SCHEDULE_SIZES = "4,4K,64K,1M,16M"
Row = dict[str, Any]


class Trial(NamedTuple):
    """What two ranks came to."""

    right: bool
    found: str
    advice: str = ""


def trial(transport: str) -> Trial:
    """Two ranks, twenty all_reduces of 1 MiB, every element checked.

    Args:
        transport: "shm" or "tcp".
    """
    argv = ["bench", "all_reduce", "--transport", transport, "--sizes", "1M"]
    rows, outcome = measured(argv)
    if not rows:
        why = outcome.errors.strip().splitlines()[-1:] or [f"exit code {outcome.code}"]
        if outcome.code == launch.TIMED_OUT:
            why = [f"no result within {SECONDS:.0f} s"]
        return Trial(False, why[0], f"for the full output, run trigram {' '.join(argv)}")
    row = rows[0]
    found = f"all_reduce of 1 MiB in {row['time_us_p50']:.0f} us, {row['busbw_GBps']:.2f} GB/s"
    if row["wrong"]:
        advice = "report this as a bug of trigram, with this whole table"
        return Trial(False, f"{found}, but {row['wrong']} elements are wrong", advice)
    return Trial(True, found)


def crossover() -> Table:
    """Which schedule of all_reduce is the fastest for two ranks here, by size, beside the one that is chosen.

    A job has its own: run ``trigram bench all_reduce --via all`` under its launcher.
    """
    title = "all_reduce of two ranks on this machine: microseconds, and the fastest schedule"
    table = Table("bytes", title=title, box=SIMPLE, pad_edge=False)
    columns: list[dict[int, list[Row]]] = []
    for transport in ("shm", "tcp"):
        rows, _ = measured(
            ["bench", "all_reduce", "--transport", transport, "--via", "all", "--sizes", SCHEDULE_SIZES]
        )
        by_size: dict[int, list[Row]] = {}
        for row in rows:
            by_size.setdefault(row["bytes"], []).append(row)
        columns.append(by_size)
        table.add_column(f"{transport}: default", justify="right")
        table.add_column("fastest", justify="right", no_wrap=True)
    for size in columns[0]:
        cells = [str(size)]
        for found in columns:
            rows = found.get(size, [])  # The schedule that was chosen, then every one by name.
            best = min(rows[1:], key=lambda row: row["time_us_p50"], default=None)
            cells.append(f"{rows[0]['time_us_p50']:.1f}" if rows else "")
            cells.append(f"{best['via']} {best['time_us_p50']:.1f}" if best else "")
        table.add_row(*cells)
    return table


def measured(argv: list[str]) -> tuple[list[Row], launch.Outcome]:
    """Runs a bench with two ranks here.

    Args:
        argv: What to type after ``trigram``.

    Returns:
        Its rows, as ``--json`` writes them, none where it failed, and how it ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        outcome = launch.launch(2, [*argv, "--json", str(file)], quiet=True, timeout=SECONDS)
        return (json.loads(file.read_text()) if file.exists() else []), outcome
