"""Divides the optimizer's state among the ranks (ZeRO, arXiv 1910.02054).

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
from trigram.gradients.buckets import Bucket
from trigram.gradients.updating.fused_updates import FusedUpdates
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.gradients.updating.shown_params import disclaim
from trigram.gradients.updating.updates import Updates
from trigram.optimizers import optimizer_hooks
from trigram.runtime import dynamo
from trigram.runtime.group import Group
from trigram.runtime.weak_hook import WeakHook
from trigram.sharded.lent_parts import LentParts
from trigram.sharded.optimizer_calls import OptimizerCalls
from trigram.sharded.recovery import Recovery
from trigram.sharded.refusals import check_memory, check_optimizer
from trigram.sharded.slice_values import SliceValues
from trigram.sharded.state import ShardedState
from trigram.sharded.weights.divided_weights import DividedWeights
from trigram.sharded.weights.gradient_buckets import layouts
from trigram.steps.step_hooks import StepHooks
from trigram.steps.step_recovery import Arrival, SharedState


class ShardedUpdates(GradientPart, Updates):
    """Each rank does a part of the optimizer's work.

    Args:
        model: The module.
        groups: The model's process groups.
        optimizer: The script's optimizer.
        whole: Whether it needs whole parameters.
        overlap: The gather is awaited in the next forward pass instead of in ``step``.
        fused: Whether slices are updated in backward.
        divides_gradients: Whether each rank keeps a part of the gradients.
        recovery: What happens when a rank is lost.

    Attributes:
        state: The state that is divided.
        values: The slices that are updated in backward; None: the optimizer steps when the script asks.
        fused_updates: Updates of slices in backward, if any.
        lent: Parts that an algorithm averages between replicas.
    """

    moves_parameters = True

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        optimizer: Optimizer,
        whole: bool = False,
        overlap: bool = False,
        fused: bool = False,
        divides_gradients: bool = False,
        recovery: Recovery | None = None,
    ) -> None:
        check_memory(model, groups.ignored)
        check_optimizer(model, optimizer)
        self.optimizer = optimizer
        weights = DividedWeights(optimizer, whole, divides_gradients, groups.size)
        self.values = SliceValues(optimizer, weights, groups) if fused else None
        self.fused_updates = FusedUpdates(optimizer, self.values) if fused else Updates()
        self.state = ShardedState(optimizer, weights, self.fused_updates, overlap)
        self.lent = LentParts(self.state)
        self.recovery = recovery or Recovery()
        self.recovery.serve(self.state)

    def attach(self, hooks: StepHooks) -> None:
        """See :class:`Updates`."""
        super().attach(hooks)
        self.state.attach(hooks)
        self.lent.attach(hooks)
        if self.values is not None:
            self.values.attach(hooks)

    def begin(self) -> None:
        """See :class:`Updates`."""
        optimizer = self.optimizer
        if self.state.weights.divides_gradients:
            self.state.weights.check_all_updated(optimizer_hooks.parameters_of(optimizer))
        stepped = optimizer.register_step_post_hook(WeakHook(self, "_stepped"))
        self.calls_of_script = OptimizerCalls(self.state, self.recovery)
        self.handles = [stepped, *self.calls_of_script.handles]
        self.handles.append(optimizer.register_step_pre_hook(self.state.stay))
        self.fused_updates.begin()
        # Slices leave the groups before anything else happens after a step: the script's own hooks may save a
        # checkpoint.
        optimizer._optimizer_step_post_hooks.move_to_end(stepped.id, last=False)  # type: ignore[attr-defined]

    def watch(self, model: nn.Module) -> list[Any]:
        """See :class:`Updates`; gathers may be under way where weights are read."""
        handles: list[Any] = []
        for module in model.modules() if self.state.overlap else ():
            if type(module) is not nn.Sequential and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(WeakHook(self, "_read"), prepend=True))
            handles.append(module.register_state_dict_pre_hook(WeakHook(self, "_read")))
        return handles + self.lent.watch(model)

    def _read(self, *_: Any) -> None:
        self.drain()

    def parameters_found(self) -> None:
        """See :class:`Updates`. Where gradients are divided, buckets keep their first order: slices would
        have to move."""
        # These may be updated after they are frozen.
        self.sync.parameters.ids |= set(self.state.weights.shards.places)
        if self.state.weights.divides_gradients:
            self.sync.pipeline.learn(False)

    # Passes.

    @property
    def before_passes(self) -> Group:
        """See :class:`Updates`. A step and a ``state_dict`` are calls in this group too, so a rank that makes
        them alone meets the others there, and no rank waits."""
        return self.sync.groups.main

    def pass_begins(self) -> None:
        """See :class:`Updates`."""
        self.lent.check_collected()
        self.drain()
        self.state.failed.check()

    def begin_updates(self, param: int | None) -> None:
        """See :class:`Updates`."""
        self.fused_updates.begin_updates(param)
        self.fusing = self.fused_updates.fusing

    def before_average(self, bucket: Bucket) -> None:
        """See :class:`Updates`."""
        self.fused_updates.before_average(bucket)

    def update_ready(self) -> None:
        """See :class:`Updates`."""
        self.fused_updates.update_ready()

    def averaged(self, k: int) -> None:
        """See :class:`Updates`."""
        self.fused_updates.averaged(k)

    def count_calls(self) -> int:
        """See :class:`Updates`. A pass that fails on this rank before its first gradient updates nothing
        here, and the other ranks may have begun to gather: all ranks count a call for each bucket of weights,
        whether this pass makes it or not."""
        return len(self.state.weights.shards.buckets) if self.values is not None else 0

    def pass_failed(self, aborted: bool) -> None:
        """See :class:`Updates`; gathers of the pass end with it."""
        self.fused_updates.pass_failed(aborted)
        self.state.weights.gathers.end()

    def pass_interrupted(self) -> None:
        """See :class:`Updates`."""
        self.state.weights.gathers.end()

    def counted_anew(self) -> None:
        """See :class:`Updates`."""
        self.state.count = 0

    def pass_ends(self) -> None:
        """See :class:`Updates`; the weights that were updated are there, unless they may come later."""
        if not self.state.overlap:
            self.drain()

    # The optimizer's step.

    def step_begins(self) -> None:
        """See :class:`Updates`."""
        self.state.weights.shards.leave()  # after a step that has raised an exception
        self.state.failed.abort()
        self.state.failed.check()

    def step_has_gradients(self, mine: set[int]) -> None:
        """See :class:`Updates`; the slices take the place of the parameters."""
        self.fused_updates.step_has_gradients(mine)
        sync, shards = self.sync, self.state.weights.shards
        optimizer = sync.updating[-1]() if sync.updating else None
        own = optimizer_hooks.parameters_of(self.optimizer)
        if optimizer is not self.optimizer:
            if mine & own:
                names = sync.parameters.names_by_id()
                name = next(name for each, name in names.items() if each in mine & own)
                raise MisuseError(
                    f"{sync.groups.name}: {type(optimizer).__name__}.step updates {name}, which the "
                    f"optimizer= of with_bagua ({type(self.optimizer).__name__}) updates in slices; step "
                    "that optimizer itself, without another optimizer around it"
                )
            return
        self.state.count += 1
        self.recovery.check_options()
        if shards.entered:  # the rest after an update in backward
            self.state.failed.step_begins(self._count_gathers())
            return
        self.lent.check_collected()
        self.drain()
        with torch.no_grad():
            self.follow_model(own)
        self.state.weights.shards.enter(lambda p: True)
        self.state.failed.step_begins(0 if self.lent.active else self._count_gathers())

    def _count_gathers(self) -> int:
        """The calls that follow the step that runs."""
        return self.state.weights.count_gathers(self.state.updated)

    @torch.no_grad()
    def follow_model(self, own: set[int]) -> None:
        """Divides parameters that the optimizer updates and that are not divided yet; all ranks call it.

        Args:
            own: ``id()`` of the optimizer's parameters.
        """
        sync, weights = self.sync, self.state.weights
        weights.prepare()
        if not weights.lacks(own):
            return
        self.lent.check_moving()
        if weights.divides_gradients:
            weights.check_all_updated(own)
            if weights.shards.places:
                self._put_together()
                weights.begin_anew()
            wanted = layouts(sync.buckets)
        else:
            if not (weights.shards.places or sync.elastic.can_redo):
                sync.order.learn()  # slices never move: take the order of gradients before they are made
            wanted = weights.lay_out_missing(own, weights.loads)
        self.recovery.agree(wanted)
        for layout in wanted:
            weights.add(layout, self.recovery.parts())
        weights.shards.cut()
        if self.values is not None:
            self.values.divided()

    def _put_together(self) -> None:
        """The optimizer has the state of whole parameters again."""
        shards = self.state.weights.shards
        shards.join(self.recovery.whole_state())
        shards.keep_joined()

    @dynamo.disable  # a script may compile the optimizer's step
    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, *args: Any) -> None:
        """The optimizer has stepped: collects the weights."""
        shards = self.state.weights.shards
        running = sum(o() is optimizer for o in self.sync.updating)
        if not shards.entered or running > 1:  # nothing to update, or a step of its class inside its own
            return
        shards.leave()
        self.state.failed.step_ended()
        if self.lent.active:
            self.state.owed = True
            return
        # Slices have changed the parameters' memory, of which autograd does not know.
        for p, _, _ in shards.places.values():
            if p.grad is not None and id(p) not in self.state.updated:
                increment_version(p)
        self.recovery.gather(self.state.updated)

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """See :class:`Updates`; the optimizer has seen whole parameters."""
        if mine & optimizer_hooks.parameters_of(self.optimizer):
            raise MisuseError(
                f"{self.sync.groups.name}: {optimizer}.step(closure) has not called the closure, so it has "
                "updated whole parameters instead of this rank's slices; call step() without a closure"
            )

    # All ranks get all weights.

    def drain(self, timeout: float | None = None) -> None:
        """See :class:`Updates`."""
        self.state.drain(timeout)

    def collect(self) -> None:
        """Collects the weights from parts that were lent; all ranks call it."""
        self.recovery.collect()

    # Between steps.

    def lend(self) -> list[torch.Tensor]:
        """This rank's parts of the weights that train, for an algorithm that averages them between replicas.

        From now on the weights are collected by :meth:`collect`, after such an average, and not in ``step``.
        All ranks call it, between steps.
        """
        self.recovery.check_lending()
        self.lent.check_fused()
        self.state.between_steps("local_shards")
        self.follow_model(optimizer_hooks.parameters_of(self.optimizer))
        return self.lent.lend()

    def step_failed(self) -> None:
        """See :class:`Updates`."""
        self.fused_updates.step_failed()

    def settle(self, timeout: float | None) -> None:
        """See :class:`Updates`."""
        shards = self.state.weights.shards
        if shards.entered and not self.sync.updating:
            # The script may have reset gradients since: those of the slices, which it found in the groups.
            shards.leave()
            for p in shards.parameters():
                p.grad = None
            self.state.failed.abort()
        self.drain(timeout)

    def before_load(self) -> None:
        """See :class:`Updates`."""
        self.drain()

    def state_loaded(self) -> None:
        """See :class:`Updates`."""
        self.fused_updates.state_loaded()

    def release(self) -> None:
        """See :class:`Updates`; the optimizer gets its state together again."""
        if self.state.owed:
            self.collect()
        self.drain()
        self.state.weights.shards.leave()
        if self.state.weights.shards.places:
            self._put_together()
        self.fused_updates.release()
        self.lent.active = False
        self._let_go()

    def close_without_calls(self) -> None:
        """See :class:`Updates`. An optimizer that has lost state goes on refusing to step."""
        self.fused_updates.close_without_calls()
        shards = self.state.weights.shards
        shards.leave()
        kept = shards.forget()
        if any(state for _, state in kept):
            self.optimizer.state.update(kept)
        else:
            self._let_go()

    def _let_go(self) -> None:
        disclaim(self.optimizer)
        self.state.weights.shards.release()
        for handle in self.handles:
            handle.remove()

    # Elastic jobs.

    @property
    def shared(self) -> SharedState:
        """See :class:`Updates`."""
        return self.recovery

    def follow(self, part: Arrival) -> None:
        """See :class:`Updates`."""
        self.recovery.follow(part)

    def stats(self, found: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Updates`."""
        found["bytes"] += self.state.weights.gathers.sent
        found["bytes_per_step"] = found["bytes"] // found["steps"] if found["steps"] else 0
        found["sharded_values"] = self.state.weights.own_values()
        found["one_pass_updates"] = self.values.one_pass.updates if self.values is not None else 0
        return found | self.recovery.stats()
