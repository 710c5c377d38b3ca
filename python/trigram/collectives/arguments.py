"""The arguments of the calls: what the engine takes of tensors, lists, lengths and operators, or why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import device
from trigram.runtime import engine_codes
from trigram.runtime.group import Group

# Looking a name up in this module is faster than in another one, and small calls take two microseconds.
_DTYPES = engine_codes.DTYPES
_COMPLEX = frozenset(code for dtype, code in _DTYPES.items() if dtype.is_complex)
VIAS = engine_codes.VIAS
OPS = engine_codes.OPS
_STRIDED = torch.strided
_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM
Tensors = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]
"""One tensor, or several that a call sees one after another, as one."""


def check(t: torch.Tensor, what: str) -> int:
    """The engine's code of a tensor's dtype; raises if the engine does not support the tensor."""
    try:
        if t.is_cpu and t.layout is _STRIDED and t.is_contiguous() and not t.is_neg():
            code = _DTYPES[t.dtype]
            if code not in _COMPLEX or not t.is_conj():
                return code
    except (AttributeError, KeyError):
        pass
    return refuse(t, what)


def refuse(t: torch.Tensor, what: str) -> int:
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
    if t.is_conj() or t.is_neg():
        raise MisuseError(
            f"{what}: the tensor is a lazy conjugate or negative view, whose memory has other values; pass "
            "t.resolve_conj().resolve_neg()"
        )
    return code


def check_alike(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Checks that two tensors have the same dtype and device."""
    if a.dtype != b.dtype:
        raise MisuseError(
            f"{what}: the tensors have different dtypes, {a.dtype} and {b.dtype}; cast one of them"
        )
    if a.device != b.device:
        raise MisuseError(
            f"{what}: the tensors are on different devices, {a.device} and {b.device}; move one of them"
        )


def check_same(a: torch.Tensor, b: torch.Tensor, times: int, what: str) -> None:
    """Checks that ``a`` has ``times`` as many elements as ``b``, and the same dtype and device."""
    check_alike(a, b, what)
    if a.numel() != times * b.numel():
        raise MisuseError(
            f"{what}: the larger tensor has {a.numel()} elements and the smaller {b.numel()}; "
            f"with {times} ranks it must have {times * b.numel()}"
        )


def seconds(timeout: float, what: str) -> float | None:
    """A timeout as the engine takes it; None: no limit."""
    if not timeout > 0:
        raise MisuseError(f"{what}: timeout={timeout!r} is invalid; pass a positive number of seconds")
    return None if timeout == math.inf else float(timeout)


def check_all(tensors: Sequence[torch.Tensor], what: str) -> int:
    """As :func:`check`, of a list of CPU tensors of one dtype."""
    if not tensors:
        raise MisuseError(f"{what}: the list of tensors is empty; pass at least one")
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise MisuseError(f"{what}: the list has a {type(t).__name__}; pass a list of tensors")
    dtype = check(tensors[0], what)
    for t in tensors:
        check(t, what)
        check_alike(tensors[0], t, what)
        if not t.is_cpu:
            raise UnsupportedError(
                f"{what}: lists work on CPU tensors only; make a call for each tensor on {t.device}"
            )
    return dtype


def by_rank(whole: Tensors, size: int, what: str) -> list[torch.Tensor]:
    """The parts of a tensor, or the tensors of a list, one for each rank."""
    if isinstance(whole, torch.Tensor):
        check(whole, what)
        if whole.numel() % size:
            raise MisuseError(
                f"{what}: {whole.numel()} elements cannot be divided equally among {size} ranks; pass a list"
            )
        flat = whole.detach().view(-1)
        return list(flat.split(max(flat.numel() // size, 1))) if flat.numel() else [flat] * size
    if len(whole) != size:
        raise MisuseError(f"{what}: {len(whole)} tensors in a list for {size} ranks; pass one for each rank")
    return list(whole)


def blocks(
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
            refuse(given, what)
    if isinstance(whole, torch.Tensor):
        raise MisuseError(
            f"{what}: one of out and t is a list of tensors; then both are, or the larger one is"
        )
    parts = [own] if isinstance(own, torch.Tensor) else list(own)
    wholes = [whole] if isinstance(own, torch.Tensor) else list(whole)
    if len(parts) != len(wholes):
        raise MisuseError(f"{what}: lists of {len(wholes)} and {len(parts)} tensors; pass as many of both")
    divided = [by_rank(w, group.size, what) for w in wholes]
    dtype = check_all([*parts, *(t for ts in divided for t in ts)], what)
    lengths = [sum(ts[rank].numel() for ts in divided) for rank in range(group.size)]
    for part, ts in zip(parts, divided, strict=True):
        if part.numel() != ts[group.rank].numel():
            raise MisuseError(
                f"{what}: rank {group.ranks[group.rank]} has a part of {part.numel()} elements, and room for "
                f"{ts[group.rank].numel()}; they must be the same"
            )
    return dtype, [ts[rank] for rank in range(group.size) for ts in divided], parts, lengths


def parts_of(
    group: Group, whole: torch.Tensor, own: torch.Tensor, splits: Sequence[int], what: str
) -> list[int]:
    """The elements of each rank's part of ``whole``; ``own`` is this rank's."""
    check_alike(whole, own, what)
    lengths = elements(whole, splits, group.size, what, "splits")
    if own.numel() != lengths[group.rank]:
        raise MisuseError(
            f"{what}: the part of rank {group.ranks[group.rank]} has {own.numel()} elements; with "
            f"splits[{group.rank}]={splits[group.rank]} it must have {lengths[group.rank]}"
        )
    return lengths


def equal_parts(group: Group, parts: Tensors, t: torch.Tensor, what: str) -> list[torch.Tensor]:
    """The tensors of a list, one for each rank and all like ``t``."""
    found = by_rank(parts, group.size, what)
    check_all([t, *found], what)
    for part in found:
        check_same(part, t, 1, what)
    return found


def elements(t: torch.Tensor, splits: Sequence[int], size: int, what: str, argument: str) -> list[int]:
    """Checks splits along the first dimension, and converts them to elements."""
    rows = t.shape[0] if t.dim() else 1
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise MisuseError(
            f"{what}: {argument}={list(splits)} must be {size} lengths, one for each rank, that add up to "
            f"{rows}"
        )
    row = t.numel() // rows if rows else 0
    return [int(n) * row for n in splits]


def op_code(op: Any, what: str) -> int:
    """The engine's code of an operator; that of a sum for PREMUL_SUM."""
    try:
        return OPS[op]
    except (KeyError, TypeError):
        if factor_of(op) is not None:
            return engine_codes.OPS["sum"]
        names = ", ".join(engine_codes.OP_NAMES)
        raise MisuseError(f"{what}: unknown op {op!r}; use one of {names}") from None


def factor_of(op: Any) -> Any:
    """What ``op`` multiplies each rank's numbers with before they are summed; None: nothing."""
    if isinstance(op, tuple) and len(op) == 2 and op[0] == "premul_sum":
        return op[1]
    if type(op) is dist.ReduceOp and op == _PREMUL_SUM:
        state: Any = op.__getstate__()
        return state[1]
    return None


def via_code(via: str | None) -> int:
    """The engine's code of a schedule's name."""
    try:
        return VIAS[via]
    except (KeyError, TypeError):
        names = ", ".join(v for v in VIAS if v)
        raise UnsupportedError(f"all_reduce: unknown via {via!r}; use one of {names}") from None
