"""What `trigram bench` measures: the buffers of an operation at one size, and their expected contents.

The input of a rank is a hash of (rank, index), so each rank computes the inputs of all others without any
communication: the check uses nothing of the library it checks, and needs the memory of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 1 << 20
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
}
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
# In these some ranks end before others begin: without a barrier between iterations they would run ahead.
ONE_WAY = ("reduce", "broadcast", "send_recv")
IN_PLACE = ("all_reduce", "reduce", "broadcast", "barrier")
EXACT = ("min", "max", "band", "bor", "bxor")


class Allocate(Protocol):
    """`torch.empty` or `trigram.empty`."""

    def __call__(self, count: int, /, *, dtype: torch.dtype) -> Tensor:
        """`count` uninitialized elements."""
        ...


@dataclass(frozen=True)
class Case:
    """One operation at one size, as this rank sees it."""

    operation: str
    op: str
    rank: int
    world: int
    t: Tensor
    out: Tensor

    @classmethod
    def make(
        cls,
        operation: str,
        size: int,
        *,
        rank: int,
        world: int,
        op: str = "sum",
        dtype: torch.dtype = torch.float32,
        allocate: Allocate = torch.empty,
    ) -> Case:
        """Allocates the buffers for `size` bytes (over all ranks, where an operation splits or gathers).

        Args:
            operation: Such as "all_reduce".
            size: Bytes; rounded down to whole elements and equal parts per rank, at least one element each.
            rank: This rank.
            world: The number of ranks.
            op: The reduction; ignored by operations that do not reduce.
            dtype: The elements' type.
            allocate: Makes the tensors.
        """
        count = max(1, size // dtype.itemsize)
        part = max(1, count // world)
        degree = len(ring_neighbours(rank, world))
        length, result = {
            "all_gather": (part, part * world),
            "reduce_scatter": (part * world, part),
            "all_to_all": (part * world, part * world),
            "send_recv": (count, count),
            "gossip": (count, count * degree),
            "barrier": (0, 0),
        }.get(operation, (count, 0))
        return cls(operation, op, rank, world, allocate(length, dtype=dtype), allocate(result, dtype=dtype))

    @property
    def bytes(self) -> int:
        """The number in the size column."""
        whole = self.out if self.operation == "all_gather" else self.t
        return whole.nbytes

    @property
    def bus_factor(self) -> float:
        """Bytes through a rank's link per byte of the size, as in nccl-tests: busbw = algbw x this."""
        others = (self.world - 1) / self.world
        return {
            "all_reduce": 2 * others,
            "all_gather": others,
            "reduce_scatter": others,
            "all_to_all": others,
            "gossip": len(self.neighbours),
        }.get(self.operation, 1.0)

    @cached_property
    def neighbours(self) -> list[int]:
        """The ranks with which `gossip` swaps tensors."""
        return ring_neighbours(self.rank, self.world)

    @property
    def partner(self) -> int | None:
        """The other rank of `send_recv`: 2i for 2i + 1 and the reverse; None for an unpaired last rank."""
        other = self.rank ^ 1
        return other if other < self.world else None

    @property
    def repeats(self) -> int:
        """How often the checked call is made: twice, so that an overlap of two calls shows in the result."""
        return 1 if self.operation == "reduce" else 2

    def fill(self) -> None:
        """Fills the buffers with this rank's input."""
        for start in range(0, self.t.numel(), BLOCK):
            part = self.t[start : start + BLOCK]
            part.copy_(self._values(self.rank, torch.arange(start, start + len(part))))
        self.out.zero_()

    def wrong(self) -> int:
        """The number of wrong elements in this rank's result after `fill` and `repeats` calls."""
        total = 0
        for start in range(0, self._result.numel(), BLOCK):
            got = self._result[start : start + BLOCK].cpu()
            must, slack = self._expected(torch.arange(start, start + len(got)))
            near = (got.to(must.dtype) - must).abs() <= slack
            total += int(((got != must.to(got.dtype)) & ~near).sum())
        return total

    @property
    def _result(self) -> Tensor:
        no_result = {"reduce": self.rank != 0, "send_recv": self.partner is None}
        if no_result.get(self.operation, False):
            return self.t[:0]
        return self.t if self.operation in IN_PLACE else self.out

    def _expected(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The expected elements at `index`, and the rounding error to tolerate."""
        if self.operation in REDUCTIONS:
            at = index + self.rank * self.out.numel() if self.operation == "reduce_scatter" else index
            inputs = [self._values(rank, at) for rank in range(self.world)]
            # all_reduce works in place: the second call reduces `world` copies of the first result.
            again = self.operation == "all_reduce"
            must = self._combined(inputs, again)
            if self.op in EXACT or not must.is_floating_point():
                return must, torch.zeros(())
            info = torch.finfo(self.t.dtype)
            magnitude = self._combined([values.abs() for values in inputs], again)
            return must, info.tiny + 2 * info.eps * self.world * magnitude
        source: int | Tensor = 0
        match self.operation:
            case "all_gather":
                source, index = index // self.t.numel(), index % self.t.numel()
            case "all_to_all":
                part = self.t.numel() // self.world
                source, index = index // part, index % part + self.rank * part
            case "gossip":
                source = torch.tensor(self.neighbours)[index // self.t.numel()]
                index = index % self.t.numel()
            case "send_recv":
                source = self.partner or 0
        return self._values(source, index), torch.zeros(())

    def _combined(self, inputs: list[Tensor], again: bool) -> Tensor:
        scale = 1 / self.world if self.op == "avg" else 1
        once = reduce(COMBINE[self.op], inputs) * scale
        return reduce(COMBINE[self.op], [once] * self.world) * scale if again else once

    def _values(self, rank: int | Tensor, index: Tensor) -> Tensor:
        """Elements of a rank's input, rounded to the type in use and widened to float64 or int64."""
        mixed = (index + rank * 0x9E3779B97F4A7C) * 0x5851F42D4C957F2D
        mixed = (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F
        bits = (mixed >> 32) & 0xFFFFFF
        if not self.t.is_floating_point():
            return bits % 100
        unit = bits.double() / (1 << 23) - 1
        # Near one, so that the product over many ranks stays within the range of float16.
        return (1 + unit / 8 if self.op == "prod" else unit).to(self.t.dtype).double()


def ring_neighbours(rank: int, world: int) -> list[int]:
    """The one or two neighbours of a rank on a ring, the left one first."""
    return (
        [] if world == 1 else sorted({(rank - 1) % world, (rank + 1) % world}, key=lambda other: other > rank)
    )
