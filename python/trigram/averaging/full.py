"""The mean of uncompressed values: one all-reduce."""

from __future__ import annotations

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups


class FullAverage(Average):
    """The mean by one all-reduce."""

    name = "all_reduce"

    def __init__(self, memory: torch.Tensor, groups: ModelGroups) -> None:
        self.memory = memory
        self.groups = groups
        # What a bandwidth-optimal all-reduce sends.
        self.sent = 2 * (groups.size - 1) * memory.nbytes // groups.size

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        yield collectives.all_reduce(self.memory, "avg", None, self.groups.main, async_op=True)
