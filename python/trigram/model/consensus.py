"""``consensus`` and ``consensus_state_dict``: the weights averaged over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.collectives.consistency import unequal
from trigram.mixing.step import AveragingStep
from trigram.model.shards import collect
from trigram.model.wrapped import WrappedModel, lookup
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
    _settle(hooks, timeout)
    _agree(hooks, model)
    named = [*model.named_parameters(), *model.named_buffers()]
    ignored = _ignored(wrapped)
    tensors = _to_average([t.detach() for _, t in named if t.numel() and t.data_ptr() not in ignored], hooks)
    replicas = [(t, t.clone()) for t in tensors]
    mean_of(tensors, hooks.groups)
    if isinstance(hooks, WeightSync):
        hooks.moved_here()
    collect(model)
    return Consensus(model, replicas, hooks)


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
    hooks = wrapped.hooks
    if hooks is not None:
        _settle(hooks, timeout)
        _agree(hooks, model)
    state = model.state_dict()
    ignored = _ignored(wrapped)
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
    if hooks is not None:
        mean_of(
            _to_average([t for k, t in copies.items() if t.numel() and k not in left], hooks), hooks.groups
        )
    return state


def _averaging_steps(hooks: StepHooks | None) -> list[AveragingStep]:
    """The averaging steps that all ranks make in the same order."""
    if not isinstance(hooks, WeightSync) or not isinstance(hooks.schedule, EverySteps):
        return []
    return [step for steps in hooks.schedule.fragments for step in steps]


def _settle(hooks: StepHooks, timeout: float | None) -> None:
    """Waits for all ranks; ends the averaging steps under way and applies them."""
    if isinstance(hooks, WeightSync):
        hooks.drain(timeout, between_steps=True)
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
