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
"""Seconds that rank 0 waits for the files of the other ranks when it ends."""


def _folder() -> Path | None:
    asked = os.environ.get(VARIABLE, "")
    return Path("trigram-report" if asked == "1" else asked) if asked not in ("", "0") else None


def of_this_rank(present: world.World) -> report.Rank:
    """What this rank says of itself now."""
    times = next(iter(steps.of_process()), None)
    whole = times.summary() if times is not None else None
    keys = ("step", *steps.PHASES)
    group = (times.group if times is not None else None) or present.group
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
        ranks=list(group.ranks),
        rates=list(group.core.rates()) if group.rank >= 0 else [],
        sent=sum(counters["sent_bytes"]),
        fidelity=times.fidelity() if times is not None else {},
    )


def _begin() -> None:
    folder, present = _folder(), world.present()
    if folder is not None and present is not None:
        steps.keep()
        with contextlib.suppress(OSError):  # what cannot be written is told at the end
            (folder / f"{report.PREFIX}{present.rank}.json").unlink(missing_ok=True)


def _finish() -> None:
    folder, present = _folder(), world.present()
    if folder is None or present is None:
        return
    try:
        report.write(folder, of_this_rank(present))
    except OSError as error:
        logs.warning(f"{VARIABLE}: rank {present.rank} cannot write its figures to {folder}: {error}")
        return
    if present.rank != 0 or exit_status.has_failed():
        return
    deadline = time.monotonic() + _PATIENCE
    try:
        while len(rows := report.read(folder)) < present.size and time.monotonic() < deadline:
            time.sleep(0.05)
    except (
        ConfigError
    ) as error:  # a file that something else has left there must not keep this rank in the job
        logs.warning(f"{VARIABLE}: no report: {error}")
        return
    sys.stdout.write(report.text([row for row in rows if row.rank < present.size]) + "\n")
    sys.stdout.flush()


world.at_start.append(_begin)
world.at_exit.insert(0, _finish)
