"""Every algorithm of docs/algorithms.md that gossips, for all ranks of a training in one process.

Plain torch; nothing here knows trigram. Arithmetic is f32 in the order that the document gives, so that a
codec rounds as in the real thing wherever nothing but the order of two roundings is left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.codec_roundtrip import decoded
from tests.reference.graphs import Graph
from tests.reference.simulation import Algorithm, Part, Script, Simulation, cut, flatten, put


class Gossip(Algorithm):
    """Full, with a graph of any kind."""

    def __init__(self, graph: Graph, overlap: bool = True, every: int = 1) -> None:
        self.graph, self.overlap, self.every = graph, overlap, every
        self.flight: list[Tensor] | None = None

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        w = self.graph(round)
        n = len(x)
        return [sum_of([w[i, j] * x[j] for j in range(n) if w[i, j] != 0]) for i in range(n)]

    def boundary(self, done: int) -> None:
        if done % self.every == 0:
            self.flight = self.mix(self.sim.all_weights(), done // self.every - 1)
            if not self.overlap:
                self.land()

    def land(self) -> None:
        if self.flight is not None:
            self.sim.set_weights(self.flight)
            self.flight = None

    drain = land

    def backward_ended(self, step: int) -> None:
        self.land()


class OuterGossip(Gossip):
    """Slow weights with an outer step; what is averaged are those of all ranks after their own steps."""

    def __init__(self, graph: Graph, lr: float, momentum: float, **more: Any) -> None:
        super().__init__(graph, **more)
        self.lr, self.momentum = lr, momentum

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.slow = [sim.start.clone() for _ in range(sim.n)]
        self.velocity = [torch.zeros_like(sim.start) for _ in range(sim.n)]

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        own = [s + self.lr * (w - s) for s, w in zip(self.slow, x, strict=True)]
        mixed = super().mix(own, round)
        for i, s in enumerate(self.slow):
            self.velocity[i] = self.momentum * self.velocity[i] + mixed[i] - s
        self.slow = [s + v for s, v in zip(self.slow, self.velocity, strict=True)]
        return [s.clone() for s in self.slow]


def sum_of(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for p in parts[1:]:
        total += p
    return total


def gamma_of(codec: str) -> float:
    name, _, fraction = codec.partition(":")
    if name == "sign":
        return 0.2
    return min(1.0, 0.2 * (float(fraction) / 0.1) ** 0.824) if name == "topk" else 1.0


class Coded(Gossip):
    """Through a codec."""

    def __init__(
        self,
        graph: Graph,
        codec: str,
        block: int | None = None,
        gamma: float | None = None,
        overlap: bool = True,
        every: int = 1,
    ) -> None:
        super().__init__(graph, overlap, every)
        self.codec, self.block = codec, block
        self.gamma = gamma_of(codec) if gamma is None else gamma


class Choco(Coded):
    """A codec on a fixed graph."""

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.hat = [sim.start.clone() for _ in range(sim.n)]

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        w, n = self.graph(round), len(x)
        q = [decoded(self.codec, own - hat, self.block) for own, hat in zip(x, self.hat, strict=True)]
        self.hat = [hat + mine for hat, mine in zip(self.hat, q, strict=True)]
        return [
            x[i]
            + self.gamma
            * sum_of([w[i, j] * (self.hat[j] - self.hat[i]) for j in range(n) if j == i or w[i, j] != 0])
            for i in range(n)
        ]


class Edges(Coded):
    """A codec on a graph that changes: a reference per edge."""

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.r: dict[tuple[int, int], Tensor] = {}

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        w, n = self.graph(round), len(x)
        new = [own.clone() for own in x]
        moves: dict[int, list[Tensor]] = {i: [] for i in range(n)}
        for i in range(n):
            for j in range(i + 1, n):
                if w[i, j] == 0:
                    continue
                r = self.r.get((i, j), self.sim.start)
                a, b = (decoded(self.codec, x[k] - r, self.block) for k in (i, j))
                moves[i].append(w[i, j] * (b - a))
                moves[j].append(w[j, i] * (a - b))
                self.r[i, j] = r + (a + b) / 2
        for i in range(n):
            if moves[i]:
                new[i] = x[i] + self.gamma * sum_of(moves[i])
        return new


class PushSum(Gossip):
    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.y = [sim.start.clone() for _ in range(sim.n)]
        self.z = [sim.start.clone() for _ in range(sim.n)]
        self.w = torch.ones(sim.n)

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        y = [a + (b - c) for a, b, c in zip(self.y, x, self.z, strict=True)]
        self.y = super().mix(y, round)
        self.w = self.graph(round) @ self.w
        self.z = [a / b for a, b in zip(self.y, self.w, strict=True)]
        return [z.clone() for z in self.z]


class AsyncPairs(Algorithm):
    """Gossip in pairs, by a script: exchange k follows matching k, and concerns the k-th of the parts."""

    def __init__(
        self,
        graph: Graph,
        script: Script,
        codec: str | None = None,
        block: int | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        self.graph, self.script, self.codec, self.block, self.parts = graph, script, codec, block, parts
        self.k = 0
        self.flight: list[Tensor] | None = None
        self.r: dict[tuple[int, int, int], Tensor] = {}

    def begin(self) -> None:
        x, n = self.sim.all_weights(), self.sim.n
        w, at = self.graph(self.k), self.k % len(self.parts or [0])
        self.k += 1
        inside = torch.ones_like(x[0], dtype=torch.bool)
        if self.parts is not None:
            shapes, part = self.sim.parameters(0), self.parts[at]
            inside = put(shapes, part, flatten([torch.ones_like(p) for p in cut(shapes, part)])).bool()
        add = [torch.zeros_like(own) for own in x]
        for i in range(n):
            for j in range(i + 1, n):
                if w[i, j] == 0:
                    continue
                a, b = x[i][inside], x[j][inside]
                if self.codec is not None:
                    r = self.r.get((i, j, at), self.sim.start[inside])
                    a, b = (decoded(self.codec, own - r, self.block) for own in (a, b))
                    self.r[i, j, at] = r + (a + b) / 2
                add[i][inside], add[j][inside] = (b - a) / 2, (a - b) / 2
        self.flight = add

    def land(self) -> None:
        if self.flight is not None:
            self.sim.add(self.flight)
            self.flight = None

    drain = land

    def boundary(self, done: int) -> None:
        if self.flight is not None and self.script(done):
            self.land()
        if self.flight is None:
            self.begin()
