"""Short runs of `trigram bench` with two ranks on this machine, for `trigram doctor`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from trigram.runtime import launch

SECONDS = 60.0
SCHEDULE_SIZES = "4,4K,64K,1M,16M"
Row = dict[str, Any]


class Trial(NamedTuple):
    """The result of a run of two ranks.

    Attributes:
        correct: The run ended, and all elements are right.
        found: Its result, in a line.
        advice: What to do if it is not correct.
    """

    correct: bool
    found: str
    advice: str = ""


def trial(transport: str) -> Trial:
    """Runs twenty all_reduces of 1 MiB on two ranks and checks every element.

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
    """A table of all_reduce on two ranks by size: the time of the default schedule, and the fastest schedule.

    Other jobs give other results: run ``trigram bench all_reduce --via all`` under the job's launcher.
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
            rows = found.get(size, [])  # the default schedule, then each by name
            best = min(rows[1:], key=lambda row: row["time_us_p50"], default=None)
            cells.append(f"{rows[0]['time_us_p50']:.1f}" if rows else "")
            cells.append(f"{best['via']} {best['time_us_p50']:.1f}" if best else "")
        table.add_row(*cells)
    return table


def measured(argv: list[str]) -> tuple[list[Row], launch.Outcome]:
    """Runs a `trigram` command with two ranks on this machine.

    Args:
        argv: The arguments of the command.

    Returns:
        The rows that ``--json`` writes (none if it failed), and how it ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        outcome = launch.launch(
            2, launch.trigram_command([*argv, "--json", str(file)]), show="none", timeout=SECONDS
        )
        return (json.loads(file.read_text()) if file.exists() else []), outcome
