"""Compares algorithms and bucket sizes for a job, and recommends one for each freedom that a user gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trigram.algorithms.names import DEFAULT, names
from trigram.algorithms.parse import find
from trigram.plan import losses
from trigram.plan.inputs import Job
from trigram.plan.losses import ALLOWED
from trigram.plan.step import Prediction, predict

CANDIDATES = (
    *names(),
    *("central/bf16/sync", "central/f16/sync"),
)
NOT_COMPARED = ("qadam",)
"""Needs an optimizer of its own."""
BUCKETS_MB = (4.0, 1.0, 2.0, 8.0, 25.0)
"""Sizes that are compared; the first is the default."""
BUCKET_GAIN = 0.02
"""A bucket size other than the default must gain this part of a step: predictions are no better."""
WORTH = 0.1
"""Gain for which numerics may change: below, the next stricter recommendation stands."""


@dataclass(frozen=True)
class Row:
    """One algorithm with its best bucket size.

    Attributes:
        algorithm: As ``with_bagua`` takes it.
        bucket_mb: Size of a bucket of gradients in MiB; None if the algorithm averages weights.
        seconds: Predicted time of a step.
        relative: To the default algorithm with the default bucket size.
        nbytes: Bytes that a rank sends per step.
        memory: Bytes that a rank needs in addition.
        kind: ``exact``, ``close`` or ``different``, see :func:`trigram.plan.losses.kind`.
        loss: What is known of the loss.
    """

    algorithm: str
    bucket_mb: float | None
    seconds: float
    relative: float
    nbytes: float
    memory: float
    kind: str
    loss: str


@dataclass(frozen=True)
class Decision:
    """What ``with_bagua(plan=...)`` takes: algorithm, its options (with the schedule's), and bucket size."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    bucket_mb: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All rows, fastest first, and the recommendations by what may change: ``exact``, ``close``, ``any``."""

    rows: tuple[Row, ...]
    best: dict[str, Row]

    def decision(self, allowed: str) -> Decision:
        """The recommendation for ``exact``, ``close`` or ``any``, as ``with_bagua`` takes it."""
        row = self.best[allowed]
        return Decision(row.algorithm, schedule(row.algorithm), row.bucket_mb)

    def among(self, algorithms: Iterable[str]) -> Comparison:
        """The same of some algorithms only; the default one must be among them."""
        rows = [row for row in self.rows if row.algorithm in set(algorithms)]
        return Comparison(tuple(rows), _best(rows))


def schedule(name: str) -> dict[str, Any]:
    """The options of an algorithm that set its schedule, written out so that later defaults do not matter."""
    found = find(name)
    options: dict[str, Any] = {}
    if not found.gradients and found.every is not None:
        options["overlap"] = found.options.overlap
    if found.options.staleness is not None:
        options["staleness"] = found.options.staleness
    if found.value.when.startswith("every:"):
        options["every"] = found.every
    if "topology" in _takes(name):
        options["topology"] = found.graph
    return options


def _takes(name: str) -> tuple[str, ...]:
    return ("topology",) if find(name).kind != "central" else ()


def compare(job: Job, candidates: Iterable[str] = CANDIDATES) -> Comparison:
    """Predicts every candidate with every bucket size.

    Args:
        job: What was measured or given.
        candidates: Names, or trigrams written out; ``qadam`` is left out, and ``lossless`` if no gradients
            were seen.
    """
    base = predict(job, find(DEFAULT), _bytes(BUCKETS_MB[0]))
    rows = []
    for name in dict.fromkeys((DEFAULT, *candidates)):
        algorithm = find(name)
        if name in NOT_COMPARED or (algorithm.value.what == "lossless" and job.costs.exact is None):
            continue
        sizes = BUCKETS_MB if algorithm.gradients else (None,)
        tried = {mb: predict(job, algorithm, _bytes(mb or BUCKETS_MB[0])) for mb in sizes}
        default = next(iter(tried))
        best = min(tried, key=lambda mb: tried[mb].seconds)
        if tried[best].seconds > (1 - BUCKET_GAIN) * tried[default].seconds:
            best = default
        rows.append(_row(name, best, tried[best], base))
    rows.sort(key=lambda row: row.seconds)
    return Comparison(tuple(rows), _best(rows))


def _best(rows: list[Row]) -> dict[str, Row]:
    best: dict[str, Row] = {}
    before: Row | None = None
    for allowed, kinds in ALLOWED.items():
        row = next(row for row in rows if row.kind in kinds)
        if before is not None and row.seconds > (1 - WORTH) * before.seconds:
            row = before
        best[allowed] = before = row
    return best


def _row(name: str, bucket_mb: float | None, found: Prediction, base: Prediction) -> Row:
    return Row(
        name,
        bucket_mb,
        found.seconds,
        found.seconds / base.seconds,
        found.nbytes,
        found.memory,
        losses.kind(find(name)),
        losses.known(name),
    )


def _bytes(mebibytes: float) -> int:
    return int(mebibytes * (1 << 20))


def as_rows(found: Comparison) -> list[dict[str, Any]]:
    """The rows for plan.json."""
    return [asdict(row) for row in found.rows]
