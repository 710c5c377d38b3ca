"""``consensus`` and ``consensus_state_dict``: the weights averaged over all ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.collectives.consistency import unequal
from trigram.elastic import membership
from trigram.elastic.answers import Answers
from trigram.errors import AbortedError
from trigram.mixing.step import AveragingStep
from trigram.model.elastic_gather import gather, is_alone, repeated
from trigram.model.shards import collect
from trigram.model.wrapped import WrappedModel, lookup
from trigram.runtime import job, world
from trigram.steps.model_changes import agree_on_layouts, layouts
from trigram.steps.step_hooks import StepHooks
from trigram.training.schedule import EverySteps
from trigram.training.weight_sync import WeightSync


class Consensus:
    """The averaged weights: inside a ``with`` block, or permanently without one."""

    def __init__(
        self,
        model: nn.Module,
        replicas: list[tuple[torch.Tensor, torch.Tensor]],
        hooks: StepHooks | None,
    ) -> None:
        steps = _averaging_steps(hooks)
        self._model = model
        self._hooks = hooks
        self._replicas = replicas
        self._before = [(step, step.agreed_on) for step in steps]
        for step in steps:
            step.agreed_on = True

    def __enter__(self) -> nn.Module:
        for step, agreed_on in self._before:  # the averages do not stay
            step.agreed_on = agreed_on
        return self._model

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        if self._replicas:
            coalesced.copy_all(*zip(*self._replicas, strict=True))
            if isinstance(self._hooks, WeightSync):
                self._hooks.moved_here()
            collect(self._model)


@torch.no_grad()
def consensus(model: nn.Module, timeout: float | None = 300.0) -> Consensus:
    """Gives all ranks the average weights and the average of floating-point buffers.

    All ranks call it, between steps. With ``with trigram.consensus(model):``, the weights and buffers of each
    rank are restored at the end of the block; without ``with``, the averages stay. What is the same on all
    ranks does not change under algorithms that average gradients. Parameters and buffers in ``ignore`` of
    :func:`trigram.with_bagua` never change. Other buffers (integers, bools) become those of the first rank.

    It needs memory for a copy of what changes, and a few MiB more.

    Args:
        model: A model given to :func:`trigram.with_bagua`.
        timeout: Seconds to wait for the other ranks.

    Raises:
        TimeoutError: Some ranks did not call it in time; the message names them.
        MismatchError: A parameter or buffer has another shape or dtype on some ranks; the message names it.
    """
    wrapped = lookup(model, "consensus")
    hooks = wrapped.hooks
    if hooks is None:
        return Consensus(model, [], None)
    mean = _Mean(hooks)

    def average() -> None:
        _settle(hooks, timeout)
        _agree(hooks, model)
        named = [*model.named_parameters(), *model.named_buffers()]
        ignored = _ignored(wrapped)
        mean.take([t.detach() for _, t in named if t.numel() and t.data_ptr() not in ignored])

    _together(hooks, average, mean.undo)
    mean.put_back()
    if isinstance(hooks, WeightSync):
        hooks.moved_here()
    collect(model)
    return Consensus(model, mean.replicas, hooks)


@torch.no_grad()
def consensus_state_dict(
    model: nn.Module, device: torch.device | str | None = None, timeout: float | None = 300.0
) -> dict[str, Any]:
    """The ``state_dict`` of the average model, on all ranks, to evaluate or save while training continues.

    All ranks call it, between steps. Averaging steps under way are ended and applied first; apart from them
    the model does not change. The averages are those of :func:`trigram.consensus`. Only one rank need save
    the result.

    Args:
        model: A model given to :func:`trigram.with_bagua`.
        device: Where the copy is made, for example ``"cpu"``; None: on the devices of the model. The copy
            needs as much memory as the model, and a few MiB more.
        timeout: Seconds to wait for the other ranks.

    Returns:
        A copy of ``model.state_dict()``, which shares no memory with the model. Tensors that share memory in
        the model share it in the copy.

    Raises:
        TimeoutError: Some ranks did not call it in time; the message names them.
        MismatchError: A parameter or buffer has another shape or dtype on some ranks; the message names it.
    """
    wrapped = lookup(model, "consensus_state_dict")
    if (hooks := wrapped.hooks) is None:
        return _copied(model, set(), device)[0]
    found: list[dict[str, Any]] = []  # the last counts

    def average() -> None:
        _settle(hooks, timeout)
        _agree(hooks, model)
        state, tensors = _copied(model, _ignored(wrapped), device)
        mean_of(_to_average(tensors, hooks), hooks.groups)
        found[:] = [state]

    _together(hooks, average)
    return found[0] if found else _copied(model, set(), device)[0]


def _copied(
    model: nn.Module, ignored: set[int], device: torch.device | str | None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A copy of a model's state, and the tensors in it that have values, but for those at these addresses."""
    state = model.state_dict()
    copies: dict[Any, torch.Tensor] = {}
    left: set[Any] = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            state[name] = copy.deepcopy(value)
            continue
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if same not in copies:
            copies[same] = value.detach().to(device or value.device, copy=True)
            if value.data_ptr() in ignored:
                left.add(same)
        state[name] = copies[same]
    return state, [t for k, t in copies.items() if t.numel() and k not in left]


class _Mean:
    """The averages of a model's tensors, in their place.

    Attributes:
        replicas: Each tensor, and a copy of what this rank had in it.
    """

    def __init__(self, hooks: StepHooks) -> None:
        self._hooks = hooks
        self._taken = self._undone = False
        self.replicas: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Averages tensors; once more after :meth:`undo`."""
        self._taken = self._undone = False
        averaged = _to_average(tensors, self._hooks)
        self.replicas = [(t, t.clone()) for t in averaged]
        mean_of(averaged, self._hooks.groups)
        self._taken = True

    def undo(self) -> None:
        """A rank was lost: this one has its own values again. Averages that are complete are kept; another
        rank may know that all have them, and make them no more."""
        if self._taken:
            self._swap()
            self._undone = True
        elif self.replicas:
            coalesced.copy_all(*zip(*self.replicas, strict=True))
            self.replicas = []

    def put_back(self) -> None:
        """All have the averages."""
        if self._undone:
            self._swap()
            self._undone = False

    def _swap(self) -> None:
        for t, other in self.replicas:
            mine = t.clone()
            t.copy_(other)
            other.copy_(mine)


def _together(
    hooks: StepHooks, average: Callable[[], None], undo: Callable[[], object] | None = None
) -> None:
    """Calls ``average`` on all ranks; in an elastic job again if a rank is lost meanwhile, and not on a rank
    that makes this call of its script alone."""
    if not hooks.elastic.can_redo:
        average()
        return
    if is_alone():
        return
    calls, groups = job.here().part(Answers), hooks.groups

    def make() -> tuple[bytes, bool]:
        # Who has joined and has no state yet waits for it until all begin their next step.
        there = calls.group()
        apart = [r for r in groups.control.ranks if r not in there.ranks]
        if apart and there.ranks != [r for r in groups.control.ranks if r not in apart]:
            there = world.current().among(
                there, there.name, [r for r in groups.control.ranks if r not in apart]
            )
        with groups.among(there) if apart else contextlib.nullcontext():
            average()
        return b"", gather(b"", calls.group(), calls.tells)[1]

    repeated(make, undo)


def _averaging_steps(hooks: StepHooks | None) -> list[AveragingStep]:
    """The averaging steps that all ranks make in the same order."""
    if not isinstance(hooks, WeightSync) or not isinstance(hooks.schedule, EverySteps):
        return []
    return [step for steps in hooks.schedule.fragments for step in steps]


def _settle(hooks: StepHooks, timeout: float | None) -> None:
    """Waits for all ranks; ends the averaging steps under way and applies them."""
    if isinstance(hooks, WeightSync):
        if not hooks.settle(timeout):
            raise AbortedError(membership.why_aborted())  # which ends this try
    else:
        hooks.abort_failed(timeout)
        _await_all(hooks, timeout)


def _agree(hooks: StepHooks, model: nn.Module) -> None:
    """Raises on all ranks if a parameter or buffer has another shape on some."""
    agree_on_layouts(layouts(hooks.parameters.tensors(model)), hooks.groups.control)


def _to_average(tensors: list[torch.Tensor], hooks: StepHooks) -> list[torch.Tensor]:
    """The tensors that averages may change: all, or, if ranks hold the same weights, those that differ. The
    average of equal values may differ from them in the last bit."""
    return tensors if hooks.weights_differ else unequal(tensors, hooks.groups.control)


def _ignored(wrapped: WrappedModel) -> set[int]:
    """The addresses of the parameters and buffers that trigram leaves alone."""
    module, names = wrapped.model(), wrapped.extras.ignore
    assert module is not None
    found = [*module.named_parameters(), *module.named_buffers()]
    return {t.data_ptr() for name, t in found if name in names and t.numel()}


def _await_all(hooks: StepHooks, timeout: float | None) -> None:
    control = hooks.groups.control
    before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
    try:
        collectives.barrier(control)
    finally:
        control.timeout = before
