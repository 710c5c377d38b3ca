"""Compressed averages in two levels: uncompressed inside a host, compressed between hosts.

For GPUs on hosts that a slow network connects. The L GPUs of a host reduce-scatter their values with NCCL;
each GPU averages its shard with the GPUs at the same position on the other hosts, through a codec
(:mod:`trigram.gpu.two_level`); an all-gather inside the host then gives every GPU all means. Each rank sends
1/L of the bytes that it would send between hosts without levels, and the codec rounds sums over a host, of
which fewer are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trigram.averaging.average import SHARD, Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.errors import TrigramError
from trigram.gpu import device, routes
from trigram.gpu.two_level import TwoLevelGroups
from trigram.runtime import engine_codes
from trigram.runtime.serving import Pending
from trigram.runtime.world import current

_SUM = engine_codes.OPS["sum"]


class HostLevels:
    """The two-level groups of one model; all its buckets share them.

    Args:
        groups: The model's process groups.

    Attributes:
        two_level: The groups inside a host and between hosts.
        between_hosts: Process groups of this rank and the ranks at its position on the other hosts; None on a
            rank that has no such position (hosts with unequal numbers of ranks).
        broken: Whether the groups were aborted, or not made yet.
    """

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self.between_hosts: ModelGroups | None = None
        self.broken = True
        self.begin()

    def begin(self) -> None:
        """Makes new groups after an abort, because ranks had reached different calls in the old ones."""
        if self.broken:
            self.two_level = TwoLevelGroups(self.groups.control, routes.start)
            if self.between_hosts is not None and self.two_level.across is not None:
                self.between_hosts.renew(self.two_level.across)
            elif self.two_level.across is not None:
                self.between_hosts = ModelGroups(self.two_level.across)
                self.between_hosts.describe(self.groups.description)
            self.broken = False

    def abort(self, why: str) -> None:
        """Aborts all calls under way in both levels; all ranks call it."""
        if self.broken:
            return
        self.broken = True
        if self.between_hosts is not None:
            self.between_hosts.line.clear()
        self.two_level.abort(why)
        for group in (
            (self.between_hosts.main, self.between_hosts.second_phase)
            if self.between_hosts is not None
            else ()
        ):
            group.core.abort(group.core.next(), why)
            routes.abort(group, why)

    @staticmethod
    def of(groups: ModelGroups, memory: torch.Tensor) -> HostLevels | None:
        """The model's levels if GPU tensors like ``memory`` take the hierarchical route, else None."""
        if not device.handles(memory) or not TwoLevelGroups.applies_to(groups.control):
            return None
        if not routes.is_hierarchical(groups.control, memory.device):
            return None
        if groups.levels is None:
            groups.levels = HostLevels(groups)
        assert isinstance(groups.levels, HostLevels)
        return groups.levels

    def length(self, total: int) -> int:
        """``total``, rounded up so that it divides into shards inside a host and those into shards between
        hosts."""
        multiple = self.two_level.hosts * SHARD
        return self.two_level.count * multiple * -(-total // (self.two_level.count * multiple))


@dataclass
class _Between:
    """The average between hosts, as something to wait for."""

    average: Average

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.average.ready()

    def wait(self) -> None:
        """Waits for it."""
        self.average.wait()


@dataclass
class _InTurn:
    """Several things to wait for, up to the first that has failed: those after it may wait for ever then."""

    parts: list[Pending]

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(part.is_completed() for part in self.parts)

    def wait(self) -> None:
        """See the class."""
        for part in self.parts:
            part.wait()


class HierarchicalAverage(Average):
    """An :class:`~trigram.averaging.average.Average` in two levels.

    Args:
        memory: One-dimensional; its length is a result of :meth:`HostLevels.length`.
        levels: The two-level groups.
        make: Makes the average between hosts, from this rank's shard and the groups between hosts.
    """

    def __init__(
        self, memory: torch.Tensor, levels: HostLevels, make: Callable[[torch.Tensor, ModelGroups], Average]
    ) -> None:
        self.memory, self.levels = memory, levels
        two_level = levels.two_level
        self.shards = two_level.shards(memory.numel(), two_level.hosts * SHARD)
        self.mine = two_level.owned(memory, self.shards)
        self.average = make(self.mine, levels.between_hosts) if levels.between_hosts is not None else None
        self.sent = self.average.sent if self.average is not None else 0

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """See :class:`Average`. The other ranks of this host may use them: a sum that is 0 is held back."""
        if self.average is not None:
            self.average.hold(views)

    def settle(self, unused: Sequence[bool]) -> None:
        """See :class:`Average`."""
        if self.average is not None:
            self.average.settle(unused)

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        self.levels.begin()
        two_level, main = self.levels.two_level, self.levels.groups.main
        dtype = engine_codes.DTYPES[self.memory.dtype]
        signature = (engine_codes.ALL_REDUCE, dtype, self.memory.numel(), _SUM, 0, 0)
        # Another rank may abort this bucket: only calls of the main group report that, so one is made here.
        told = main.core.check_consistency(signature, main.timeout)
        try:
            combined = two_level.combine(self.memory, self.shards, _SUM)
        except TrigramError as e:
            self.levels.abort(f"rank {main.ranks[main.rank]} could not start a two-level average: {e}")
            raise
        under_way: list[Pending] = [told, combined]
        if self.average is not None and self.levels.between_hosts is not None:
            # With this factor the mean over hosts is the mean over ranks, also for unequal hosts.
            self.mine.mul_(two_level.hosts / self.levels.groups.size)
            routes.follow(self.levels.between_hosts.main, combined)
            self.average.start(step)
            under_way.insert(1, _Between(self.average))
        del combined  # it keeps a communicator
        try:
            yield _InTurn(under_way)
            under_way.clear()
            two_level.spread(self.memory, self.shards).wait()
        except TrigramError as e:
            self.levels.abort(f"rank {current().rank} aborted a two-level average: {e}")
            if self.average is not None:
                with contextlib.suppress(TrigramError):
                    self.average.await_end()
            raise

    def await_end(self) -> None:
        """See :class:`Exchange`."""
        self.wait()

    # No state moves with a parameter: the residual belongs to this rank's shard, and new buckets have others.

    def state(self) -> dict[str, torch.Tensor]:
        """The state of the average between hosts."""
        return self.average.state() if self.average is not None else {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        if self.average is not None:
            self.average.load(state)
