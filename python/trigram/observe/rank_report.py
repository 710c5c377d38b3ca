"""``TRIGRAM_REPORT=DIR``: each rank leaves its figures in a folder when it ends, and rank 0 prints them.

Nothing is sent for it: ranks of one host share the folder. ``TRIGRAM_REPORT=1`` means ``trigram-report``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from trigram.errors import ConfigError
from trigram.observe import report, steps
from trigram.runtime import exit_status, logs, world

VARIABLE = "TRIGRAM_REPORT"
_PATIENCE = 5.0
"""Seconds that rank 0 waits for the files of its host's other ranks when it has left."""


def _folder() -> Path | None:
    asked = os.environ.get(VARIABLE, "")
    return Path("trigram-report" if asked == "1" else asked) if asked not in ("", "0") else None


def of_this_rank(present: world.World, times: steps.StepTimes | None) -> report.Rank:
    """What this rank says of itself and of a model now."""
    whole = times.summary() if times is not None else None
    keys = ("step", *steps.PHASES)
    ranks, rates = times.links() if times is not None else steps.links(present.group)
    counters: dict[str, Any] = dict(present.engine.counters())
    return report.Rank(
        rank=present.rank,
        world_size=present.size,
        host=socket.gethostname(),
        model=times.name if times is not None else "",
        steps=times.step.count if times is not None else 0,
        mean={key: whole[key]["mean"] if whole else 0.0 for key in keys},
        median={key: whole[key]["median"] if whole else 0.0 for key in keys},
        buckets=list(times.buckets) if times is not None else [],
        ranks=ranks,
        rates=rates,
        sent=sum(counters["sent_bytes"]),
        fidelity=times.fidelity() if times is not None else {},
    )


def _begin() -> None:
    folder, present = _folder(), world.present()
    if folder is not None and present is not None:
        exit_status.watch()
        with contextlib.suppress(OSError):  # what cannot be written is told at the end
            (folder / f"{report.PREFIX}{present.rank}.json").unlink(missing_ok=True)


_awaited: tuple[Path, list[int]] | None = None
"""Of a rank that prints the report: the folder, and the ranks of its host."""


def _finish() -> None:
    global _awaited
    folder, present = _folder(), world.present()
    if folder is None or present is None:
        return
    try:
        report.write(folder, of_this_rank(present, steps.longest()))
    except OSError as error:
        logs.warning(f"{VARIABLE}: rank {present.rank} cannot write its figures to {folder}: {error}")
        return
    if present.rank == 0 and not exit_status.has_failed():
        hosts = present.engine.hosts
        _awaited = folder, [r for r in range(present.size) if hosts[r] == hosts[0]]


def _print() -> None:
    """This rank has left the job, so nobody waits for it while it waits for the files of the others."""
    global _awaited
    awaited, _awaited = _awaited, None
    if awaited is None:
        return
    folder, ranks = awaited
    deadline = time.monotonic() + _PATIENCE
    try:
        rows = report.read(folder)
        while not set(ranks) <= {row.rank for row in rows} and time.monotonic() < deadline:
            time.sleep(0.05)
            rows = report.read(folder)
        text = report.text(rows)
    except ConfigError as error:  # a file that something else has left there
        text = f"trigram report: none, because {error}"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


world.at_start.append(_begin)
world.at_exit.insert(0, _finish)
world.after_exit.append(_print)
