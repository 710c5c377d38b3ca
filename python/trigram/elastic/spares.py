"""Spare ranks of an elastic job: they train along and count for nothing, until another rank is gone.

A spare runs the script as all ranks do, computes gradients and makes every update with the others' mean. So
it has the training state of all, to the bit, and takes the place of a lost rank in the change of the
membership that the loss causes, without a transfer (torchft's ``FIXED_WITH_SPARES`` does the same).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spares:
    """Which ranks were started as spares, and how many train. All members hold the same.

    Attributes:
        ranks: The ranks that were started as spares, whether they take a place now or not.
        target: How many ranks train, if there are as many: the largest number of others that there has been.
    """

    ranks: frozenset[int] = frozenset()
    target: int = 0

    def training(self, members: Sequence[int]) -> list[int]:
        """The members that count, ascending: all others, and so many spares, the lowest, as are missing."""
        others = [r for r in members if r not in self.ranks]
        spares = sorted(r for r in members if r in self.ranks)
        return sorted([*others, *spares[: max(self.target - len(others), 0)]])

    def idle(self, members: Sequence[int]) -> list[int]:
        """The members that train along and do not count, ascending."""
        training = set(self.training(members))
        return sorted(r for r in members if r not in training)

    def with_members(self, members: Sequence[int], joining: Iterable[int] = ()) -> Spares:
        """As it is with these members, of whom ``joining`` have joined as spares."""
        ranks = (self.ranks & set(members)) | set(joining)
        return Spares(ranks, max(self.target, sum(r not in ranks for r in members)))
