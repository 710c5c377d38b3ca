"""What travels for a bucket of gradients; :mod:`trigram.codings` has those that change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trigram.averaging.average import Average, FullAverage
from trigram.training.buckets import Bucket
from trigram.training.step_hooks import Channels


class Coding:
    """What travels for a bucket, and what is done to it before and after: by default, the gradients.

    One per model; it may remember things by bucket.
    """

    def layout(self, like: torch.Tensor, channels: Channels) -> Callable[[int], int] | None:
        """From the elements that gradients take, the bucket's length; None: gradients and flags, in full.

        ``like`` is one of the parameters."""
        return None

    def average(self, bucket: Bucket, channels: Channels) -> Average:
        """How a bucket becomes its mean."""
        return FullAverage(bucket.memory, channels)

    def prepare(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """The gradients are in the bucket, and about to leave."""

    def departed(self, bucket: Bucket) -> None:
        """They have left, encoded."""

    def parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """What it remembers of each parameter in a bucket."""
        return [{} for _ in bucket.params]
