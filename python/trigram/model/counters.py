"""``stats``: counters of a model, a group or the process."""

from __future__ import annotations

from typing import Any

from torch import nn

from trigram.model.wrapped import lookup
from trigram.runtime.group import Group
from trigram.runtime.world import current


def stats(of: nn.Module | Group | None = None) -> dict[str, Any]:
    """Counters of the communication so far.

    Args:
        of: A model given to :func:`with_bagua`, a group, or None for this process.

    Returns:
        For the process or a group: ``calls`` (collectives that ended without error), ``direct_bytes`` (bytes
        read or written in peers' memory), ``sent_bytes`` (payload bytes sent, by world rank),
        ``engine_seconds`` (processor time of the engine's thread; blocking calls run on the caller's thread
        instead), ``rates`` (the most bytes per second that each rank's link carried of late; the last set
        the shard sizes of large all-reduces between hosts; empty until they are measured), ``waited_for``
        (seconds that this rank's callers waited for each world rank; the largest value shows the straggler)
        and ``silent_for`` (seconds without a heartbeat of each world rank, if they are more than 1.5,
        otherwise 0.0: the rank is stopped, frozen or cut off, and is lost after ``TRIGRAM_SILENCE`` seconds).
        For a model also ``algorithm``, ``world_size``, ``ranks`` (world ranks that train it now), ``steps``,
        ``bytes`` and ``bytes_per_step`` (what a rank has to send, by the formulas of docs/algorithms.md) and
        ``wait_seconds``. If gradients are averaged: ``overlap`` (fraction of the communication time hidden
        behind backward) and ``buckets``. If weights are averaged: ``rounds`` (averaging steps) and ``waits``
        (those that staleness waited for). ``suspects``: by world rank, the averaging steps in which a robust
        average left out the rank, because it sent NaN, infinity or undecodable values. ``auto``: what
        ``algorithm="auto"`` has tried and decided; ``fidelity``: what averages lose, with
        ``TRIGRAM_GRADIENTS``.
    """
    totals: dict[str, Any] = dict(current().engine.counters())
    if not isinstance(of, nn.Module):
        group = of or current().group
        return {**totals, "rates": group.core.rates() if group.rank >= 0 else []}
    wrapped = lookup(of, "stats")
    totals["rates"] = wrapped.groups.main.core.rates() if wrapped.groups else []
    counters: dict[str, Any] = {
        "steps": 0,
        "bytes_per_step": 0,
        "bytes": 0,
        "wait_seconds": 0.0,
        "overlap": 0.0,
    }
    counters |= {"buckets": [], "rounds": 0, "waits": 0}
    counters["suspects"] = dict(wrapped.groups.non_finite_senders.counts) if wrapped.groups else {}
    if wrapped.hooks is not None:
        counters |= wrapped.hooks.stats()
    counters["steps"] += wrapped.earlier_steps
    if wrapped.tuner is not None:
        counters["auto"] = wrapped.tuner.report()
    return {
        "algorithm": wrapped.algorithm.name,
        "world_size": wrapped.size,
        "ranks": list(wrapped.group.ranks),
        **counters,
        **totals,
    }
