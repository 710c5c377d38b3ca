"""Who sent what is no number: NaN or infinity.

Robust rules leave such values out and tell here whose they were. A mean has them on all ranks, and
nobody can say any more where they came from; with ``check_finite=True`` each rank looks before its
gradients leave, and all raise an error that names the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.collectives.consistency import listed, ranks_that
from trigram.errors import CorruptError
from trigram.runtime import logs
from trigram.runtime.group import Group


class NonFiniteSenders:
    """How often each rank sent what a robust rule left out.

    Attributes:
        counts: By world rank, the rounds in which it did; those that never did are not in it.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def note(self, ranks: Sequence[int], round: int, rule: str) -> None:
        """Counts the ranks, once in a round, whatever the number of its buckets; a new one is told.

        A negative round is none of those that are numbered."""
        for rank in ranks:
            if rank not in self.counts:
                logs.warning(
                    f"rank {rank} sent values that are NaN, infinite or cannot be decoded; central:{rule} "
                    "leaves them out of the average, and training continues. Check that rank's loss and "
                    "inputs "
                    '(logged once per rank; trigram.stats(model)["suspects"] counts the averaging steps)'
                )
            if round < 0 or self._last.get(rank) != round:
                self._last[rank] = round
                self.counts[rank] = self.counts.get(rank, 0) + 1


class NonFiniteCheck:
    """Looks at gradients before they leave.

    Args:
        group: Where ranks tell each other, at the end of each backward pass.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.fine = True

    def begin(self) -> None:
        """A backward pass begins."""
        self.fine = True

    def look(self, values: torch.Tensor) -> None:
        """Values that are about to leave: one pass over them, for the largest magnitude."""
        if values.numel() and self.fine:
            self.fine = bool(torch.linalg.vector_norm(values, torch.inf).isfinite())

    def agree(self) -> None:
        """Raises on all ranks if it was not well on one."""
        ill = ranks_that(not self.fine, self.group)
        if ill:
            raise CorruptError(
                f"the gradients of rank(s) {listed(ill)} contain NaN or infinity in this step; check the "
                "loss and the inputs of these ranks, or use a robust average, which leaves such ranks out: "
                "central:median/full/sync",
                ill[0],
            )
