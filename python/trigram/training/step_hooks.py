"""The hooks on a model that find the beginning and end of each training step; the base class of all
algorithms.

:class:`StepHooks` calls, in this order: :meth:`StepHooks.before_step` before the forward pass of a step,
:meth:`StepHooks.begin` when its backward pass begins, and :meth:`StepHooks.end` when the backward pass has
ended. Subclasses average gradients or weights there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all
from trigram.elastic.recovery import ElasticModel
from trigram.errors import MismatchError, UnsupportedError
from trigram.gpu import device
from trigram.runtime.group import Group
from trigram.training.elasticity import Elasticity, FixedRanks
from trigram.training.tensor_check import check_tensors
from trigram.training.weak_hook import WeakHook


class StepHooks:
    """The hooks on one model; counts its steps.

    Args:
        model: The module. The constructor broadcasts the parameters and buffers of the group's first rank.
        groups: The model's process groups.

    Attributes:
        steps: Backward passes whose gradients or weights were averaged.
        sync: False inside ``no_sync``.
        weights_differ: Whether ranks may hold different weights.
        in_step: Whether all ranks make the same step at a time.
        joining: True inside ``trigram.join``.
        limit, successor: After ``limit`` steps (the warm-up), ``successor()`` makes the hooks that follow.
    """

    weights_differ = False
    in_step = True

    def __init__(self, model: nn.Module, groups: ModelGroups) -> None:
        self.model = weakref.ref(model)
        self.groups = groups
        self.sync = True
        self.joining = False
        self.forwards = 0
        self.active = False
        self.steps = 0
        self.bytes = 0
        self.waited = 0.0
        self.limit = 0
        self.successor: Callable[[], StepHooks] | None = None
        self.handles: list[Any] = []
        self.elastic: Elasticity = FixedRanks()
        check_tensors(model, None if groups.joining else groups.control)
        self.find_parameters(model)
        if not groups.joining:
            _agree_on(model, groups.control)
            coalesced.broadcast([*model.parameters(), *model.buffers()], 0, groups.control)
        self.watch(model)

    # Subclasses override these.

    def before_step(self, model: nn.Module, src: int) -> None:
        """A forward pass of a step begins; ``src`` is the group rank whose buffers all ranks get."""

    def begin(self) -> None:
        """The backward pass of a step begins."""

    def end(self) -> None:
        """The backward pass has ended on this rank."""

    def abort_pass(self) -> None:
        """Aborts the last backward pass if it is still active, because it raised an exception."""

    def step_without_inputs(self) -> None:
        """A whole step of a rank that has no inputs left."""
        raise NotImplementedError

    def drain(self, timeout: float | None = None) -> None:
        """Ends the averaging steps under way, on all ranks, and applies them."""

    def state(self) -> dict[str, Any]:
        """The state between steps, for a checkpoint."""
        return {"steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.steps = state["steps"]

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        return {
            "steps": self.steps,
            "bytes_per_step": self.bytes // self.steps if self.steps else 0,
            "bytes": self.bytes,
            "wait_seconds": self.waited,
        }

    # Elastic jobs.

    def meta(self) -> dict[str, Any]:
        """What all ranks must know to continue in the same way after the ranks have changed."""
        return {"steps": self.steps}

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Continues after the ranks have changed; all ranks call it."""
        raise NotImplementedError

    # Hooks.

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train."""
        named = list(model.named_parameters())
        self.names = [n for n, _ in named]
        self.params = [p for _, p in named]
        trained = [p for p in self.params if p.requires_grad]
        for name, p in named:
            if p.requires_grad and p.device != trained[0].device:
                raise UnsupportedError(
                    f"with_bagua: parameter {name} is on {p.device}, but other parameters are on "
                    f"{trained[0].device}; move the whole model to one device"
                )
            if p.requires_grad and not p.is_cpu and p.device.type not in device.kinds:
                raise UnsupportedError(
                    f"with_bagua: parameter {name} is on {p.device}; move the model to the CPU or to a GPU"
                )
            if p.requires_grad and not torch.is_floating_point(p):
                raise UnsupportedError(
                    f"with_bagua: parameter {name} has dtype {p.dtype}, but only real floating-point "
                    "parameters can be trained; set requires_grad=False on it"
                )
        self.trains = [p.requires_grad for p in self.params]

    def has_changed(self, model: nn.Module) -> bool:
        """Whether a layer was frozen, unfrozen or added since the parameters were found."""
        return [p.requires_grad for p in self.params] != self.trains or len(self.params) != sum(
            1 for _ in model.parameters()
        )

    def watch(self, model: nn.Module) -> None:
        """Installs the hooks on the model."""
        self.close()
        self.handles = [
            model.register_forward_pre_hook(WeakHook(self, "_before_forward")),
            model.register_forward_hook(WeakHook(self, "_after_forward")),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not (torch.is_grad_enabled() and model.training):
            return
        self.abort_pass()
        if self.successor is not None and self.steps >= self.limit and not self.joining:
            self.successor()._before_forward(model, args)
            return
        # Like DistributedDataParallel: rank 0's buffers count; inside ``join``, those of the last rank that
        # still has inputs.
        src = max(self._ranks_with_inputs(present=True)[0]) if self.joining else 0
        self.before_step(model, src)
        self.forwards += 1

    @torch.compiler.disable
    def _after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and self.sync) or not self.handles:
            return
        # These hooks report the start of the outermost backward pass. A pass inside it (reentrant
        # checkpointing) must not count as a step.
        for t in pytree.tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(WeakHook(self, "_on_backward"))

    def _on_backward(self, _grad: torch.Tensor) -> None:
        if self.sync and not self.active:
            self.begin_backward()

    def begin_backward(self) -> None:
        """Starts a backward pass, and asks autograd to report its end."""
        self.active = True
        self.begin()
        torch.autograd.Variable._execution_engine.queue_callback(WeakHook(self, "_on_end"))

    @torch.no_grad()
    def _on_end(self) -> None:
        if self.active:
            self.end()

    # Uneven inputs.

    def _ranks_with_inputs(self, present: bool) -> tuple[list[int], bool]:
        """The group ranks that still have inputs, and whether any of them averages in this step."""
        answers = tell_all([int(present), int(present and self.sync)], self.groups.control)
        ranks = [group_rank for group_rank, (here, _) in enumerate(answers) if here]
        return ranks, any(syncs for _, syncs in answers)

    @torch.no_grad()
    def run_without_inputs(self, model: nn.Module) -> None:
        """Takes part in the steps of the other ranks without inputs, until no rank has inputs left."""
        self.abort_pass()
        while True:
            here, syncing = self._ranks_with_inputs(present=False)
            if not here:
                break
            self.sync = syncing
            self.before_step(model, max(here))
            if syncing:
                self.step_without_inputs()
            self.sync = True
        self.drain()
        if self.weights_differ:
            return
        # All ranks get the model of the rank that trained longest; of several, the last.
        control = self.groups.control
        counts = [count for (count,) in tell_all([self.forwards], control)]
        longest = max(group_rank for group_rank, count in enumerate(counts) if count == max(counts))
        coalesced.broadcast([*model.parameters(), *model.buffers()], longest, control)


def agree_on_algorithm(text: str, groups: ModelGroups) -> None:
    """Raises a ``MismatchError`` on all ranks if they use different algorithms or options."""
    other = ranks_unlike_first(text, groups.control)
    if other:
        raise MismatchError(
            f"with_bagua: rank(s) {listed(other)} use a different algorithm or different options than rank "
            f"{groups.control.ranks[0]}; {groups.name} uses {text}. Pass the same arguments on all ranks, "
            "and set the same TRIGRAM_ALGORITHM"
        )


def _agree_on(model: nn.Module, group: Group) -> None:
    """Raises a ``MismatchError`` on all ranks if the models differ, before any weight is changed."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [
        f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad} {coalesced.expanded_dimensions(t)}"
        for n, t in tensors
    ]
    other = ranks_unlike_first("\n".join(lines), group)
    if other:
        first = tell_all([len(lines)], group)[0][0]
        raise MismatchError(
            f"with_bagua: the model of rank(s) {listed(other)} differs from that of rank {group.ranks[0]} "
            "in the names, shapes, dtypes, requires_grad or expanded dimensions of its parameters and "
            f"buffers ({first} tensors on rank {group.ranks[0]}, {len(lines)} on rank "
            f"{group.ranks[group.rank]}); build the same "
            "model on all ranks"
        )
