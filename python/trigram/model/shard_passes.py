"""Gradients of shards, averaged between replicas: the passes of a model that is sharded inside.

The model of ``fully_shard`` makes the forward and backward passes, and the shards that
:func:`trigram.local_shards` has returned are what averages concern. FSDP writes gradients in backward passes
and in a callback at their end, and says so in its hook for all-reduces; other parameters have hooks of their
own. A pass that has written some is followed by the average, after all callbacks of autograd. Who is told of
the model's passes and updates here tells the hooks of the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.errors import MisuseError
from trigram.gradients.gradient_sync import GradientSync
from trigram.model.wrapped import wrapped_models
from trigram.observe.steps import StepTimes
from trigram.optimizers import optimizer_hooks
from trigram.runtime.weak_hook import WeakHook


class ShardPasses:
    """Tells the hooks of a model's shards, while they average gradients; implements
    :class:`trigram.optimizers.optimizer_hooks.Updated` for the parameters of the model.

    Args:
        model: The shards.
        whole: The model.
        pairs: Its parameters, as it holds them between steps, and the shard of each.

    Attributes:
        unsent: Gradients were written in ``no_sync`` since the last average.
        waits_for_closure: As :class:`GradientSync`.
    """

    waits_for_closure = GradientSync.waits_for_closure

    def __init__(self, model: nn.Module, whole: nn.Module, pairs: Sequence[tuple[Any, nn.Parameter]]) -> None:
        self.model, self._whole, self._pairs = weakref.ref(model), weakref.ref(whole), pairs
        self.unsent = False
        self._averages: dict[int, Any] = {}  # by `id()` of a parameter: its gradient since the last one
        before, after = WeakHook(self, "_before_forward"), WeakHook(self, "_after_forward")
        # Before FSDP's, which gathers the shards; after it nothing of a step may have failed unheard.
        self._handles = [
            whole.register_forward_pre_hook(before, prepend=True),
            whole.register_forward_hook(after, always_call=True),
        ]
        written = WeakHook(self, "_written")
        for module in whole.modules():
            if hasattr(module, "set_all_reduce_hook"):  # an FSDPModule
                _listen(module, written)
        leaves = [p for p, _ in pairs if p.is_leaf]
        self._handles += [p.register_post_accumulate_grad_hook(written) for p in leaves if p.requires_grad]
        optimizer_hooks.listen(self)

    def close(self) -> None:
        """Is told of nothing any more."""
        optimizer_hooks.leave(self)
        for handle in self._handles:
            handle.remove()

    @property
    def hooks(self) -> GradientSync | None:
        """Those of the shards, if they average gradients now."""
        model = self.model()
        wrapped = None if model is None else wrapped_models.get(model)
        if wrapped is None or wrapped.stale or not isinstance(wrapped.hooks, GradientSync):
            return None
        return wrapped.hooks

    # Passes.

    def _before_forward(self, whole: nn.Module, args: Any) -> None:
        hooks, model = self.hooks, self.model()
        if hooks is None or model is None:
            return
        self._check_parameters(whole, hooks)
        model.training = whole.training
        for p, shard in self._pairs:
            if shard.requires_grad != p.requires_grad:
                shard.requires_grad_(p.requires_grad)
        for name, b in zip(model._buffers, whole.buffers(), strict=False):
            model._buffers[name] = _local(b)  # a forward pass may have put others there
        hooks.passes.before_forward(model, args)

    def _check_parameters(self, whole: nn.Module, hooks: GradientSync) -> None:
        """Raises if the script has put others in the place of the parameters: nothing would average them."""
        for (name, now), (p, _) in zip(whole.named_parameters(), self._pairs, strict=False):
            # FSDP itself puts whole parameters there, which are no DTensors, while it has gathered them.
            if now is not p and hasattr(now, "_local_tensor") == hasattr(p, "_local_tensor"):
                raise MisuseError(
                    f"{hooks.groups.name}: parameter {name} was replaced after trigram.local_shards, as by "
                    "load_state_dict(assign=True); load in place, or call trigram.unwrap on the shards "
                    "before, and local_shards and with_bagua after it, on all ranks"
                )

    def _after_forward(self, _whole: nn.Module, args: Any, output: Any) -> None:
        hooks, model = self.hooks, self.model()
        if hooks is not None and model is not None:
            hooks.passes.after_forward(model, args, output)

    def _written(self, *_: Any) -> None:
        """Gradients have been written, in a backward pass."""
        if (hooks := self.hooks) is None:
            return
        if hooks.sync:
            hooks.passes.end_late(WeakHook(self, "_backward_is_over"))
        else:
            self.unsent = True

    def _backward_is_over(self) -> None:
        if (hooks := self.hooks) is not None:
            self._average(hooks)

    @torch.no_grad()
    def _average(self, hooks: GradientSync) -> None:
        """Averages the gradients that the model has, as a pass of the shards."""
        self.unsent, joins = False, hooks.elastic.newcomer
        for p, shard in self._pairs:
            shard.grad = _local(p.grad)
        hooks.passes.begin(None)
        hooks.passes.end()
        self._take()
        if joins:  # it has got weights
            gather_again(self._whole())

    def _take(self) -> None:
        """The model gets the averages that the shards have."""
        for p, shard in self._pairs:
            mine = _local(p.grad)
            if mine is None or shard.grad is None:
                p.grad = None if shard.grad is None else _like(p, shard.grad.clone())
            elif mine.data_ptr() != shard.grad.data_ptr():
                mine.copy_(shard.grad)
            self._averages[id(p)] = p.grad

    # Updates.

    @property
    def ids(self) -> set[int]:
        """See :class:`trigram.optimizers.optimizer_hooks.Watched`."""
        return {id(p) for p, _ in self._pairs if p.requires_grad} if self.hooks is not None else set()

    @property
    def parameters(self) -> ShardPasses:
        """See :class:`trigram.optimizers.optimizer_hooks.Updated`."""
        return self

    @property
    def number(self) -> int:
        """See :class:`trigram.steps.step_hooks.StepHooks`."""
        return self._there.number

    @property
    def updating(self) -> list[weakref.ref[Optimizer]]:
        """See :class:`trigram.optimizers.optimizer_hooks.Updated`."""
        return self._there.updating

    @property
    def times(self) -> StepTimes:
        """See there."""
        return self._there.times

    @property
    def _there(self) -> GradientSync:
        """The hooks, of which it is told of updates only while there are some."""
        hooks = self.hooks
        assert hooks is not None
        return hooks

    def _shards(self, mine: set[int]) -> set[int]:
        return {id(shard) for p, shard in self._pairs if id(p) in mine}

    def before_update(self, mine: set[int]) -> None:
        """See there."""
        hooks = self._there
        if self.unsent and not hooks.sync:
            raise MisuseError(
                f"{hooks.groups.name}: optimizer.step() inside no_sync would update the weights with the "
                "gradients of this replica only; leave no_sync for the last backward pass before the update"
            )
        if self.unsent:
            self._average(hooks)
        assigned = [
            (p, shard)
            for p, shard in self._pairs
            if id(p) in mine and p.grad is not None and p.grad is not self._averages.get(id(p))
        ]
        for p, shard in assigned:  # by the script
            shard.grad = _local(p.grad)
        hooks.before_update(self._shards(mine))
        if assigned:
            self._take()

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """See there."""
        self._there.closure_ignored(self._shards(mine), optimizer)

    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """See there. A warm-up ends in ``trigram.step``, after which weights are averaged, or in the next
        forward pass: one that ended here would have that call make an averaging step of the same update."""
        self._there.has_updated(self._shards(mine))

    def update_skipped(self, mine: set[int]) -> None:
        """See there."""
        self._there.update_skipped(self._shards(mine))


class _Heard:
    """FSDP's hook for all-reduces: that of the script if there is one, and then ours."""

    def __init__(self, ours: WeakHook, before: Any) -> None:
        self.ours, self.before = ours, before

    def __call__(self, gradients: torch.Tensor) -> None:
        if self.before is not None:
            self.before(gradients)
        self.ours()


def _listen(module: Any, written: WeakHook) -> None:
    """Has ``written`` called when FSDP has reduced gradients. Its public function would take the place of a
    hook of the script, and refuses modules with several groups of parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one, or None, in releases before
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            before = group._all_reduce_hook
            group._all_reduce_hook = _Heard(written, before.before if isinstance(before, _Heard) else before)


def gather_again(whole: nn.Module | None) -> None:
    """The shards have changed: FSDP gathers what it has kept since a forward pass without backward."""
    for module in whole.modules() if whole is not None else ():
        reshard: Any = getattr(module, "reshard", None)  # of an FSDPModule
        if reshard is not None:
            reshard()


def _local(gradient: Any) -> Any:
    """What a rank holds of a gradient, which may be a DTensor."""
    return getattr(gradient, "_local_tensor", gradient)


def _like(param: Any, local: torch.Tensor) -> torch.Tensor:
    """A gradient of a parameter, of what this rank holds of it."""
    if not hasattr(param, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor  # slow, and there only where the model has some

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
