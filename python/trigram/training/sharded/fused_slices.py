"""Slices that are updated inside backward: each when its gradients' mean is there, and then gathered; or all
at once, in one pass over memory, where all ranks are in one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram.training import optimizer_hooks
from trigram.training.sharded.divided_weights import DividedWeights
from trigram.training.sharded.gradient_buckets import layouts
from trigram.training.sharded.one_pass import OnePass
from trigram.training.sharded.weight_buckets import Layout


class FusedSlices(DividedWeights):
    """Divided weights that may be updated in backward.

    Attributes:
        one_pass: Which passes are updated at once, and how; None: the optimizer steps when the script asks.
        at_once: Whether this pass computes means, updates and weights in one pass over memory.
        remaining: By bucket of weights, the parameters that this pass has yet to update.
        bucket_of: By ``id()`` of a parameter, its bucket of weights.
    """

    one_pass: OnePass | None = None
    at_once = False
    remaining: list[int]
    bucket_of: dict[int, int]

    def fuse(self, optimizer: Optimizer) -> None:
        """See :class:`FusedBuckets`."""
        super().fuse(optimizer)
        self.one_pass = OnePass(optimizer, self.groups)

    def _divide(self, wanted: Sequence[Layout]) -> None:
        """See :class:`DividedWeights`."""
        super()._divide(wanted)
        if self.one_pass is not None:
            self.one_pass.agree()

    def begin_fused(self, param: int | None) -> bool:
        """See :class:`FusedBuckets`; the first update divides the weights."""
        if self.one_pass is None:
            return False
        fuses = self._begin_fused(param)
        self.at_once = self.one_pass.begin(self.buckets, self.shards, fuses and self.fidelity is None)
        return fuses

    def _begin_fused(self, param: int | None) -> bool:
        if not super().begin_fused(param):
            return False
        self._prepare()
        if self._missing(optimizer_hooks.parameters_of(self.optimizer)) or (
            self.divides_gradients and layouts(self.buckets) != self.layouts
        ):
            return False  # the next update divides them
        arrive = {id(self.params[i]) for i in self.buckets.place}
        self.remaining = [sum(id(p) in arrive for p in b.params) for b in self.shards.buckets]
        self.bucket_of = {id(p): k for k, b in enumerate(self.shards.buckets) for p in b.params}
        return True

    def update(self, params: Sequence[torch.Tensor]) -> None:
        """Steps this rank's slices of some parameters; gathers the buckets of weights that are complete."""
        assert self.fused is not None
        if self.at_once:
            self._update_at_once()
            return
        self.shards.enter(lambda p: True, self.fused.in_groups(params))
        try:
            self.fused.update()
        finally:
            self.shards.leave()
        complete = []
        for p in params:
            k = self.bucket_of.get(id(p))
            if k is not None:
                if p.grad is not None:
                    increment_version(p)
                self.remaining[k] -= 1
                if self.remaining[k] == 0:
                    complete.append(k)
        for k in sorted(complete):
            self._gather(k, self.groups.second_phase)

    def _update_at_once(self) -> None:
        """Updates the bucket that has landed; all ranks get its weights."""
        assert self.fused is not None and self.one_pass is not None
        k = self.landed - 1
        self.fused.count()
        started = self.one_pass.start(k, self.buckets[k], self.shards)
        if started is not None:
            self.gathers.add(*started)

    def land_ready(self) -> None:
        """See :class:`FusedBuckets`. Updates at once begin when backward has ended: where all cores compute,
        there is no idle time before."""
        if not self.at_once:
            super().land_ready()

    def show_rest(self, updated: set[int]) -> None:
        """See :class:`FusedBuckets`."""
        self.shards.enter(lambda p: id(p) not in updated)

    def end(self) -> None:
        """See :class:`GradientSync`; the weights that were updated are there, unless they may come later."""
        super().end()
        if not self.overlap:
            self.drain()

    # Passes that fail.

    def _call_counts(self) -> list[int]:
        """See :class:`GradientSync`. A pass that fails on this rank before its first gradient updates nothing
        here, and the other ranks may have begun to gather: all ranks count a call for each bucket of weights,
        whether this pass makes it or not."""
        first, second = super()._call_counts()
        return [first, second + (len(self.shards.buckets) if self.fused is not None else 0)]

    def _finish(self, failed: str | None = None) -> None:
        """See :class:`GradientSync`; gathers of a pass that fails end with it."""
        try:
            super()._finish(failed)
        except BaseException:
            self.gathers.end()
            raise
        if failed is not None:
            self.gathers.end()

    def _gather_failed(self) -> None:
        """See :class:`DividedWeights`. The pass has failed on another rank when this one had all averages and
        had counted it: some values may be updated, and others not."""
        if self.fused is not None and self.fusing and not self.fused.broken:
            self.fused.broken = True
            self.steps, self.passes = self.steps - 1, max(self.passes - 1, 0)
            self.count_anew()
            self._abort_calls(self._call_counts(), "a gather of this pass failed")

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        return {**super().stats(), "one_pass_updates": self.one_pass.updates if self.one_pass else 0}
