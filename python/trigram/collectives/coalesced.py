"""Coalesced tensors: many tensors, one after the other in one 1-D tensor of registered memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trigram.collectives import calls
from trigram.runtime import engine_codes
from trigram.runtime.group import Group
from trigram.runtime.memory import empty

_ALIGN = 64
"""Bytes: each tensor starts at a new cache line."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: ``length`` indices along one dimension, complex numbers as pairs of real ones.

    It is no view, because a script may give the parameter other memory (``p.data = ...``).
    """

    of: torch.Tensor
    dim: int
    start: int
    length: int

    def view(self) -> torch.Tensor:
        """The values, where they are now."""
        return as_real(self.of.detach()).narrow(self.dim, self.start, self.length)

    def numel(self) -> int:
        """How many values it has."""
        return self.view().numel()

    @property
    def dtype(self) -> torch.dtype:
        """That of its values."""
        return self.of.dtype.to_real()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.of.device


Part = torch.Tensor | Piece
"""A parameter, or a piece of one."""


def now(parts: Iterable[Part]) -> list[torch.Tensor]:
    """The tensors, and of pieces the views of where they are now."""
    return [part.view() if isinstance(part, Piece) else part for part in parts]


_Alike = TypeVar("_Alike", torch.Tensor, Part)


def alike(tensors: Iterable[_Alike]) -> list[list[_Alike]]:
    """Groups tensors, or pieces of them, by dtype and device, in order."""
    groups: dict[tuple[torch.dtype, torch.device], list[_Alike]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def as_real(t: torch.Tensor) -> torch.Tensor:
    """The tensor, complex numbers as pairs of real ones: a view of the same memory."""
    return torch.view_as_real(t) if t.is_complex() and not _is_lazy_view(t) else t


def offsets(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> tuple[list[int], int]:
    """The offset of each tensor in the coalesced one, in elements, and the length of the coalesced one; of
    complex tensors in one of ``dtype`` real, each element takes two."""
    at, total = [], 0
    for t in tensors:
        step = max(_ALIGN // (dtype or t.dtype).itemsize, 1)
        at.append(total)
        pairs = t.is_complex() and dtype is not None and not dtype.is_complex
        total += -(-t.numel() * (2 if pairs else 1) // step) * step
    return at, total


def view_like(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A view of part of ``memory`` with the shape and, for channels-last, the strides of ``like``; of complex
    numbers if ``like`` is, and ``memory`` holds them as pairs."""
    if like.is_complex() and not memory.is_complex():
        part = torch.view_as_complex(memory[offset : offset + 2 * like.numel()].view(-1, 2))
    else:
        part = memory[offset : offset + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(like.shape, like.stride(), part.storage_offset())
    return part.view(like.shape)


def is_channels_last(t: torch.Tensor) -> bool:
    """Whether coalesced values of the tensor are in the order of ``torch.channels_last``, and not in that of
    rows; ranks must agree on it."""
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def is_permuted(t: torch.Tensor) -> bool:
    """Whether the tensor fills its memory, and neither in the order of rows nor in that of
    ``torch.channels_last``: as a transposed matrix. Coalesced values are in the order of rows then."""
    if t.dim() < 2 or t.layout != torch.strided or t.is_contiguous() or is_channels_last(t):
        return False
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    return t.permute(order).is_contiguous()


def parts(t: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Views that make up the tensor in row-major order, each of at most ``most`` bytes."""
    if t.nbytes <= most or t.dim() == 0:
        return [t]
    if t.is_contiguous():
        return list(t.view(-1).split(max(most // t.element_size(), 1)))
    rows = most * len(t) // t.nbytes
    if rows == 0:
        return [part for row in t for part in parts(row, most)]
    return list(t.split(rows))


def chunks(tensors: Iterable[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """The :func:`parts` of all tensors, in lists that take at most about ``most`` bytes each, coalesced."""
    found: list[list[torch.Tensor]] = []
    size = most
    for part in (part for t in tensors if t.numel() for part in parts(t, most)):
        if size + part.nbytes > most:
            found.append([])
            size = 0
        found[-1].append(part)
        size += -(-part.nbytes // _ALIGN) * _ALIGN
    return found


def expanded_dimensions(t: torch.Tensor) -> list[int]:
    """The dimensions along which all elements are one element in memory, as after ``expand``."""
    return [d for d in range(t.dim()) if t.stride(d) == 0 and t.shape[d] > 1]


def _is_lazy_view(t: torch.Tensor) -> bool:
    """Whether it is a view that conjugates or negates when it is read, as ``x.conj()``."""
    return t.is_conj() or t.is_neg()


def _without_repeats(t: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    for d in dimensions:
        t = t.narrow(d, 0, 1)
    return t


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors of the same shapes; also to expanded tensors, which torch refuses to write to."""
    if not targets:
        return
    expanded = [expanded_dimensions(t) for t in targets]
    to = [_without_repeats(t, d) for t, d in zip(targets, expanded, strict=True)]
    given = [_without_repeats(s, d) for s, d in zip(sources, expanded, strict=True)]
    if any(map(_is_lazy_view, to)):  # the fused copy does not write to these
        for t, s in zip(to, given, strict=True):
            t.copy_(s)
    else:
        torch._foreach_copy_(to, given)


class Coalesced:
    """Tensors with a copy in one 1-D tensor of registered memory.

    Args:
        tensors: Tensors, or pieces of them, on one device, of one dtype unless ``dtype`` is given.
        dtype: The dtype of the memory; None: that of the tensors.
        length: From the length that the tensors need, in elements, to that of the memory; the rest is zero.
            None: no more than needed.

    Attributes:
        memory: The 1-D tensor.
        views: Views of ``memory``, with the shapes of the tensors.
        total: The length that the tensors need, in elements.
        plain: Whether all tensors can be written to at once.
    """

    def __init__(
        self,
        tensors: Sequence[Part],
        dtype: torch.dtype | None = None,
        length: Callable[[int], int] | None = None,
    ) -> None:
        self._parts = list(tensors)
        self._has_pieces = any(isinstance(part, Piece) for part in tensors)
        tensors = now(tensors)
        dtype = dtype or tensors[0].dtype
        at, self.total = offsets(tensors, dtype)
        total = self.total if length is None else length(self.total)
        self.memory = empty(total, dtype=dtype, device=tensors[0].device)
        self.memory.zero_()
        self.views = [view_like(self.memory, a, t) for a, t in zip(at, tensors, strict=True)]
        self.plain = not any(expanded_dimensions(t) or _is_lazy_view(t) for t in tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors; of pieces the views of where they are now."""
        return now(self._parts) if self._has_pieces else self._parts  # type: ignore[return-value]

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the tensors to the memory."""
        torch._foreach_copy_(self.views, self.tensors)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copies the memory to the tensors."""
        if self.plain:
            torch._foreach_copy_(self.tensors, self.views)
        else:
            copy_all(self.tensors, self.views)

    def broadcast(self, src: int, group: Group, unpack: bool = True) -> None:
        """Broadcasts the tensors of group rank ``src``, dtypes that the engine does not know as bytes;
        without ``unpack`` only to the memory."""
        if group.rank == src:
            self.pack()
        known = self.memory.dtype in engine_codes.DTYPES
        sent = self.memory if known else self.memory.view(torch.uint8)
        calls.broadcast(sent, group.ranks[src], group)
        if group.rank != src and unpack:
            self.unpack()


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], src: int, group: Group, chunk_bytes: int = 64 << 20) -> None:
    """Broadcasts the tensors of group rank ``src``, coalesced in messages of up to ``chunk_bytes``."""
    for same in alike(t.detach() for t in tensors):
        for chunk in chunks(same, chunk_bytes):
            Coalesced(chunk).broadcast(src, group)
