"""Every central algorithm of docs/algorithms.md, step by step, for all ranks of a training in one process.

Plain torch; nothing here knows trigram. Arithmetic is f32 in the order that the document gives, so that a
codec rounds as in the real thing wherever nothing but the order of two roundings is left open.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.codec_roundtrip import decoded, finite, keeps_residual
from tests.reference.simulation import (
    Algorithm,
    Part,
    Script,
    Simulation,
    average_gradients,
    cut,
    flatten,
    mean,
    put,
    unflatten,
)

# Gradients.


class FullGradients(Algorithm):
    def backward_ended(self, step: int) -> None:
        average_gradients(self.sim)


class Owners:
    """The mean of all ranks' vectors by way of shards: what each rank sent, and what all got."""

    def __init__(
        self,
        first: str,
        second: str,
        block: int | None = None,
        second_block: int | None = None,
        feedback: tuple[bool, bool] = (False, False),
    ) -> None:
        self.first, self.second, self.block, self.second_block = first, second, block, second_block
        self.feedback = feedback
        self.e: list[Tensor] = []
        self.f = torch.empty(0)

    def __call__(
        self, parts: Sequence[Tensor], spans: Sequence[slice] = (), used: Sequence[Sequence[bool]] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """`spans` are the parameters' places; `used[i][k]`: whether rank i has a gradient for `spans[k]`."""
        n, length = len(parts), len(parts[0])
        shard = 64 * math.ceil(math.ceil(length / n) / 64)
        if not self.e:
            self.e = [torch.zeros(n * shard) for _ in parts]
            self.f = torch.zeros(n * shard)
        nobody = [s for k, s in enumerate(spans) if not any(u[k] for u in used)]
        sent = []
        for i, part in enumerate(parts):
            m, before = nn.functional.pad(part, (0, n * shard - length)), self.e[i].clone()
            held = torch.zeros(len(m), dtype=torch.bool)
            for k, s in enumerate(spans):
                held[s] = not used[i][k] and not bool(m[s].any())
            m = m + before.masked_fill(held, 0)
            q = torch.cat([decoded(self.first, s, self.block) for s in m.split(shard)])
            sent.append(q)
            if self.feedback[0]:
                self.e[i] = finite(m - q) + before.masked_fill(~held, 0)
                for s in nobody:
                    self.e[i][s] = before[s]
        m, before = mean(sent), self.f.clone()
        held = torch.zeros(len(m), dtype=torch.bool)
        for k, s in enumerate(spans):
            for owner in range(n):
                own = slice(max(s.start, owner * shard), min(s.stop, (owner + 1) * shard))
                if own.start < own.stop:
                    held[own] = not used[owner][k] and not bool(m[own].any())
        m = m + before.masked_fill(held, 0)
        out = torch.cat([decoded(self.second, s, self.second_block) for s in m.split(shard)])
        if self.feedback[1]:
            self.f = finite(m - out) + before.masked_fill(~held, 0)
            for s in nobody:
                self.f[s] = before[s]
        return [q[:length] for q in sent], out[:length]


class Gathered:
    """The mean of all ranks' vectors, each encoded once; what each rank sent, and what all got."""

    def __init__(self, codec: str) -> None:
        self.codec = codec

    def __call__(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        n, length = len(parts), len(parts[0])
        whole = n * 64 * math.ceil(math.ceil(length / n) / 64)
        sent = [decoded(self.codec, nn.functional.pad(p, (0, whole - length))) for p in parts]
        return [q[:length] for q in sent], mean(sent)[:length]


class CodedGradients(Algorithm):
    """central/CODEC/sync; `momentum` not None: DGC."""

    def __init__(
        self,
        codec: str,
        block: int | None = None,
        momentum: float | None = None,
        second: str | None = None,
        second_feedback: bool | None = None,
        feedback: bool | None = None,
    ) -> None:
        keeps = keeps_residual(codec) if feedback is None else feedback
        second = second or ("int8" if codec == "sign" else codec)
        again = (keeps and keeps_residual(second)) if second_feedback is None else second_feedback
        self.owners = Owners(codec, second, block, block if second == codec else None, (keeps, again))
        self.momentum, self.u = momentum, []
        self.order: list[int] = []

    def bucket(self, step: int, rank: int) -> Tensor:
        """A rank's gradients, laid out as they travel."""
        own = self.sim.parameters(rank)
        return flatten(
            [own[k].grad if own[k].grad is not None else torch.zeros_like(own[k]) for k in self.order],
        )

    def reorder(self, step: int) -> None:
        """Reverse order first, then as gradients arrived in that first backward of rank 0.

        What is kept of a parameter moves with it. What an owner keeps goes to his own residual, times n, for
        a shard is another part of the bucket then: so it stays in the mean.
        """
        own = self.sim.parameters(0)
        forward = list(range(len(own)))
        reverse = forward[::-1] if self.sim.reverse else forward
        first = step <= self.sim.warmup
        new = reverse if first else [*self.sim.arrived, *(k for k in reverse if k not in self.sim.arrived)]
        if self.order and new != self.order and self.owners.e:
            like, n = [own[k] for k in self.order], self.sim.n

            def move(flat: Tensor) -> Tensor:
                parts = dict(zip(self.order, unflatten(flat, like), strict=True))
                there = flatten([parts[k] for k in new])
                return nn.functional.pad(there, (0, len(flat) - len(there)))

            shard = len(self.owners.f) // n
            for j, e in enumerate(self.owners.e):
                mine = slice(j * shard, (j + 1) * shard)
                e[mine] += n * self.owners.f[mine]
            self.owners.f = torch.zeros_like(self.owners.f)
            self.owners.e = [move(e) for e in self.owners.e]
            self.u = [move(u) for u in self.u]
        self.order = new

    def backward_ended(self, step: int) -> None:
        self.reorder(step)
        if step < self.sim.warmup:
            return
        parts = [self.bucket(step, i) for i in range(self.sim.n)]
        spans, used = self.spans(), self.used()
        before = self.u = self.u or [torch.zeros_like(p) for p in parts]
        if self.momentum is not None:
            parts = self.u = [self.momentum * u + p for u, p in zip(self.u, parts, strict=True)]
            self.keep(parts, [torch.zeros_like(p) for p in parts], spans, used)
        sent, out = self.owners(parts, spans, used)
        if self.momentum is not None:
            self.u = [torch.where(q != 0, torch.zeros_like(u), u) for u, q in zip(self.u, sent, strict=True)]
            self.keep(self.u, before, spans, used)
        self.deliver(out)

    def spans(self) -> list[slice]:
        own, at, spans = self.sim.parameters(0), 0, []
        for k in self.order:
            spans.append(slice(at, at + own[k].numel()))
            at += own[k].numel() + -own[k].numel() % 16
        return spans

    def used(self) -> list[list[bool]]:
        grads = [[p.grad for p in self.sim.parameters(i)] for i in range(self.sim.n)]
        return [[own[k] is not None for k in self.order] for own in grads]

    @staticmethod
    def keep(
        now: list[Tensor], before: list[Tensor], spans: list[slice], used: Sequence[Sequence[bool]]
    ) -> None:
        """What rank i does not use stays as it was."""
        for mine, was, flags in zip(now, before, used, strict=True):
            for span, flag in zip(spans, flags, strict=True):
                if not flag:
                    mine[span] = was[span]

    def deliver(self, out: Tensor) -> None:
        used = [
            any(self.sim.parameters(i)[k].grad is not None for i in range(self.sim.n)) for k in self.order
        ]
        for i in range(self.sim.n):
            own = [self.sim.parameters(i)[k] for k in self.order]
            for p, g, there in zip(own, unflatten(out, own), used, strict=True):
                if there:
                    p.grad = g.clone()


class QAdam(CodedGradients):
    """Momentum travels; the optimizer is part of it."""

    def __init__(
        self,
        bits: int = 8,
        block: int | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.freezes = one = bits == 1
        codec = "sign" if one else "int8"
        super().__init__(codec, block, second=codec, feedback=one, second_feedback=one)
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        own = sim.parameters(0)
        self.m, self.v = [torch.zeros_like(p) for p in own], [torch.zeros_like(p) for p in own]
        self.frozen: list[Tensor] | None = None

    def backward_ended(self, step: int) -> None:
        self.reorder(step)
        own = self.sim.parameters(0)
        b1, b2 = self.betas
        if step < self.sim.warmup:
            for k, p in enumerate(own):
                self.m[k] = b1 * self.m[k] + (1 - b1) * p.grad
                self.v[k] = b2 * self.v[k] + (1 - b2) * p.grad**2
            return
        if self.frozen is None and self.freezes:
            self.frozen = [v / (1 - b2 ** max(self.sim.warmup, 1)) for v in self.v]
        for i in range(self.sim.n):
            for k, p in enumerate(self.sim.parameters(i)):
                new = b1 * self.m[k] + (1 - b1) * p.grad
                p.grad = new if self.frozen is None else torch.where(self.frozen[k] == 0, 0 * new, new)
        _, out = self.owners([self.bucket(step, i) for i in range(self.sim.n)])
        for k, new in zip(self.order, unflatten(out, [own[k] for k in self.order]), strict=True):
            if self.frozen is not None:
                self.m[k] = torch.where(self.frozen[k] == 0, torch.zeros_like(new), new)
                continue
            mean = (new - b1 * self.m[k]) / (1 - b1)
            self.m[k], self.v[k] = new.clone(), b2 * self.v[k] + (1 - b2) * mean**2

    def update(self, rank: int) -> bool:
        b1, b2 = self.betas
        t = self.sim.done + 1
        with torch.no_grad():
            for k, p in enumerate(self.sim.parameters(rank)):
                if self.frozen is None:
                    root = (self.v[k] / (1 - b2**t)).sqrt()
                else:
                    root = self.frozen[k].sqrt()
                    root = root.clamp(min=0.01 * float(root.square().mean().sqrt()))
                p.sub_(self.lr * ((self.m[k] / (1 - b1**t)) / (root + self.eps) + self.decay * p))
        return True


class PowerSGD(Algorithm):
    def __init__(self, rank: int = 2, start: Callable[[list[tuple[int, int]]], list[Tensor]] | None = None):
        self.rank, self.start = rank, start or normal_each(rank)

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.matrices = []
        for k, p in enumerate(sim.parameters(0)):
            rows, columns = (len(p), p.numel() // len(p)) if p.dim() > 1 else (0, 0)
            if self.rank * (rows + columns) < rows * columns:
                self.matrices.append((k, rows, columns))
        self.q = dict(
            zip(
                [k for k, _, _ in self.matrices],
                self.start([(r, c) for _, r, c in self.matrices]),
                strict=True,
            )
        )
        self.e = {k: [torch.zeros(r, c) for _ in range(sim.n)] for k, r, c in self.matrices}

    def backward_ended(self, step: int) -> None:
        if step < self.sim.warmup:
            return
        n = self.sim.n
        for k, rows, columns in self.matrices:
            those = [self.sim.parameters(i)[k] for i in range(n)]
            used = [p.grad is not None for p in those]
            if not any(used):
                continue
            m = [
                torch.zeros_like(e) if p.grad is None else p.grad.view(rows, columns) + e
                for p, e in zip(those, self.e[k], strict=True)
            ]
            p_, _ = torch.linalg.qr(mean([a @ self.q[k] for a in m]))
            self.q[k] = mean([a.T @ p_ for a in m])
            left = [finite(a - p_ @ (p_.T @ a)) for a in m]
            self.e[k] = [new if u else old for new, old, u in zip(left, self.e[k], used, strict=True)]
            for p in those:
                p.grad = (p_ @ self.q[k].T).view_as(p)
        sent = {k for k, _, _ in self.matrices}
        average_gradients(self.sim, [k for k in range(len(self.sim.parameters(0))) if k not in sent])


def normal_each(rank: int) -> Callable[[list[tuple[int, int]]], list[Tensor]]:
    """Each matrix from its own generator."""

    def start(shapes: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.randn(c, rank, generator=torch.Generator().manual_seed(0)) for _, c in shapes]

    return start


# Weights, central.


class CentralWeights(Algorithm):
    """every:H, or asynchronously by a script; `codec` None: full; `outer` (lr, momentum): DiLoCo."""

    def __init__(
        self,
        every: int = 1,
        codec: str | None = None,
        block: int | None = None,
        outer: tuple[float, float] | None = None,
        state: bool = False,
        overlap: bool = False,
        script: Script | None = None,
        owner_feedback: bool = True,
        feedback: float | None = None,
    ) -> None:
        self.feedback = feedback
        self.every, self.codec, self.outer, self.state, self.overlap = every, codec, outer, state, overlap
        self.script = script
        second = "int8" if codec == "sign" else codec
        self.owners: Callable[[list[Tensor]], tuple[list[Tensor], Tensor]] | None = None
        if codec is not None and codec.startswith("chunktopk"):
            self.owners = Gathered(codec)
        elif codec is not None:
            second_block = block if second == codec else None
            self.owners = Owners(codec, second or "", block, second_block, (False, owner_feedback))
        self.flight: list[Tensor] | None = None  # what is added to each rank's weights when it lands

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.r = sim.start.clone()
        self.momentum = torch.zeros_like(self.r)
        self.e = [torch.zeros_like(self.r) for _ in range(sim.n)]

    def agree(self, x: list[Tensor]) -> list[Tensor]:
        """What each rank adds to its weights; moves r."""
        if self.owners is None:
            average = mean(x)
            if self.outer is None:
                return [average - own for own in x]
            self.outer_step(self.r - average)
            return [self.r - own for own in x]
        parts = [own - self.r for own in x]
        if self.feedback is not None:
            parts = [self.feedback * e + part for e, part in zip(self.e, parts, strict=True)]
        q, move = self.owners(parts)
        self.e = [part - mine for part, mine in zip(parts, q, strict=True)]
        before = self.r
        if self.outer is None:
            self.r = self.r + move
        else:
            self.outer_step(-move)
        if self.feedback is not None:
            return [self.r - own for own in x]
        return [(self.r - before) - mine for mine in q]

    def outer_step(self, d: Tensor) -> None:
        assert self.outer is not None
        lr, mu = self.outer
        self.momentum = mu * self.momentum + d
        self.r = self.r - lr * (d + mu * self.momentum)

    def land(self) -> None:
        if self.flight is not None:
            self.sim.add(self.flight)
            self.flight = None

    drain = land

    def boundary(self, done: int) -> None:
        if self.script is not None:
            if self.flight is not None and self.script(done):
                self.land()
            if self.flight is None:
                self.flight = self.agree(self.sim.all_weights())
        elif done % self.every == 0:
            self.flight = self.agree(self.sim.all_weights())
            if self.state:
                self.average_state()
            if not self.overlap:
                self.land()

    def backward_ended(self, step: int) -> None:
        if self.script is None:
            self.land()

    def average_state(self) -> None:
        for those in zip(*(self.sim.parameters(i) for i in range(self.sim.n)), strict=True):
            states = [o.state[p] for o, p in zip(self.sim.optimizers, those, strict=True)]
            for key, value in states[0].items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    new = mean([s[key] for s in states])
                    for s in states:
                        s[key].copy_(new)


class Shares(CentralWeights):
    """A share of the weights in each averaging step: every ``stride``-th value of the whole model."""

    def __init__(self, share: float, every: int = 1, **more: Any) -> None:
        super().__init__(every, **more)
        self.stride, self.steps, self.order = round(1 / share), 0, list[int]()

    def agree(self, x: list[Tensor]) -> list[Tensor]:
        if not self.order:  # as the module says, one order for each round
            self.order = random.Random(self.steps // self.stride).sample(range(self.stride), self.stride)
        shapes = self.sim.parameters(0)
        chosen = torch.zeros(sum(p.numel() for p in shapes))
        chosen[self.order.pop(0) :: self.stride] = 1
        parts = chosen.split([p.numel() for p in shapes])
        here = flatten([part.view(p.shape) for part, p in zip(parts, shapes, strict=True)])
        self.steps += 1
        return [here * (mean(x) - own) for own in x]


class Fragments(CentralWeights):
    """One part of the parameters after the other is averaged: every H / len(parts) steps, or asynchronously
    by a script, the next when the last has landed."""

    def __init__(self, every: int, parts: Sequence[Part], overlap: bool = False, **more: Any) -> None:
        super().__init__(every, overlap=overlap, **more)
        self.parts = parts
        self.each = [CentralWeights(every, **more) for _ in parts]
        self.begun = 0

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        for part, one in zip(self.parts, self.each, strict=True):
            one.r = flatten(cut(sim.parameters(0), part))
            one.momentum = torch.zeros_like(one.r)

    def boundary(self, done: int) -> None:
        if self.script is not None:
            if self.flight is not None and self.script(done):
                self.land()
            if self.flight is None:
                self.begin(self.begun % len(self.parts))
                self.begun += 1
            return
        period = self.every // len(self.parts)
        if done % period:
            return
        self.begin(done // period % len(self.parts))
        if not self.overlap:
            self.land()

    def begin(self, at: int) -> None:
        """Averages the part; it lands later."""
        part, everybody = self.parts[at], [self.sim.parameters(i) for i in range(self.sim.n)]
        moves = self.each[at].agree([flatten(cut(own, part)) for own in everybody])
        self.flight = [put(own, part, move) for own, move in zip(everybody, moves, strict=True)]
