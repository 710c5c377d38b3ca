"""Horovod's synchronous collectives, through which gradients flow back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram.compat.horovod import calls
from trigram.compat.horovod.basics import ProcessSet, global_process_set, rank
from trigram.compat.horovod.calls import Average, Sum, synchronize
from trigram.compat.horovod.compression import Compression


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: int, pre: float, post: float, of: ProcessSet, *tensors: Any) -> Any:
        ctx.how = op, pre, post, of
        found = calls._reduce(
            tensors, [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors],
            name, op, pre, post, of,
        )  # fmt: skip
        return tuple(synchronize(found))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, pre, post, of = ctx.how
        return (None,) * 5 + tuple(_Allreduce.apply(None, op, pre, post, of, *grads))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces a tensor over all ranks of a set; ``tensor`` stays as it is."""
    how = calls.operator(op, average)
    small, ctx = compression.compress(tensor)
    (out,) = _Allreduce.apply(name, how, prescale_factor, postscale_factor, process_set, small)
    return compression.decompress(out, ctx)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces several tensors."""
    how = calls.operator(op, average)
    small, ctxs = zip(*(compression.compress(t) for t in tensors), strict=True)
    outs = _Allreduce.apply(name, how, prescale_factor, postscale_factor, process_set, *small)
    return [compression.decompress(out, ctx) for out, ctx in zip(outs, ctxs, strict=True)]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, of: ProcessSet, *tensors: Any) -> Any:
        ctx.of, ctx.rows = of, [t.shape[0] if t.dim() else 1 for t in tensors]
        return tuple(synchronize(calls.grouped_allgather_async(tensors, name, of)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of: ProcessSet = ctx.of
        means = _Allreduce.apply(None, Average, 1.0, 1.0, of, *grads)
        every = synchronize(calls.allgather_async(torch.tensor([ctx.rows], device="cpu"), None, of))
        mine = every[: of.rank()].sum(0).tolist()
        return (None, None, *(m.narrow(0, at, n) for m, at, n in zip(means, mine, ctx.rows, strict=True)))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates the tensors of all ranks of a set along the first dimension, which may differ."""
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The same for several tensors."""
    return list(_Allgather.apply(name, process_set, *tensors))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, root: int, of: ProcessSet, tensor: Any) -> Any:
        ctx.root, ctx.of = root, of
        return synchronize(calls.broadcast_async(tensor, root, name, of))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mean,) = _Allreduce.apply(None, Average, 1.0, 1.0, ctx.of, *grads)
        return None, None, None, mean if rank() == ctx.root else mean * 0


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A copy of rank ``root_rank``'s tensor, on all ranks of a set."""
    return _Broadcast.apply(name, root_rank, process_set, tensor)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, splits: Any, of: ProcessSet, tensor: Any) -> Any:
        out, ctx.received = synchronize(calls.alltoall_async(tensor, splits, name, of))
        ctx.of = of
        ctx.mark_non_differentiable(ctx.received)
        return out, ctx.received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back, _ = _Alltoall.apply(None, ctx.received, ctx.of, grads[0])
        return None, None, None, back


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank of a set its rows; see :func:`alltoall_async`.

    Returns:
        The rows received; with ``splits`` also how many from each rank.
    """
    out, received = _Alltoall.apply(name, splits, process_set, tensor)
    return out if splits is None else (out, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: int, pre: float, post: float, of: ProcessSet, *tensors: Any) -> Any:
        ctx.how = op, pre, post, of
        return tuple(synchronize(calls.grouped_reducescatter_async(tensors, name, op, of, pre, post)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, pre, post, of = ctx.how
        factor = pre * post * (of.size() if op == Sum else 1)
        return (None,) * 5 + tuple(_Allgather.apply(None, of, *(g * factor for g in grads)))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Averages or sums a tensor over all ranks of a set; each gets its rows of the result."""
    small, ctx = compression.compress(tensor)
    (out,) = _Reducescatter.apply(name, op, prescale_factor, postscale_factor, process_set, small)
    return compression.decompress(out, ctx)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """The same for several tensors."""
    small, ctxs = zip(*(compression.compress(t) for t in tensors), strict=True)
    outs = _Reducescatter.apply(name, op, prescale_factor, postscale_factor, process_set, *small)
    return [compression.decompress(out, ctx) for out, ctx in zip(outs, ctxs, strict=True)]
