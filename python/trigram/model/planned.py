"""The end of ``trigram plan``: compares algorithms for what was measured or given, and writes the plan."""

from __future__ import annotations

import sys
from pathlib import Path

from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.plan import choice, file, report
from trigram.plan.inputs import Job
from trigram.plan.measuring import Wanted
from trigram.plan.step import predict


def show(job: Job, path: Path | None, allowed: str) -> None:
    """Prints the table, and writes the plan if a file is given; ``allowed``: what its decision may change."""
    found = choice.compare(job)
    sys.stdout.write(report.text(job, found))
    if path is not None:
        file.write(path, job, found, allowed)


def conclude(job: Job, seconds: float, asked: Wanted) -> None:
    """The same for a job that was measured, whose steps took so many seconds with the default algorithm."""
    show(job, asked.path, asked.allowed)
    predicted = predict(job, find(DEFAULT), int(choice.BUCKETS_MB[0] * (1 << 20))).seconds
    sys.stdout.write(
        f"check: {DEFAULT} with buckets of {choice.BUCKETS_MB[0]:g} MiB took {1e3 * seconds:.4g} ms per step "
        f"here; predicted {1e3 * predicted:.4g}\n"
    )
    sys.stdout.flush()
