"""``consensus``: the weights averaged over all ranks."""

from __future__ import annotations

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.mean import mean_of
from trigram.collectives.consistency import same_everywhere
from trigram.model.wrapped import lookup
from trigram.training.step_hooks import StepHooks
from trigram.training.weight_sync import WeightSync


class Consensus:
    """The averaged weights: inside a ``with`` block, or permanently without one."""

    def __init__(self, model: nn.Module, replicas: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._model = model
        self._replicas = replicas

    def __enter__(self) -> nn.Module:
        return self._model

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for t, was in self._replicas:
            t.copy_(was)


@torch.no_grad()
def consensus(model: nn.Module, timeout: float | None = 300.0) -> Consensus:
    """Gives all ranks the average weights and the average of floating-point buffers.

    All ranks call it. With ``with trigram.consensus(model):``, the weights and buffers of each rank are
    restored at the end of the block; without ``with``, the averages stay. If the weights are the same on all
    ranks, only buffers change.

    Args:
        model: A model given to :func:`with_bagua`.
        timeout: Seconds to wait for the other ranks.

    Raises:
        TimeoutError: Some ranks did not call it in time; the message names them.
    """
    wrapped = lookup(model, "consensus")
    hooks = wrapped.hooks
    if hooks is None:
        return Consensus(model, [])
    if isinstance(hooks, WeightSync):
        hooks.drain(timeout)
        counters = [p.detach() for p in model.parameters()]
    else:
        hooks.abort_pass()
        _await_all(hooks, timeout)
        weights = [p.detach() for p in model.parameters()]
        # The average of equal values may differ from them in the last bit.
        counters = [] if same_everywhere(weights, hooks.groups.control) else weights
    tensors = [*counters, *(b for b in model.buffers() if b.numel())]
    replicas = [(t, t.clone()) for t in tensors]
    mean_of(tensors, hooks.groups)
    return Consensus(model, replicas)


def _await_all(hooks: StepHooks, timeout: float | None) -> None:
    control = hooks.groups.control
    before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
    try:
        collectives.barrier(control)
    finally:
        control.timeout = before
