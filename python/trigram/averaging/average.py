"""What an average is: a flat tensor becomes its mean over all ranks, begun now and finished later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

SHARD = 64
"""Shards are multiples of this many values."""


class Average(Protocol):
    """One flat tensor that becomes its mean over the ranks.

    Attributes:
        sent: Bytes that a rank sends in one round.
        calls: Calls that a round makes in the second group; once :meth:`advance` is true all are made.
    """

    sent: int
    calls: int

    def start(self, round: int) -> None:
        """Begins; the tensor belongs to the average until it is done."""

    def advance(self) -> bool:
        """Moves on without waiting; true once the last leg has begun."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would not wait; moves on."""

    def wait(self) -> None:
        """Waits for the end; then the tensor is the mean."""

    def await_end(self) -> None:
        """Waits for what is under way to end, well or not."""

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What is remembered of each view into the tensor."""

    def fold(self) -> None:
        """Moves what is remembered otherwise to where :meth:`parts` finds it."""

    def state(self) -> dict[str, torch.Tensor]:
        """All that must be remembered between rounds."""

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """What :meth:`state` gave."""


def padded(length: int, ranks: int) -> int:
    """The length at which ``length`` values divide into shards."""
    shard = -(-length // ranks)
    return ranks * SHARD * -(-shard // SHARD)
