"""The robust averages of docs/algorithms.md written plainly in numpy, and the algorithms made of them, for
all ranks of a training in one process. Nothing here knows trigram."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference.central import CentralWeights, CodedGradients, Owners
from tests.reference.codec_roundtrip import decoded, finite, keeps_residual
from tests.reference.simulation import Simulation, unflatten


class Statistic:
    """`median`, `trimmed:F` or `clip:R` of the ranks' vectors; those that are not finite are left out."""

    def __init__(self, rule: str, iterations: int = 3) -> None:
        self.kind, _, number = rule.partition(":")
        self.number = float(number or 0)
        self.iterations = iterations
        self.v: np.ndarray | None = None  # where clipping starts

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        rows = np.stack([p.double().numpy() for p in parts])
        rows = rows[np.isfinite(rows).all(axis=1)]
        n = len(rows)
        if self.kind == "median":
            found = np.median(rows, axis=0)
        elif self.kind == "trimmed":
            cut = min(int(self.number), (n - 1) // 2)
            found = np.sort(rows, axis=0)[cut : n - cut].mean(axis=0)
        else:
            found = self._clip(rows)
        return torch.from_numpy(found).float()

    def _clip(self, rows: np.ndarray) -> np.ndarray:
        v = np.zeros(rows.shape[1]) if self.v is None else self.v
        for _ in range(self.iterations):
            distances = [math.sqrt(float(((x - v) ** 2).sum())) for x in rows]
            limit = self.number * sorted(distances)[(len(rows) - 1) // 2]
            moves = [
                (x - v) * (min(1.0, limit / d) if d else 1.0) for x, d in zip(rows, distances, strict=True)
            ]
            v = v + sum(moves) / len(rows)
        self.v = v
        return v


class RobustOwners(Owners):
    """The statistic of all ranks' vectors by way of shards; `codec` None: in full."""

    def __init__(self, statistic: Statistic, codec: str | None, feedback: tuple[bool, bool]) -> None:
        second = "int8" if codec == "sign" else codec
        super().__init__(codec or "", second or "", None, None, feedback)
        self.statistic = statistic

    def __call__(
        self, parts: Sequence[Tensor], spans: Sequence[slice] = (), used: Sequence[Sequence[bool]] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """Where these are compared, all ranks use all parameters."""
        if not self.first:
            return list(parts), self.statistic(parts)
        n, length = len(parts), len(parts[0])
        shard = 64 * math.ceil(math.ceil(length / n) / 64)
        if not self.e:
            self.e, self.f = [torch.zeros(n * shard) for _ in parts], torch.zeros(n * shard)
        sent = []
        for i, part in enumerate(parts):
            m = nn.functional.pad(part, (0, n * shard - length)) + self.e[i]
            q = torch.cat([decoded(self.first, s, None) for s in m.split(shard)])
            sent.append(q)
            if self.feedback[0]:
                self.e[i] = finite(m - q)
        m = self.statistic(sent) + self.f
        out = torch.cat([decoded(self.second, s, None) for s in m.split(shard)])
        if self.statistic.v is not None:  # all start from what all got
            self.statistic.v = out.double().numpy()
        if self.feedback[1]:
            self.f = finite(m - out)
        return [q[:length] for q in sent], out[:length]


class RobustGradients(CodedGradients):
    """central:AGGREGATION/WHAT/sync."""

    def __init__(self, statistic: Statistic, codec: str | None = None) -> None:
        super().__init__(codec or "int8")
        fed = codec is not None and keeps_residual(codec)
        self.statistic = statistic
        self.owners = RobustOwners(statistic, codec, (fed, fed and codec != "sign"))

    def reorder(self, step: int) -> None:
        old = self.order
        super().reorder(step)
        if self.statistic.v is None or old == self.order:
            return
        own = self.sim.parameters(0)
        flat = torch.from_numpy(self.statistic.v)
        parts = dict(zip(old, unflatten(flat, [own[k] for k in old]), strict=True))
        there = [nn.functional.pad(parts[k].flatten(), (0, -parts[k].numel() % 16)) for k in self.order]
        moved = torch.cat(there)
        self.statistic.v = nn.functional.pad(moved, (0, len(flat) - len(moved))).numpy()


class RobustWeights(CentralWeights):
    """central:AGGREGATION/WHAT/every:H and async."""

    def __init__(self, statistic: Statistic, codec: str | None = None, **more: object) -> None:
        super().__init__(codec=codec, **more)  # type: ignore[arg-type]
        self.statistic = statistic
        if codec is not None:
            self.owners = RobustOwners(statistic, codec, (False, True))

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        if self.owners is None and self.outer is None:
            self.statistic.v = sim.start.double().numpy()

    def agree(self, x: list[Tensor]) -> list[Tensor]:
        if self.owners is not None:
            return super().agree(x)
        if self.outer is None:
            found = self.statistic(x)
            return [found - own for own in x]
        self.outer_step(-self.statistic([own - self.r for own in x]))
        return [self.r - own for own in x]
