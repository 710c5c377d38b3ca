"""The protocol of an average: a one-dimensional tensor becomes its mean over all ranks, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

SHARD = 64
"""The length of a shard is a multiple of this many values."""


class Average(Protocol):
    """Averages one tensor over the ranks, step after step, in place.

    An implementation gets the tensor, one-dimensional and of a fixed length, when it is made. All ranks make
    the same calls in the same order.

    Attributes:
        sent: Bytes that this rank sends in one averaging step.
        calls: Calls that one averaging step makes in :attr:`ModelGroups.second_phase`. They are all made once
            :meth:`advance` has returned True.
    """

    sent: int
    calls: int

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """Names views into the tensor that this rank did not use, for the step that :meth:`start` starts
        next."""

    def settle(self, unused: Sequence[bool]) -> None:
        """After :meth:`wait`: the state of views that no rank used becomes what it was before the step.

        Args:
            unused: For each view given to :meth:`hold`, whether no rank used it; the same on all ranks.
        """

    def start(self, step: int) -> None:
        """Starts averaging step number ``step``; the caller leaves the tensor alone until :meth:`wait`
        returns."""

    def advance(self) -> bool:
        """Starts the next phase if the last one is complete, without waiting; True once the last phase has
        started."""

    def ready(self) -> bool:
        """Advances without waiting; True if :meth:`wait` would return at once."""

    def wait(self) -> None:
        """Waits until the tensor holds the mean. Raises the error of the step if it failed."""

    def await_end(self) -> None:
        """Waits until the calls under way have ended, after a failure or an abort; the result is not used."""

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The state of each view into the tensor (residuals, ...), by name; it moves when buckets are
        rebuilt."""

    def fold(self) -> None:
        """Adds state that belongs to no view to what :meth:`parts` returns, before buckets are rebuilt."""

    def state(self) -> dict[str, torch.Tensor]:
        """The state between averaging steps, for a checkpoint."""

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what :meth:`state` returned."""


def padded(length: int, ranks: int) -> int:
    """``length``, rounded up so that it divides into one shard per rank, each a multiple of ``SHARD``."""
    shard = -(-length // ranks)
    return ranks * SHARD * -(-shard // SHARD)
