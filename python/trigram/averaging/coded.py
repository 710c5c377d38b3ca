"""An average through codecs, in two phases: shards to their owners, results to all.

Encoded values (8 bits, signs, top-k) cannot be summed without decoding, and a ring would decode and encode
them again at each hop. Instead every rank owns one shard and reduces it in float32. What it makes of the
shards of all ranks is an :class:`Owner`: their mean, or a robust aggregation (``robust.py``).
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


class Owner:
    """What the owner of a shard makes of the shards of all ranks: their mean, in float32.

    Attributes:
        calls: How many calls it makes.
        leaves_out_silent: See :class:`Average`.
        tail: Bytes that go to all ranks after the encoded result.
        dtype: In which it computes.
    """

    calls = 0
    leaves_out_silent = False
    tail = 0
    dtype = torch.float32

    def reduce(self, average: CodedAverage) -> Phases:
        """Reduces ``average.received`` into ``average.result``: starts each call and yields it, as
        :class:`Exchange`."""
        for j, code in enumerate(average.received):
            average.first.decode(code, average.result, None if j == 0 else 1.0, average.groups.main.ranks[j])
        average.result /= average.groups.size
        yield from ()

    def finish(self, average: CodedAverage) -> None:
        """All ranks have the results of all owners."""

    def bytes_sent(self, ranks: int) -> int:
        """What its own calls send."""
        return 0

    def parts(self, views: Sequence[torch.Tensor], base: int) -> list[dict[str, torch.Tensor]]:
        """Its state of each view, by name; ``base``: where the tensor begins in its storage."""
        return [{} for _ in views]

    def state(self) -> dict[str, torch.Tensor]:
        """Its state between averaging steps."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what :meth:`state` returned."""


class CodedAverage(Average):
    """An :class:`~trigram.averaging.average.Average` through codecs: an all-to-all, then an all-gather.

    Args:
        memory: One-dimensional, float32, float16 or bfloat16; its length is a result of ``padded``.
        groups: The model's process groups.
        first: The codec of the first phase: each rank sends each shard to its owner.
        second: The codec of the second phase: each owner sends its result to all ranks.
        feedback: For each phase, whether it adds the error of its last encoding to the next (error feedback).
        remainder: float32, as long as ``memory``: receives the encoding error of the first phase, which is
            then not fed back, whatever ``feedback`` says.
        owner: What the owner of a shard makes of it; None: the mean.

    Attributes:
        received: The encoded shards of all ranks that this rank owns, one in each row.
        result: What this rank makes of them.
        tails: What each owner sends after its encoded result.
        residual: The encoding error of the first phase, float32, as long as ``memory``; None without
            feedback.
        mean_residual: The encoding error of the second phase, float32, one shard; None without feedback.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        groups: ModelGroups,
        first: Codec,
        second: Codec,
        feedback: tuple[bool, bool],
        remainder: torch.Tensor | None = None,
        owner: Owner | None = None,
    ) -> None:
        n = groups.size
        self.memory, self.groups, self.first, self.second = memory, groups, first, second
        self.owner = Owner() if owner is None else owner
        self.calls, self.leaves_out_silent = 1 + self.owner.calls, self.owner.leaves_out_silent
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
        one, two = first.size(shard), second.size(shard) + self.owner.tail
        self.encoded_shards = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.received = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.result = torch.empty(shard, dtype=self.owner.dtype, device=memory.device)
        self.encoded_result = empty(two, dtype=torch.uint8, device=memory.device)
        self.encoded_results = empty(n, two, dtype=torch.uint8, device=memory.device)
        at = second.size(shard)
        self.codes, self.tails = self.encoded_results[:, :at], self.encoded_results[:, at:]
        self.code, self.tail = self.encoded_result[:at], self.encoded_result[at:].zero_()
        self.sent = (n - 1) * (one + two) + self.owner.bytes_sent(n)
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
        self.step = step
        feeds = self.remainder is None
        with self.held.held_back(self.memory):
            for j, (shard, kept) in enumerate(zip(self.shards, self.kept, strict=True)):
                self.first.encode(shard, self.encoded_shards[j], kept, feeds, self._seed(j))
        yield collectives.all_to_all(
            self.received, self.encoded_shards, group=self.groups.main, async_op=True
        )
        yield from self.owner.reduce(self)
        with self.held_mean.held_back(self.result):  # a part that is 0 has nothing to send
            self.second.encode(self.result, self.code, self.mean_residual, True, self._seed(self.groups.size))
        yield collectives.all_gather(
            self.encoded_results, self.encoded_result, self.groups.second_phase, async_op=True
        )
        for j, (code, shard) in enumerate(zip(self.codes, self.shards, strict=True)):
            self.second.decode(code, shard, None, self.groups.main.ranks[j])
        self.owner.finish(self)

    def _seed(self, shard: int) -> int:
        """A different seed for each (step, rank, shard)."""
        n = self.groups.size
        return ((self.step * n + self.groups.rank) * (n + 1) + shard) * 0x9E3779B97F4A7C15

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The first phase's residual, and the owner's state."""
        base = self.shards[0].storage_offset()
        found = self.owner.parts(views, base)
        if self.residual is not None:
            for view, part in zip(views, found, strict=True):
                at = view.storage_offset() - base
                part["residual"] = self.residual[at : at + view.numel()]
        return found

    def fold(self) -> None:
        """Moves the second phase's error into this rank's residual, times the ranks, so that the mean keeps
        it."""
        if self.mean_residual is not None and self.residual is not None:
            mine = self.kept[self.groups.rank]
            assert mine is not None
            mine.add_(self.mean_residual, alpha=self.groups.size)
            self.mean_residual.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """The residuals of both phases, and the owner's state."""
        kept = {"residual": self.residual, "owned": self.mean_residual}
        return {k: t.clone() for k, t in kept.items() if t is not None} | self.owner.state()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        for mine, name in ((self.residual, "residual"), (self.mean_residual, "owned")):
            if mine is not None:
                mine.copy_(state[name])
        self.owner.load(state)
