"""The mean of what all ranks encode, gathered by all: for codes so sparse that a second phase would lose the
mean.

Few ranks choose the same places, so that the mean of n sparse codes has up to n times as many values as one
of them. Encoded again it would keep a n-th of them.
"""

from __future__ import annotations

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.codecs import Codec
from trigram.runtime.memory import empty


class GatheredAverage(Average):
    """Averages one tensor over the ranks in place, by an all-gather of its codes; the same bits on all ranks.

    Args:
        memory: One-dimensional, float32.
        groups: The model's process groups.
        codec: Encodes each rank's values.
        remainder: float32, as long as ``memory``: receives the encoding error of this rank.
    """

    def __init__(
        self, memory: torch.Tensor, groups: ModelGroups, codec: Codec, remainder: torch.Tensor
    ) -> None:
        self.memory, self.groups, self.codec, self.remainder = memory, groups, codec, remainder
        n, size = groups.size, codec.size(memory.numel())
        self.mine = empty(size, dtype=torch.uint8, device=memory.device)
        self.all = empty(n, size, dtype=torch.uint8, device=memory.device)
        self.sent = (n - 1) * size

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        self.codec.encode(self.memory, self.mine, self.remainder, False)
        yield collectives.all_gather(self.all, self.mine, self.groups.main, async_op=True)
        ranks = self.groups.main.ranks
        for j, code in enumerate(self.all):
            self.codec.decode(code, self.memory, None if j == 0 else 1.0, ranks[j])
        self.memory /= self.groups.size
