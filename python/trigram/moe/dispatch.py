"""``dispatch`` and ``combine``: tokens go to the ranks that have their experts, and results come back.

The rows of a rank are sorted by expert, so those for one rank lie together; a small all-to-all says how many
come, a second one moves them, and the receiver sorts what came by expert. No token is dropped. ``combine``
goes the same way back.

Gradients of experts: each rank's loss is a mean over its own tokens, and data-parallel training averages
losses over ranks. A token's path through an expert therefore scales the gradient by ``1 / size`` where it
enters the expert's output, and by ``size`` where it leaves the expert's input. So an expert's parameters get
the gradient of the mean of the group's losses, and all else gets that of its own rank's loss.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from trigram.codecs import Codec
from trigram.codecs import find as find_codec
from trigram.collectives import all_to_all
from trigram.errors import MismatchError, MisuseError
from trigram.moe.rows import Route, travel
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup, current, resolve

_KEY = 1 << 41
"""Identifies our group among those beside the same ranks."""
_beside: weakref.WeakKeyDictionary[Group, tuple[object, Group]] = weakref.WeakKeyDictionary()
_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Handle:
    """What :func:`combine` needs of a :func:`dispatch`.

    Attributes:
        route: The way of the rows.
        order: For each row that was sent, which row of ``x`` (times k) it was.
        arrival: For each row of ``tokens``, which of those that came it is.
        shape: The shape of ``expert_index``, with k.
        tokens: What dispatch has returned.
    """

    route: Route
    order: torch.Tensor
    arrival: torch.Tensor
    shape: tuple[int, int]
    tokens: torch.Tensor


def dispatch(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    num_experts: int,
    group: AnyGroup = None,
    codec: str | Codec | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Handle]:
    """Sends each token to the ranks that have its experts. All ranks of the group call it.

    Of n ranks, group rank r has the experts from ``r * num_experts / n`` on, ``num_experts / n`` of them.

    Args:
        x: ``(tokens, width)``, a float dtype; the number of tokens may differ between ranks, and be 0.
        expert_index: ``(tokens,)`` or ``(tokens, k)``, int64: the experts of each token, from 0.
        num_experts: Of all ranks; a multiple of their number.
        group: The ranks that share out the experts; None: all. See :func:`trigram.moe.groups`.
        codec: A codec of :func:`trigram.codecs.find`, such as ``bf16`` or ``int8``, for the rows on their way
            and for their gradients on the way back; None: they travel as they are.

    Returns:
        The tokens that came for this rank's experts, ``(rows, width)``, sorted by expert; how many each of
        this rank's experts has, ``(num_experts / n,)``, int64, on the device of ``x``; and what
        :func:`combine` needs. Gradients of the tokens flow back to ``x``.

    Raises:
        MisuseError: An argument is wrong, on any rank; all ranks raise it.
        MismatchError: The ranks differ in width, dtype, ``num_experts``, k or codec; all ranks raise it.
    """
    g = resolve(group)
    n = g.size
    if num_experts < 1 or num_experts % n:
        raise MisuseError(
            f"moe.dispatch: num_experts={num_experts} is not a multiple of the {n} ranks of the group; add "
            "experts, or pass a smaller group"
        )
    local = num_experts // n
    coding = find_codec(codec) if isinstance(codec, str) else codec
    wrong = _wrong(x, expert_index, num_experts, coding)
    kept = expert_index.new_zeros((0, 1)) if wrong else expert_index
    kept = kept[:, None] if kept.dim() == 1 else kept
    chosen = kept.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts)
    facts = [0 if wrong else 1, x.shape[-1] if x.dim() else 0, kept.shape[1], num_experts, _code(x, coding)]
    heard = _exchange_counts(g, counts.cpu(), facts)
    _check_agreed(g, heard[:, local:].tolist(), wrong)
    arriving = heard[:, :local]
    route = Route(_own_group(g), counts.view(n, local).sum(1).tolist(), arriving.sum(1).tolist(), coding)
    rows = travel(x.index_select(0, order // kept.shape[1]), route)
    # What came is sorted by rank, then by expert.
    experts = torch.arange(local, device="cpu").repeat(n).repeat_interleave(arriving.reshape(-1))
    arrival = experts.argsort(stable=True).to(x.device)
    tokens = _Scaled.apply(rows.index_select(0, arrival), float(n))  # type: ignore[no-untyped-call]
    shape = (kept.shape[0], kept.shape[1])
    return tokens, arriving.sum(0).to(x.device), Handle(route, order, arrival, shape, tokens)


def combine(handle: Handle, expert_output: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    """Sends what the experts have made of their tokens back. All ranks of the group call it.

    Args:
        handle: From :func:`dispatch`.
        expert_output: ``(rows, any width)``, a row for each of the tokens that dispatch has returned.
        scores: ``(tokens, k)``, or ``(tokens,)`` if k is 1: the weight of each expert's output. None: 1.

    Returns:
        ``(tokens, width)``: for each token the sum of its experts' outputs times their scores. Gradients flow
        to ``expert_output`` and ``scores``.

    Raises:
        MisuseError: The shapes do not fit the dispatch.
    """
    count, k = handle.shape
    if expert_output.dim() != 2 or len(expert_output) != len(handle.arrival):
        raise MisuseError(
            f"moe.combine: expert_output has shape {tuple(expert_output.shape)}; pass a row for each of the "
            f"{len(handle.arrival)} tokens that dispatch returned on rank {_me(handle.route.group)}"
        )
    if scores is not None and tuple(scores.shape) not in {(count, k), (count,) if k == 1 else (count, k)}:
        raise MisuseError(
            f"moe.combine: scores has shape {tuple(scores.shape)}; the expert_index of this dispatch on rank "
            f"{_me(handle.route.group)} has {(count, k)}"
        )
    # Backward needs all ranks, also those whose layer had no token and returned what depends on nothing.
    if torch.is_grad_enabled() and not expert_output.requires_grad:
        expert_output = expert_output.detach().requires_grad_()
    if handle.tokens.requires_grad and not len(handle.tokens):
        expert_output = expert_output + handle.tokens.sum().to(expert_output.dtype)
    scaled = _Scaled.apply(expert_output, 1 / handle.route.group.size)  # type: ignore[no-untyped-call]
    sent = torch.zeros_like(scaled).index_copy(0, handle.arrival, scaled)
    came = travel(sent, handle.route.back())
    by_token = torch.zeros_like(came).index_copy(0, handle.order, came).view(count, k, came.shape[1])
    return by_token.sum(1) if scores is None else (by_token * scores.reshape(count, k, 1)).sum(1)


class _Scaled(torch.autograd.Function):
    """The tensor as it is, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        """Returns the values."""
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Scales the gradient."""
        return gradient * ctx.factor, None


def _own_group(group: Group) -> Group:
    """A group of the same ranks for our calls alone: backward makes them between other calls."""
    made_for, own = _beside.get(group, (None, group))
    if made_for is not group.core:  # a new group, or an elastic job that has changed
        own = current().beside(group, "mixture of experts", _KEY)
        _beside[group] = group.core, own
    return own


def _me(group: Group) -> int:
    return group.ranks[group.rank]


def _code(x: torch.Tensor, codec: Codec | None) -> int:
    """A number for the dtype and the codec, to compare between ranks."""
    text = f"{x.dtype} {codec}"
    return int.from_bytes(text.encode()[-32:].rjust(32), "little") % ((1 << 61) - 1)


def _wrong(x: torch.Tensor, expert_index: torch.Tensor, num_experts: int, codec: Codec | None) -> str:
    """What is wrong with the arguments; nothing: "". The other ranks hear of it, and raise too."""
    if x.dim() != 2 or x.dtype not in _DTYPES:
        return f"x has shape {tuple(x.shape)} and dtype {x.dtype}; pass floats of shape (tokens, width)"
    if codec is not None and x.dtype == torch.float64:
        return f"x has dtype {x.dtype}, which no codec encodes; pass codec=None, or other floats"
    if expert_index.dtype != torch.int64 or expert_index.dim() not in (1, 2) or len(expert_index) != len(x):
        return (
            f"expert_index has shape {tuple(expert_index.shape)} and dtype {expert_index.dtype}; pass int64 "
            f"of shape ({len(x)},) or ({len(x)}, k)"
        )
    if expert_index.dim() == 2 and expert_index.shape[1] == 0:
        return "expert_index has no expert for a token; pass at least one"
    if expert_index.numel() and not 0 <= int(expert_index.min()) <= int(expert_index.max()) < num_experts:
        return (
            f"expert_index has values from {int(expert_index.min())} to {int(expert_index.max())}; pass "
            f"experts from 0 to {num_experts - 1}"
        )
    return ""


def _exchange_counts(group: Group, counts: torch.Tensor, facts: list[int]) -> torch.Tensor:
    """By group rank: how many tokens it has for each of this rank's experts, then the facts that it gives."""
    n = group.size
    given = torch.cat([counts.view(n, -1), torch.tensor([facts], device="cpu").expand(n, -1)], 1).contiguous()
    heard = torch.empty_like(given)
    all_to_all(heard, given, group=_own_group(group))
    return heard


def _check_agreed(group: Group, facts: list[list[int]], wrong: str) -> None:
    """Raises on all ranks if one has given invalid arguments, or others than the first."""
    names = [f"rank {rank}" for rank in group.ranks]
    if wrong:
        raise MisuseError(f"moe.dispatch: on rank {_me(group)} {wrong}")
    invalid = [name for name, fact in zip(names, facts, strict=True) if not fact[0]]
    if invalid:
        raise MisuseError(f"moe.dispatch: the arguments on {', '.join(invalid)} are invalid; see its error")
    for name, fact in zip(names, facts, strict=True):
        for what, theirs, first in zip(
            ("", "the width of x", "k", "num_experts", "the dtype of x or the codec"),
            fact,
            facts[0],
            strict=True,
        ):
            if theirs != first:
                raise MismatchError(
                    f"moe.dispatch: {what} on {name} differs from that on {names[0]}; pass the same on all "
                    "ranks of the group"
                )
