"""The mean of all ranks' values, exactly as an all-reduce makes it, through codes that lose nothing.

What a rank contributes is often 16 bits in 32 (gradients under ``torch.autocast``), the sum is not. So with
few ranks each sends the code of all it has to all others, and each adds up: n - 1 codes of 11 bits for a
value. With more, each rank sends the code of each shard to its owner, which sends that of the mean to all.
Values are added in the order of the ranks, as an all-reduce does inside a host, and by scatter-gather between
hosts; a ring or a tree adds in another order, which with three ranks or more rounds in another way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.codecs import lossless
from trigram.errors import CorruptError
from trigram.runtime.memory import empty

MOST_TO_ALL = 2
"""The most ranks with which all send all to all. Three would send 0.7 of the values' bytes then, and 0.8 in
two phases; but 1.7 and 1.15 where values have all their bits."""


class LosslessAverage(Average):
    """Averages one tensor over the ranks in place; the bits are those of a sum in the order of the ranks.

    All lengths of codes are exchanged before the codes, for all ranks make the same calls.

    Args:
        memory: One-dimensional, float32, on the CPU; its length is a result of ``padded``.
        groups: The model's process groups.

    Attributes:
        sent: Bytes that this rank has sent in the last averaging step.
    """

    def __init__(self, memory: torch.Tensor, groups: ModelGroups) -> None:
        n, size = groups.size, memory.numel()
        self.memory, self.groups = memory, groups
        self.to_all = n <= MOST_TO_ALL
        self.calls = 1 if self.to_all else 3
        self.shards = [memory] if self.to_all else list(memory.view(n, -1))
        self.codes = empty(sum(lossless.most(len(s)) for s in self.shards), dtype=torch.uint8, device="cpu")
        self.received = empty(
            n * lossless.most(size // (1 if self.to_all else n)), dtype=torch.uint8, device="cpu"
        )
        self.lengths = torch.zeros(n, len(self.shards), dtype=torch.int64, device="cpu")
        self.owned = torch.zeros(n, dtype=torch.int64, device="cpu")
        summed = 0 if n == 2 else len(self.shards[0])
        self.total = torch.empty(summed, dtype=torch.float32, device="cpu")
        self.sent = 2 * (n - 1) * memory.nbytes // n

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        groups, rank, n = self.groups, self.groups.rank, self.groups.size
        at = 0
        for k, shard in enumerate(self.shards):  # one after the other, as an all-to-all takes them
            length = lossless.encode(shard, self.codes[at:])
            self.lengths[rank, k] = length
            at += length
        codes, mine = self.codes[:at], self.lengths[rank]
        yield collectives.all_gather(self.lengths, mine.clone(), group=groups.main, async_op=True)
        lengths = self.lengths.tolist()
        self._check_lengths(lengths)
        if self.to_all:
            sizes = [row[0] for row in lengths]
            self.sent = (n - 1) * (at + 8)
            received = self.received[: sum(sizes)]
            yield collectives.all_gather(received, codes, groups.second_phase, async_op=True, splits=sizes)
            self._sum(received.split(sizes), self.memory)
            return
        sizes = [row[rank] for row in lengths]
        received = self.received[: sum(sizes)]
        yield collectives.all_to_all(
            received, codes, sizes, lengths[rank], group=groups.second_phase, async_op=True
        )
        own = self.shards[rank]
        self._sum(received.split(sizes), own)
        length = lossless.encode(own, self.codes)
        self.owned[rank] = length
        yield collectives.all_gather(
            self.owned, self.owned[rank : rank + 1].clone(), groups.second_phase, async_op=True
        )
        sizes = self.owned.tolist()
        self._check_lengths([[size] for size in sizes])
        self.sent = at - lengths[rank][rank] + (n - 1) * (length + 8 * (n + 1))
        received = self.received[: sum(sizes)]
        yield collectives.all_gather(
            received, self.codes[:length], groups.second_phase, async_op=True, splits=sizes
        )
        for j, code in enumerate(received.split(sizes)):
            if j != rank:
                lossless.decode(code, self.shards[j], sender=groups.main.ranks[j])

    def _check_lengths(self, lengths: Sequence[Sequence[int]]) -> None:
        """Raises if a rank announces a code longer than one can be: others would be read in wrong places."""
        most = lossless.most(len(self.shards[0]))
        for j, row in enumerate(lengths):
            wrong = [length for length in row if not 0 <= length <= most]
            if wrong:
                sender = self.groups.main.ranks[j]
                raise CorruptError(
                    f"lossless: rank {sender} announces a code of {wrong[0]} bytes; "
                    f"{len(self.shards[0])} values take {most} at most",
                    sender,
                )

    def _sum(self, codes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The mean of the codes of all ranks, in the order of the ranks, as an all-reduce adds them."""
        ranks, rank, n = self.groups.main.ranks, self.groups.rank, self.groups.size
        if n == 2:  # a + b is b + a
            lossless.decode(codes[1 - rank], out, add=True, ranks=n, sender=ranks[1 - rank])
            return
        for j, code in enumerate(codes):
            lossless.decode(code, self.total, j > 0, n if j == n - 1 else 0, ranks[j])
        out.copy_(self.total)
