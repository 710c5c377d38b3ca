"""What this rank itself has contributed to a pass: should a rank be lost, the pass is done again with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.collectives import coalesced
from trigram.training.buckets import Bucket


class GradientBackup:
    """Copies of a rank's gradients of one pass; the buckets' own memory comes to hold averages."""

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor | None] = {}

    def clear(self) -> None:
        """A new pass begins."""
        self.gradients = {}

    def keep(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Copies a bucket that is about to leave."""
        if bucket.spare is None:
            bucket.spare = torch.empty_like(bucket.memory)
        kept = bucket.spare.copy_(bucket.memory)
        for k, i in enumerate(bucket.params):
            view = bucket.views[k]
            at = int(view.storage_offset() - bucket.memory.storage_offset())
            self.gradients[i] = None if params[i].grad is None else coalesced.view_like(kept, at, view)

    def restore(self, params: Sequence[torch.Tensor]) -> None:
        """Gives the parameters back what they had before their buckets left, and forgets it."""
        kept, self.gradients = self.gradients, {}
        for i, own in kept.items():
            grad = params[i].grad
            if own is None:
                params[i].grad = None
            elif grad is not None:
                grad.copy_(own)
