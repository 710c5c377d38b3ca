"""Adam's second moment where every rank has its own optimizer, and weights are averaged.

With DDP, Adam divides by the root of the second moment of the *mean* gradient of n ranks. A rank that updates
its own weights knows only its own gradient, whose noise is larger: its second moment is up to n times as
large, its steps are up to sqrt(n) times as short, and the mean of the weights moves more slowly than DDP's
would. That costs most where gradients are mostly noise, and where few ranks have any, such as rows of an
embedding.

The second moment of the mean is E[g^2]/n + (1 - 1/n) E[g_i g_j], i and j two ranks. Gradients of two ranks
are of different batches, as are those of two steps of one rank, so their product is on average that of a
gradient and the one before; Adam's first moment before the step stands for that. So after each step of the
optimizer

    v <- v - (1 - beta2) (1 - 1/n) (g^2 - max(g m, 0)),   m the first moment before it, without its bias,

which makes v an average of g^2/n + (1 - 1/n) max(g m, 0) instead of g^2. As (1 - beta2) g^2 is a part of v,
v is at least a n-th of what Adam made it; where Adam has used another g than is there now (clipped copies, a
decay by weights that have moved since), that bound holds all the same. No state is added, and nothing is
sent. v means the same as with DDP, so a warm-up with full gradients, or a switch between algorithms, needs no
transition. See docs/adr/0028-second-moment-of-the-mean.md.

SparseAdam updates and decays only the rows in a gradient. A rare row is in the gradient of one rank of n, and
with DDP its moments would decay n times as often as this rank's do: most of the momentum of the last
gradients would not reach the weights. So the first moment of these rows decays as often as DDP's,

    m <- beta1^n m + (1 - beta1^n) g,

and v changes as above: of the second moments of n ranks each is a sum over a n-th of the gradients. The last
gradient is a large part of the moments of a rare row, so the step just made is made again with the new ones.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from trigram import _core
from trigram.collectives.coalesced import as_real
from trigram.runtime import logs

_FIRST = 10
"""In the first steps the first moment says too little about the gradients of other batches."""

_left: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of which a log line has said that they are left alone."""


def adapt(optimizer: Optimizer, mine: set[int], ranks: int) -> None:
    """Makes Adam's second moments those of the mean gradient; to be called after each step of the optimizer.

    Args:
        optimizer: Any optimizer. Only ``torch.optim.Adam``, ``AdamW`` and ``SparseAdam`` change, and
            subclasses which make torch's step: without ``amsgrad``, where moments are float32 or float64. Of
            a subclass with an update or moments of its own a log line says once that it is left alone.
        mine: ``id()`` of the parameters to adapt: those of which every rank has gradients of its own.
        ranks: How many ranks train the model.
    """
    kinds = torch.optim.Adam | torch.optim.AdamW | torch.optim.SparseAdam
    if ranks == 1 or not isinstance(optimizer, kinds):
        return
    if not _makes_torchs_step(optimizer) or not _has_adams_state(optimizer, mine):
        if optimizer not in _left:
            _left.add(optimizer)
            logs.warning(
                f"{type(optimizer).__name__} has an update or moments other than torch's Adam, so they stay "
                "those of this rank's gradients, which are noisier than their mean: with an algorithm that "
                "averages weights its steps are shorter than with DistributedDataParallel"
            )
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        for group in optimizer.param_groups:
            for param in group["params"]:
                state, gradient = optimizer.state.get(param), param.grad
                if id(param) in mine and state and gradient is not None and gradient.is_sparse:
                    _adapt_rows(param, gradient.coalesce(), state, group, ranks)
        return
    # By a GradScaler, if the optimizer unscales gradients itself.
    skipped = getattr(optimizer, "found_inf", None)
    if skipped is not None and bool(skipped):
        return
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        decay = 0.0 if decoupled else float(group["weight_decay"])
        for param in group["params"]:
            state = optimizer.state.get(param)
            if id(param) in mine and param.grad is not None and state and not group["amsgrad"]:
                if param.is_complex():  # Adam takes their pairs for real parameters
                    state = {k: as_real(v) if torch.is_tensor(v) else v for k, v in state.items()}
                _adapt_one(as_real(param), as_real(param.grad), state, group, decay, ranks)


def _makes_torchs_step(optimizer: Optimizer) -> bool:
    """Whether its ``step`` is torch's, or those of subclasses call that of the class above, as to clip
    gradients before it."""
    for kind in type(optimizer).__mro__:
        if "step" not in vars(kind):
            continue
        step = inspect.unwrap(vars(kind)["step"])  # torch wraps the ``step`` of each class in another
        if step.__module__.startswith("torch.optim."):
            return True
        code = getattr(step, "__code__", None)
        if code is None or "__class__" not in code.co_freevars or "step" not in code.co_names:  # no super()
            return False
    return False


def _has_adams_state(optimizer: Optimizer, mine: set[int]) -> bool:
    """Whether the states have moments of whole parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
    states = [(p, optimizer.state[p]) for p in params if optimizer.state.get(p)]
    return all(
        getattr(state.get(name), "shape", None) == p.shape
        for p, state in states
        for name in ("exp_avg", "exp_avg_sq")
    )


@torch.no_grad()
def _adapt_one(
    param: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    decay: float,
    ranks: int,
) -> None:
    second, first, step = state["exp_avg_sq"], state["exp_avg"], state["step"]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if second.dtype not in (torch.float32, torch.float64) or beta1 == 0:
        return
    gradient = gradient.to(second.dtype)
    if group["maximize"]:
        gradient = -gradient
    if decay:
        gradient = gradient.add(param, alpha=decay)
    part = (1 - beta2) * (1 - 1 / ranks)
    low = second / ranks if not _is_plain(second, first, gradient) else None
    known: Any
    if torch.is_tensor(step) and not step.is_cpu:
        known, part = (t.to(second.dtype) for t in _unread(step, beta1, part))  # type: ignore[assignment]
    elif (steps := float(step)) > _FIRST:
        known = beta1 * (1 - beta1 ** (steps - 1))
    else:
        return
    if low is None:
        addresses = (second.data_ptr(), first.data_ptr(), gradient.data_ptr())
        factors = (1 / known, -(1 - beta1) / known, part, 1 / ranks)
        _core.adapt_second_moment(*addresses, second.numel(), factors)
        return
    others = first.sub(gradient, alpha=1 - beta1).div_(known).mul_(gradient).clamp_(min=0)
    second.add_(others.addcmul_(gradient, gradient, value=-1).mul_(part))
    torch.maximum(second, low, out=second)


def _unread(step: torch.Tensor, beta1: float, part: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The divisor and the part from a counter on a GPU, which is not read: that would wait for the GPU. In
    the first steps the part is 0, and the divisor 1: it would be 0 in the first, and 0 times NaN is NaN."""
    late = (step > _FIRST).to(torch.float64)
    return late * beta1 * (1 - beta1 ** (step.double() - 1)) + (1 - late), late * part


@torch.no_grad()
def _adapt_rows(
    param: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], ranks: int
) -> None:
    """Adapts SparseAdam's moments of the rows in a gradient, and their weights."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if gradient.sparse_dim() != 1 or gradient._nnz() == 0 or beta1 == 0:
        return
    rows, values = gradient.indices()[0], gradient.values()
    if group.get("maximize"):
        values = -values
    first, second, step = state["exp_avg"][rows], state["exp_avg_sq"][rows], float(state["step"])
    before = first.sub(values, alpha=1 - beta1).div_(beta1)
    often = beta1**ranks
    moment = before * often + values * (1 - often)
    size = float(group["lr"]) * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    part = (1 - beta2) * (1 - 1 / ranks)
    others = before.mul_(values).clamp_(min=0).sub_(values.square())
    square = torch.maximum(second.add(others, alpha=part), second / ranks)
    made = first.div_(second.sqrt_().add_(group["eps"]))
    param[rows] += made.sub_(moment / square.sqrt().add_(group["eps"])).mul_(size)
    state["exp_avg"][rows] = moment
    state["exp_avg_sq"][rows] = square


def _is_plain(second: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether these have the same place for each value, without gaps, as float32 on the CPU."""
    dense = second.is_contiguous() or (
        second.dim() == 4 and second.is_contiguous(memory_format=torch.channels_last)
    )
    return (
        dense
        and second.is_cpu
        and second.dtype == torch.float32
        and all(t.is_cpu and t.stride() == second.stride() for t in others)
    )
