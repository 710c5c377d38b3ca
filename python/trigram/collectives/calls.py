"""Collectives on torch tensors.

Each takes ``group`` (a Trigram group, a torch ``ProcessGroup``, or None for the world) and ``async_op``. With
``async_op=True`` it returns a :class:`Work` at once, otherwise None when it has finished. ``src`` and ``dst``
are world ranks, as in ``torch.distributed``. Tensors must be contiguous, on the CPU or a GPU, of dtype
float32, float64, float16, bfloat16, int8, uint8, int32, int64 or bool. Sums of 16-bit floats accumulate in
float32.

On CPU tensors no collective returns before every rank has called it. If ranks make different calls, all of
them raise ``MismatchError``. On GPU tensors collectives run in the order of the current stream, as in torch:
see docs/gpu.md. All may raise ``MisuseError`` and ``UnsupportedError`` for arguments, ``PeerLostError`` if a
rank dies, and ``TimeoutError`` after the ``op_timeout`` of ``init``, 10 minutes by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram.collectives.work import Work
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.gpu import device, routes
from trigram.runtime import engine_codes, logs
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup, resolve

# Looking a name up in this module is faster than in another one, and small calls take two microseconds.
_DTYPES = engine_codes.DTYPES
_VIAS = engine_codes.VIAS
_OPS = engine_codes.OPS
_ALL_REDUCE = engine_codes.ALL_REDUCE
_STRIDED = torch.strided


def _check(t: torch.Tensor, what: str) -> int:
    """The engine's code of a tensor's dtype; raises if the engine does not support the tensor."""
    try:
        if t.is_cpu and t.layout is _STRIDED and t.is_contiguous():
            return _DTYPES[t.dtype]
    except (AttributeError, KeyError):
        pass
    return _refuse(t, what)


def _refuse(t: torch.Tensor, what: str) -> int:
    """Raises the reason why the engine does not support a tensor; returns the dtype's code for a GPU
    tensor."""
    if not isinstance(t, torch.Tensor):
        raise MisuseError(f"{what}: expected a tensor, got {type(t).__name__}")
    code = _DTYPES.get(t.dtype)
    if code is None:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UnsupportedError(f"{what}: dtype {t.dtype} is not supported; cast the tensor to one of {names}")
    if not t.is_cpu and t.device.type not in device.kinds:
        kinds = ", ".join(["cpu", *device.kinds])
        raise UnsupportedError(f"{what}: the tensor is on {t.device}; move it to one of {kinds}")
    if t.layout != torch.strided:
        raise UnsupportedError(f"{what}: the tensor has layout {t.layout}; pass t.to_dense()")
    if not t.is_contiguous():
        raise MisuseError(
            f"{what}: the tensor is not contiguous; pass t.contiguous(), and copy the result back"
        )
    return code


def _op(op: Any, what: str) -> int:
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        names = ", ".join(engine_codes.OP_NAMES)
        raise MisuseError(f"{what}: unknown op {op!r}; use one of {names}") from None


def _alike(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    if a.dtype != b.dtype:
        raise MisuseError(
            f"{what}: the tensors have different dtypes, {a.dtype} and {b.dtype}; cast one of them"
        )
    if a.device != b.device:
        raise MisuseError(
            f"{what}: the tensors are on different devices, {a.device} and {b.device}; move one of them"
        )


def _same(a: torch.Tensor, b: torch.Tensor, times: int, what: str) -> None:
    """Checks that ``a`` has ``times`` as many elements as ``b``, and the same dtype and device."""
    _alike(a, b, what)
    if a.numel() != times * b.numel():
        raise MisuseError(
            f"{what}: the larger tensor has {a.numel()} elements and the smaller {b.numel()}; "
            f"with {times} ranks it must have {times * b.numel()}"
        )


def _dispatch(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits = None,
) -> Work | None:
    if (tensor := source if source is not None else target) is not None and not tensor.is_cpu:
        return _on_device(group, asked, source, target, async_op, what, splits)
    if target is source and source is not None:  # most calls are in place, and short
        address, nbytes = source.data_ptr(), source.nbytes
        memory = (address, nbytes, address, nbytes)
    else:
        given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
        memory = given + ((0, 0) if target is None else (target.data_ptr(), target.nbytes))
    if target is not None and target.requires_grad:
        torch.autograd.graph.increment_version(target)
    core = group.core
    if async_op:
        return Work(core.start(asked, memory, group.timeout, splits), (source, target), what, group.describe)
    try:
        if group.describe is None:
            core.run(asked, memory, group.timeout, splits)
        else:
            with logs.waiting(what, group.describe):
                core.run(asked, memory, group.timeout, splits)
    except TrigramError as e:
        routes.abort(group, str(e))  # other ranks may have called it on GPU tensors, whose calls must end
        raise
    return None


def _on_device(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits,
) -> Work | None:
    """The same for GPU tensors, in the order of the current stream."""
    if asked[4]:
        raise UnsupportedError(
            f"{what}: via applies to CPU tensors only; for GPU tensors set TRIGRAM_GPU_TRANSPORT"
        )
    if target is not None and target.requires_grad:
        torch.autograd.graph.increment_version(target)
    call = routes.start(group, asked, source, target, splits)
    if async_op:
        return Work(call, (source, target), what, group.describe)
    call.order()
    return None


def all_reduce(
    t: torch.Tensor,
    op: Any = "sum",
    via: str | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces ``t`` over all ranks, in place; all ranks get the same bits.

    Args:
        t: Any shape; the same number of elements on all ranks.
        op: sum, avg, min, max, prod, band, bor, bxor, or a ``ReduceOp`` of torch. avg divides the sum by the
            number of ranks, and rounds once.
        via: The schedule: shared, ring, tree, recursive_doubling or scatter_gather. None: chosen by size and
            links.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
    """
    dtype = _check(t, "all_reduce")
    try:
        asked = (_ALL_REDUCE, dtype, t.numel(), _OPS[op], _VIAS[via], 0)
    except (KeyError, TypeError):
        _op(op, "all_reduce")  # raises if the operator is unknown
        names = ", ".join(v for v in _VIAS if v)
        raise UnsupportedError(f"all_reduce: unknown via {via!r}; use one of {names}") from None
    return _dispatch(resolve(group), asked, t, t, async_op, "all_reduce")


def reduce(
    t: torch.Tensor, dst: int, op: Any = "sum", group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Reduces ``t`` over all ranks into ``t`` of rank ``dst``; on the other ranks ``t`` stays unchanged."""
    g = resolve(group)
    root = g.group_rank(dst, "reduce")
    asked = (engine_codes.REDUCE, _check(t, "reduce"), t.numel(), _op(op, "reduce"), 0, root)
    return _dispatch(g, asked, t, t if g.rank == root else None, async_op, "reduce")


def broadcast(t: torch.Tensor, src: int, group: AnyGroup = None, async_op: bool = False) -> Work | None:
    """Copies ``t`` of rank ``src`` into ``t`` of all ranks."""
    g = resolve(group)
    asked = (engine_codes.BROADCAST, _check(t, "broadcast"), t.numel(), 0, 0, g.group_rank(src, "broadcast"))
    return _dispatch(g, asked, t, t, async_op, "broadcast")


def barrier(group: AnyGroup = None, async_op: bool = False) -> Work | None:
    """Waits until every rank has called it."""
    return _dispatch(resolve(group), (engine_codes.BARRIER, 5, 0, 0, 0, 0), None, None, async_op, "barrier")


def all_gather(
    out: torch.Tensor, t: torch.Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Collects ``t`` of all ranks, in rank order, in ``out`` of all ranks.

    Args:
        out: ``size * t.numel()`` elements of the same dtype, any shape.
        t: The same number of elements on all ranks.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
    """
    g = resolve(group)
    dtype = _check(t, "all_gather")
    _check(out, "all_gather")
    _same(out, t, g.size, "all_gather")
    return _dispatch(g, (engine_codes.ALL_GATHER, dtype, t.numel(), 0, 0, 0), t, out, async_op, "all_gather")


def reduce_scatter(
    out: torch.Tensor, t: torch.Tensor, op: Any = "sum", group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Reduces ``t`` over all ranks; rank i gets the i-th of ``size`` equal parts in ``out``.

    Args:
        out: One part.
        t: ``size * out.numel()`` elements of the same dtype.
        op: As for :func:`all_reduce`.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
    """
    g = resolve(group)
    dtype = _check(t, "reduce_scatter")
    _check(out, "reduce_scatter")
    _same(t, out, g.size, "reduce_scatter")
    asked = (engine_codes.REDUCE_SCATTER, dtype, out.numel(), _op(op, "reduce_scatter"), 0, 0)
    return _dispatch(g, asked, t, out, async_op, "reduce_scatter")


def gather(
    out: torch.Tensor | None,
    t: torch.Tensor,
    dst: int,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Collects ``t`` of all ranks, in rank order, in ``out`` of rank ``dst`` (None elsewhere)."""
    g = resolve(group)
    root = g.group_rank(dst, "gather")
    dtype = _check(t, "gather")
    if g.rank == root:
        if out is None:
            raise MisuseError(f"gather: out is None on rank {dst}, which is dst; pass a tensor there")
        _check(out, "gather")
        _same(out, t, g.size, "gather")
    asked = (engine_codes.GATHER, dtype, t.numel(), 0, 0, root)
    return _dispatch(g, asked, t, out if g.rank == root else None, async_op, "gather")


def scatter(
    t: torch.Tensor,
    inp: torch.Tensor | None,
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Copies the i-th of ``size`` equal parts of ``inp`` of rank ``src`` to ``t`` of rank i."""
    g = resolve(group)
    root = g.group_rank(src, "scatter")
    dtype = _check(t, "scatter")
    if g.rank == root:
        if inp is None:
            raise MisuseError(f"scatter: inp is None on rank {src}, which is src; pass a tensor there")
        _check(inp, "scatter")
        _same(inp, t, g.size, "scatter")
    asked = (engine_codes.SCATTER, dtype, t.numel(), 0, 0, root)
    return _dispatch(g, asked, inp if g.rank == root else None, t, async_op, "scatter")


def all_to_all(
    out: torch.Tensor,
    inp: torch.Tensor,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Sends part j of ``inp`` to rank j, and collects the parts meant for this rank in ``out``.

    Args:
        out: The parts received, in rank order.
        inp: The parts sent, in rank order.
        out_splits: Length of each part of ``out`` along the first dimension; None: equal.
        in_splits: The same of ``inp``. Either both are given, on all ranks, or neither.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
    """
    g = resolve(group)
    dtype = _check(inp, "all_to_all")
    _check(out, "all_to_all")
    _alike(inp, out, "all_to_all")
    if (out_splits is None) != (in_splits is None):
        raise MisuseError("all_to_all: only one of out_splits and in_splits is given; pass both or neither")
    if out_splits is None or in_splits is None:
        _same(out, inp, 1, "all_to_all")
        if inp.numel() % g.size:
            raise MisuseError(
                f"all_to_all: {inp.numel()} elements cannot be divided equally among {g.size} ranks; pass "
                "out_splits and in_splits"
            )
        asked = (engine_codes.ALL_TO_ALL, dtype, inp.numel() // g.size, 0, 0, 0)
        return _dispatch(g, asked, inp, out, async_op, "all_to_all")
    lengths = (
        _elements(inp, in_splits, g.size, "in_splits"),
        _elements(out, out_splits, g.size, "out_splits"),
    )
    if lengths[0][g.rank] != lengths[1][g.rank]:
        raise MisuseError(
            f"all_to_all: on rank {g.ranks[g.rank]} in_splits[{g.rank}] and out_splits[{g.rank}], the part "
            "that the rank sends to itself, differ; make them equal"
        )
    return _dispatch(
        g, (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0), inp, out, async_op, "all_to_all", lengths
    )


def _elements(t: torch.Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """Checks splits along the first dimension, and converts them to elements."""
    rows = t.shape[0] if t.dim() else 1
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise MisuseError(
            f"all_to_all: {what}={list(splits)} must be {size} lengths, one for each rank, that add up to "
            f"{rows}"
        )
    row = t.numel() // rows if rows else 0
    return [int(n) * row for n in splits]


def send(
    t: torch.Tensor, dst: int, tag: int = 0, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Sends ``t`` to rank ``dst``. Messages with the same tag arrive in order.

    A message of up to 1 MiB may return before it is received; a larger one returns when the receiver takes
    it.
    """
    return _message(True, t, dst, tag, group, async_op)


def recv(
    t: torch.Tensor, src: int, tag: int = 0, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Receives the next message of rank ``src`` with this tag into ``t``, of the same size and dtype."""
    return _message(False, t, src, tag, group, async_op)


def _message(
    sends: bool, t: torch.Tensor, peer: int, tag: int, group: AnyGroup, async_op: bool
) -> Work | None:
    what = "send" if sends else "recv"
    g = resolve(group)
    dtype = _check(t, what)
    if not 0 <= tag < 1 << 31:
        raise MisuseError(f"{what}: tag {tag} is invalid; it must be from 0 to 2**31 - 1")
    place = g.group_rank(peer, what)
    if not sends and t.requires_grad:
        torch.autograd.graph.increment_version(t)
    if not t.is_cpu:
        call = routes.message(g, sends, place, tag, t, dtype)
        if async_op:
            return Work(call, (t,), what)
        call.wait()
        return None
    core = g.core.message(sends, place, tag, dtype, t.numel(), t.data_ptr(), async_op, g.timeout)
    return None if core is None else Work(core, (t,), what, g.describe)


def batch_send_recv(messages: Sequence[tuple[bool, int, torch.Tensor]], group: Group) -> Work:
    """Sends and receives several messages at once, with tensors on one GPU. All ranks of the group call it.

    Args:
        messages: Whether this rank sends the message, the other's group rank, and the tensor.
        group: The ranks.
    """
    coded = [(sends, place, t, _check(t, "batch_send_recv")) for sends, place, t in messages]
    call = routes.batch_send_recv(group, coded)
    return Work(call, tuple(t for _, _, t in messages), "batch_send_recv")
