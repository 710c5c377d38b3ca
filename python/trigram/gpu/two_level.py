"""Groups in two levels: the GPUs of a host, and between hosts the ranks that own the same shard.

A tensor is first combined among the ranks of each host, of which each then owns a shard; shards travel
between the ranks with the same place on their hosts; then each shard is given to all ranks of its host.
With L ranks on a host each sends a shard of 1/L between hosts, all at the same time.
"""

from __future__ import annotations

import itertools

import torch

from trigram.gpu.device import StartCall
from trigram.runtime import engine_codes
from trigram.runtime.group import Group
from trigram.runtime.world import current

_LINE = 64
"""Shards are whole multiples of so many values, but for the last."""


class TwoLevelGroups:
    """The two levels of a group, as one of its ranks sees them. All its ranks make it, in the same order.

    Args:
        group: The ranks.
        start: Begins a collective inside a host.

    Attributes:
        local: The ranks of this host.
        across: The ranks that own the same shard on their hosts; None: this rank owns none.
        count: Shards: as many as the smallest host has ranks.
        hosts: Number of hosts.
    """

    def __init__(self, group: Group, start: StartCall) -> None:
        world, ranks, hosts = current(), group.ranks, group.hosts()
        self.start = start
        self.count = min(map(len, hosts))
        self.hosts = len(hosts)
        self.across: Group | None = None
        for k, host in enumerate(hosts):
            inside = world.derive(group, f"{group.name}, host {k}", [ranks[p] for p in host])
            if inside.rank >= 0:
                self.local = inside
        for k in range(self.count):
            across = world.derive(
                group, f"{group.name}, shard {k} of each host", [ranks[h[k]] for h in hosts]
            )
            if across.rank >= 0:
                self.across = across

    @staticmethod
    def help(group: Group) -> bool:
        """Whether a group has two levels: several hosts, one of them with several ranks."""
        hosts = group.hosts()
        return len(hosts) > 1 and max(map(len, hosts)) > 1

    def shards(self, count: int, line: int = _LINE) -> list[int]:
        """Lengths of the shards of ``count`` values by rank of this host, in whole ``line``; some own none."""
        shard = -(-count // self.count)
        shard = -(-shard // line) * line
        starts = [min(k * shard, count) for k in range(self.count + 1)]
        owned = [b - a for a, b in itertools.pairwise(starts)]
        return owned + [0] * (self.local.size - self.count)

    def owned(self, t: torch.Tensor, shards: list[int]) -> torch.Tensor:
        """This rank's shard of a flat tensor."""
        start = sum(shards[: self.local.rank])
        return t[start : start + shards[self.local.rank]]

    def combine(self, t: torch.Tensor, shards: list[int], op: int) -> None:
        """Each rank's shard becomes the combination of what the ranks of this host have there."""
        asked = (engine_codes.REDUCE_SCATTER, engine_codes.DTYPES[t.dtype], 0, op, 0, 0)
        self.start(self.local, asked, t, t, (shards, shards)).order()

    def spread(self, t: torch.Tensor, shards: list[int]) -> None:
        """Each rank's shard is given to all ranks of this host."""
        asked = (engine_codes.ALL_GATHER, engine_codes.DTYPES[t.dtype], 0, 0, 0, 0)
        self.start(self.local, asked, t, t, (shards, shards)).order()

    def abort(self, why: str) -> None:
        """What is under way here fails, on all ranks that it needs."""
        for group in (self.local, self.across):
            if group is not None:
                group.core.abort(group.core.next(), why)
