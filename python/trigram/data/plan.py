"""Who gets which samples: deals an epoch to ranks so that those of one step take the same time.

A *step* is one batch for each rank. The samples of a window are sorted by cost, so those of one step cost
about the same. Each goes to the rank that would be done with it first, the dearest sample first. Everything
here is a function of its arguments; all ranks compute the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Step = list[list[int]]
"""The indices of each rank's samples."""


@dataclass(frozen=True)
class Limits:
    """What a batch may hold; see :class:`trigram.data.BalancedBatchSampler`."""

    batch_size: int | None
    max_cost: float | None
    window: int
    padded: bool
    drop_last: bool


def steps(
    order: Sequence[int], costs: Sequence[float], speeds: Sequence[float], limits: Limits
) -> list[Step]:
    """Deals samples to ranks.

    Args:
        order: The indices of the samples, in random order.
        costs: The cost of each sample of the data set.
        speeds: How fast each rank is, relative to the others.
        limits: What a batch may hold.

    Returns:
        The steps, window after window. If samples are left at the end, they are the last step. If they are
        fewer than ranks, the first samples of ``order`` are repeated.
    """
    ranks = len(speeds)
    full = ranks * (limits.batch_size or 1)
    length = max(limits.window, full)
    planned: list[Step] = []
    left: list[int] = []
    for start in range(0, len(order), length):
        pool = sorted([*left, *order[start : start + length]], key=costs.__getitem__, reverse=True)
        last = start + length >= len(order)
        at = 0
        while len(pool) - at >= full:
            end = at + full if limits.batch_size is not None else len(pool)
            step, used = _deal(pool[at:end], costs, speeds, limits)
            if at + used == len(pool) and limits.batch_size is None and not last:
                break  # it may have room for samples of the next window
            planned.append(step)
            at += used
        left = pool[at:]
    if left and not limits.drop_last:
        repeated = [order[i % len(order)] for i in range(ranks - len(left))]
        planned.append(_deal([*left, *repeated], costs, speeds, limits)[0])
    return planned


def _deal(
    samples: list[int], costs: Sequence[float], speeds: Sequence[float], limits: Limits
) -> tuple[Step, int]:
    """One step, and how many of the samples, sorted by cost, it holds: all, but for ``max_cost``."""
    ranks = len(speeds)
    fastest = sorted(range(ranks), key=lambda r: -speeds[r])
    equal = speeds[fastest[0]] == speeds[fastest[-1]]
    most = -(-len(samples) // ranks) if equal and limits.batch_size is not None else len(samples)
    step: Step = [[] for _ in speeds]
    loads = [0.0] * ranks

    def ready(rank: int, cost: float) -> tuple[float, float, int]:
        """When the rank would be done with one more; then by count, so that samples of cost 0 spread."""
        return (loads[rank] + cost) / speeds[rank], (len(step[rank]) + 1) / speeds[rank], rank

    queue: list[tuple[float, float, int]] = []
    for at, sample in enumerate(samples):
        cost = costs[sample]
        if at < ranks:
            rank = fastest[at]  # each has one, however slow it is
        else:
            if not queue:
                return step, at
            rank = heapq.heappop(queue)[2]
            cost = costs[step[rank][0]] if limits.padded else cost
            if limits.max_cost is not None:
                room = limits.max_cost * speeds[rank] / speeds[fastest[0]]
                if loads[rank] + cost > room:
                    return step, at
        step[rank].append(sample)
        loads[rank] += cost
        if len(step[rank]) < most:
            heapq.heappush(queue, ready(rank, cost))
    return step, len(samples)


def cost_of(batch: Sequence[int], costs: Sequence[float], padded: bool) -> float:
    """The cost of one batch."""
    each = [costs[i] for i in batch]
    return len(each) * max(each, default=0.0) if padded else sum(each)
