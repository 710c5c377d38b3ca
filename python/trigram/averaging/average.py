"""The mean of a flat tensor over all ranks, begun now and finished later: full, or through a codec.

Gradients are averaged this way bucket by bucket, and so are weights and their differences. What
is not summable on the way (8 bits, signs, the largest few) is not sent around a ring that would
code it again at each hop: every rank reduces a share of its own, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trigram.codecs.codec import Codec
from trigram.collectives import calls as collectives
from trigram.training.step_hooks import Channels

SHARD = 64
"""Shards are multiples of this many values."""


class Average(Protocol):
    """One flat tensor that becomes its mean over the ranks.

    Attributes:
        sent: Bytes that a rank sends in one round.
        calls: Calls that a round makes in the second group; once :meth:`advance` is true all are made.
    """

    sent: int
    calls: int

    def start(self, round: int) -> None:
        """Begins; the tensor belongs to the average until it is done."""

    def advance(self) -> bool:
        """Moves on without waiting; true once the last leg has begun."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would not wait; moves on."""

    def wait(self) -> None:
        """Waits for the end; then the tensor is the mean."""

    def forget(self) -> None:
        """Waits for what is under way to end, well or not."""

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What is remembered of each view into the tensor."""

    def fold(self) -> None:
        """Moves what is remembered otherwise to where :meth:`parts` finds it."""

    def state(self) -> dict[str, torch.Tensor]:
        """All that must be remembered between rounds."""

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """What :meth:`state` gave."""


def padded(length: int, ranks: int) -> int:
    """The length at which ``length`` values divide into shards."""
    shard = -(-length // ranks)
    return ranks * SHARD * -(-shard // SHARD)


class FullAverage:
    """The numbers themselves: AllReduce."""

    calls = 0

    def __init__(self, memory: torch.Tensor, channels: Channels) -> None:
        self.memory = memory
        self.channels = channels
        # What a bandwidth-optimal AllReduce sends.
        self.sent = 2 * (channels.size - 1) * memory.nbytes // channels.size
        self.work: collectives.Work | None = None

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.work = collectives.all_reduce(self.memory, "avg", None, self.channels.first, async_op=True)

    def advance(self) -> bool:
        """See :class:`Average`."""
        return True

    def ready(self) -> bool:
        """See :class:`Average`."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """See :class:`Average`."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()

    def forget(self) -> None:
        """See :class:`Average`."""
        self.wait()

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Nothing."""
        return [{} for _ in views]

    def fold(self) -> None:
        """Nothing."""

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Nothing."""


class CodedAverage:
    """Through codecs, in two legs: shards to their owners, means to all.

    Args:
        memory: ``padded`` many values of float32, float16 or bfloat16.
        channels: Where to talk.
        first: The codec of the shards.
        second: The codec of the means.
        feedback: Whether each leg adds what it lost before to what it sends.
        remainder: Where what the first leg loses is left, without being fed back; overrides
            ``feedback`` of the first leg.
    """

    calls = 1

    def __init__(
        self,
        memory: torch.Tensor,
        channels: Channels,
        first: Codec,
        second: Codec,
        feedback: tuple[bool, bool],
        remainder: torch.Tensor | None = None,
    ) -> None:
        n = channels.size
        self.channels, self.first, self.second = channels, first, second
        self.shards = list(memory.view(n, -1))
        shard = memory.numel() // n
        self.remainder = remainder
        if feedback[0] and remainder is None:
            self.residual: torch.Tensor | None = torch.zeros(memory.numel(), device=memory.device)
        else:
            self.residual = None
        kept = self.residual if remainder is None else remainder
        self.kept: list[torch.Tensor] | list[None] = [None] * n if kept is None else list(kept.view(n, -1))
        self.owned = torch.zeros(shard, device=memory.device) if feedback[1] else None
        one, two = first.size(shard), second.size(shard)
        self.out = collectives.empty(n, one, dtype=torch.uint8, device=memory.device)
        self.inp = collectives.empty(n, one, dtype=torch.uint8, device=memory.device)
        self.mean = torch.empty(shard, device=memory.device)
        self.mine = collectives.empty(two, dtype=torch.uint8, device=memory.device)
        self.all = collectives.empty(n, two, dtype=torch.uint8, device=memory.device)
        self.sent = (n - 1) * (one + two)
        self.work: collectives.Work | None = None
        self.leg = 0
        self.round = 0

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.round = round
        for j, (shard, kept) in enumerate(zip(self.shards, self.kept, strict=True)):
            feeds = self.remainder is None
            self.first.encode(shard, self.out[j], kept, feeds, self._seed(j))
        self.leg = 1
        self.work = collectives.all_to_all(self.inp, self.out, group=self.channels.first, async_op=True)

    def _seed(self, shard: int) -> int:
        """A number of its own for each (round, rank, shard)."""
        n = self.channels.size
        return ((self.round * n + self.channels.rank) * (n + 1) + shard) * 0x9E3779B97F4A7C15

    def advance(self) -> bool:
        """See :class:`Average`."""
        if self.leg == 1 and self.work is not None and self.work.is_completed():
            self._reduce()
        return self.leg != 1

    def _reduce(self) -> None:
        """The shards are here: the mean of this rank's, to all."""
        assert self.work is not None
        self.work.wait()
        for j, code in enumerate(self.inp):
            self.first.decode(code, self.mean, None if j == 0 else 1.0, self.channels.first.ranks[j])
        self.mean /= self.channels.size
        self.second.encode(self.mean, self.mine, self.owned, True, self._seed(self.channels.size))
        self.leg = 2
        self.work = collectives.all_gather(self.all, self.mine, self.channels.second, async_op=True)

    def ready(self) -> bool:
        """See :class:`Average`."""
        self.advance()
        return self.leg == 0 or (self.leg == 2 and self.work is not None and self.work.is_completed())

    def wait(self) -> None:
        """See :class:`Average`."""
        if self.leg == 1:
            self._reduce()
        if self.leg == 2 and self.work is not None:
            self.work.wait()
            self.leg, self.work = 0, None
            for j, (code, shard) in enumerate(zip(self.all, self.shards, strict=True)):
                self.second.decode(code, shard, None, self.channels.first.ranks[j])

    def forget(self) -> None:
        """See :class:`Average`."""
        self.leg, work, self.work = 0, self.work, None
        if work is not None:
            work.wait()

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """This rank's residual."""
        if self.residual is None:
            return [{} for _ in views]
        base = self.shards[0].storage_offset()
        at = [v.storage_offset() - base for v in views]
        return [{"residual": self.residual[a : a + v.numel()]} for a, v in zip(at, views, strict=True)]

    def fold(self) -> None:
        """What the means lost goes to this rank's residual, times the ranks: so it stays in the mean."""
        if self.owned is not None and self.residual is not None:
            mine = self.kept[self.channels.rank]
            assert mine is not None
            mine.add_(self.owned, alpha=self.channels.size)
            self.owned.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's residual, and what the means lost."""
        kept = {"residual": self.residual, "owned": self.owned}
        return {k: t.clone() for k, t in kept.items() if t is not None}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        for mine, name in ((self.residual, "residual"), (self.owned, "owned")):
            if mine is not None:
                mine.copy_(state[name])
