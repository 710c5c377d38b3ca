"""The mean through codecs, in two phases: shards to their owners, means to all.

Encoded values (8 bits, signs, top-k) cannot be summed without decoding, and a ring would decode and encode
them again at each hop. Instead every rank owns one shard and reduces it in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.averaging.held_residual import HeldResidual, positions
from trigram.codecs import Codec
from trigram.runtime.memory import empty


class CodedAverage(Average):
    """An :class:`~trigram.averaging.average.Average` through codecs: an all-to-all, then an all-gather.

    Args:
        memory: One-dimensional, float32, float16 or bfloat16; its length is a result of ``padded``.
        groups: The model's process groups.
        first: The codec of the first phase: each rank sends each shard to its owner.
        second: The codec of the second phase: each owner sends its mean to all ranks.
        feedback: For each phase, whether it adds the error of its last encoding to the next (error feedback).
        remainder: float32, as long as ``memory``: receives the encoding error of the first phase, which is
            then not fed back, whatever ``feedback`` says.

    Attributes:
        residual: The encoding error of the first phase, float32, as long as ``memory``; None without
            feedback.
        mean_residual: The encoding error of the second phase, float32, one shard; None without feedback.
    """

    calls = 1

    def __init__(
        self,
        memory: torch.Tensor,
        groups: ModelGroups,
        first: Codec,
        second: Codec,
        feedback: tuple[bool, bool],
        remainder: torch.Tensor | None = None,
    ) -> None:
        n = groups.size
        self.memory, self.groups, self.first, self.second = memory, groups, first, second
        self.shards = list(memory.view(n, -1))
        shard = memory.numel() // n
        self.remainder = remainder
        if feedback[0] and remainder is None:
            self.residual: torch.Tensor | None = torch.zeros(
                memory.numel(), dtype=torch.float32, device=memory.device
            )
        else:
            self.residual = None
        kept = self.residual if remainder is None else remainder
        self.kept: list[torch.Tensor] | list[None] = [None] * n if kept is None else list(kept.view(n, -1))
        self.mean_residual = (
            torch.zeros(shard, dtype=torch.float32, device=memory.device) if feedback[1] else None
        )
        self.held, self.held_mean = HeldResidual(self.residual), HeldResidual(self.mean_residual)
        one, two = first.size(shard), second.size(shard)
        self.encoded_shards = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.received = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.mean = torch.empty(shard, dtype=torch.float32, device=memory.device)
        self.encoded_mean = empty(two, dtype=torch.uint8, device=memory.device)
        self.encoded_means = empty(n, two, dtype=torch.uint8, device=memory.device)
        self.sent = (n - 1) * (one + two)
        self.step = 0

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """See :class:`Average`."""
        self.held.hold(positions(views, self.memory))
        self.held_mean.hold(positions(views, self.shards[self.groups.rank]))

    def settle(self, unused: Sequence[bool]) -> None:
        """See :class:`Average`."""
        self.held.settle(unused)
        self.held_mean.settle(unused)

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        yield self._send_shards(step)
        for j, code in enumerate(self.received):
            self.first.decode(code, self.mean, None if j == 0 else 1.0, self.groups.main.ranks[j])
        self.mean /= self.groups.size
        self._encode_mean(self.encoded_mean)
        yield self._gather_means()
        for j, (code, shard) in enumerate(zip(self.encoded_means, self.shards, strict=True)):
            self.second.decode(code, shard, None, self.groups.main.ranks[j])

    def _send_shards(self, step: int) -> collectives.Work | None:
        """Each shard, encoded, to the rank that owns it."""
        self.step = step
        feeds = self.remainder is None
        with self.held.held_back(self.memory):
            for j, (shard, kept) in enumerate(zip(self.shards, self.kept, strict=True)):
                self.first.encode(shard, self.encoded_shards[j], kept, feeds, self._seed(j))
        return collectives.all_to_all(
            self.received, self.encoded_shards, group=self.groups.main, async_op=True
        )

    def _gather_means(self) -> collectives.Work | None:
        """What each rank has made of its shard, encoded, to all ranks."""
        return collectives.all_gather(
            self.encoded_means, self.encoded_mean, self.groups.second_phase, async_op=True
        )

    def _seed(self, shard: int) -> int:
        """A different seed for each (step, rank, shard)."""
        n = self.groups.size
        return ((self.step * n + self.groups.rank) * (n + 1) + shard) * 0x9E3779B97F4A7C15

    def _encode_mean(self, out: torch.Tensor) -> None:
        """Encodes the mean of the shard that this rank owns. A part that is 0 has nothing to send."""
        with self.held_mean.held_back(self.mean):
            self.second.encode(self.mean, out, self.mean_residual, True, self._seed(self.groups.size))

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The first phase's residual."""
        if self.residual is None:
            return [{} for _ in views]
        base = self.shards[0].storage_offset()
        at = [v.storage_offset() - base for v in views]
        return [{"residual": self.residual[a : a + v.numel()]} for a, v in zip(at, views, strict=True)]

    def fold(self) -> None:
        """Moves the second phase's error into this rank's residual, times the ranks, so that the mean keeps
        it."""
        if self.mean_residual is not None and self.residual is not None:
            mine = self.kept[self.groups.rank]
            assert mine is not None
            mine.add_(self.mean_residual, alpha=self.groups.size)
            self.mean_residual.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """The residuals of both phases."""
        kept = {"residual": self.residual, "owned": self.mean_residual}
        return {k: t.clone() for k, t in kept.items() if t is not None}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        for mine, name in ((self.residual, "residual"), (self.mean_residual, "owned")):
            if mine is not None:
                mine.copy_(state[name])
