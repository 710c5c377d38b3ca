"""A backup of this rank's gradients of a backward pass, to repeat the averages if a rank is lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.collectives import coalesced
from trigram.gradients.buckets import Bucket


class GradientBackup:
    """Copies of this rank's gradients of one backward pass; the averages overwrite the buckets themselves."""

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor | None] = {}

    def clear(self) -> None:
        """Drops the backup when a new pass begins."""
        self.gradients = {}

    def keep(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Copies a bucket before it is sent."""
        if bucket.backup is None:
            bucket.backup = torch.empty_like(bucket.memory)
        kept = bucket.backup.copy_(bucket.memory)
        for k, i in enumerate(bucket.params):
            view = bucket.views[k]
            start = coalesced.as_real(view).storage_offset()
            at = int(start - bucket.memory.storage_offset())
            self.gradients[i] = None if params[i].grad is None else coalesced.view_like(kept, at, view)

    def keep_sparse(self, param: torch.Tensor, i: int) -> None:
        """Keeps a sparse gradient before it is averaged: the average is another tensor."""
        self.gradients[i] = param.grad

    def restore(self, params: Sequence[torch.Tensor]) -> None:
        """Restores the gradients that the parameters had before their buckets were sent, and drops the
        backup."""
        kept, self.gradients = self.gradients, {}
        for i, backup in kept.items():
            grad = params[i].grad
            if backup is None or backup.is_sparse:
                params[i].grad = backup
            elif grad is not None:
                grad.copy_(backup)
