"""Updates the buckets of a model inside backward: each when its mean is there, while others are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from trigram.collectives import coalesced
from trigram.errors import MisuseError, UnsupportedError
from trigram.gradients.buckets import Bucket
from trigram.gradients.in_parts import drop
from trigram.gradients.updating.fused_steps import FusedSteps
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.gradients.updating.updates import Updates
from trigram.observe import steps
from trigram.optimizers import optimizer_hooks
from trigram.runtime.weak_hook import WeakHook


class Values(Protocol):
    """What of the parameters this rank updates: all their values, or slices.

    Attributes:
        after_backward: Whether the updates of this pass wait until backward has ended.
    """

    after_backward: bool

    def begin(self, stepper: FusedSteps, fuses: bool) -> bool:
        """A pass begins that may update weights (``fuses``); returns whether it does."""

    def update(self, k: int, params: Sequence[torch.Tensor]) -> None:
        """Steps the optimizer for these parameters of the ``k``-th bucket, which has its average."""

    def show_rest(self, updated: set[int]) -> None:
        """Shows the optimizer all but the parameters with these ``id()``, which the pass has updated."""


class WholeValues:
    """All values of the parameters."""

    after_backward = False
    stepper: FusedSteps

    def begin(self, stepper: FusedSteps, fuses: bool) -> bool:
        """See :class:`Values`."""
        self.stepper = stepper
        return fuses

    def update(self, k: int, params: Sequence[torch.Tensor]) -> None:
        """See :class:`Values`."""
        self.stepper.shown.show(lambda p: [(p, p.grad)], self.stepper.in_groups(params))
        try:
            self.stepper.update()
        finally:
            self.stepper.shown.restore()

    def show_rest(self, updated: set[int]) -> None:
        """See :class:`Values`."""
        self.stepper.shown.show(lambda p: [] if id(p) in updated else [(p, p.grad)])


class FusedUpdates(GradientPart, Updates):
    """From the second update on, buckets are updated in backward.

    Args:
        optimizer: The script's optimizer.
        values: What this rank updates.

    Attributes:
        stepper: The optimizer's steps in backward, when the hooks have begun.
        begun: Whether they have.
        landed: How many buckets this pass has updated.
    """

    stepper: FusedSteps

    def __init__(self, optimizer: Optimizer, values: Values | None = None) -> None:
        self.optimizer = optimizer
        self.values: Values = values or WholeValues()
        self.landed = 0
        self.begun = False

    def begin(self) -> None:
        """See :class:`Updates`."""
        sync, optimizer = self.sync, self.optimizer
        # torch's fused kernels take gradients memory for memory, whatever the strides.
        by_memory = {id(p) for g in optimizer.param_groups if g.get("fused") for p in g["params"]}
        for name, p in zip(sync.parameters.names, sync.params, strict=True):
            if id(p) in by_memory and not sync.updates.moves_parameters and coalesced.is_permuted(p):
                raise UnsupportedError(
                    f"{sync.groups.name}: fused=True: the dimensions of parameter {name} lie in memory in "
                    "another order than in its shape, as of a transposed matrix, which the optimizer's own "
                    "fused=True does not support with gradients in buckets; make the parameter contiguous "
                    "(p.data = p.data.contiguous()), or make the optimizer without fused=True"
                )
        self.stepper = FusedSteps(optimizer)
        self.stepper.handles += [
            optimizer.register_state_dict_pre_hook(WeakHook(self, "_before_state_dict")),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, "_before_loading_state")),
        ]
        self.begun = True

    def _before_state_dict(self, *_: Any) -> None:
        """Also after a step of the script that has raised an exception, the groups hold the parameters."""
        optimizer_hooks.forget_failed(self.sync)
        self.step_failed()

    def _before_loading_state(self, *_: Any) -> None:
        """A checkpoint ends a failure, so a pass that has failed is aborted before: later, its failure would
        count again."""
        self.sync.abort_failed()

    # Passes.

    def begin_updates(self, param: int | None) -> None:
        """See :class:`Updates`."""
        self.landed = 0
        fuses = self.stepper.started and param is not None
        if fuses:
            self.stepper.begin(self.sync.groups.name, bool(self.sync.updating))
        self.fusing = self.values.begin(self.stepper, fuses)

    def before_average(self, bucket: Bucket) -> None:
        """Awaits and updates the buckets whose memory this one may use: other ranks may wait for their
        weights before they send the gradients that this one's mean needs."""
        while self.fusing and self.landed < self.sync.this_pass.sent - bucket.in_turn:
            self.sync.buckets[self.landed].average.wait()
            self._land()

    def update_ready(self) -> None:
        """Updates the buckets whose means are there, in order."""
        if not self.fusing or self.values.after_backward:
            return
        sync = self.sync
        while self.landed < sync.this_pass.sent and sync.buckets[self.landed].average.ready():
            sync.buckets[self.landed].average.wait()
            self._land()

    def averaged(self, k: int) -> None:
        """See :class:`Updates`."""
        if self.fusing and self.landed == k:
            self._land()

    def _land(self) -> None:
        """Updates the next bucket; its mean is there."""
        sync, k = self.sync, self.landed
        bucket = sync.buckets[k]
        self.landed += 1
        bucket.assign(sync.params, None)
        for passed in sync.this_pass.filters:
            passed.after(bucket)
        before = sync.times.enter(steps.OPTIMIZER)
        params = self.stepper.of_optimizer([sync.params[i] for i in bucket.params])
        try:
            # In a backward pass inside ``torch.autocast`` too, as the script's step outside of it.
            with torch.autocast(params[0].device.type if params else "cpu", enabled=False):
                self.values.update(k, params)
        except BaseException:
            self.stepper.broken = True
            raise
        self.stepper.use(params, sync.groups.main)
        sync.times.enter(before)

    def pass_failed(self, aborted: bool) -> None:
        """See :class:`Updates`. A forward pass that fails here fails a pass of the other ranks that updates
        weights."""
        if self.stepper.started if aborted else self.fusing:
            self.stepper.broken = True
            drop(self.sync.params)

    # Steps of optimizers.

    def step_has_gradients(self, mine: set[int]) -> None:
        """The script steps its optimizer: shows it what was not updated in backward."""
        sync, fused = self.sync, self.stepper
        optimizer = sync.updating[-1]() if sync.updating else None
        if optimizer is fused.optimizer:
            had = fused.updated if fused.waiting else set()
            fused.before_step(sync.groups.name)
            if had:
                self.values.show_rest(had)
        elif (
            optimizer is not None
            and fused.waiting
            and optimizer_hooks.parameters_of(optimizer) & fused.updated
        ):
            raise MisuseError(
                f"{sync.groups.name}: {type(optimizer).__name__}.step updates parameters that fused=True has "
                f"updated in backward with {type(fused.optimizer).__name__}; step that optimizer itself"
            )

    def step_failed(self) -> None:
        """See :class:`Updates`."""
        if not self.begun:
            return  # another thread looks for failed passes while this model is wrapped
        sync = self.sync
        if self.stepper.shown.active and not sync.updating and not sync.passes.in_backward:
            self.stepper.shown.restore()
            for p in sync.params:  # the script may have reset gradients since, of what it found in the groups
                p.grad = None

    # Between steps.

    def state_loaded(self) -> None:
        """The pass of gradients that were used has updated the weights."""
        drop(self.sync.params)

    def release(self) -> None:
        """See :class:`Updates`. Gradients that were used go with the hooks."""
        self.stepper.close()

    def close_without_calls(self) -> None:
        """See :class:`Updates`."""
        self.release()
