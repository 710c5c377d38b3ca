"""Averages that a minority of broken values cannot steer, as arithmetic on rows, one row per rank.

What they are is written down in docs/algorithms.md. Rows hold finite numbers: who sent others has
been left out. Nothing here communicates; :mod:`trigram.robust` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

CHUNK = 1 << 14
"""Columns that are worked on together: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class RobustAggregation:
    """What stands in the place of the mean.

    Attributes:
        kind: ``median``, ``trimmed`` or ``clip``.
        parameter: F of ``trimmed:F``, R of ``clip:R``.
        iterations: Of ``clip``.
    """

    kind: str
    parameter: float = 0.0
    iterations: int = 3

    def __str__(self) -> str:
        return self.kind if self.kind == "median" else f"{self.kind}:{self.parameter:g}"

    @staticmethod
    def parse(text: str) -> RobustAggregation | None:
        """The rule of ``median``, ``trimmed:F`` or ``clip:R``; None: it is none of them."""
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
        """The fewest ranks that it has a value for."""
        return 2 * int(self.parameter) + 1 if self.kind == "trimmed" else 1

    def without_history(self) -> RobustAggregation:
        """The same where there is no earlier result to start from: the median for ``clip``."""
        return replace(self, kind="median", parameter=0.0) if self.kind == "clip" else self

    def combine(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Median or trimmed mean of each column; where rows are missing, fewer are trimmed."""
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
    """The rows, sorted in each column.

    Compares and steps whole rows: for few ranks ten times as fast as sorting columns.
    """
    found = list(rows)
    for turn in range(len(found)):
        for k in range(turn % 2, len(found) - 1, 2):
            low, high = found[k], found[k + 1]
            found[k], found[k + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return found


def products(rows: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """The inner products of all rows' differences to a centre, in float64.

    All that clipping must know of a share, whatever the number of its iterations: norms over the
    whole are sums over shares. A row that is not finite has a product with itself that is not.
    """
    n = len(rows)
    total = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for at in range(0, centre.numel(), CHUNK):
        d = rows[:, at : at + CHUNK].double() - centre[at : at + CHUNK].double()
        total += d @ d.T
    return total


def clipped(gram: torch.Tensor, radius: float, iterations: int) -> list[float]:
    """How much of each row's difference to the centre goes into the result of centred clipping.

    Each iteration is ``v += mean_i min(1, t / |x_i - v|) (x_i - v)`` with t the radius times the
    median of all ``|x_i - v|`` (of an even number the lower one in the middle). v is always the
    centre and a combination of the differences, so their inner products tell all distances.
    """
    n = len(gram)
    share = torch.zeros(n, dtype=torch.float64)
    for _ in range(iterations):
        square = gram.diagonal() - 2 * (gram @ share) + share @ gram @ share
        distance = square.clamp(min=0.0).sqrt()
        limit = radius * distance.median()
        scale = torch.where(distance > limit, limit / distance, 1.0)
        share = share * (1 - scale.mean()) + scale / n
    return [float(s) for s in share]
