"""The two levels of a job: the GPUs of a host, and the rails between hosts.

A *rail* is the ranks with the same place on their hosts. A tensor is first combined among the ranks of
each host, of which each then owns a share; shares travel along the rails; then each is given to all
ranks of its host. With L ranks a host, each sends a share of 1/L between hosts, all at the same time.
"""

from __future__ import annotations

import itertools

import torch

from trigram.collectives import calls as collectives
from trigram.gpu import device
from trigram.runtime import engine_codes as codes
from trigram.runtime.world import Group, current

_LINE = 64
"""Shares are whole multiples of so many values, but for the last."""


class Rails:
    """The levels of a group, as one of its ranks sees them. All its ranks make it, in the same order.

    Attributes:
        local: The ranks of this host.
        rail: The ranks that own the same share on their hosts; None: this rank owns none.
        count: How many rails there are: as many as the smallest host has ranks.
    """

    def __init__(self, group: Group) -> None:
        world, ranks, hosts = current(), group.ranks, group.hosts()
        self.count = min(map(len, hosts))
        self.hosts = len(hosts)
        self.rail: Group | None = None
        for k, host in enumerate(hosts):
            inside = world.derive(group, f"{group.name}, host {k}", [ranks[p] for p in host])
            if inside.rank >= 0:
                self.local = inside
        for place in range(self.count):
            across = [ranks[host[place]] for host in hosts]
            rail = world.derive(group, f"{group.name}, rail {place}", across)
            if rail.rank >= 0:
                self.rail = rail

    @staticmethod
    def help(group: Group) -> bool:
        """Whether a group has two levels."""
        hosts = group.hosts()
        return len(hosts) > 1 and max(map(len, hosts)) > 1

    def shares(self, count: int, line: int = _LINE) -> list[int]:
        """``count`` values dealt among the ranks of this host, in whole ``line``; some may own none."""
        share = -(-count // self.count)
        share = -(-share // line) * line
        starts = [min(k * share, count) for k in range(self.count + 1)]
        own = [b - a for a, b in itertools.pairwise(starts)]
        return own + [0] * (self.local.size - self.count)

    def mine(self, t: torch.Tensor, shares: list[int]) -> torch.Tensor:
        """This rank's share of a flat tensor."""
        start = sum(shares[: self.local.rank])
        return t[start : start + shares[self.local.rank]]

    def combine(self, t: torch.Tensor, shares: list[int], op: int) -> None:
        """Each rank's share becomes the combination of what the ranks of this host have there."""
        if device.handles(t):
            asked = (codes.REDUCE_SCATTER, codes.DTYPES[t.dtype], 0, op, 0, 0)
            device.start(self.local, asked, t, t, (shares, shares)).order()
            return
        for place, part in enumerate(t.split(shares)):
            collectives.reduce(part, self.local.ranks[place], codes.OP_NAMES[op], self.local)

    def spread(self, t: torch.Tensor, shares: list[int]) -> None:
        """Each rank's share is given to all ranks of this host."""
        if device.handles(t):
            asked = (codes.ALL_GATHER, codes.DTYPES[t.dtype], 0, 0, 0, 0)
            device.start(self.local, asked, t, t, (shares, shares)).order()
            return
        for place, part in enumerate(t.split(shares)):
            collectives.broadcast(part, self.local.ranks[place], self.local)

    def give_up(self, why: str) -> None:
        """What is under way here fails, on all ranks that it needs."""
        for group in (self.local, self.rail):
            if group is not None:
                group.core.abort(group.core.next(), why)
