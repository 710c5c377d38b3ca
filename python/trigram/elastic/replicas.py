"""Replicas of several ranks: an elastic job whose ranks train in groups, such as those of one host.

The ranks of a replica hold parts of one model (``fully_shard``, tensor parallelism) and wait for each other
in calls of their own. So they come into the job and leave it together: a rank's death takes its replica out.
Averages are between the ranks that have the same place in their replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """Which ranks make up a replica: each ``size`` that follow each other. All ranks hold the same.

    Attributes:
        size: Ranks of a replica; 1: each rank is one.
    """

    size: int = 1

    def number(self, rank: int) -> int:
        """The number of a rank's replica."""
        return rank // self.size

    def of(self, rank: int) -> range:
        """The ranks of a rank's replica."""
        first = rank - rank % self.size
        return range(first, first + self.size)

    def row(self, rank: int, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have the same place in their replicas as a rank."""
        return [r for r in ranks if r % self.size == rank % self.size]

    def whole(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose replica is complete among them."""
        there = set(ranks)
        return [r for r in ranks if there.issuperset(self.of(r))]

    def touched(self, ranks: Iterable[int]) -> set[int]:
        """All ranks of the replicas of ``ranks``."""
        return {each for r in ranks for each in self.of(r)}

    def first(self, ranks: Sequence[int], most: int) -> list[int]:
        """The first of ``ranks``, which are of complete replicas: as many replicas as have ``most`` ranks,
        and one at least."""
        numbers = sorted({self.number(r) for r in ranks})[: max(most // self.size, 1)]
        return [r for r in ranks if self.number(r) in numbers]
