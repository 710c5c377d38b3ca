"""The arithmetic of torch's optimizers that the engine carries out, and whether it gives torch's bits.

torch has several kernels for an update, which differ in their rounding, and so do its builds for other
processors. So the engine's arithmetic is used only where it has given the same bits as the script's kind of
optimizer with random values, in this process and on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from trigram import _core
from trigram.collectives.updates import Rule
from trigram.optimizers import optimizer_hooks


@dataclass(frozen=True)
class Rounding:
    """How a kernel rounds.

    Attributes:
        fused: Whether products and sums are fused multiply-adds.
        lanes: Values that it computes at a time; of those of a parameter that are left over, it rounds
            another product. 1: there are none.
    """

    fused: bool
    lanes: int

    def flipped_from(self, count: int) -> int:
        """The first of a parameter's values that are left over, or a number above all."""
        return count - count % self.lanes if count % self.lanes else sys.maxsize


ROUNDINGS = Rounding(True, 1), Rounding(True, 8), Rounding(False, 1), Rounding(True, 16), Rounding(True, 4)
"""The roundings that are tried: torch's own loops, its fused kernels, both without such instructions."""

_LENGTHS = (1 << 16) + 15, 5
_STEPS = 3


def has_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the engine knows the arithmetic of a group; options may change from step to step."""
    if type(optimizer) is SGD:
        numbers = [group[k] for k in ("lr", "momentum", "dampening", "weight_decay")]
    elif type(optimizer) in (Adam, AdamW):
        numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        if group["amsgrad"] or group["capturable"]:
            return False
        if not 1 - group["betas"][0] < 0.5:  # torch then computes the mean from its other end
            return False
    else:
        return False
    return not group["differentiable"] and all(type(n) in (int, float) for n in numbers)


def rule(optimizer: Optimizer, group: Mapping[str, Any], step: float, first: bool) -> Rule:
    """The numbers of one step.

    Args:
        optimizer: The optimizer.
        group: The options.
        step: The number of the step, from 1.
        first: Whether the values have no momentum yet.
    """
    sign, lr, decay = -1.0 if group["maximize"] else 1.0, group["lr"], group["weight_decay"]
    if type(optimizer) is SGD:
        kept = 1 - group["dampening"]
        return "sgd", [sign, decay, group["momentum"], kept, float(group["nesterov"]), float(first), -lr]
    beta1, beta2 = group["betas"]
    size = lr / (1 - beta1**step)
    correction = (1 - beta2**step) ** 0.5
    decoupled = group.get("decoupled_weight_decay", type(optimizer) is AdamW)
    shrink = 1 - lr * decay if decoupled else 1.0
    added = 0.0 if decoupled else decay
    return "adam", [sign, added, shrink, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], -size]


def kind(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides which kernel of torch updates a group, and how it computes."""
    names = "weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach", "fused"
    options = tuple(bool(group.get(n)) for n in names)
    return type(optimizer).__name__, group.get("decoupled_weight_decay"), *options


def states(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the state that values have, one for each value."""
    if type(optimizer) is SGD:
        return ("momentum_buffer",) if group["momentum"] else ()
    return "exp_avg", "exp_avg_sq"


def begin(optimizer: Optimizer, group: Mapping[str, Any], value: torch.Tensor, state: dict[str, Any]) -> bool:
    """Counts a step in the state of some values, which gets what it lacks, as torch's optimizers do.

    Returns:
        Whether the values had no momentum.
    """
    if type(optimizer) is SGD:
        if not group["momentum"] or state.get("momentum_buffer") is not None:
            return False
        state["momentum_buffer"] = torch.empty_like(value, requires_grad=False)
        return True
    if not state:
        dtype = torch.float32
        if not group["fused"] and torch.get_default_dtype() == torch.float64:
            dtype = torch.float64
        state["step"] = torch.zeros((), dtype=dtype, device=value.device)
        state["exp_avg"] = torch.zeros_like(value, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
    state["step"] += 1
    return False


_tried: dict[tuple[Any, ...], Rounding | None] = {}


def rounding(optimizer: Optimizer, group: Mapping[str, Any]) -> Rounding | None:
    """The rounding with which the engine gives the bits of torch; None: it does not. Takes some milliseconds
    when it is asked first."""
    if not has_rule(optimizer, group):
        return None
    key = kind(optimizer, group)
    if key not in _tried:
        _tried[key] = next((r for r in ROUNDINGS if _same_bits(optimizer, group, r)), None)
    return _tried[key]


@torch.no_grad()
def _same_bits(optimizer: Optimizer, options: Mapping[str, Any], how: Rounding) -> bool:
    """Whether steps with random values have the bits of torch's."""
    random = torch.Generator("cpu").manual_seed(1)
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the script's defaults are
    accepted = {
        k: v
        for k, v in options.items()
        if k in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused")
        or k in ("betas", "eps", "decoupled_weight_decay")
    }
    if type(optimizer) is AdamW:
        accepted.pop("decoupled_weight_decay", None)
    accepted["lr"] = accepted["lr"] or 0.01  # a warm-up begins with 0
    for count in _LENGTHS:
        theirs = nn.Parameter(torch.randn(count, generator=random, **plain))
        ours = theirs.detach().clone()
        made = type(optimizer)([theirs], **accepted)
        group = made.param_groups[0]
        state: dict[str, Any] = {}
        for _ in range(_STEPS):
            scales = 10 ** (4 * torch.rand(count, generator=random, **plain) - 3)
            gradient = torch.randn(count, generator=random, **plain) * scales
            theirs.grad = gradient.clone()
            optimizer_hooks.step_unheard(made)
            first = begin(made, group, ours, state)
            step = float(state["step"]) if "step" in state else 1.0
            held = [state[name] for name in states(made, group)]
            if any(t.dtype != torch.float32 or not t.is_cpu for t in (gradient, ours, *held)):
                return False
            at = [t.data_ptr() for t in held] + [0, 0]
            memory = gradient.data_ptr(), ours.data_ptr(), at[0], at[1]
            numbers = rule(made, group, step, first)
            _core.update_alone(numbers, how.fused, how.flipped_from(count), memory, count)
            pairs = [(theirs.detach(), ours)]
            pairs += [(made.state[theirs][n], t) for n, t in zip(states(made, group), held, strict=True)]
            if not all(torch.equal(a, b) for a, b in pairs):
                return False
    return True
