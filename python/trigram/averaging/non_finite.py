"""Which rank sent NaN or infinite values.

A robust aggregation leaves such values out and records the rank here. A mean becomes NaN on all ranks, and
does not show which rank caused it; with ``check_finite=True`` each rank checks its gradients before it sends
them, and all ranks raise an error that names the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.collectives.consistency import listed, ranks_that
from trigram.errors import CorruptError
from trigram.runtime import logs
from trigram.runtime.group import Group


class NonFiniteSenders:
    """How often a robust aggregation left out the values of each rank.

    Attributes:
        counts: The number of averaging steps, by world rank. Ranks whose values were never left out are
            missing.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def note(self, ranks: Sequence[int], step: int, rule: str) -> None:
        """Counts each rank once per averaging step, for all buckets together; logs a rank the first time.

        A negative ``step`` has no number: every call counts."""
        for rank in ranks:
            if rank not in self.counts:
                logs.warning(
                    f"rank {rank} sent values that are NaN, infinite or cannot be decoded; central:{rule} "
                    "leaves them out, and training continues. Check that rank's loss and inputs "
                    '(logged once per rank; trigram.stats(model)["suspects"] counts the averaging steps)'
                )
            if step < 0 or self._last.get(rank) != step:
                self._last[rank] = step
                self.counts[rank] = self.counts.get(rank, 0) + 1


class NonFiniteCheck:
    """Checks gradients for NaN and infinity before they are sent.

    Args:
        group: The group in which ranks exchange their results, at the end of each backward pass.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.all_finite = True

    def begin(self) -> None:
        """A backward pass begins."""
        self.all_finite = True

    def check(self, values: torch.Tensor) -> None:
        """Checks values that are about to be sent; reads them once, for the largest magnitude."""
        if values.numel() and self.all_finite:
            self.all_finite = bool(torch.linalg.vector_norm(values, torch.inf).isfinite())

    def raise_if_any(self) -> None:
        """Raises a ``CorruptError`` on all ranks if one of them found NaN or infinity in this backward
        pass."""
        bad = ranks_that(not self.all_finite, self.group)
        if bad:
            raise CorruptError(
                f"the gradients of rank(s) {listed(bad)} contain NaN or infinity in this step; check the "
                "loss and the inputs of these ranks, or use a robust average, which leaves such ranks out: "
                "central:median/full/sync",
                bad[0],
            )
