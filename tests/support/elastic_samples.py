"""What ranks of an elastic job say about the samples that counted: each does, once in an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def epochs_of(entries: Iterable[tuple[int, int, list[int]]], samples: int, ranks: int) -> list[int]:
    """The epochs that were made, ascending; of each, all samples counted once, or all but fewer than there
    are ranks.

    Args:
        entries: Of all ranks, for each step the epoch, a number, and the samples that the rank had.
        samples: Of the dataset.
        ranks: Of the job.
    """
    used: dict[int, Counter[int]] = {}
    for epoch, _, had in entries:
        used.setdefault(epoch, Counter()).update(had)
    for epoch, counts in used.items():
        assert max(counts.values()) == 1 and len(counts) > samples - ranks, (epoch, counts)
    return sorted(used)
