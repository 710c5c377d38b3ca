"""Who talks to whom in gossip: graphs, their mixing weights and how fast they mix.

A graph says for each round whom a place sends to, and whom it receives from with which weight;
the rest of the weight stays. Undirected graphs use Metropolis-Hastings weights, directed ones
``1/(1 + out-degree)`` (one-peer and exponential graphs: arXiv 2110.13363). A new graph is one
function here, from (place, round) to those it sends to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from trigram.errors import MisuseError, UnsupportedError

Edges = Callable[[int, int, int], list[int]]
"""(place, ranks, round) to the places that the place sends to."""


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
    # Where n is odd, the partner of the last, missing place sits out.
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


# Name -> its edges, whether edges have a direction, rounds until it repeats (0: never).
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
    """The names of all graphs."""
    return list(_GRAPHS)


class Graph:
    """Who sends to whom, round by round.

    Attributes:
        kind: Its name.
        size: Number of places.
        changes: Whether it differs from round to round.
        directed: Whether i may send to j without hearing from it.
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
        """The places that ``place`` sends to."""
        return self._edges(place, self.size, round)

    def neighbours(self, place: int, round: int = 0) -> tuple[list[int], list[tuple[int, float]]]:
        """Whom a place sends to, and whom it receives from, with the weights."""
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
        """Those that a place sends to in some round."""
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
                # What is pushed is a share of the sender's; what is mixed, a weight of the receiver.
                of = len(theirs) if push else degree if self.directed else max(degree, len(theirs))
                received.append((j, 1 / (1 + of)))
        return to, received

    def matrix(self, round: int = 0) -> torch.Tensor:
        """W, float64 (size, size): row i says what place i receives from each. Rows sum to 1; under
        ``push`` columns do."""
        w = torch.zeros(self.size, self.size, dtype=torch.float64)
        for i in range(self.size):
            to, received = self.neighbours(i, round)
            for j, weight in received:
                w[i, j] = weight
            push = self.kind.startswith("push:")
            w[i, i] = 1 / (1 + len(to)) if push else 1 - sum(weight for _, weight in received)
        return w

    def gap(self) -> float:
        """The spectral gap per round: 1 - the second singular value of W, for a changing graph of a
        cycle's product (random ones: of 16 rounds) to the power 1/length. 1 mixes at once, 0 never."""
        if self.size == 1:
            return 1.0
        rounds = self._period or 16
        product = torch.eye(self.size, dtype=torch.float64)
        for round in range(rounds):
            product = self.matrix(round) @ product
        second = float(torch.linalg.svdvals(product)[1])
        return 1 - max(second, 0.0) ** (1 / rounds) if second > 1e-12 else 1.0

    def closure(self) -> Graph:
        """The same graph with every edge in both directions; itself where it has them already."""
        if not self.directed:
            return self

        def edges(i: int, n: int, round: int) -> list[int]:
            back = (j for j in range(n) if i in self._edges(j, n, round))
            return _others(i, (*self._edges(i, n, round), *back))

        return Graph(f"{self.kind} (both ways)", self.size, edges, False, self._period)


def find(kind: str, size: int) -> Graph:
    """A graph by name among ``size`` ranks.

    Raises:
        UnsupportedError: There is no such graph; the message lists those there are.
    """
    if size < 1:
        raise MisuseError(f"topology {kind!r}: the number of ranks is {size}; it must be 1 or more")
    try:
        edges, directed, period = _GRAPHS[kind]
    except KeyError:
        raise UnsupportedError(f"unknown topology {kind!r}; use one of {', '.join(_GRAPHS)}") from None
    return Graph(kind, size, edges, directed, period(size))
