"""Compressed averages in two levels: full numbers inside a host, codes between hosts.

For GPUs whose hosts are joined by a slow network. The ranks of a host sum what they have (NCCL), each
encodes the share that it owns on its GPU, codes travel along the rails (:mod:`trigram.rails`), and the
means are given to all GPUs of the host. A rank sends 1/L of what it would send on its own, and codes are
made of sums over a host, of which fewer are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from trigram.averaging.average import SHARD, Average
from trigram.errors import TrigramError
from trigram.gpu import device
from trigram.gpu.two_level import Rails
from trigram.runtime import engine_codes as codes
from trigram.runtime.world import current
from trigram.training.step_hooks import Channels

_SUM = codes.OPS["sum"]


class TwoLevels:
    """The levels of a model's ranks, with groups for what travels along the rails.

    Args:
        channels: The model's.
    """

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.along: Channels | None = None
        self.broken = True
        self.begin()

    def begin(self) -> None:
        """What was given up begins anew, in new groups: ranks had come to different calls of the old."""
        if self.broken:
            self.rails = Rails(self.channels.side)
            if self.along is not None and self.rails.rail is not None:
                self.along.renew(self.rails.rail)
            elif self.rails.rail is not None:
                self.along = Channels(self.rails.rail)
            self.broken = False

    def give_up(self, why: str) -> None:
        """What is under way fails; all ranks do this."""
        if self.broken:
            return
        self.broken = True
        self.rails.give_up(why)
        device.give_up(self.rails.local, why)
        for group in (self.along.first, self.along.second) if self.along is not None else ():
            group.core.abort(group.core.next(), why)
            device.give_up(group, why)

    @staticmethod
    def of(channels: Channels, memory: torch.Tensor) -> TwoLevels | None:
        """The levels, where GPU tensors of these ranks travel hierarchically; the same for all buckets."""
        if not device.handles(memory) or not Rails.help(channels.side):
            return None
        if not device.is_hierarchical(channels.side, memory.device):
            return None
        if channels.levels is None:
            channels.levels = TwoLevels(channels)
        found: TwoLevels = channels.levels
        return found

    def length(self, total: int) -> int:
        """The length at which ``total`` values divide among rails, and there among hosts."""
        line = self.rails.hosts * SHARD
        return self.rails.count * line * -(-total // (self.rails.count * line))


class Hierarchical:
    """An :class:`Average` of what the ranks of each host have summed.

    Args:
        memory: :meth:`TwoLevels.length` many values.
        levels: The levels.
        make: The average along a rail, of this rank's share.
    """

    calls = 0

    def __init__(
        self, memory: torch.Tensor, levels: TwoLevels, make: Callable[[torch.Tensor, Channels], Average]
    ) -> None:
        self.memory, self.levels = memory, levels
        rails = levels.rails
        self.shares = rails.shares(memory.numel(), rails.hosts * SHARD)
        self.mine = rails.mine(memory, self.shares)
        self.average = make(self.mine, levels.along) if levels.along is not None else None
        self.sent = self.average.sent if self.average is not None else 0
        self.under_way = False

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.levels.begin()
        first = self.levels.channels.first
        asked = (codes.ALL_REDUCE, codes.DTYPES[self.memory.dtype], self.memory.numel(), _SUM, 0, 0)
        # Others may give up this bucket: they say so here, and not in the levels.
        self.witness = first.core.witness(asked, first.timeout)
        self.under_way = True
        self.levels.rails.combine(self.memory, self.shares, _SUM)
        if self.average is not None:
            # A mean over hosts of these is the mean over ranks, however many each host has.
            self.mine.mul_(self.levels.rails.hosts / self.levels.channels.size)
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
            self.levels.rails.spread(self.memory, self.shares)
        except TrigramError as e:
            self.levels.give_up(f"rank {current().rank}: {e}")
            if self.average is not None:
                with contextlib.suppress(TrigramError):
                    self.average.forget()
            raise

    def forget(self) -> None:
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
