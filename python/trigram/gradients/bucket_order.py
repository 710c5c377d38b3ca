"""The order of a model's buckets: that of the gradients in rank 0's first backward pass, on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from trigram import _core, collectives
from trigram.gradients.bucket_set import BucketSet
from trigram.gradients.compressors import GradientCompressor
from trigram.gradients.local import LocalGradients
from trigram.observe import steps
from trigram.runtime.group import Group


class Ordered(Protocol):
    """A model's hooks, as the order of its buckets needs them.

    Attributes:
        params: All parameters of the model.
        dense: The indices of those whose gradients are in buckets.
    """

    params: list[torch.Tensor]
    dense: list[int]
    buckets: BucketSet
    local: LocalGradients
    pipeline: _core.Pipeline
    times: steps.StepTimes
    steps: int

    @property
    def before_passes(self) -> Group:
        """The group of the calls that all ranks make between passes."""


class BucketOrder:
    """Builds the buckets of one model, in an order that all ranks know.

    Args:
        sync: The model's hooks, which this does not keep.
    """

    def __init__(self, sync: Ordered) -> None:
        self._sync = weakref.ref(sync)
        self._learned: list[torch.Tensor] = []  # parameters, in the order of their gradients

    @property
    def sync(self) -> Ordered:
        """The model's hooks."""
        sync = self._sync()
        assert sync is not None
        return sync

    def begin_anew(self) -> None:
        """Builds the buckets of other parameters."""
        sync = self.sync
        # Backward usually reaches the last layers first; after the first pass the order is known.
        known = {id(p): k for k, p in enumerate(self._learned)}
        order = sync.dense[::-1]
        order.sort(key=lambda i: known.get(id(sync.params[i]), len(known)))
        with sync.local.moving(sync.buckets):
            sync.buckets.begin_anew(sync.params, order)
        self._built()
        sync.pipeline.learn(any(id(sync.params[i]) not in known for i in order))

    def build(self, order: Sequence[int], keep_residuals: bool = True) -> None:
        """Builds the buckets in another order; see :meth:`BucketSet.build`."""
        sync = self.sync
        with sync.local.moving(sync.buckets):
            sync.buckets.build(order, keep_residuals)
        self._built()

    def change(self, bucket_bytes: int, compressor: GradientCompressor | None = None) -> None:
        """Gives the buckets another size, and averages another compressor; all ranks call it, between passes.

        Args:
            bucket_bytes: The size of a bucket in bytes.
            compressor: None: the same. Residuals move to the new buckets; if another has none, they are added
                to this rank's next gradients.
        """
        buckets = self.sync.buckets
        buckets.bucket_bytes = bucket_bytes
        if compressor is not None:
            buckets.compressor.end()
            buckets.compressor = compressor
        self.build(buckets.order)

    def _built(self) -> None:
        sync = self.sync
        sync.times.buckets = [b.nbytes for b in sync.buckets]
        sync.pipeline.assign([id(p) for p in sync.params], [b.params for b in sync.buckets])

    def learn(self) -> None:
        """Rebuilds the buckets in the order of the gradients in rank 0's first backward pass, if there was
        one; all ranks call it, between passes."""
        sync = self.sync
        learned = sync.pipeline.order
        if learned is None or not sync.steps:
            return
        seen = dict.fromkeys(learned)  # once each, also if a pass has failed and was made again
        rest = [i for i in reversed(sync.dense) if i not in seen]
        order = torch.tensor([*seen, *rest], dtype=torch.int64, device="cpu")
        collectives.broadcast(order, sync.before_passes.ranks[0], sync.before_passes)
        self.is_known(order.tolist())
        if order.tolist() != sync.buckets.order:
            self.build(order.tolist())

    def is_known(self, order: Sequence[int]) -> None:
        """All ranks know the order of these parameters, by index, also when they train again later."""
        now = [self.sync.params[i] for i in order]
        there = {id(p) for p in now}
        self._learned = now + [p for p in self._learned if id(p) not in there]
        self.sync.pipeline.learn(False)
