"""Times several things in turns and compares them: the machine's speed changes from second to second, and
what is measured a second apart can be compared, what is measured an hour apart cannot.

The other scripts of this folder use it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """How many times faster one thing is than another.

    Attributes:
        best: Of the fastest run of each.
        median: Of the ratios of runs that followed each other; `low` and `high` are their quartiles.
        n: The number of such pairs.
    """

    best: float
    median: float
    low: float
    high: float
    n: int


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Compares two lists of times, of which the i-th of one was measured beside the i-th of the other.

    Raises:
        ValueError: The lists differ in length or have fewer than two times.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"{len(ours)} and {len(theirs)} times are no pairs")
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive")
    return Ratio(min(theirs) / min(ours), median, low, high, len(each))


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] | None = None,
    after: Callable[[str], object] | None = None,
    warmup: int = 1,
) -> dict[str, list[float]]:
    """Seconds that each call takes, A B A B: `repeats` times, after `warmup` times that do not count.

    Args:
        calls: What to measure, by name.
        repeats: How often.
        before: Called before each call, outside of its time: it prepares the data, or lets ranks meet.
        after: Called with the name after each call, outside of its time: it checks the result.
        warmup: Turns that are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            if before is not None:
                before()
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            if turn >= warmup:
                seconds[name].append(took)
            if after is not None:
                after(name)
    return seconds


def table(rows: Sequence[tuple[str, Ratio]]) -> str:
    """A Markdown table; above 1 the first thing of a row is the faster one."""
    lines = ["| compared | best | median | quartiles | n |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {name} | {r.best:.2f} | {r.median:.2f} | {r.low:.2f} to {r.high:.2f} | {r.n} |"
        for name, r in rows
    ]
    return "\n".join(lines) + "\n"
