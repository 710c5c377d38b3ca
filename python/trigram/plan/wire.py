"""How long collectives occupy the links between hosts, and the ranks of a host.

An all-reduce between hosts with a rank each runs in the simulator, with the engine's own schedules
(``rust/core/src/sim.rs``), as long as its memory is small; beyond that, and for the other calls, closed forms
bound the time by the busiest link: docs/planning.md.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from trigram import _core
from trigram.algorithms import graphs
from trigram.plan.inputs import Costs, Machines

SIMULATED_BYTES = 24 << 20
"""Memory of all ranks together up to which an all-reduce is simulated."""
SIMULATED_RANKS = 32
RING_RANKS, RING_SECONDS = 5, 3e-4
"""As the planner's (``rust/core/src/planner.rs``): a ring serves large calls among many equal links."""
PATTERN_ROUNDS, PATTERN_RANKS = 16, 64
"""Rounds of a graph, and ranks of an undirected one, that are looked at: others are alike."""


class Call(NamedTuple):
    """A collective.

    Attributes:
        busy: Seconds that it occupies the busiest link; other calls wait for so long.
        delay: Seconds of its hops, in which other calls may use the link.
        sends: Messages of a rank, each of which costs processor time.
    """

    busy: float
    delay: float = 0.0
    sends: int = 0

    def after(self, other: Call) -> Call:
        """Both, one after the other."""
        return Call(self.busy + other.busy, self.delay + other.delay, self.sends + other.sends)

    @property
    def alone(self) -> float:
        """Seconds from its begin to its end."""
        return self.busy + self.delay


def all_reduce(nbytes: int, machines: Machines, costs: Costs) -> Call:
    """The sum of ``nbytes`` on each rank, until all ranks have it."""
    inside = costs.shared * nbytes if machines.ranks_per_host > 1 else 0.0
    call = between_hosts(nbytes, machines.rates, machines.latency)
    return Call(inside + call.busy + call.sends * costs.message, call.delay)


def between_hosts(nbytes: int, rates: tuple[float, ...], latency: float) -> Call:
    """An all-reduce among hosts whose ranks have been summed; simulated if it is small."""
    hosts = len(rates)
    if hosts == 1:
        return Call(0.0)
    call = closed_form(nbytes, rates, latency)
    if hosts <= SIMULATED_RANKS and nbytes * hosts <= SIMULATED_BYTES:
        alone = simulated(-(-nbytes // 4), rates, latency)
        return call._replace(busy=min(call.busy, alone), delay=max(0.0, alone - call.busy))
    return call


@cache
def simulated(elements: int, rates: tuple[float, ...], latency: float) -> float:
    """Seconds of an all-reduce of float32 by the simulator, with a rank per host."""
    return _core.simulate_all_reduce(elements, latency, list(rates))


def closed_form(nbytes: int, rates: tuple[float, ...], latency: float) -> Call:
    """An all-reduce without the simulator: what the slowest link and all links together must carry
    (ARCHITECTURE.md, "Rate balance"), and the hops of the schedule that the planner takes."""
    hosts, slowest = len(rates), min(rates)
    equal = max(rates) <= 1.1 * slowest
    if equal and hosts >= RING_RANKS and nbytes / slowest > RING_SECONDS * hosts:
        hops = 2 * (hosts - 1)
        return Call(hops / hosts * nbytes / slowest, hops * latency, hops)
    carried = nbytes * max(1 / slowest, 2 * (hosts - 1) / sum(rates))
    return Call(carried, 2 * latency, 2 * (hosts - 1))


def exchange(shard: int, machines: Machines, costs: Costs, gathers: bool) -> Call:
    """One phase of a coded average: every rank has a part of ``shard`` bytes for every other.

    Args:
        shard: Bytes from one rank to another.
        machines: The machines.
        costs: What messages cost.
        gathers: All parts of a rank are the same, and enter each other host once.
    """
    n, local, hosts = machines.ranks, machines.ranks_per_host, machines.hosts
    if hosts == 1:
        return Call(costs.shared * n * shard)
    parts = local * (hosts - 1) * (1 if gathers else local)
    return Call(parts * shard / min(machines.rates) + (n - local) * costs.message, machines.latency)


def neighbours(nbytes: int, kind: str, machines: Machines) -> tuple[float, float]:
    """One averaging step with the neighbours in a graph.

    Returns:
        Seconds, by the busiest link in each of the first rounds, and the messages that a rank sends.
    """
    load, degree = _pattern(kind, machines.ranks, machines.ranks_per_host)
    seconds = load * nbytes / min(machines.rates) + (machines.latency if load else 0.0)
    return seconds, degree


@cache
def _pattern(kind: str, ranks: int, local: int) -> tuple[float, float]:
    """Messages over a host's link (mean over rounds of the busiest host), and messages that a rank sends."""
    graph = graphs.find(kind, ranks)
    looked = ranks if graph.directed else min(ranks, max(PATTERN_RANKS, local))
    busiest, sent = [], 0
    rounds = PATTERN_ROUNDS if graph.changes else 1
    for number in range(rounds):
        out: dict[int, int] = {}
        into: dict[int, int] = {}
        for rank in range(looked):
            receivers = graph.sends(rank, number)
            sent += len(receivers)
            for other in receivers:
                if other // local != rank // local:
                    out[rank // local] = out.get(rank // local, 0) + 1
                    into[other // local] = into.get(other // local, 0) + 1
        busiest.append(max([*out.values(), *into.values()], default=0))
    return sum(busiest) / rounds, sent / (rounds * looked)


def pair_share(machines: Machines) -> float:
    """Of the pairs of ranks, the part that is on two hosts."""
    n, local = machines.ranks, machines.ranks_per_host
    return (n - local) / (n - 1) if n > 1 else 0.0


def shard_elements(elements: int, ranks: int) -> int:
    """Values of a shard of a coded average, as docs/algorithms.md pads them."""
    return 64 * math.ceil(math.ceil(elements / ranks) / 64)
