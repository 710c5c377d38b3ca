"""The graphs of docs/algorithms.md: who sends to whom, and with which weights.

Plain torch; nothing here knows trigram.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Graph = Callable[[int], Tensor]  # round -> W, whose row i says what rank i takes of whom


def targets(kind: str, n: int, round: int = 0) -> list[list[int]]:
    """Whom each rank sends to (the graphs that the document defines completely)."""
    ranks = range(n)
    if kind == "ring":
        return [sorted({(i - 1) % n, (i + 1) % n} - {i}) for i in ranks]
    powers = [2**k for k in range(n.bit_length()) if 2**k < n]
    if kind == "exponential":
        return [[(i + p) % n for p in powers] for i in ranks]
    if kind == "one_peer":
        return [[(i + powers[round % len(powers)]) % n] if powers else [] for i in ranks]
    if kind == "pairs":
        half = math.ceil(n / 2)
        edges = [(i, half + (i + round) % half) for i in range(half)]
        return [sorted({a + b - i for a, b in edges if i in (a, b) and max(a, b) < n}) for i in ranks]
    if kind == "torus":
        b = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
        a = n // b
        return [
            sorted(
                {(i // b + da) % a * b + (i % b + db) % b for da, db in ((0, 1), (0, -1), (1, 0), (-1, 0))}
                - {i}
            )
            for i in ranks
        ]
    if kind == "complete":
        return [sorted(set(ranks) - {i}) for i in ranks]
    raise KeyError(kind)


def metropolis(neighbours: list[list[int]]) -> Tensor:
    n = len(neighbours)
    w = torch.zeros(n, n)
    for i, mine in enumerate(neighbours):
        for j in mine:
            w[i, j] = 1 / (1 + max(len(mine), len(neighbours[j])))
        w[i, i] = 1 - float(w[i].double().sum())
    return w


def out_degree(sends: list[list[int]]) -> Tensor:
    """Everybody keeps as much as he sends to each."""
    n = len(sends)
    w = torch.zeros(n, n)
    for j, mine in enumerate(sends):
        for i in [j, *mine]:
            w[i, j] = 1 / (1 + len(mine))
    return w


DIRECTED = ("exponential", "one_peer")


def graph(kind: str, n: int, symmetric: bool = False) -> Graph:
    """W by round; `symmetric`: of the symmetric closure."""

    def matrix(round: int) -> Tensor:
        sends = targets(kind, n, round)
        if kind in DIRECTED and not symmetric:
            return out_degree(sends)
        return metropolis([sorted(set(sends[i]) | {j for j in range(n) if i in sends[j]}) for i in range(n)])

    return matrix
