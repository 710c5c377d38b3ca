"""An average: a one-dimensional tensor becomes its mean over all ranks, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.averaging.exchange import Exchange

SHARD = 64
"""The length of a shard is a multiple of this many values."""


class Average(Exchange):
    """Averages one tensor over the ranks, step after step, in place. By default it has no state.

    A subclass gets the tensor, one-dimensional and of a fixed length, when it is made. The caller leaves the
    tensor alone from :meth:`start` until :meth:`wait` has returned.

    Attributes:
        sent: Bytes that this rank sends in one averaging step.
        leaves_out_silent: Whether it leaves out ``ModelGroups.silent()`` itself; else their zeros are in the
            mean.
    """

    sent: int
    leaves_out_silent = False

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """Names views into the tensor that this rank did not use, for the step that :meth:`start` starts
        next."""

    def settle(self, unused: Sequence[bool]) -> None:
        """After :meth:`wait`: the state of views that no rank used becomes what it was before the step.

        Args:
            unused: For each view given to :meth:`hold`, whether no rank used it; the same on all ranks.
        """

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The state of each view into the tensor (residuals, ...), by name; it moves when buckets are
        rebuilt."""
        return [{} for _ in views]

    def fold(self) -> None:
        """Adds state that belongs to no view to what :meth:`parts` returns, before buckets are rebuilt."""

    def state(self) -> dict[str, torch.Tensor]:
        """The state between averaging steps, for a checkpoint."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what :meth:`state` returned."""


def padded(length: int, ranks: int) -> int:
    """``length``, rounded up so that it divides into one shard per rank, each a multiple of ``SHARD``."""
    shard = -(-length // ranks)
    return ranks * SHARD * -(-shard // SHARD)
