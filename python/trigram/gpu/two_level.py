"""Two levels of groups: the GPUs of each host, and across hosts the ranks that own the same shard.

A hierarchical AllReduce takes three phases: a reduce-scatter inside each host, after which each of its ranks
owns a shard; an all-reduce of each shard across hosts; an all-gather inside each host. With L ranks on a host
each sends 1/L of the tensor to other hosts, all at the same time.
"""

from __future__ import annotations

import itertools

import torch

from trigram.gpu.device import Call, StartCall
from trigram.runtime import engine_codes
from trigram.runtime.group import Group
from trigram.runtime.world import current

_LINE = 64
"""Shards are multiples of this number of values, except the last."""


class TwoLevelGroups:
    """The two levels of a group, as one of its ranks sees them. All its ranks create it, in the same order.

    Args:
        group: The group.
        start: Starts a collective on GPU tensors inside a host.

    Attributes:
        local: The group of this host's ranks.
        results: The same ranks, for results: when they are there differs between ranks.
        across: The group of the ranks that own the same shard; None: this rank owns none.
        count: The number of shards: the number of ranks of the smallest host.
        hosts: The number of hosts.
    """

    def __init__(self, group: Group, start: StartCall) -> None:
        world, ranks, hosts = current(), group.ranks, group.hosts()
        self.start, self.prepared = start, False
        self.count = min(map(len, hosts))
        self.hosts = len(hosts)
        self.across: Group | None = None
        for k, host in enumerate(hosts):
            inside = world.derive(group, f"{group.name}, host {k}", [ranks[p] for p in host])
            results = world.derive(group, f"{group.name}, results on host {k}", inside.ranks)
            if inside.rank >= 0:
                self.local, self.results = inside, results
        for k in range(self.count):
            across = world.derive(
                group, f"{group.name}, shard {k} of each host", [ranks[h[k]] for h in hosts]
            )
            if across.rank >= 0:
                self.across = across

    @staticmethod
    def applies_to(group: Group) -> bool:
        """Whether a group has several hosts, and one of them several ranks."""
        hosts = group.hosts()
        return len(hosts) > 1 and max(map(len, hosts)) > 1

    def shards(self, count: int, line: int = _LINE) -> list[int]:
        """The lengths of the shards of ``count`` values, by local rank: multiples of ``line``, except the
        last; 0 for ranks that own none."""
        shard = -(-count // self.count)
        shard = -(-shard // line) * line
        starts = [min(k * shard, count) for k in range(self.count + 1)]
        owned = [b - a for a, b in itertools.pairwise(starts)]
        return owned + [0] * (self.local.size - self.count)

    def owned(self, t: torch.Tensor, shards: list[int]) -> torch.Tensor:
        """This rank's shard of a 1-D tensor."""
        start = sum(shards[: self.local.rank])
        return t[start : start + shards[self.local.rank]]

    def prepare(self, t: torch.Tensor) -> None:
        """Connects the ranks for results, before the first result: NCCL waits on the host for all of them
        then, and later they may be in other calls. All ranks call it before their first call."""
        if not self.prepared:
            shards = self.shards(self.count * _LINE)
            values = torch.zeros(sum(shards), dtype=torch.float32, device=t.device)
            self.spread(values, shards).wait()
            self.prepared = True

    def combine(self, t: torch.Tensor, shards: list[int], op: int) -> Call:
        """Reduce-scatters ``t`` in place inside the host: each rank's shard becomes the sum (or other
        ``op``). Later work on the current stream waits for it, also if it fails: the call tells."""
        asked = (engine_codes.REDUCE_SCATTER, engine_codes.DTYPES[t.dtype], 0, op, 0, 0)
        call = self.start(self.local, asked, t, t, (shards, shards), self.local.timeout)
        call.order()
        return call

    def spread(self, t: torch.Tensor, shards: list[int]) -> Call:
        """All-gathers the shards of ``t`` in place inside the host; as :meth:`combine`. All ranks of the host
        call it in the same order, which may be another than that of :meth:`combine`."""
        asked = (engine_codes.ALL_GATHER, engine_codes.DTYPES[t.dtype], 0, 0, 0, 0)
        call = self.start(self.results, asked, t, t, (shards, shards), self.results.timeout)
        call.order()
        return call

    def abort(self, why: str) -> None:
        """Aborts both levels for good, on all their ranks and on this host's GPUs: others may wait for calls
        that this rank has not made yet."""
        for group in (self.local, self.results, self.across):
            if group is not None:
                group.abort(why)
