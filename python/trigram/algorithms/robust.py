"""Robust aggregation as arithmetic on rows, one row per rank: a minority of wrong rows has bounded influence.

docs/algorithms.md defines the aggregations. Rows contain neither NaN nor infinity: the caller leaves out
ranks that sent such values. Nothing here communicates; :mod:`trigram.averaging.robust` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

CHUNK = 1 << 14
"""Columns processed at a time: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class RobustAggregation:
    """A robust aggregation, which replaces the mean.

    Attributes:
        kind: ``median``, ``trimmed`` or ``clip``.
        parameter: F of ``trimmed:F``, R of ``clip:R``.
        iterations: The number of iterations of ``clip``.
    """

    kind: str
    parameter: float = 0.0
    iterations: int = 3

    def __str__(self) -> str:
        return self.kind if self.kind == "median" else f"{self.kind}:{self.parameter:g}"

    @staticmethod
    def parse(text: str) -> RobustAggregation | None:
        """The aggregation that ``median``, ``trimmed:F`` or ``clip:R`` names; None: ``text`` is none of
        them."""
        kind, _, number = text.partition(":")
        if text == "median":
            return RobustAggregation(kind)
        if kind == "trimmed" and number.isascii() and number.isdigit():
            return RobustAggregation(kind, int(number))
        if kind == "clip":
            try:
                radius = float(number)
            except ValueError:
                return None
            return RobustAggregation(kind, radius) if 0 < radius < math.inf else None
        return None

    def least(self) -> int:
        """The smallest number of ranks for which it is defined."""
        return 2 * int(self.parameter) + 1 if self.kind == "trimmed" else 1

    def without_history(self) -> RobustAggregation:
        """The aggregation to use when there is no earlier result: the median for ``clip``, otherwise this
        one."""
        return replace(self, kind="median", parameter=0.0) if self.kind == "clip" else self

    def combine(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Writes the median or trimmed mean of each column to ``out``.

        Args:
            rows: One flat tensor per rank, of equal length and dtype. With fewer than 2 F + 1, fewer values
                are trimmed.
            out: As long as a row.
        """
        n = len(rows)
        cut = (n - 1) // 2
        if self.kind == "trimmed":
            cut = min(cut, int(self.parameter))
        for at in range(0, out.numel(), CHUNK):
            middle = ordered([r[at : at + CHUNK] for r in rows])[cut : n - cut]
            total = middle[0] / len(middle)
            for row in middle[1:]:
                total += row / len(middle)
            out[at : at + CHUNK] = total


def ordered(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows, with each column sorted in ascending order.

    An odd-even transposition sort of whole rows: with few ranks it is ten times as fast as sorting columns.
    """
    found = list(rows)
    for phase in range(len(found)):
        for k in range(phase % 2, len(found) - 1, 2):
            low, high = found[k], found[k + 1]
            found[k], found[k + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return found


def products(rows: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """The inner products of the rows' differences to a centre, float64 of shape (rows, rows).

    This is all that clipping needs from a shard, for any number of iterations: norms over the whole tensor
    are sums over shards. If a row contains NaN or infinity, its inner product with itself is NaN or infinite.

    Args:
        rows: Shape (ranks, values).
        centre: Shape (values,).
    """
    n = len(rows)
    total = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for at in range(0, centre.numel(), CHUNK):
        d = rows[:, at : at + CHUNK].double() - centre[at : at + CHUNK].double()
        total += d @ d.T
    return total


def clipped(gram: torch.Tensor, radius: float, iterations: int) -> list[float]:
    """The weights of the rows' differences to the centre in the result of centred clipping.

    Each iteration is ``v += mean_i min(1, t / |x_i - v|) (x_i - v)``; t is the radius times the median of all
    ``|x_i - v|`` (the lower of the two middle ones if their number is even). v is always the centre plus a
    linear combination of the differences, so the inner products of the differences determine all distances.

    Args:
        gram: The inner products from :func:`products`, summed over all shards.
        radius: R of ``clip:R``.
        iterations: How many.
    """
    n = len(gram)
    weight = torch.zeros(n, dtype=torch.float64, device="cpu")
    for _ in range(iterations):
        square = gram.diagonal() - 2 * (gram @ weight) + weight @ gram @ weight
        distance = square.clamp(min=0.0).sqrt()
        limit = radius * distance.median()
        scale = torch.where(distance > limit, limit / distance, 1.0)
        weight = weight * (1 - scale.mean()) + scale / n
    return [float(w) for w in weight]
