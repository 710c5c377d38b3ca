"""Updates the buckets of a model inside backward: each when its mean is there, while others are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.averaging.gradient_filter import GradientFilter
from trigram.collectives import coalesced
from trigram.errors import MisuseError, UnsupportedError
from trigram.observe import steps
from trigram.runtime.weak_hook import WeakHook
from trigram.training import optimizer_hooks
from trigram.training.buckets import Bucket
from trigram.training.fused_steps import FusedSteps
from trigram.training.sharded_gradient import ShardedGradient
from trigram.training.step_hooks import StepHooks


class FusedBuckets(StepHooks):
    """Step hooks whose buckets may be updated in backward.

    Attributes:
        buckets: The buckets of gradients.
        fused: The optimizer's steps in backward; None: it steps when the script asks.
        fusing: Whether this pass updates weights.
        filters: What the gradients of this pass go through.
        landed: How many buckets it has updated.
    """

    buckets: Sequence[Bucket]
    fused: FusedSteps | None = None
    fusing = False
    landed = 0
    filters: Sequence[GradientFilter] = ()
    moves_parameters = False
    """Whether parameters move into buckets, and get the strides of their place there."""

    @property
    def next(self) -> int:
        """How many buckets were sent in this pass."""
        return self.pipeline.started

    def fuse(self, optimizer: Optimizer) -> None:
        """From the second update on, buckets are updated in backward."""
        # torch's fused kernels take gradients memory for memory, whatever the strides.
        by_memory = {id(p) for g in optimizer.param_groups if g.get("fused") for p in g["params"]}
        for name, p in zip(self.names, self.params, strict=True):
            if id(p) in by_memory and not self.moves_parameters and coalesced.is_permuted(p):
                raise UnsupportedError(
                    f"{self.groups.name}: fused=True: the dimensions of parameter {name} lie in memory in "
                    "another order than in its shape, as of a transposed matrix, which the optimizer's own "
                    "fused=True does not support with gradients in buckets; make the parameter contiguous "
                    "(p.data = p.data.contiguous()), or make the optimizer without fused=True"
                )
        self.fused = FusedSteps(optimizer)
        self.fused.handles += [
            optimizer.register_state_dict_pre_hook(WeakHook(self, "restore_failed")),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, "_before_loading_state")),
        ]

    def restore_failed(self, *_: Any) -> None:
        """After a step of the script that has raised an exception: the groups hold the parameters again."""
        optimizer_hooks.forget_failed(self)
        if self.fused is not None and self.fused.shown.active and not self.updating and not self.in_backward:
            self.fused.shown.restore()
            for p in self.params:  # the script may have reset gradients since, of what it found in the groups
                p.grad = None

    def _before_loading_state(self, *_: Any) -> None:
        """A checkpoint ends a failure, so a pass that has failed is aborted before: later, its failure would
        count again."""
        self.abort_failed()

    def abort_failed(self, timeout: float | None = None) -> None:
        """See :class:`StepHooks`."""
        self.restore_failed()
        super().abort_failed(timeout)

    def close_without_calls(self) -> None:
        """See :class:`StepHooks`."""
        super().close_without_calls()
        FusedBuckets.release(self)

    def release(self) -> None:
        """Leaves the optimizer alone; gradients that were used are gone."""
        if self.fused is not None:
            self.fused.close()
        for p in self.params:
            if isinstance(p.grad, ShardedGradient):
                p.grad = None

    def begin_fused(self, param: int | None) -> bool:
        """Whether this pass updates weights; ``param``: see :meth:`begin`."""
        if self.fused is None or not self.fused.started or param is None:
            return False
        self.fused.begin(self.groups.name, bool(self.updating))
        return True

    def land_ready(self) -> None:
        """Updates the buckets whose means are there, in order."""
        while self.fusing and self.landed < self.next and self.buckets[self.landed].average.ready():
            self.buckets[self.landed].average.wait()
            self.land()

    def land_before(self, bucket: Bucket) -> None:
        """Awaits and updates the buckets whose memory this one may use: other ranks may wait for their
        weights before they send the gradients that this one's mean needs."""
        while self.fusing and self.landed < self.next - bucket.in_turn:
            self.buckets[self.landed].average.wait()
            self.land()

    def land(self) -> None:
        """Updates the next bucket; its mean is there."""
        assert self.fused is not None
        bucket = self.buckets[self.landed]
        self.landed += 1
        bucket.assign(self.params, None)
        for passed in self.filters:
            passed.after(bucket)
        before = self.times.enter(steps.OPTIMIZER)
        params = self.fused.of_optimizer([self.params[i] for i in bucket.params])
        try:
            self.update(params)
        except BaseException:
            self.fused.broken = True
            raise
        self.fused.use(params, self.groups.main)
        self.times.enter(before)

    def update(self, params: Sequence[torch.Tensor]) -> None:
        """Steps the optimizer for some parameters."""
        assert self.fused is not None
        self.fused.shown.show(lambda p: [(p, p.grad)], self.fused.in_groups(params))
        try:
            # In a backward pass inside ``torch.autocast`` too, as the script's step outside of it.
            with torch.autocast(params[0].device.type if params else "cpu", enabled=False):
                self.fused.update()
        finally:
            self.fused.shown.restore()

    def finish_fused(self) -> None:
        """The script steps its optimizer: shows it what was not updated in backward."""
        fused = self.fused
        if fused is None:
            return
        optimizer = self.updating[-1]() if self.updating else None
        if optimizer is fused.optimizer:
            had = fused.updated if fused.waiting else set()
            fused.before_step(self.groups.name)
            if had:
                self.show_rest(had)
        elif (
            optimizer is not None
            and fused.waiting
            and optimizer_hooks.parameters_of(optimizer) & fused.updated
        ):
            raise MisuseError(
                f"{self.groups.name}: {type(optimizer).__name__}.step updates parameters that fused=True has "
                f"updated in backward with {type(fused.optimizer).__name__}; step that optimizer itself"
            )

    def show_rest(self, updated: set[int]) -> None:
        """Shows the optimizer the parameters that backward has not updated."""
        assert self.fused is not None
        self.fused.shown.show(lambda p: [] if id(p) in updated else [(p, p.grad)])
