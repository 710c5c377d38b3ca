"""Slices that are updated inside backward: each when its gradients' mean is there, and then gathered; or all
at once, in one pass over memory, where all ranks are in one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.gradients.updating.fused_steps import FusedSteps
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.optimizers import optimizer_hooks
from trigram.sharded.one_pass import OnePass
from trigram.sharded.weights.divided_weights import DividedWeights


class SliceValues(GradientPart):
    """This rank's slices; :class:`~trigram.gradients.updating.fused_updates.Values` of updates in backward.

    Attributes:
        weights: The weights with their slices.
        one_pass: Which passes are updated at once, and how.
        after_backward: Whether this pass computes means, updates and weights in one pass over memory. It
            begins when backward has ended: where all cores compute, there is no idle time before.
        remaining: By bucket of weights, the parameters that this pass has yet to update.
        bucket_of: By ``id()`` of a parameter, its bucket of weights.
    """

    after_backward = False
    stepper: FusedSteps
    remaining: list[int]
    bucket_of: dict[int, int]

    def __init__(self, optimizer: Optimizer, weights: DividedWeights, groups: ModelGroups) -> None:
        self.optimizer, self.weights = optimizer, weights
        self.one_pass = OnePass(optimizer, groups)

    def divided(self) -> None:
        """Parameters were divided; all ranks call it."""
        self.one_pass.agree()

    def begin(self, stepper: FusedSteps, fuses: bool) -> bool:
        """See :class:`~trigram.gradients.updating.fused_updates.Values`. The first update divides the
        weights."""
        self.stepper = stepper
        fuses = fuses and self._are_divided()
        at_once = fuses and self.sync.fidelity is None
        self.after_backward = self.one_pass.begin(self.sync.buckets, self.weights.shards, at_once)
        return fuses

    def _are_divided(self) -> bool:
        sync, weights = self.sync, self.weights
        weights.prepare()
        if weights.lacks(optimizer_hooks.parameters_of(self.optimizer)):
            return False  # the next update divides them
        arrive = {id(sync.params[i]) for i in sync.buckets.place}
        buckets = weights.shards.buckets
        self.remaining = [sum(id(p) in arrive for p in b.params) for b in buckets]
        self.bucket_of = {id(p): k for k, b in enumerate(buckets) for p in b.params}
        return True

    def update(self, k: int, params: Sequence[torch.Tensor]) -> None:
        """Steps this rank's slices of some parameters; gathers the buckets of weights that are complete."""
        if self.after_backward:
            self._update_at_once(k)
            return
        shards = self.weights.shards
        shards.enter(lambda p: True, self.stepper.in_groups(params))
        try:
            self.stepper.update()
        finally:
            shards.leave()
        complete = []
        for p in params:
            of = self.bucket_of.get(id(p))
            if of is not None:
                if p.grad is not None:
                    increment_version(p)
                self.remaining[of] -= 1
                if self.remaining[of] == 0:
                    complete.append(of)
        for of in sorted(complete):
            self.weights.gather_bucket(of, self.sync.groups.second_phase)

    def _update_at_once(self, k: int) -> None:
        """Updates the bucket that has landed; all ranks get its weights."""
        self.stepper.count()
        started = self.one_pass.start(k, self.sync.buckets[k], self.weights.shards)
        if started is not None:
            self.weights.gathers.add(*started)

    def show_rest(self, updated: set[int]) -> None:
        """See :class:`~trigram.gradients.updating.fused_updates.Values`."""
        self.weights.shards.enter(lambda p: id(p) not in updated)
