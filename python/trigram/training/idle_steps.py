"""What a rank without inputs does of a model's steps: where gradients are averaged, and where weights are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.gradients.gradient_sync import GradientSync
from trigram.optimizers import shared_optimizers
from trigram.steps.step_hooks import StepHooks
from trigram.steps.without_inputs import WithoutInputs
from trigram.training.weight_sync import WeightSync


class GradientsWithoutInputs(WithoutInputs[GradientSync]):
    """It contributes gradients of 0."""

    @torch.no_grad()
    def step(self, src: int) -> None:
        """See :class:`WithoutInputs`."""
        sync = self.hooks
        sync.prepare_pass(self.model, src, in_backward=False)
        kept = [p.grad for p in sync.params]
        for p in sync.params:
            p.grad = None
        sync.passes.active = True
        try:
            sync.begin_pass(None, idle=True)
            sync.end()
        finally:
            for p, grad in zip(sync.params, kept, strict=True):
                p.grad = grad
        sync.idle_steps += 1

    def share_optimizers(self, longest: int) -> None:
        """See :class:`WithoutInputs`. What a script changes there itself, such as a scheduler the learning
        rate, may differ from now on."""
        why = "ranks have made unequal numbers of updates"
        groups = self.hooks.groups
        shared_optimizers.share(groups.averaged(self.model), longest, groups, "join", why)
        self.hooks.since_fewer = 0

    def block_ends(self) -> None:
        """The passes of ranks without inputs were followed by no update: all ranks count anew."""
        self.hooks.since_update = self.hooks.since = 0


class WeightsWithoutInputs(WithoutInputs[WeightSync]):
    """It contributes the weights that it has."""

    @torch.no_grad()
    def inputs_end(self) -> None:
        """Makes the boundary of the last step, and starts an overlapping averaging step that is due: the
        other ranks start it with their next step."""
        super().inputs_end()
        sync = self.hooks
        sync.boundaries.make(sync.tracker.late())
        sync.schedule.begin_step()

    @torch.no_grad()
    def step(self, src: int) -> None:
        """See :class:`WithoutInputs`."""
        sync = self.hooks
        sync.schedule.before_update(lambda: False)
        sync.tracker.idle_step()
        sync.idle_steps += 1
        sync.boundaries.make_next()
        sync.schedule.begin_step()

    def skip_boundary(self) -> None:
        """The other ranks have made their update, and no rank averages after it."""
        sync = self.hooks
        sync.tracker.idle_step()
        sync.idle_steps += 1
        sync.tracker.skip_boundary()


def without_inputs(model: nn.Module, hooks: StepHooks) -> WithoutInputs[Any]:
    """What a rank without inputs does of these steps, inside :func:`trigram.join`."""
    if isinstance(hooks, GradientSync):
        return GradientsWithoutInputs(model, hooks)
    assert isinstance(hooks, WeightSync)
    return WeightsWithoutInputs(model, hooks)
