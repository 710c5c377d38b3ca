"""The script's calls of a sharded optimizer outside of its step: ``state_dict``, ``load_state_dict``, and
``train`` and ``eval`` of schedule-free ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from trigram.optimizers.group_values import GroupValues
from trigram.runtime.weak_hook import WeakHook
from trigram.sharded.state import ShardedState
from trigram.sharded.weights.other_methods import OtherMethods


class WholeState(Protocol):
    """Where the state of whole parameters comes from, and goes:
    :class:`~trigram.sharded.recovery.Recovery`."""

    def gives_whole_state(self) -> bool:
        """Whether a ``state_dict`` that begins is one of all ranks."""

    def whole_state(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The state of whole parameters, on all ranks, which all call it."""

    def before_load(self) -> None:
        """The script is about to load a state, of an optimizer that is divided."""

    def after_load(self) -> None:
        """The script has loaded a state of whole parameters."""

    def collect(self) -> None:
        """Others than the optimizer have changed this rank's parts of the weights; all ranks call it."""


class OptimizerCalls:
    """Hooks on a sharded optimizer, which gives, and takes, the state of whole parameters.

    Attributes:
        handles: What removes the hooks.
    """

    def __init__(self, state: ShardedState, recovery: WholeState) -> None:
        self.state, self.recovery = state, recovery
        optimizer = state.optimizer
        self.handles: list[Any] = [
            OtherMethods(optimizer, self),
            optimizer.register_state_dict_pre_hook(WeakHook(self, "_before_state_dict")),
            optimizer.register_state_dict_post_hook(WeakHook(self, "_after_state_dict")),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, "_before_load")),
            optimizer.register_load_state_dict_post_hook(WeakHook(self, "_after_load")),
        ]

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        state = self.state
        if state.weights.shards.places and self.recovery.gives_whole_state():
            state.stay.check("optimizer.state_dict()")
            state.between_steps("state_dict()")
            shards = state.weights.shards
            shards.cut()
            shards.join(self.recovery.whole_state())

    def _after_state_dict(self, *_: Any) -> None:
        self.state.weights.shards.separate()

    def _before_load(self, *_: Any) -> None:
        if self.state.weights.shards.places:
            self.recovery.before_load()

    def _after_load(self, *_: Any) -> None:
        self.recovery.after_load()

    @torch.no_grad()
    def swap(self, call: str, method: Callable[[], Any]) -> Any:
        """A method of the optimizer that may exchange the weights: it sees this rank's slices."""
        state = self.state
        if not state.weights.shards.places or state.weights.shards.entered:
            return method()
        state.stay.check(call)
        state.between_steps(call)
        state.weights.prepare()
        shards, before = state.weights.shards, GroupValues(state.optimizer)
        shards.enter(lambda p: True, gradients=False)
        try:
            found = method()
        finally:
            shards.leave()
        notes_it = all("train_mode" in g for g in state.optimizer.param_groups)
        if not (notes_it and before.same()):  # the weights may be others
            self.recovery.collect()
        return found
