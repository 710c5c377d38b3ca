"""Compressed averages in two levels: full numbers inside a host, codes between hosts.

For GPUs whose hosts are joined by a slow network. The ranks of a host sum what they have (NCCL), each
encodes the share that it owns on its GPU, codes travel along the two (:mod:`trigram.two`), and the
means are given to all GPUs of the host. A rank sends 1/L of what it would send on its own, and codes are
made of sums over a host, of which fewer are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from trigram.averaging.average import SHARD, Average
from trigram.averaging.groups import ModelGroups
from trigram.errors import TrigramError
from trigram.gpu import device, routes
from trigram.gpu.two_level import TwoLevelGroups
from trigram.runtime import engine_codes
from trigram.runtime.world import current

_SUM = engine_codes.OPS["sum"]


class HostLevels:
    """The levels of a model's ranks, with groups for what travels along the two.

    Args:
        groups: The model's.
    """

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self.along: ModelGroups | None = None
        self.broken = True
        self.begin()

    def begin(self) -> None:
        """What was given up begins anew, in new groups: ranks had come to different calls of the old."""
        if self.broken:
            self.two = TwoLevelGroups(self.groups.control, routes.start)
            if self.along is not None and self.two.across is not None:
                self.along.renew(self.two.across)
            elif self.two.across is not None:
                self.along = ModelGroups(self.two.across)
            self.broken = False

    def abort(self, why: str) -> None:
        """What is under way fails; all ranks do this."""
        if self.broken:
            return
        self.broken = True
        self.two.abort(why)
        routes.abort(self.two.local, why)
        for group in (self.along.main, self.along.second_phase) if self.along is not None else ():
            group.core.abort(group.core.next(), why)
            routes.abort(group, why)

    @staticmethod
    def of(groups: ModelGroups, memory: torch.Tensor) -> HostLevels | None:
        """The levels, where GPU tensors of these ranks travel hierarchically; the same for all buckets."""
        if not device.handles(memory) or not TwoLevelGroups.applies_to(groups.control):
            return None
        if not routes.is_hierarchical(groups.control, memory.device):
            return None
        if groups.levels is None:
            groups.levels = HostLevels(groups)
        assert isinstance(groups.levels, HostLevels)
        return groups.levels

    def length(self, total: int) -> int:
        """The length at which ``total`` values divide among two, and there among hosts."""
        line = self.two.hosts * SHARD
        return self.two.count * line * -(-total // (self.two.count * line))


class HierarchicalAverage:
    """An :class:`Average` of what the ranks of each host have summed.

    Args:
        memory: :meth:`HostLevels.length` many values.
        levels: The levels.
        make: The average along a rail, of this rank's share.
    """

    calls = 0

    def __init__(
        self, memory: torch.Tensor, levels: HostLevels, make: Callable[[torch.Tensor, ModelGroups], Average]
    ) -> None:
        self.memory, self.levels = memory, levels
        two = levels.two
        self.shards = two.shards(memory.numel(), two.hosts * SHARD)
        self.mine = two.owned(memory, self.shards)
        self.average = make(self.mine, levels.along) if levels.along is not None else None
        self.sent = self.average.sent if self.average is not None else 0
        self.under_way = False

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.levels.begin()
        first = self.levels.groups.main
        asked = (
            engine_codes.ALL_REDUCE,
            engine_codes.DTYPES[self.memory.dtype],
            self.memory.numel(),
            _SUM,
            0,
            0,
        )
        # Others may give up this bucket: they say so here, and not in the levels.
        self.witness = first.core.witness(asked, first.timeout)
        self.under_way = True
        self.levels.two.combine(self.memory, self.shards, _SUM)
        if self.average is not None:
            # A mean over hosts of these is the mean over ranks, however many each host has.
            self.mine.mul_(self.levels.two.hosts / self.levels.groups.size)
            self.average.start(round)

    def advance(self) -> bool:
        """See :class:`Average`. The second leg has groups of its own, so nobody waits for its order."""
        if self.average is not None:
            self.average.advance()
        return True

    def ready(self) -> bool:
        """See :class:`Average`."""
        if not self.under_way:
            return True
        return self.witness.is_completed() and (self.average is None or self.average.ready())

    def wait(self) -> None:
        """See :class:`Average`."""
        if not self.under_way:
            return
        self.under_way = False
        try:
            self.witness.wait()
            if self.average is not None:
                self.average.wait()
            self.levels.two.spread(self.memory, self.shards)
        except TrigramError as e:
            self.levels.abort(f"rank {current().rank}: {e}")
            if self.average is not None:
                with contextlib.suppress(TrigramError):
                    self.average.await_end()
            raise

    def await_end(self) -> None:
        """See :class:`Average`."""
        self.wait()

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Nothing that could move: what a share's codes dropped is its owner's, whose share is another
        when buckets are dealt anew."""
        return [{} for _ in views]

    def fold(self) -> None:
        """See :meth:`parts`."""

    def state(self) -> dict[str, torch.Tensor]:
        """What the average along the rail remembers."""
        return self.average.state() if self.average is not None else {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        if self.average is not None:
            self.average.load(state)
