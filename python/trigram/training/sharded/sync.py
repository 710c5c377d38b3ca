"""Averages gradients during backward, and divides the optimizer's state among the ranks (ZeRO,
arXiv 1910.02054).

When the optimizer steps, each rank updates its part of each bucket of weights; then the parts are gathered,
so that all ranks hold all weights. See docs/sharding.md, and docs/adr/0029 for the reasons.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.errors import MisuseError
from trigram.runtime import dynamo
from trigram.runtime.weak_hook import WeakHook
from trigram.training import optimizer_hooks
from trigram.training.compressors import GradientCompressor
from trigram.training.sharded.agreement import StayCheck, agree_on_options
from trigram.training.sharded.failed_steps import FailedSteps
from trigram.training.sharded.fused_slices import FusedSlices
from trigram.training.sharded.lent_slices import LentSlices
from trigram.training.sharded.optimizer_calls import OptimizerCalls
from trigram.training.sharded.other_methods import OtherMethods
from trigram.training.shown_params import disclaim


class ShardedSync(FailedSteps, FusedSlices, LentSlices, OptimizerCalls):
    """Averages the gradients of one model, and gives each rank a part of the optimizer's work.

    Args:
        model, groups, bucket_bytes, compressor, optimizer, whole, overlap: See :class:`DividedWeights`.

    Attributes:
        updates: The optimizer's steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        compressor: GradientCompressor,
        optimizer: Optimizer,
        whole: bool = False,
        overlap: bool = False,
    ) -> None:
        self.updates = 0
        self.stay = StayCheck()
        super().__init__(model, groups, bucket_bytes, compressor, optimizer, whole, overlap)
        stepped = optimizer.register_step_post_hook(WeakHook(self, "_stepped"))
        # Before the script's own hooks, which may save a checkpoint.
        optimizer._optimizer_step_post_hooks.move_to_end(stepped.id, last=False)  # type: ignore[attr-defined]
        self._first_hook = stepped.id
        self.optimizer_handles: list[Any] = [
            OtherMethods(optimizer, self),
            stepped,
            optimizer.register_step_pre_hook(self.stay),
            optimizer.register_state_dict_pre_hook(WeakHook(self, "_before_state_dict")),
            optimizer.register_state_dict_post_hook(WeakHook(self, "_after_state_dict")),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, "_before_load_optimizer")),
            optimizer.register_load_state_dict_post_hook(WeakHook(self, "_after_load_optimizer")),
        ]

    def fuse(self, optimizer: Optimizer) -> None:
        """See :class:`FusedBuckets`; slices leave the groups before anything else happens after a step."""
        super().fuse(optimizer)
        optimizer._optimizer_step_post_hooks.move_to_end(self._first_hook, last=False)  # type: ignore[attr-defined]

    # The optimizer's step.

    def before_update(self, mine: set[int]) -> None:
        """See :meth:`GradientSync.before_update`; then the slices take the place of the parameters."""
        self.shards.leave()  # after a step that has raised an exception
        self.abort_step()
        self.check_steps()
        super().before_update(mine)
        optimizer = self.updating[-1]() if self.updating else None
        own = optimizer_hooks.parameters_of(self.optimizer)
        if optimizer is not self.optimizer:
            if mine & own:
                name = next(n for n, p in zip(self.names, self.params, strict=True) if id(p) in mine & own)
                raise MisuseError(
                    f"{self.groups.name}: {type(optimizer).__name__}.step updates {name}, which the "
                    f"optimizer= of with_bagua ({type(self.optimizer).__name__}) updates in slices; step "
                    "that optimizer itself, without another optimizer around it"
                )
            return
        self.updates += 1
        self._check_options()
        if self.shards.entered:  # the rest after an update in backward
            self.step_begins(self._gathers(self._updated()))
            return
        self._check_collected()
        self.drain()
        with torch.no_grad():
            self._follow(own)
        self.shards.enter(lambda p: True)
        self.step_begins(0 if self.lent else self._gathers(self._updated()))

    def _updated(self) -> set[int]:
        """Parameters that this pass has updated in backward."""
        return self.fused.updated if self.fused is not None and self.fusing else set()

    def count_anew(self) -> None:
        """See :class:`GradientSync`."""
        super().count_anew()
        if self.has_failed:
            self.updates = 0

    def _check_options(self) -> None:
        """Raises on all ranks if their optimizers have other options; rarely: in steps 1, 2, 4, and so on."""
        if self.updates.bit_count() == 1:
            agree_on_options(self.groups, self.optimizer)

    @dynamo.disable  # a script may compile the optimizer's step
    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, *args: Any) -> None:
        """The optimizer has stepped: collects the weights."""
        running = sum(o() is optimizer for o in self.updating)
        if not self.shards.entered or running > 1:  # nothing to update, or a step of its class inside its own
            return
        self.shards.leave()
        self.step_ended()
        if self.lent:
            self.owed = True
            return
        updated = self._updated()
        # Slices have changed the parameters' memory, of which autograd does not know.
        for p, _, _ in self.shards.places.values():
            if p.grad is not None and id(p) not in updated:
                increment_version(p)
        self._gather_all(updated)

    def _after_load_optimizer(self, *_: Any) -> None:
        """See :class:`OptimizerCalls`. A checkpoint ends a failure."""
        self.broken = False
        super()._after_load_optimizer()

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """See :class:`GradientSync`; the optimizer has seen whole parameters."""
        super().closure_ignored(mine, optimizer)
        if mine & optimizer_hooks.parameters_of(self.optimizer):
            raise MisuseError(
                f"{self.groups.name}: {optimizer}.step(closure) has not called the closure, so it has "
                "updated whole parameters instead of this rank's slices; call step() without a closure"
            )

    # Before anything else begins, all weights are there.

    def begin(self, param: int | None) -> None:
        """See :class:`GradientSync`."""
        self._check_collected()
        self.drain()
        self.check_steps()
        super().begin(param)

    def _before_load(self, *_: Any) -> None:
        self.drain()
        super()._before_load()

    def abort_failed(self, timeout: float | None = None) -> None:
        """See :class:`StepHooks`; between steps, it also ends gathers and a step that has raised an
        exception."""
        optimizer_hooks.forget_failed(self)
        if self.in_backward:
            return  # gathers of this pass are awaited at its end, when all ranks have started theirs
        if self.active:
            super().abort_failed()  # before anything is awaited that the other ranks have aborted
        if self.shards.entered and not self.updating:
            # The script may have reset gradients since: those of the slices, which it found in the groups.
            self.shards.leave()
            for p in self.shards.parameters():
                p.grad = None
            self.abort_step()
        self.drain(timeout)
        super().abort_failed()

    # The end.

    def release(self) -> None:
        """Puts the optimizer's state together again on all ranks, which all call it, and leaves it alone."""
        if self.owed:
            self.collect()
        self.drain()
        self.shards.leave()
        if self.shards.places:
            self._put_together()
        super().release()
        self.lent = False
        self._let_go()

    def close_without_calls(self) -> None:
        """See :class:`StepHooks`. An optimizer that has lost state goes on refusing to step."""
        super().close_without_calls()
        self.shards.leave()
        kept = self.shards.forget()
        if any(state for _, state in kept):
            self.optimizer.state.update(kept)
        else:
            self._let_go()

    def _let_go(self) -> None:
        disclaim(self.optimizer)
        self.shards.release()
        for handle in self.optimizer_handles:
            handle.remove()
