"""Weights in registered buckets, each divided into one part per rank; a rank updates its part.

By default the parts are equal, and cut through parameters. If parameters must stay whole, each belongs to one
rank, and the parts are as long as their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trigram import collectives
from trigram.averaging.average import padded
from trigram.collectives import coalesced
from trigram.runtime.group import Group
from trigram.runtime.memory import empty


@dataclass(frozen=True)
class Layout:
    """How a bucket is divided.

    Attributes:
        indices: The parameters, in the order in which they lie in the bucket.
        offsets: Where each begins, in elements.
        bounds: Part r is ``bounds[r]`` to ``bounds[r + 1]``.
        shapes, strides: Of each in the bucket, whatever memory a script gives to the parameter later.
    """

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """The length of the bucket, in elements."""
        return self.bounds[-1]

    @property
    def equal(self) -> bool:
        """Whether all parts have the same length."""
        return len({b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)}) == 1

    @property
    def splits(self) -> list[int] | None:
        """The lengths of the parts, for collectives; None: equal."""
        return None if self.equal else [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's place in the memory of the bucket."""
        first = memory.storage_offset()
        return [
            memory.as_strided(shape, stride, first + at)
            for shape, stride, at in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """What part ``rank`` holds: a parameter's position, and the first and last of its values in
        memory."""
        lo, hi = self.bounds[rank], self.bounds[rank + 1]
        cut = [
            (k, max(lo - at, 0), min(hi - at, shape.numel()))
            for k, (at, shape) in enumerate(zip(self.offsets, self.shapes, strict=True))
        ]
        return [(k, start, stop) for k, start, stop in cut if start < stop]


def _layout(
    params: Sequence[torch.Tensor], indices: Sequence[int], offsets: Sequence[int], bounds: Sequence[int]
) -> Layout:
    """Parameters keep their order in memory, without gaps and overlaps."""
    shapes = tuple(params[i].shape for i in indices)
    strides = tuple(torch.empty_like(params[i], device="meta").stride() for i in indices)
    return Layout(tuple(indices), tuple(offsets), tuple(bounds), shapes, strides)


def divide(params: Sequence[torch.Tensor], indices: Sequence[int], ranks: int) -> Layout:
    """Equal parts, which cut through parameters."""
    offsets, total = coalesced.offsets([params[i] for i in indices])
    part = padded(total, ranks) // ranks
    return _layout(params, indices, offsets, [part * r for r in range(ranks + 1)])


def allot(params: Sequence[torch.Tensor], indices: Sequence[int], loads: list[int]) -> Layout:
    """Whole parameters: each goes to the rank that has least so far.

    Args:
        params: All parameters.
        indices: Those of the bucket.
        loads: The number of values of each rank in the buckets before; this bucket's are added.
    """
    owned: list[list[int]] = [[] for _ in loads]
    for i in sorted(indices, key=lambda i: -params[i].numel()):
        rank = loads.index(min(loads))
        owned[rank].append(i)
        loads[rank] += params[i].numel()
    order = [i for mine in owned for i in mine]
    offsets, total = coalesced.offsets([params[i] for i in order])
    ends, bounds, count = [*offsets, total], [0], 0
    for mine in owned:
        count += len(mine)
        bounds.append(ends[count])
    return _layout(params, order, offsets, bounds)


class WeightBucket:
    """Parameters of one dtype in registered memory; the constructor moves them there.

    Attributes:
        layout: How it is divided.
        params: The parameters, in the order of the layout.
        memory: One-dimensional.
        views: The parameters' values, in the order of the layout.
        sent: Bytes that a rank sends in one gather.
    """

    def __init__(self, params: Sequence[torch.Tensor], layout: Layout, ranks: int) -> None:
        self.layout = layout
        self.params = [params[i] for i in layout.indices]
        like = self.params[0]
        self.memory = empty(layout.length, dtype=like.dtype, device=like.device)
        self.memory.zero_()
        self.views = layout.views(self.memory)
        for k, param in enumerate(self.params):
            self.hold(param, k)
        self.sent = (ranks - 1) * self.memory.nbytes // ranks

    @torch.no_grad()
    def hold(self, param: torch.Tensor, k: int) -> None:
        """Moves the values of a parameter to its place in the bucket."""
        self.views[k].copy_(param)
        param.data = self.views[k]

    def part(self, rank: int) -> torch.Tensor:
        """The part of a rank."""
        return self.memory[self.layout.bounds[rank] : self.layout.bounds[rank + 1]]

    def gather(self, group: Group) -> collectives.Work:
        """Starts to collect the parts of all ranks."""
        work = collectives.all_gather(
            self.memory, self.part(group.rank), group, async_op=True, splits=self.layout.splits
        )
        assert work is not None
        return work


def flat(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values of ``t`` in the order in which those of ``like``, of the same shape, lie in memory.

    A view of ``t`` if it lies in memory in the same way, else a copy.
    """
    if t.stride() != like.stride() and not (t.is_contiguous() and like.is_contiguous()):
        t = torch.empty_like(like, dtype=t.dtype).copy_(t)
    return t.as_strided((t.numel(),), (1,), t.storage_offset())
