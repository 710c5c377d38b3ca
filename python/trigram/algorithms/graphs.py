"""Gossip topologies: graphs over group ranks, their mixing weights and spectral gaps.

In each averaging step a rank sends to some ranks, and receives from some with a weight each; its own tensor
has the rest of the weight. Undirected graphs use Metropolis-Hastings weights, directed ones ``1/(1 +
out-degree)`` (one-peer and exponential graphs: arXiv 2110.13363). Steps are counted from 0 by ``round``. A
new topology is one function here, from (rank, size, round) to the ranks that it sends to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from trigram.errors import MisuseError, UnsupportedError

Edges = Callable[[int, int, int], list[int]]
"""From (rank, number of ranks, round) to the ranks that this rank sends to."""


def _ring(i: int, n: int, _round: int) -> list[int]:
    return _others(i, ((i - 1) % n, (i + 1) % n))


def _forward(i: int, n: int, _round: int) -> list[int]:
    return _others(i, ((i + 1) % n,))


def _exponential(i: int, n: int, _round: int) -> list[int]:
    return _others(i, ((i + (1 << k)) % n for k in range(_log2(n))))


def _one_peer(i: int, n: int, round: int) -> list[int]:
    return _others(i, ((i + (1 << round % max(_log2(n), 1))) % n,))


def _pairs(i: int, n: int, round: int) -> list[int]:
    half = (n + 1) // 2
    # If n is odd, the rank whose partner would be rank n sends to nobody in this step.
    other = half + (i + round) % half if i < half else (i - half - round) % half
    return _others(i, (other,)) if other < n else []


def _random(i: int, n: int, round: int) -> list[int]:
    order = list(range(n))
    random.Random(round).shuffle(order)
    at = order.index(i)
    return [order[at ^ 1]] if at ^ 1 < n else []


def _torus(i: int, n: int, _round: int) -> list[int]:
    width = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    height = n // width
    x, y = i % width, i // width
    right, left = y * width + (x + 1) % width, y * width + (x - 1) % width
    down, up = (y + 1) % height * width + x, (y - 1) % height * width + x
    return _others(i, (right, left, down, up))


def _complete(i: int, n: int, _round: int) -> list[int]:
    return _others(i, range(n))


def _random_push(i: int, n: int, round: int) -> list[int]:
    if n == 1:
        return []
    other = random.Random(round * n + i).randrange(n - 1)
    return [other + (other >= i)]


def _others(i: int, places: object) -> list[int]:
    return sorted(set(places) - {i})  # type: ignore[call-overload]


def _log2(n: int) -> int:
    return max(n - 1, 0).bit_length()


# Name -> edges, whether they are directed, and the number of rounds after which they repeat (0: never).
_GRAPHS: dict[str, tuple[Edges, bool, Callable[[int], int]]] = {
    "ring": (_ring, False, lambda n: 1),
    "exponential": (_exponential, True, lambda n: 1),
    "one_peer": (_one_peer, True, lambda n: max(_log2(n), 1)),
    "pairs": (_pairs, False, lambda n: (n + 1) // 2),
    "random": (_random, False, lambda n: 0),
    "torus": (_torus, False, lambda n: 1),
    "complete": (_complete, False, lambda n: 1),
    "push:random": (_random_push, True, lambda n: 0),
    "push:exponential": (_exponential, True, lambda n: 1),
    "push:one_peer": (_one_peer, True, lambda n: max(_log2(n), 1)),
    "push:ring": (_forward, True, lambda n: 1),
}


def kinds() -> list[str]:
    """The names of all topologies."""
    return list(_GRAPHS)


class Graph:
    """A topology: which rank sends to which, in each averaging step.

    Attributes:
        kind: Its name.
        size: The number of ranks.
        changes: Whether the edges change from step to step.
        directed: Whether i may send to j without receiving from j.
    """

    def __init__(self, kind: str, size: int, edges: Edges, directed: bool, period: int) -> None:
        self.kind = kind
        self.size = size
        self.changes = period != 1
        self.directed = directed
        self._edges = edges
        self._period = period
        self._memo: dict[tuple[int, int], tuple[list[int], list[tuple[int, float]]]] = {}

    def sends(self, place: int, round: int = 0) -> list[int]:
        """The ranks that rank ``place`` sends to."""
        return self._edges(place, self.size, round)

    def neighbours(self, place: int, round: int = 0) -> tuple[list[int], list[tuple[int, float]]]:
        """The ranks that rank ``place`` sends to, and those that it receives from, with their weights."""
        if self._period:
            round %= self._period
        key = (place, round)
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) > 1024:
                self._memo.clear()
            found = self._memo[key] = self._neighbours(place, round)
        return found

    def ever(self, place: int) -> set[int]:
        """The ranks that rank ``place`` sends to in any round."""
        if not self._period:
            return set(range(self.size)) - {place}
        return {j for round in range(self._period) for j in self.sends(place, round)}

    def _neighbours(self, place: int, round: int) -> tuple[list[int], list[tuple[int, float]]]:
        to = self.sends(place, round)
        degree = len(to)
        received = []
        for j in range(self.size):
            theirs = self.sends(j, round) if j != place else []
            if place in theirs:
                push = self.kind.startswith("push:")
                # With push the sender's degree determines the weight; with gossip the receiver's, or the
                # larger.
                of = len(theirs) if push else degree if self.directed else max(degree, len(theirs))
                received.append((j, 1 / (1 + of)))
        return to, received

    def matrix(self, round: int = 0) -> torch.Tensor:
        """The mixing matrix W, float64 (size, size): W[i, j] is the weight with which i receives from j. Rows
        sum to 1; with ``push`` columns do."""
        w = torch.zeros(self.size, self.size, dtype=torch.float64, device="cpu")
        for i in range(self.size):
            to, received = self.neighbours(i, round)
            for j, weight in received:
                w[i, j] = weight
            push = self.kind.startswith("push:")
            w[i, i] = 1 / (1 + len(to)) if push else 1 - sum(weight for _, weight in received)
        return w

    def gap(self) -> float:
        """The spectral gap per averaging step: 1 - the second singular value of W; 1 averages in one step, 0
        never.

        For a changing graph, the singular value is that of the product of W over one period (16 steps for
        random graphs), to the power 1 / length.
        """
        if self.size == 1:
            return 1.0
        rounds = self._period or 16
        product = torch.eye(self.size, dtype=torch.float64, device="cpu")
        for round in range(rounds):
            product = self.matrix(round) @ product
        second = float(torch.linalg.svdvals(product)[1])
        return 1 - max(second, 0.0) ** (1 / rounds) if second > 1e-12 else 1.0

    def closure(self) -> Graph:
        """The graph with every edge in both directions; an undirected graph itself."""
        if not self.directed:
            return self

        def edges(i: int, n: int, round: int) -> list[int]:
            back = (j for j in range(n) if i in self._edges(j, n, round))
            return _others(i, (*self._edges(i, n, round), *back))

        return Graph(f"{self.kind} (both directions)", self.size, edges, False, self._period)


def names(who: str) -> list[str]:
    """The topologies of ``gossip`` or ``push``."""
    if who == "push":
        return [name.removeprefix("push:") for name in _GRAPHS if name.startswith("push:")]
    return [name for name in _GRAPHS if ":" not in name]


def find(kind: str, size: int) -> Graph:
    """The topology of a name over ``size`` ranks.

    Raises:
        UnsupportedError: There is no such topology; the message lists all names.
        MisuseError: ``size`` is less than 1.
    """
    if size < 1:
        raise MisuseError(f"topology {kind!r}: the number of ranks is {size}; it must be 1 or more")
    try:
        edges, directed, period = _GRAPHS[kind]
    except KeyError:
        raise UnsupportedError(f"unknown topology {kind!r}; use one of {', '.join(_GRAPHS)}") from None
    return Graph(kind, size, edges, directed, period(size))
