"""Collectives on torch tensors.

Each takes ``group`` (a Trigram group, a torch ``ProcessGroup``, or None for the world) and ``async_op``. With
``async_op=True`` it returns a :class:`Work` at once, otherwise None when it has finished. ``timeout`` is the
number of seconds that the call may take, counted from here; None: that of the group; ``math.inf``: no limit.
When it has passed, the call fails on all ranks, with a ``TimeoutError`` that names the ranks that were waited
for. ``src`` and ``dst`` are world ranks, as in ``torch.distributed``. Tensors must be contiguous, on the CPU
or a GPU, of dtype float32, float64, float16, bfloat16, int8, uint8, int16, int32, int64, bool, complex64,
complex128 or a float8. Sums of 16-bit floats accumulate in float32.

On CPU tensors no collective returns before every rank has called it. If ranks make different calls, all of
them raise ``MismatchError``. On GPU tensors collectives run in the order of the current stream, as in torch:
see docs/gpu.md. All may raise ``MisuseError`` and ``UnsupportedError`` for arguments, ``PeerLostError`` if a
rank dies, and ``TimeoutError`` after the ``op_timeout`` of ``init``, 10 minutes by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

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
        if _factor(op) is not None:
            return engine_codes.OPS["sum"]
        names = ", ".join(engine_codes.OP_NAMES)
        raise MisuseError(f"{what}: unknown op {op!r}; use one of {names}") from None


_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM


def _factor(op: Any) -> Any:
    """What ``op`` multiplies each rank's numbers with before they are summed; None: nothing."""
    if isinstance(op, tuple) and len(op) == 2 and op[0] == "premul_sum":
        return op[1]
    if type(op) is dist.ReduceOp and op == _PREMUL_SUM:
        state: Any = op.__getstate__()
        return state[1]
    return None


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


def _seconds(timeout: float, what: str) -> float | None:
    """A timeout as the engine takes it; None: no limit."""
    if not timeout > 0:
        raise MisuseError(f"{what}: timeout={timeout!r} is invalid; pass a positive number of seconds")
    return None if timeout == math.inf else float(timeout)


def _dispatch(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits = None,
    timeout: float | None = None,
) -> Work | None:
    limit = group.timeout if timeout is None else _seconds(timeout, what)
    if (tensor := source if source is not None else target) is not None and not tensor.is_cpu:
        return _on_device(group, asked, source, target, async_op, what, splits, limit)
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
        return Work(core.start(asked, memory, limit, splits), (source, target), what, group.describe)
    try:
        if group.describe is None:
            core.run(asked, memory, limit, splits)
        else:
            with logs.waiting(what, group.describe):
                core.run(asked, memory, limit, splits)
    except TrigramError as e:
        routes.abort(group, str(e))  # other ranks may have called it on GPU tensors, whose calls must end
        raise
    return None


Tensors = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]
"""One tensor, or several that a call sees one after another, as one."""
_NO_MEMORY = (0, 0, 0, 0)


def _check_all(tensors: Sequence[torch.Tensor], what: str) -> int:
    """As :func:`_check`, of a list of CPU tensors of one dtype."""
    if not tensors:
        raise MisuseError(f"{what}: the list of tensors is empty; pass at least one")
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise MisuseError(f"{what}: the list has a {type(t).__name__}; pass a list of tensors")
    dtype = _check(tensors[0], what)
    for t in tensors:
        _check(t, what)
        _alike(tensors[0], t, what)
        if not t.is_cpu:
            raise UnsupportedError(
                f"{what}: lists work on CPU tensors only; make a call for each tensor on {t.device}"
            )
    return dtype


def _by_rank(whole: Tensors, size: int, what: str) -> list[torch.Tensor]:
    """The parts of a tensor, or the tensors of a list, one for each rank."""
    if isinstance(whole, torch.Tensor):
        _check(whole, what)
        if whole.numel() % size:
            raise MisuseError(
                f"{what}: {whole.numel()} elements cannot be divided equally among {size} ranks; pass a list"
            )
        flat = whole.detach().view(-1)
        return list(flat.split(max(flat.numel() // size, 1))) if flat.numel() else [flat] * size
    if len(whole) != size:
        raise MisuseError(f"{what}: {len(whole)} tensors in a list for {size} ranks; pass one for each rank")
    return list(whole)


def _blocks(
    group: Group, whole: Any, own: Any, what: str
) -> tuple[int, list[torch.Tensor], list[torch.Tensor], list[int]]:
    """What an all_gather or reduce_scatter takes, given in lists.

    Args:
        group: The ranks.
        whole: If ``own`` is a tensor, the tensors of all ranks; otherwise for each of ``own`` these, in a
            list or in one tensor.
        own: This rank's part or parts.
        what: The call.

    Returns:
        The code of the dtype, the tensors that make up the whole and those that make up the own part, in the
        order in which the engine takes them, and the length of each rank's part.
    """
    for given in (whole, own):
        if not isinstance(given, (torch.Tensor, list, tuple)):
            _refuse(given, what)
    if isinstance(whole, torch.Tensor):
        raise MisuseError(
            f"{what}: one of out and t is a list of tensors; then both are, or the larger one is"
        )
    parts = [own] if isinstance(own, torch.Tensor) else list(own)
    wholes = [whole] if isinstance(own, torch.Tensor) else list(whole)
    if len(parts) != len(wholes):
        raise MisuseError(f"{what}: lists of {len(wholes)} and {len(parts)} tensors; pass as many of both")
    divided = [_by_rank(w, group.size, what) for w in wholes]
    dtype = _check_all([*parts, *(t for ts in divided for t in ts)], what)
    lengths = [sum(ts[rank].numel() for ts in divided) for rank in range(group.size)]
    for part, ts in zip(parts, divided, strict=True):
        if part.numel() != ts[group.rank].numel():
            raise MisuseError(
                f"{what}: rank {group.ranks[group.rank]} has a part of {part.numel()} elements, and room for "
                f"{ts[group.rank].numel()}; they must be the same"
            )
    return dtype, [ts[rank] for rank in range(group.size) for ts in divided], parts, lengths


def _dispatch_lists(
    group: Group,
    asked: engine_codes.Asked,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    async_op: bool,
    what: str,
    splits: engine_codes.Splits,
    timeout: float | None,
) -> Work | None:
    """As :func:`_dispatch`, where the engine takes each list of CPU tensors for one tensor."""
    limit = group.timeout if timeout is None else _seconds(timeout, what)
    lists = (
        [(t.data_ptr(), t.nbytes) for t in sources],
        [(t.data_ptr(), t.nbytes) for t in targets],
    )
    for t in targets:
        if t.requires_grad:
            torch.autograd.graph.increment_version(t)
    if async_op:
        core = group.core.start(asked, _NO_MEMORY, limit, splits, lists)
        return Work(core, (*sources, *targets), what, group.describe, len(targets))
    try:
        if group.describe is None:
            group.core.run(asked, _NO_MEMORY, limit, splits, lists)
        else:
            with logs.waiting(what, group.describe):
                group.core.run(asked, _NO_MEMORY, limit, splits, lists)
    except TrigramError as e:
        routes.abort(group, str(e))
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
    limit: float | None,
) -> Work | None:
    """The same for GPU tensors, in the order of the current stream."""
    if asked[4]:
        raise UnsupportedError(
            f"{what}: via applies to CPU tensors only; for GPU tensors set TRIGRAM_GPU_TRANSPORT"
        )
    if target is not None and target.requires_grad:
        torch.autograd.graph.increment_version(target)
    call = routes.start(group, asked, source, target, splits, limit)
    if async_op:
        return Work(call, (source, target), what, group.describe)
    call.order()
    return None


def all_reduce(
    t: Tensors,
    op: Any = "sum",
    via: str | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Reduces ``t`` over all ranks, in place; all ranks get the same bits.

    Args:
        t: Any shape; the same number of elements on all ranks. A list of tensors of one dtype is reduced in
            one call, each tensor where it is.
        op: sum, avg, min, max, prod, band, bor, bxor, or a ``ReduceOp`` of torch. avg divides the sum by the
            number of ranks, and rounds once. ``("premul_sum", factor)`` multiplies ``t`` with this rank's
            factor, a number or a tensor, before the sum. Complex numbers can be summed and averaged; sum and
            prod of bools are whether any or all are true; floats of 8 bits can only be moved.
        via: The schedule: shared, ring, tree, recursive_doubling or scatter_gather. None: chosen by size and
            links.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
        timeout: Seconds; None: the group's.
    """
    if isinstance(t, (list, tuple)):
        dtype = _check_all(t, "all_reduce")
        code, how = _op(op, "all_reduce"), _via(via)
        if type(op) is not str and (factor := _factor(op)) is not None:
            for x in t:
                x.detach().mul_(factor)
        asked = (_ALL_REDUCE, dtype, sum(x.numel() for x in t), code, how, 0)
        return _dispatch_lists(resolve(group), asked, t, t, async_op, "all_reduce", None, timeout)
    dtype = _check(t, "all_reduce")
    try:
        asked = (_ALL_REDUCE, dtype, t.numel(), _OPS[op], _VIAS[via], 0)
    except (KeyError, TypeError):
        asked = (_ALL_REDUCE, dtype, t.numel(), _op(op, "all_reduce"), _via(via), 0)
        if (factor := _factor(op)) is not None:
            t.detach().mul_(factor)
    return _dispatch(resolve(group), asked, t, t, async_op, "all_reduce", None, timeout)


def _via(via: str | None) -> int:
    try:
        return _VIAS[via]
    except (KeyError, TypeError):
        names = ", ".join(v for v in _VIAS if v)
        raise UnsupportedError(f"all_reduce: unknown via {via!r}; use one of {names}") from None


def reduce(
    t: torch.Tensor,
    dst: int,
    op: Any = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Reduces ``t`` over all ranks into ``t`` of rank ``dst``; on the other ranks ``t`` stays unchanged."""
    g = resolve(group)
    root = g.group_rank(dst, "reduce")
    asked = (engine_codes.REDUCE, _check(t, "reduce"), t.numel(), _op(op, "reduce"), 0, root)
    if type(op) is not str and (factor := _factor(op)) is not None:
        return _dispatch(
            g,
            asked,
            (t.detach() * factor).to(t.dtype),
            t if g.rank == root else None,
            async_op,
            "reduce",
            None,
            timeout,
        )
    return _dispatch(g, asked, t, t if g.rank == root else None, async_op, "reduce", None, timeout)


def broadcast(
    t: torch.Tensor,
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Copies ``t`` of rank ``src`` into ``t`` of all ranks."""
    g = resolve(group)
    asked = (engine_codes.BROADCAST, _check(t, "broadcast"), t.numel(), 0, 0, g.group_rank(src, "broadcast"))
    return _dispatch(g, asked, t, t, async_op, "broadcast", None, timeout)


def barrier(group: AnyGroup = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Waits until every rank has called it."""
    asked = (engine_codes.BARRIER, 5, 0, 0, 0, 0)
    return _dispatch(resolve(group), asked, None, None, async_op, "barrier", None, timeout)


def all_gather(
    out: Tensors | list[Tensors] | tuple[Tensors, ...],
    t: Tensors,
    group: AnyGroup = None,
    async_op: bool = False,
    splits: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Work | None:
    """Collects ``t`` of all ranks, in rank order, in ``out`` of all ranks.

    Args:
        out: ``size * t.numel()`` elements of the same dtype, any shape. ``t`` may be this rank's part of it.
            Or a list with a tensor for each rank, which may differ in length.
        t: The same number of elements on all ranks, unless ``splits`` or the lengths of a list say otherwise.
            If it is a list, ``out`` is a list of as many outputs, and all are gathered in one call.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
        splits: The length of each rank's part along the first dimension of ``out``, the same on all ranks;
            some may be 0. None: equal.
        timeout: Seconds; None: the group's.
    """
    g = resolve(group)
    if not (isinstance(out, torch.Tensor) and isinstance(t, torch.Tensor)):
        dtype, whole, own, lengths = _blocks(g, out, t, "all_gather")
        asked = (engine_codes.ALL_GATHER, dtype, 0, 0, 0, 0)
        return _dispatch_lists(g, asked, own, whole, async_op, "all_gather", (lengths, lengths), timeout)
    dtype = _check(t, "all_gather")
    _check(out, "all_gather")
    if splits is not None:
        lengths = _parts(g, out, t, splits, "all_gather")
        asked = (engine_codes.ALL_GATHER, dtype, 0, 0, 0, 0)
        if not t.is_cpu:
            return _uneven_on_device(g, asked, t, out, async_op, "all_gather", lengths, timeout)
        return _dispatch(g, asked, t, out, async_op, "all_gather", (lengths, lengths), timeout)
    _same(out, t, g.size, "all_gather")
    asked = (engine_codes.ALL_GATHER, dtype, t.numel(), 0, 0, 0)
    return _dispatch(g, asked, t, out, async_op, "all_gather", None, timeout)


def reduce_scatter(
    out: Tensors,
    t: Tensors | list[Tensors] | tuple[Tensors, ...],
    op: Any = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    splits: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Work | None:
    """Reduces ``t`` over all ranks; rank i gets the i-th of ``size`` equal parts in ``out``.

    Args:
        out: One part; it may be this rank's part of ``t``. If it is a list, ``t`` is a list of as many
            inputs, and all are reduced in one call.
        t: ``size * out.numel()`` elements of the same dtype, or a list with a tensor for each rank, which
            may differ in length.
        op: As for :func:`all_reduce`.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
        splits: The length of each rank's part along the first dimension of ``t``, the same on all ranks; some
            may be 0. None: equal.
        timeout: Seconds; None: the group's.
    """
    g = resolve(group)
    code = _op(op, "reduce_scatter")
    factor = None if type(op) is str else _factor(op)
    if not (isinstance(out, torch.Tensor) and isinstance(t, torch.Tensor)):
        dtype, whole, own, lengths = _blocks(g, t, out, "reduce_scatter")
        if factor is not None:
            whole = [(x.detach() * factor).to(x.dtype) for x in whole]
        asked = (engine_codes.REDUCE_SCATTER, dtype, 0, code, 0, 0)
        both = lengths, lengths
        return _dispatch_lists(g, asked, whole, own, async_op, "reduce_scatter", both, timeout)
    dtype = _check(t, "reduce_scatter")
    _check(out, "reduce_scatter")
    source: torch.Tensor = t if factor is None else (t.detach() * factor).to(t.dtype)
    if splits is not None:
        lengths = _parts(g, source, out, splits, "reduce_scatter")
        asked = (engine_codes.REDUCE_SCATTER, dtype, 0, code, 0, 0)
        if not source.is_cpu:
            return _uneven_on_device(g, asked, source, out, async_op, "reduce_scatter", lengths, timeout)
        return _dispatch(g, asked, source, out, async_op, "reduce_scatter", (lengths, lengths), timeout)
    _same(source, out, g.size, "reduce_scatter")
    asked = (engine_codes.REDUCE_SCATTER, dtype, out.numel(), code, 0, 0)
    return _dispatch(g, asked, source, out, async_op, "reduce_scatter", None, timeout)


def _parts(
    group: Group, whole: torch.Tensor, own: torch.Tensor, splits: Sequence[int], what: str
) -> list[int]:
    """The elements of each rank's part of ``whole``; ``own`` is this rank's."""
    _alike(whole, own, what)
    lengths = _elements(whole, splits, group.size, what, "splits")
    if own.numel() != lengths[group.rank]:
        raise MisuseError(
            f"{what}: the part of rank {group.ranks[group.rank]} has {own.numel()} elements; with "
            f"splits[{group.rank}]={splits[group.rank]} it must have {lengths[group.rank]}"
        )
    return lengths


def _uneven_on_device(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor,
    target: torch.Tensor,
    async_op: bool,
    what: str,
    lengths: list[int],
    timeout: float | None,
) -> Work | None:
    """An all_gather or a reduce_scatter of unequal parts of GPU tensors, which the routes do in place."""
    start = sum(lengths[: group.rank])
    if asked[0] == engine_codes.ALL_GATHER:
        own = target.view(-1)[start : start + lengths[group.rank]]
        if own.data_ptr() != source.data_ptr():
            own.copy_(source.view(-1))
        return _dispatch(group, asked, target, target, async_op, what, (lengths, lengths), timeout)
    if async_op:
        raise UnsupportedError(
            f"{what}: splits with async_op work on CPU tensors only; leave async_op out, the call does not "
            "block"
        )
    whole = source.clone()
    _dispatch(group, asked, whole, whole, False, what, (lengths, lengths), timeout)
    target.view(-1).copy_(whole.view(-1)[start : start + lengths[group.rank]])
    return None


def gather(
    out: Tensors | None,
    t: torch.Tensor,
    dst: int,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Collects ``t`` of all ranks, in rank order, in ``out`` of rank ``dst`` (None elsewhere).

    ``out`` is one tensor, or a list with one for each rank.
    """
    g = resolve(group)
    root = g.group_rank(dst, "gather")
    dtype = _check(t, "gather")
    asked = (engine_codes.GATHER, dtype, t.numel(), 0, 0, root)
    if g.rank != root:
        return _dispatch(g, asked, t, None, async_op, "gather", None, timeout)
    if out is None:
        raise MisuseError(f"gather: out is None on rank {dst}, which is dst; pass a tensor there")
    if isinstance(out, (list, tuple)):
        parts = _equal_parts(g, out, t, "gather")
        return _dispatch_lists(g, asked, [t], parts, async_op, "gather", None, timeout)
    _check(out, "gather")
    _same(out, t, g.size, "gather")
    return _dispatch(g, asked, t, out, async_op, "gather", None, timeout)


def scatter(
    t: torch.Tensor,
    inp: Tensors | None,
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Copies the i-th of ``size`` equal parts of ``inp`` of rank ``src`` to ``t`` of rank i.

    ``inp`` is one tensor, or a list with one for each rank.
    """
    g = resolve(group)
    root = g.group_rank(src, "scatter")
    dtype = _check(t, "scatter")
    asked = (engine_codes.SCATTER, dtype, t.numel(), 0, 0, root)
    if g.rank != root:
        return _dispatch(g, asked, None, t, async_op, "scatter", None, timeout)
    if inp is None:
        raise MisuseError(f"scatter: inp is None on rank {src}, which is src; pass a tensor there")
    if isinstance(inp, (list, tuple)):
        parts = _equal_parts(g, inp, t, "scatter")
        return _dispatch_lists(g, asked, parts, [t], async_op, "scatter", None, timeout)
    _check(inp, "scatter")
    _same(inp, t, g.size, "scatter")
    return _dispatch(g, asked, inp, t, async_op, "scatter", None, timeout)


def _equal_parts(group: Group, parts: Tensors, t: torch.Tensor, what: str) -> list[torch.Tensor]:
    """The tensors of a list, one for each rank and all like ``t``."""
    found = _by_rank(parts, group.size, what)
    _check_all([t, *found], what)
    for part in found:
        _same(part, t, 1, what)
    return found


def all_to_all(
    out: Tensors,
    inp: Tensors,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Sends part j of ``inp`` to rank j, and collects the parts meant for this rank in ``out``.

    Args:
        out: The parts received, in rank order: one tensor or a list.
        inp: The parts sent, in rank order: one tensor or a list. If one of both is a list, both are, and
            there are no splits.
        out_splits: Length of each part of ``out`` along the first dimension; None: equal.
        in_splits: The same of ``inp``. Either both are given, or neither; each rank may do as it likes, since
            leaving them out is the same as giving equal lengths.
        group: The ranks that take part.
        async_op: Return at once, with a :class:`Work`.
        timeout: Seconds; None: the group's.
    """
    g = resolve(group)
    if isinstance(out, (list, tuple)) and isinstance(inp, (list, tuple)):
        if out_splits is not None or in_splits is not None:
            raise MisuseError("all_to_all: lists of tensors take no splits; leave them out")
        given, wanted = _by_rank(inp, g.size, "all_to_all"), _by_rank(out, g.size, "all_to_all")
        dtype = _check_all([*given, *wanted], "all_to_all")
        _same(given[g.rank], wanted[g.rank], 1, "all_to_all")
        parts = [t.numel() for t in given], [t.numel() for t in wanted]
        asked = (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0)
        return _dispatch_lists(g, asked, given, wanted, async_op, "all_to_all", parts, timeout)
    if isinstance(out, (list, tuple)) or isinstance(inp, (list, tuple)):
        raise MisuseError("all_to_all: one of out and inp is a list; pass two lists, or two tensors")
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
        return _dispatch(g, asked, inp, out, async_op, "all_to_all", None, timeout)
    lengths = (
        _elements(inp, in_splits, g.size, "all_to_all", "in_splits"),
        _elements(out, out_splits, g.size, "all_to_all", "out_splits"),
    )
    if lengths[0][g.rank] != lengths[1][g.rank]:
        raise MisuseError(
            f"all_to_all: on rank {g.ranks[g.rank]} in_splits[{g.rank}] and out_splits[{g.rank}], the part "
            "that the rank sends to itself, differ; make them equal"
        )
    asked = (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0)
    return _dispatch(g, asked, inp, out, async_op, "all_to_all", lengths, timeout)


def _elements(t: torch.Tensor, splits: Sequence[int], size: int, what: str, argument: str) -> list[int]:
    """Checks splits along the first dimension, and converts them to elements."""
    rows = t.shape[0] if t.dim() else 1
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise MisuseError(
            f"{what}: {argument}={list(splits)} must be {size} lengths, one for each rank, that add up to "
            f"{rows}"
        )
    row = t.numel() // rows if rows else 0
    return [int(n) * row for n in splits]


def send(
    t: torch.Tensor,
    dst: int,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``t`` to rank ``dst``. Messages with the same tag arrive in order.

    A message of up to 1 MiB may return before it is received; a larger one returns when the receiver takes
    it.
    """
    work, _ = _message(True, t, dst, tag, group, async_op, timeout)
    return work


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> int: ...


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    *,
    async_op: Literal[True],
    timeout: float | None = None,
) -> Work: ...


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | int: ...


def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | int:
    """Receives the next message of rank ``src`` with this tag into ``t``, of the same size and dtype.

    Args:
        t: The message, of the sender's size and dtype.
        src: The sender; None: whichever rank's message comes first. A message goes to the receive that was
            made first, of those that fit.
        tag: Only messages that were sent with it.
        group: The ranks that may send.
        async_op: Return at once, with a :class:`Work`; its ``source_rank()`` is the sender.
        timeout: Seconds; None: the group's.

    Returns:
        The sender's world rank; with ``async_op`` a :class:`Work`.

    Raises:
        PeerLostError: The sender is lost. From any source: a rank of the group has died, whose message it may
            have been, or all others have left. A message that has come before is received all the same.
    """
    work, sender = _message(False, t, src, tag, group, async_op, timeout)
    if work is not None:
        return work
    assert sender is not None
    return sender


def _message(
    sends: bool,
    t: torch.Tensor,
    peer: int | None,
    tag: int,
    group: AnyGroup,
    async_op: bool,
    timeout: float | None,
) -> tuple[Work | None, int | None]:
    what = "send" if sends else "recv"
    g = resolve(group)
    dtype = _check(t, what)
    if not 0 <= tag < 1 << 31:
        raise MisuseError(f"{what}: tag {tag} is invalid; it must be from 0 to 2**31 - 1")
    place = None if peer is None else g.group_rank(peer, what)
    if not sends and t.requires_grad:
        torch.autograd.graph.increment_version(t)
    if not t.is_cpu:
        if place is None:
            raise UnsupportedError(
                "recv: src=None works on CPU tensors only; name the sender, or receive into a CPU tensor"
            )
        call = routes.message(g, sends, place, tag, t, dtype)
        if async_op:
            return Work(call, (t,), what), None
        call.wait()
        return None, peer
    limit = g.timeout if timeout is None else _seconds(timeout, what)
    core, sender = g.core.message(sends, place, tag, dtype, t.numel(), t.data_ptr(), async_op, limit)
    return None if core is None else Work(core, (t,), what, g.describe), sender


def batch_send_recv(messages: Sequence[tuple[bool, int, torch.Tensor]], group: Group) -> Work:
    """Sends and receives several messages at once, with tensors on one GPU. All ranks of the group call it.

    Args:
        messages: Whether this rank sends the message, the other's group rank, and the tensor.
        group: The ranks.
    """
    coded = [(sends, place, t, _check(t, "batch_send_recv")) for sends, place, t in messages]
    call = routes.batch_send_recv(group, coded)
    return Work(call, tuple(t for _, _, t in messages), "batch_send_recv")
