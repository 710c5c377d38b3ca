"""Buckets of gradients that are reduced and divided: each rank keeps the mean of its part.

The gradients of a bucket are copied to registered memory that a few buckets share in turn, so that a rank
holds its parts, and whole gradients only of the buckets under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases, Together
from trigram.averaging.groups import ModelGroups
from trigram.gradients.buckets import Bucket
from trigram.gradients.compressors import GradientCompressor
from trigram.gradients.in_parts import ShardedGradient
from trigram.observe import spans
from trigram.runtime.memory import empty
from trigram.sharded.weights.weight_buckets import Layout, allot, divide


@dataclass
class _Place:
    """Registered memory that buckets use in turn."""

    memory: torch.Tensor
    user: ShardBucket | None = None


class _Turns:
    """Memory for whole gradients of one dtype and device."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.next = 0

    def take(self, bucket: ShardBucket, length: int) -> torch.Tensor:
        """Memory for a bucket; waits for the bucket that used it before."""
        most = ShardBucket.in_turn
        if len(self.places) < most:
            self.places.append(_Place(torch.empty(0, device="cpu")))
        place = self.places[self.next % most if len(self.places) == most else -1]
        self.next += 1
        if place.user is not None:
            place.user.average.wait()
        if place.memory.numel() < length:
            place.memory = empty(length, dtype=bucket.dtype, device=bucket.device)
        place.user = bucket
        return place.memory[:length]


class ReduceScatter(Average):
    """An :class:`~trigram.averaging.average.Average` of which each rank keeps its part. Flags that the bucket
    has go along in a call of their own: each rank needs them all."""

    name = "reduce_scatter"

    def __init__(self, bucket: ShardBucket, groups: ModelGroups) -> None:
        self.bucket, self.groups = bucket, groups
        self.sent = (groups.size - 1) * bucket.nbytes // groups.size

    def phases(self, step: int) -> Phases:
        """See :class:`~trigram.averaging.exchange.Exchange`."""
        bucket, main = self.bucket, self.groups.main
        works = [
            collectives.reduce_scatter(
                bucket.part, bucket.memory, "avg", main, async_op=True, splits=bucket.layout.splits
            )
        ]
        if bucket.flags is not None:
            works.append(collectives.all_reduce(bucket.flags, "max", None, main, async_op=True))
        yield Together(works)


class ShardBucket(Bucket):
    """Parameters of one dtype whose gradients are reduced and divided together.

    Args:
        fused: The bucket is used as soon as its mean is there, so it has flags.

    Attributes:
        layout: How the bucket is divided.
        part: The means of this rank's part.
    """

    def __init__(
        self, layout: Layout, params: Sequence[torch.Tensor], groups: ModelGroups, turns: _Turns, fused: bool
    ) -> None:
        like = params[layout.indices[0]]
        self.layout, self.turns, self.groups = layout, turns, groups
        self.dtype, self.device = like.dtype, like.device
        self.params = list(layout.indices)
        self.tensors = tuple(params[i] for i in layout.indices)
        self.gaps = self.backup = None
        self.flags = torch.empty(len(self.params), dtype=torch.uint8, device="cpu") if fused else None
        self.calls = 2 if fused else 1
        self.nbytes = layout.length * like.dtype.itemsize
        self.memory = self.values = torch.empty(0, dtype=self.dtype, device=self.device)
        self.views = [self.memory for _ in self.params]
        lo, hi = layout.bounds[groups.rank], layout.bounds[groups.rank + 1]
        self.part = empty(hi - lo, dtype=self.dtype, device=self.device)
        self.part.zero_()
        parts: dict[int, torch.Tensor] = {}
        for k, start, stop in layout.pieces(groups.rank):
            begins = layout.offsets[k] + start - lo
            parts[k] = self.part[begins : begins + stop - start]
        self.gradients = [
            ShardedGradient(params[i], parts.get(k), groups.main) for k, i in enumerate(layout.indices)
        ]
        self.unused: list[int] = []
        self.held: list[int] = []
        self.outside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent = False
        self.span: spans.Span | None = None
        self.average = ReduceScatter(self, groups)

    keeps_gradients = False
    in_turn = 3

    @property
    def mean(self) -> torch.Tensor:
        """This rank's part."""
        return self.part

    def ready(self) -> None:
        """Nothing refers to the gradients."""

    def is_held_by_script(self) -> bool:
        """No: parameters have no views of this memory."""
        return False

    def is_kept_by_script(self, params: Sequence[torch.Tensor], param: int | None = None) -> bool:
        """No, likewise."""
        return False

    def collect(self, params: Sequence[torch.Tensor], copies: bool = False) -> None:
        """Moves the gradients into ``memory``; see :class:`Bucket`."""
        self.memory = self.values = self.turns.take(self, self.layout.length)
        self.memory.zero_()
        to, given = [], []
        self.views = self.layout.views(self.memory)
        for k, (i, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = params[i].grad
            if grad is None:
                self.unused.append(k)
            else:
                to.append(view)
                given.append(grad)
                params[i].grad = None
        if to:
            torch._foreach_copy_(to, given)
        if self.flags is not None:
            self.flags.fill_(1)
            for k in self.unused:
                self.flags[k] = 0
        self.sent = True

    def assign(self, params: Sequence[torch.Tensor], used: torch.Tensor | None) -> None:
        """After the average: the parameters get their gradients, of which this rank has a part."""
        used = self.flags if used is None else used
        assert used is not None
        for i, gradient, anybody in zip(self.params, self.gradients, used.tolist(), strict=True):
            gradient.begin()
            if anybody and not gradient.numel():  # nothing that could be divided; any optimizer may have it
                params[i].grad = torch.zeros_like(params[i])
            else:
                params[i].grad = gradient if anybody else None


class ShardsCompressor(GradientCompressor):
    """Gradients in full, of which each rank keeps a part.

    Args:
        whole: Whether parameters belong to one rank each.
        fused: Whether buckets are updated in backward.
    """

    def __init__(self, whole: bool, fused: bool) -> None:
        self.whole, self.fused = whole, fused
        self.loads: list[int] = []
        self.turns: dict[tuple[torch.dtype, torch.device], _Turns] = {}

    def begin(self, ranks: int) -> None:
        """All buckets are made anew."""
        self.loads = [0] * ranks

    def bucket(self, indices: Sequence[int], params: Sequence[torch.Tensor], groups: ModelGroups) -> Bucket:
        """A bucket that is divided."""
        layout = allot(params, indices, self.loads) if self.whole else divide(params, indices, groups.size)
        like = params[indices[0]]
        turns = self.turns.setdefault((like.dtype, like.device), _Turns())
        return ShardBucket(layout, params, groups, turns, self.fused)


def layouts(buckets: Sequence[Bucket]) -> list[Layout]:
    """How the buckets are divided."""
    return [cast(ShardBucket, b).layout for b in buckets]
