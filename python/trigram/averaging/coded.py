"""The mean through codecs, in two phases: shards to their owners, means to all.

What cannot be summed on its route (8 bits, signs, the largest few) is not sent around a ring that would
encode it again at each hop: every rank reduces a shard of its own, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.codecs import Codec
from trigram.runtime.memory import empty


class CodedAverage:
    """Through codecs, in two legs: shards to their owners, means to all.

    Args:
        memory: ``padded`` many values of float32, float16 or bfloat16.
        groups: Where to talk.
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
        groups: ModelGroups,
        first: Codec,
        second: Codec,
        feedback: tuple[bool, bool],
        remainder: torch.Tensor | None = None,
    ) -> None:
        n = groups.size
        self.groups, self.first, self.second = groups, first, second
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
        self.out = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.inp = empty(n, one, dtype=torch.uint8, device=memory.device)
        self.mean = torch.empty(shard, device=memory.device)
        self.mine = empty(two, dtype=torch.uint8, device=memory.device)
        self.all = empty(n, two, dtype=torch.uint8, device=memory.device)
        self.sent = (n - 1) * (one + two)
        self.work: collectives.Work | None = None
        self.phase = 0
        self.round = 0

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.round = round
        for j, (shard, kept) in enumerate(zip(self.shards, self.kept, strict=True)):
            feeds = self.remainder is None
            self.first.encode(shard, self.out[j], kept, feeds, self._seed(j))
        self.phase = 1
        self.work = collectives.all_to_all(self.inp, self.out, group=self.groups.main, async_op=True)

    def _seed(self, shard: int) -> int:
        """A number of its own for each (round, rank, shard)."""
        n = self.groups.size
        return ((self.round * n + self.groups.rank) * (n + 1) + shard) * 0x9E3779B97F4A7C15

    def advance(self) -> bool:
        """See :class:`Average`."""
        if self.phase == 1 and self.work is not None and self.work.is_completed():
            self._reduce()
        return self.phase != 1

    def _reduce(self) -> None:
        """The shards are here: the mean of this rank's, to all."""
        assert self.work is not None
        self.work.wait()
        for j, code in enumerate(self.inp):
            self.first.decode(code, self.mean, None if j == 0 else 1.0, self.groups.main.ranks[j])
        self.mean /= self.groups.size
        self.second.encode(self.mean, self.mine, self.owned, True, self._seed(self.groups.size))
        self.phase = 2
        self.work = collectives.all_gather(self.all, self.mine, self.groups.second_phase, async_op=True)

    def ready(self) -> bool:
        """See :class:`Average`."""
        self.advance()
        return self.phase == 0 or (self.phase == 2 and self.work is not None and self.work.is_completed())

    def wait(self) -> None:
        """See :class:`Average`."""
        if self.phase == 1:
            self._reduce()
        if self.phase == 2 and self.work is not None:
            self.work.wait()
            self.phase, self.work = 0, None
            for j, (code, shard) in enumerate(zip(self.all, self.shards, strict=True)):
                self.second.decode(code, shard, None, self.groups.main.ranks[j])

    def await_end(self) -> None:
        """See :class:`Average`."""
        self.phase, work, self.work = 0, self.work, None
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
            mine = self.kept[self.groups.rank]
            assert mine is not None
            mine.add_(self.owned, alpha=self.groups.size)
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
