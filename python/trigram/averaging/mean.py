"""The mean of any tensors, now: consensus weights, buffers, an optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.average import padded
from trigram.averaging.groups import ModelGroups
from trigram.averaging.robust import RobustAverage
from trigram.averaging.sample_weight import SampleWeight
from trigram.collectives import coalesced


def mean_of(tensors: Sequence[torch.Tensor], groups: ModelGroups, share: SampleWeight | None = None) -> None:
    """Gives all ranks the mean of each tensor, now. Integers: those of the group's first rank.

    Where averages follow a robust rule, so do these. With a share they are weighted means.
    """
    rule, n = groups.aggregation, groups.size
    side = groups.control
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    for same in coalesced.alike(floats):
        both = coalesced.Coalesced(same, None, None if rule is None else lambda total: padded(total, n))
        both.pack()
        if rule is not None:
            now = RobustAverage(both.memory, groups, rule.without_history())
            now.start(-1)
            now.wait()
        else:
            if share is not None:
                share.weigh(both.memory)
            collectives.all_reduce(both.memory, "avg", None, side)
            if share is not None:
                share.settle(both.memory)
        both.unpack()
    others = [t for t in tensors if not t.is_floating_point() and t.numel()]
    coalesced.broadcast(others, 0, side)
