"""The optimizer steps inside backward: each bucket is updated when its mean is there, while other buckets are
under way. ``optimizer.step()`` then finds nothing to do.

Gradients have been used when backward returns, so whoever reads or changes them afterwards gets an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.errors import MisuseError, UnsupportedError
from trigram.gradients.in_parts import ShardedGradient
from trigram.gradients.updating.shown_params import ShownParams, disclaim
from trigram.optimizers import optimizer_hooks
from trigram.optimizers.group_values import GroupValues
from trigram.runtime import dynamo
from trigram.runtime.group import Group
from trigram.runtime.weak_hook import WeakHook


class FusedSteps:
    """The steps of one optimizer inside backward. The first update is an ordinary one: then its state and the
    order of the buckets are known.

    Attributes:
        optimizer: The script's optimizer.
        started: Whether it has made an update.
        updated: ``id()`` of each parameter that was updated in the last pass.
        waiting: Whether it has changed weights, and the script has not called ``step`` since then.
        broken: Whether a pass has failed, so that some ranks may have updated what others have not.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.shown = ShownParams(optimizer)
        self.started = self.waiting = self.broken = False
        self.updated: set[int] = set()
        self._used: dict[int, ShardedGradient] = {}
        self._groups: GroupValues | None = None  # when the pass began
        self._counted: GroupValues | None = None  # since its first update
        self._place: dict[int, tuple[int, int]] = {}
        stepped = optimizer.register_step_post_hook(WeakHook(self, "after_step"))
        # Before the script's own hooks: these see the parameters in the groups.
        optimizer._optimizer_step_post_hooks.move_to_end(stepped.id, last=False)  # type: ignore[attr-defined]
        self.handles = [
            stepped,
            optimizer.register_load_state_dict_post_hook(WeakHook(self, "_loaded")),
        ]

    def begin(self, name: str, in_closure: bool) -> None:
        """A backward pass begins whose buckets will be updated.

        Raises:
            MisuseError: The last pass failed, or ``step`` was not called since.
            UnsupportedError: The pass is in a closure of the optimizer, or a hook of the script would see
                no gradients.
        """
        if self.broken:
            raise MisuseError(
                f"{name}: a forward or backward pass with fused=True has failed, so ranks may hold different "
                "weights: others may have updated theirs in that step; load a checkpoint into the model and "
                "the optimizer on all ranks, or start again from one"
            )
        if self.waiting:
            raise MisuseError(
                f"{name}: a second backward pass before optimizer.step(), which fused=True cannot undo: the "
                "first has updated the weights; run all passes but the last under trigram.no_sync, and call "
                "optimizer.step() after each update, or pass fused=False"
            )
        if in_closure:
            raise UnsupportedError(
                f"{name}: fused=True updates weights in backward, so optimizer.step(closure) would step "
                "inside itself; call backward() and then step(), or pass fused=False"
            )
        hooks = self.optimizer._optimizer_step_pre_hooks.values()  # type: ignore[attr-defined]
        if any(not type(hook).__module__.startswith("trigram.") for hook in hooks):
            raise UnsupportedError(
                f"{name}: fused=True updates weights in backward, so a step pre-hook of the script "
                "(optimizer.register_step_pre_hook) would see no gradients and change nothing; remove the "
                "hook, or pass fused=False"
            )
        self.updated = set()
        self._groups, self._counted = GroupValues(self.optimizer), None
        groups = self.optimizer.param_groups
        self._place = {id(p): (g, k) for g, group in enumerate(groups) for k, p in enumerate(group["params"])}

    def of_optimizer(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the parameters that were the optimizer's when the pass began."""
        return [p for p in params if id(p) in self._place]

    def in_groups(self, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Some of the optimizer's parameters, by group, in their order there."""
        found: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for p in sorted(params, key=lambda p: self._place[id(p)]):
            found[self._place[id(p)][0]].append(p)
        return found

    def update(self) -> None:
        """Steps the optimizer with what its groups hold. Hooks belong to the script's own call; what the
        optimizer counts in its groups is counted once per pass."""
        assert self._groups is not None
        self._groups.put_back()
        optimizer_hooks.step_unheard(self.optimizer)
        self._counted = GroupValues(self.optimizer)

    def count(self) -> None:
        """Weights are updated by others than the optimizer, with the options that the pass began with."""
        assert self._groups is not None
        if self._counted is None:
            self._groups.put_back()
            self._counted = GroupValues(self.optimizer)

    def use(self, params: Sequence[torch.Tensor], group: Group) -> None:
        """The gradients of these parameters have been used."""
        for p in params:
            self.updated.add(id(p))
            if p.grad is not None:
                self.waiting = True
                gradient = self._used.get(id(p))
                if gradient is None or gradient.shape != p.shape:
                    gradient = self._used[id(p)] = ShardedGradient(p, None, group)
                gradient.begin()
                gradient.used = True
                p.grad = gradient

    def before_step(self, name: str) -> None:
        """The script calls ``step``.

        Raises:
            MisuseError: The groups have other options than in backward, a gradient was assigned since, or
                there is no new one.
        """
        self.started = True
        if not self.waiting:
            self.updated = set()
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            gradient = p.grad
            used = isinstance(gradient, ShardedGradient) and gradient.used
            if self.waiting and id(p) in self.updated:
                if gradient is not None and not used:
                    raise MisuseError(
                        f"{name}: gradients were assigned between backward() and optimizer.step(), and "
                        "fused=True has updated the weights with those before; change gradients in hooks of "
                        "the parameters, or pass fused=False"
                    )
            elif used and gradient.reset:
                p.grad = gradient.of_this_rank()
            elif used:
                raise MisuseError(
                    f"{name}: optimizer.step() without new gradients: fused=True has updated the weights "
                    "with these in backward; call it once for each backward pass, reset gradients before the "
                    "next, or pass fused=False"
                )
        changed = self._counted is not None and not self._counted.same()
        if self.waiting and changed:
            self.broken = True
            raise MisuseError(
                f"{name}: the options of the optimizer's groups (lr, ...) were changed between backward() "
                "and optimizer.step(), and fused=True has updated the weights with those before; change "
                "them before backward() or after step()"
            )
        if self.waiting and self._groups is not None:
            self._groups.put_back()  # this step counts
        self.waiting = False

    @dynamo.disable
    def after_step(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self.shown.restore()

    def close(self) -> None:
        """Leaves the optimizer alone."""
        self.shown.restore()
        for handle in self.handles:
            handle.remove()
        disclaim(self.optimizer)

    def _loaded(self, *_: Any) -> None:
        """A checkpoint was loaded: it may end a failure."""
        self.waiting = self.broken = False
