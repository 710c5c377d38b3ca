"""The table and the recommendations as text."""

from __future__ import annotations

from trigram.plan.choice import Comparison, Row
from trigram.plan.inputs import Job
from trigram.plan.losses import ALLOWED

ABOUT_LOSSES = """
exact: DDP's mean. close: the same, rounded. different: another training.
Known of the loss: beside DDP's after as many samples, negative is better; on four ranks of one host, so that
averages are not late. Less than 7.2 % (digits), 0.8 % (gpt) and 3.7 % (characters) is noise. With * the loss
is that of other settings than the time: those of its card in docs/algorithms.md, which send more.
"""
"""Below the recommendations."""
HEAD = ("algorithm", "bucket", "step, ms", "relative", "MB sent", "memory, MB", "loss", "known of it")


def text(job: Job, found: Comparison) -> str:
    """The job in a line, a table with a line for each algorithm, and a recommendation for each freedom."""
    compute, machines = job.compute, job.machines
    rates = sorted(8e-9 * rate for rate in machines.rates)
    links = f"{rates[0]:.3g}" if rates[0] > 0.9 * rates[-1] else f"{rates[0]:.3g} to {rates[-1]:.3g}"
    lines = [
        f"{compute.elements / 1e6:.3g}M parameters, {machines.ranks} ranks on {machines.hosts} hosts, "
        f"{links} Gbit/s, a hop of {1e3 * machines.latency:.3g} ms; computation {1e3 * compute.step:.4g} ms "
        f"per step ({job.source})",
        "",
    ]
    cells = [HEAD, *(_cells(row) for row in found.rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEAD))]
    for row in cells:
        columns = [
            cell.ljust(width) if k in (0, 6, 7) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(columns).rstrip())
    lines.append("")
    return "\n".join(lines + [_recommends(found, allowed) for allowed in ALLOWED]) + "\n" + ABOUT_LOSSES


def _cells(row: Row) -> tuple[str, ...]:
    bucket = "" if row.bucket_mb is None else f"{row.bucket_mb:g} MiB"
    numbers = f"{1e3 * row.seconds:.4g}", f"{row.relative:.2f}", f"{row.nbytes / 1e6:.4g}"
    return row.algorithm, bucket, *numbers, f"{row.memory / 1e6:.4g}", row.kind, row.loss


def _recommends(found: Comparison, allowed: str) -> str:
    row = found.best[allowed]
    bucket = "" if row.bucket_mb is None else f", buckets of {row.bucket_mb:g} MiB"
    before = {"close": "exact", "any": "close"}.get(allowed)
    if before is not None and found.best[before] == row:
        return f"{allowed}: {row.algorithm}{bucket}: nothing else gains 10 %"
    return f"{allowed}: {row.algorithm}{bucket}: {1e3 * row.seconds:.4g} ms per step, {row.kind}"
