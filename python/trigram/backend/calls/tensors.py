"""Tensors as the engine takes them: contiguous memory of a dtype that it knows.

Elements go in the order of the shape, so that ranks may hold them in different memory formats. Contiguous
tensors are passed in place; others go through a contiguous copy, and results are copied back
(:class:`Target`). Lists of contiguous tensors on the CPU are passed as lists (:data:`Memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from trigram.collectives.dispatch import Memory, Places
from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import device
from trigram.runtime import engine_codes

_DTYPES = engine_codes.DTYPES
_WIDER = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    **{
        getattr(torch, name): torch.float32
        for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}
"""Where the engine does not reduce a dtype: the one that holds its values and the sums of a few of them."""


def check(t: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor, or that of an ``AsyncCollectiveTensor`` when it has arrived. Raises if it is none, is
    sparse, or is on a device that no route serves."""
    if not isinstance(t, torch.Tensor):
        raise MisuseError(f"{what}: expected a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise UnsupportedError(f"{what}: the tensor has layout {t.layout}; pass t.to_dense()")
    if not t.is_cpu and t.device.type not in device.kinds:
        kinds = ", ".join(["cpu", *device.kinds])
        raise UnsupportedError(f"{what}: the tensor is on {t.device}; move it to one of {kinds}")
    # What functional collectives return is a wrapper without memory. The engine refuses other wrappers.
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def same(first: torch.Tensor, others: Sequence[torch.Tensor], what: str) -> None:
    """Raises if tensors of one call differ in dtype or device."""
    for t in others:
        if t.dtype != first.dtype or t.device != first.device:
            raise MisuseError(
                f"{what}: the tensors differ: {first.dtype} on {first.device} and {t.dtype} on {t.device}; "
                "cast or move one of them"
            )


def plain(t: torch.Tensor) -> torch.Tensor:
    """The values, where a view conjugates or negates them when it is read."""
    return t.resolve_conj().resolve_neg()


def source(t: torch.Tensor) -> torch.Tensor:
    """The elements to send, contiguous in the order of the shape: the tensor itself or a copy."""
    if t.is_contiguous() and not t.is_conj() and not t.is_neg():
        return t.detach() if t.requires_grad else t
    return plain(t.detach()).contiguous()


def overlap(one: Places, other: Places) -> bool:
    """Whether two memories have a byte in common."""
    if len(one) == len(other) == 1:
        (a, n), (b, m) = one[0], other[0]
        return a < b + m and b < a + n and n > 0 and m > 0
    spans = [(at, at + n, which) for which, each in enumerate((one, other)) for at, n in each if n]
    ends = [0, 0]
    for at, end, which in sorted(spans):
        if at < ends[1 - which]:
            return True
        ends[which] = max(ends[which], end)
    return False


def copied(memory: Memory) -> Memory:
    """A copy of memory."""
    return [t.clone() for t in memory] if isinstance(memory, list) else memory.clone()


def together(tensors: Sequence[torch.Tensor], reduces: bool = False) -> Memory | None:
    """The memory of tensors of one dtype, as one piece or as a list; None: it takes a copy.

    Args:
        tensors: The tensors.
        reduces: Whether the call computes with them.
    """
    joined = _joined(tensors)
    if joined is not None or len(tensors) == 1:
        return joined
    dtype = tensors[0].dtype
    if dtype not in _DTYPES or (reduces and (dtype in _WIDER or dtype.is_complex)):
        return None
    return list(tensors) if are_pieces(tensors) else None


def are_pieces(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the engine takes tensors of any dtypes as a list of bytes."""
    return all(t.is_cpu and t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in tensors)


def lengths(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The lengths of tensors, in elements of :func:`moved`."""
    return [t.numel() if t.dtype in _DTYPES else t.nbytes for t in tensors]


@overload
def moved(flat: torch.Tensor) -> torch.Tensor: ...


@overload
def moved(flat: Memory) -> Memory: ...


def moved(flat: Memory) -> Memory:
    """Contiguous elements as a dtype that the engine moves, unknown ones as bytes."""
    if isinstance(flat, list):
        return flat
    if flat.dtype in _DTYPES:
        return flat
    return flat.view(-1).view(torch.uint8)


def reduced(flat: torch.Tensor, op: int, what: str) -> tuple[torch.Tensor, bool]:
    """Contiguous elements as a dtype that the engine reduces, and whether they are a copy in a wider dtype.

    Raises:
        UnsupportedError: No wider dtype is known, or the operator has no meaning on complex numbers.
    """
    wider = _WIDER.get(flat.dtype)
    if wider is None and flat.dtype in _DTYPES and not flat.is_complex():
        return flat, False
    if flat.is_complex() and flat.dtype != torch.complex32:
        if op not in (engine_codes.OPS["sum"], engine_codes.OPS["avg"]):
            raise UnsupportedError(f"{what}: complex tensors can be summed and averaged only")
        return torch.view_as_real(flat).view(-1), False
    if wider is None:
        raise UnsupportedError(f"{what}: dtype {flat.dtype} is not supported; cast the tensor")
    return flat.to(wider), True


def scaled(flat: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """A copy, times the factor of ``PREMUL_SUM``."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(flat.device)
    return (flat * factor).to(flat.dtype)


class Target:
    """Where results arrive: the tensors' own memory if it is one piece, otherwise a buffer.

    Args:
        outputs: The tensors.
        filled: Whether a buffer begins with what the tensors hold.

    Attributes:
        flat: The memory, contiguous, in the order of the tensors.
        finish: Copies the buffer to the tensors; None if the results arrive in place.
    """

    __slots__ = ("finish", "flat", "parts")

    def __init__(self, outputs: Sequence[torch.Tensor], filled: bool = False) -> None:
        self.parts = outputs
        self.finish: Callable[[], None] | None = None
        joined = _joined(outputs)
        if joined is None:
            total = sum(t.numel() for t in outputs)
            joined = torch.empty(total, dtype=outputs[0].dtype, device=outputs[0].device)
            self.finish = self._copy
            self.flat = joined
            if filled:
                for part, t in zip(self._split(), outputs, strict=True):
                    part.copy_(t.detach())
        else:
            self.flat = joined

    def _split(self) -> list[torch.Tensor]:
        parts = self.flat.split([t.numel() for t in self.parts])
        return [part.view(t.shape) for part, t in zip(parts, self.parts, strict=True)]

    def _copy(self) -> None:
        with torch.no_grad():
            for part, t in zip(self._split(), self.parts, strict=True):
                t.copy_(part)


def target(outputs: Sequence[torch.Tensor]) -> tuple[Memory, Callable[[], None] | None]:
    """Where the results for several tensors arrive, and what remains to do then: in their own memory, as one
    piece or as a list, or else in a buffer."""
    memory = together(outputs)
    if memory is not None:
        return memory, None
    made = Target(outputs)
    return made.flat, made.finish


def sources(inputs: Sequence[torch.Tensor], reduces: bool = False) -> Memory:
    """Several tensors to send one after another: their own memory, as one piece or as a list, or a copy."""
    memory = together(inputs, reduces)
    return memory if memory is not None else torch.cat([source(t).view(-1) for t in inputs])


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of tensors that follow each other without gaps, such as the chunks of one tensor."""
    first = tensors[0]
    if len(tensors) == 1:
        if not first.is_contiguous() or first.is_conj() or first.is_neg():
            return None
        return first.detach() if first.requires_grad else first
    at = first.data_ptr()
    base = first.untyped_storage().data_ptr()
    for t in tensors:
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            return None
        if t.numel() == 0:
            continue
        if t.data_ptr() != at or t.untyped_storage().data_ptr() != base:
            return None
        at += t.nbytes
    total = sum(t.numel() for t in tensors)
    if total == 0:
        return None
    offset = first.storage_offset()
    return first.detach().as_strided((total,), (1,), offset)
