"""The report of a job, as text and as JSON: where its steps go, which rank or link holds the others up, and
what to do about it; from the files that its ranks leave (``TRIGRAM_REPORT``)."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from trigram.observe.figures import VERSION, Rank
from trigram.observe.phases import PHASES
from trigram.observe.verdict import judge


def as_json(rows: list[Rank]) -> dict[str, Any]:
    """The report as values for JSON: ``finding`` and ``ranks``."""
    return {"version": VERSION, "finding": asdict(judge(rows)), "ranks": [asdict(row) for row in rows]}


def text(rows: list[Rank]) -> str:
    """The report, for people."""
    found = judge(rows)
    size = max(row.world_size for row in rows)
    first = max(rows, key=lambda row: row.steps)
    lines = [f"trigram report: {size} ranks, {first.steps} steps of {first.model or 'no model'}"]
    known = {row.rank for row in rows}
    if absent := [rank for rank in range(size) if rank not in known]:
        lines.append(
            f"no file of rank(s) {', '.join(map(str, absent))}: on another host, or they have failed"
        )
    lines.append(f"Verdict: {found.verdict}")
    lines += [f"Why:     {line}" for line in found.why]
    lines += [f"Next:    {line}" for line in found.then]
    if said := _fidelity(first.fidelity):
        lines.append(said)
    header = ("rank", "host", "step ms", *PHASES)
    table: list[tuple[str, ...]] = [header]
    for row in rows:
        if row.steps:
            cells = (f"{1e3 * row.mean[key]:.2f}" for key in ("step", *PHASES))
            table.append((str(row.rank), row.host, *cells))
    widths = [max(len(line[k]) for line in table) for k in range(len(header))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines)


def _fidelity(found: dict[str, Any]) -> str:
    """What averages lose and gain, in a line; empty if it was not measured."""
    parts = []
    if (scale := found.get("noise_scale")) is not None:
        parts.append(f"noise scale of {scale:.3g} batches of a rank")
    if errors := found.get("codec_errors"):
        parts.append("relative error of " + ", ".join(f"{k} {v:.2g}" for k, v in errors.items()))
    if (distance := found.get("consensus_distance")) is not None:
        parts.append(f"ranks' weights are {distance:.2g} of their length apart")
    return f"Values:  {'; '.join(parts)}" if parts else ""


def compare(before: list[Rank], after: list[Rank]) -> str:
    """Two reports beside each other: means over ranks, and how many times as long the second takes."""

    def mean(rows: list[Rank], key: str) -> float:
        return (
            statistics.fmean(row.mean[key] for row in rows if row.steps)
            if any(r.steps for r in rows)
            else 0.0
        )

    lines = [f"{'ms of a step':>12}  {'first':>9}  {'second':>9}  second / first"]
    for key in ("step", *PHASES):
        a, b = mean(before, key), mean(after, key)
        lines.append(f"{key:>12}  {1e3 * a:9.2f}  {1e3 * b:9.2f}  {f'{b / a:.2f}' if a > 0 else ''}".rstrip())
    lines.append(f"first:  {judge(before).verdict}")
    lines.append(f"second: {judge(after).verdict}")
    return "\n".join(lines)
