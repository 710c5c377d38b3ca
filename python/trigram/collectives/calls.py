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

from collections.abc import Sequence
from typing import Any

import torch

from trigram.collectives.arguments import (
    OPS,
    VIAS,
    Tensors,
    blocks,
    by_rank,
    check,
    check_alike,
    check_all,
    check_same,
    elements,
    equal_parts,
    factor_of,
    op_code,
    parts_of,
    via_code,
)
from trigram.collectives.dispatch import (
    all_reduce_at_once,
    dispatch,
    dispatch_uneven_on_device,
)
from trigram.collectives.work import Work
from trigram.errors import MisuseError
from trigram.runtime import engine_codes
from trigram.runtime.world import AnyGroup, resolve

_ALL_REDUCE = engine_codes.ALL_REDUCE


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
    plain = not async_op and via is None and timeout is None and type(op) is str and op in OPS
    if plain and all_reduce_at_once(resolve(group), t, OPS[op]):
        return None
    if isinstance(t, (list, tuple)):
        dtype = check_all(t, "all_reduce")
        code, how = op_code(op, "all_reduce"), via_code(via)
        if type(op) is not str and (factor := factor_of(op)) is not None:
            for x in t:
                x.detach().mul_(factor)
        asked, given = (_ALL_REDUCE, dtype, sum(x.numel() for x in t), code, how, 0), list(t)
        return dispatch(resolve(group), asked, given, given, async_op, "all_reduce", None, timeout)
    dtype = check(t, "all_reduce")
    try:
        asked = (_ALL_REDUCE, dtype, t.numel(), OPS[op], VIAS[via], 0)
    except (KeyError, TypeError):
        asked = (_ALL_REDUCE, dtype, t.numel(), op_code(op, "all_reduce"), via_code(via), 0)
        if (factor := factor_of(op)) is not None:
            t.detach().mul_(factor)
    return dispatch(resolve(group), asked, t, t, async_op, "all_reduce", None, timeout)


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
    asked = (engine_codes.REDUCE, check(t, "reduce"), t.numel(), op_code(op, "reduce"), 0, root)
    if type(op) is not str and (factor := factor_of(op)) is not None:
        return dispatch(
            g,
            asked,
            (t.detach() * factor).to(t.dtype),
            t if g.rank == root else None,
            async_op,
            "reduce",
            None,
            timeout,
        )
    return dispatch(g, asked, t, t if g.rank == root else None, async_op, "reduce", None, timeout)


def broadcast(
    t: torch.Tensor,
    src: int,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Copies ``t`` of rank ``src`` into ``t`` of all ranks."""
    g = resolve(group)
    asked = (engine_codes.BROADCAST, check(t, "broadcast"), t.numel(), 0, 0, g.group_rank(src, "broadcast"))
    return dispatch(g, asked, t, t, async_op, "broadcast", None, timeout)


def barrier(group: AnyGroup = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Waits until every rank has called it."""
    asked = (engine_codes.BARRIER, 5, 0, 0, 0, 0)
    return dispatch(resolve(group), asked, None, None, async_op, "barrier", None, timeout)


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
        dtype, whole, own, lengths = blocks(g, out, t, "all_gather")
        asked = (engine_codes.ALL_GATHER, dtype, 0, 0, 0, 0)
        return dispatch(g, asked, own, whole, async_op, "all_gather", (lengths, lengths), timeout)
    dtype = check(t, "all_gather")
    check(out, "all_gather")
    if splits is not None:
        lengths = parts_of(g, out, t, splits, "all_gather")
        asked = (engine_codes.ALL_GATHER, dtype, 0, 0, 0, 0)
        if not t.is_cpu:
            return dispatch_uneven_on_device(g, asked, t, out, async_op, "all_gather", lengths, timeout)
        return dispatch(g, asked, t, out, async_op, "all_gather", (lengths, lengths), timeout)
    check_same(out, t, g.size, "all_gather")
    asked = (engine_codes.ALL_GATHER, dtype, t.numel(), 0, 0, 0)
    return dispatch(g, asked, t, out, async_op, "all_gather", None, timeout)


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
    code = op_code(op, "reduce_scatter")
    factor = None if type(op) is str else factor_of(op)
    if not (isinstance(out, torch.Tensor) and isinstance(t, torch.Tensor)):
        dtype, whole, own, lengths = blocks(g, t, out, "reduce_scatter")
        if factor is not None:
            whole = [(x.detach() * factor).to(x.dtype) for x in whole]
        asked = (engine_codes.REDUCE_SCATTER, dtype, 0, code, 0, 0)
        both = lengths, lengths
        return dispatch(g, asked, whole, own, async_op, "reduce_scatter", both, timeout)
    dtype = check(t, "reduce_scatter")
    check(out, "reduce_scatter")
    source: torch.Tensor = t if factor is None else (t.detach() * factor).to(t.dtype)
    if splits is not None:
        lengths = parts_of(g, source, out, splits, "reduce_scatter")
        asked = (engine_codes.REDUCE_SCATTER, dtype, 0, code, 0, 0)
        if not source.is_cpu:
            return dispatch_uneven_on_device(
                g, asked, source, out, async_op, "reduce_scatter", lengths, timeout
            )
        return dispatch(g, asked, source, out, async_op, "reduce_scatter", (lengths, lengths), timeout)
    check_same(source, out, g.size, "reduce_scatter")
    asked = (engine_codes.REDUCE_SCATTER, dtype, out.numel(), code, 0, 0)
    return dispatch(g, asked, source, out, async_op, "reduce_scatter", None, timeout)


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
    dtype = check(t, "gather")
    asked = (engine_codes.GATHER, dtype, t.numel(), 0, 0, root)
    if g.rank != root:
        return dispatch(g, asked, t, None, async_op, "gather", None, timeout)
    if out is None:
        raise MisuseError(f"gather: out is None on rank {dst}, which is dst; pass a tensor there")
    if isinstance(out, (list, tuple)):
        parts = equal_parts(g, out, t, "gather")
        return dispatch(g, asked, [t], parts, async_op, "gather", None, timeout)
    check(out, "gather")
    check_same(out, t, g.size, "gather")
    return dispatch(g, asked, t, out, async_op, "gather", None, timeout)


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
    dtype = check(t, "scatter")
    asked = (engine_codes.SCATTER, dtype, t.numel(), 0, 0, root)
    if g.rank != root:
        return dispatch(g, asked, None, t, async_op, "scatter", None, timeout)
    if inp is None:
        raise MisuseError(f"scatter: inp is None on rank {src}, which is src; pass a tensor there")
    if isinstance(inp, (list, tuple)):
        parts = equal_parts(g, inp, t, "scatter")
        return dispatch(g, asked, parts, [t], async_op, "scatter", None, timeout)
    check(inp, "scatter")
    check_same(inp, t, g.size, "scatter")
    return dispatch(g, asked, inp, t, async_op, "scatter", None, timeout)


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
        given, wanted = by_rank(inp, g.size, "all_to_all"), by_rank(out, g.size, "all_to_all")
        dtype = check_all([*given, *wanted], "all_to_all")
        check_same(given[g.rank], wanted[g.rank], 1, "all_to_all")
        parts = [t.numel() for t in given], [t.numel() for t in wanted]
        asked = (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0)
        return dispatch(g, asked, given, wanted, async_op, "all_to_all", parts, timeout)
    if isinstance(out, (list, tuple)) or isinstance(inp, (list, tuple)):
        raise MisuseError("all_to_all: one of out and inp is a list; pass two lists, or two tensors")
    dtype = check(inp, "all_to_all")
    check(out, "all_to_all")
    check_alike(inp, out, "all_to_all")
    if (out_splits is None) != (in_splits is None):
        raise MisuseError("all_to_all: only one of out_splits and in_splits is given; pass both or neither")
    if out_splits is None or in_splits is None:
        check_same(out, inp, 1, "all_to_all")
        if inp.numel() % g.size:
            raise MisuseError(
                f"all_to_all: {inp.numel()} elements cannot be divided equally among {g.size} ranks; pass "
                "out_splits and in_splits"
            )
        asked = (engine_codes.ALL_TO_ALL, dtype, inp.numel() // g.size, 0, 0, 0)
        return dispatch(g, asked, inp, out, async_op, "all_to_all", None, timeout)
    lengths = (
        elements(inp, in_splits, g.size, "all_to_all", "in_splits"),
        elements(out, out_splits, g.size, "all_to_all", "out_splits"),
    )
    if lengths[0][g.rank] != lengths[1][g.rank]:
        raise MisuseError(
            f"all_to_all: on rank {g.ranks[g.rank]} in_splits[{g.rank}] and out_splits[{g.rank}], the part "
            "that the rank sends to itself, differ; make them equal"
        )
    asked = (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0)
    return dispatch(g, asked, inp, out, async_op, "all_to_all", lengths, timeout)
