"""Every algorithm of docs/algorithms.md, step by step, for all ranks of a training in one process.

Plain torch; nothing here knows trigram. Arithmetic is f32 in the order that the document gives, so that a
codec rounds as in the real thing wherever nothing but the order of two roundings is left open.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Graph = Callable[[int], Tensor]  # round -> W, whose row i says what rank i takes of whom
Script = Callable[[int], bool]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Losses = Callable[[nn.Module, int], Sequence[Tensor]]  # (model, rank) -> the losses of the micro-batches
HUGE = torch.finfo(torch.float32).max
TINY = 1e-36


# Codecs: what a receiver sees of a vector, and how many bytes it took.


def _affine(x: Tensor, largest: int, bits: int) -> Tensor:
    """One block of int8 or int4."""
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    if float(high - low) < TINY:
        return torch.zeros_like(x)
    below = (1 << bits) - 1
    step = ((high / largest - low / largest).view(torch.int32) + below) & ~below
    step = step.view(torch.float32)
    inverse = 1.0 / step
    zero = (-low * inverse).round().clamp(0, largest)
    code = ((x * inverse).round() + zero).clamp(0, largest)
    return ((code - zero) * step).clamp(-HUGE, HUGE)


def _fp8(x: Tensor) -> Tensor:
    top = x.abs().max()
    if float(top) < TINY:
        return torch.zeros_like(x)
    scale = top / 448
    return (x * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _sign(x: Tensor) -> Tensor:
    mean = x.double().abs().mean().float()
    return torch.where(x.signbit(), -mean, mean)


def _topk(x: Tensor, fraction: float) -> Tensor:
    kept = torch.zeros_like(x)
    index = x.abs().sort(descending=True, stable=True).indices[: how_many(fraction, len(x))]
    kept[index] = x[index]
    return kept


def how_many(fraction: float, n: int) -> int:
    return max(1, math.ceil(fraction * n))


BLOCKS = {"int8": 512, "int4": 32, "fp8": 128, "sign": 256}


def decoded(codec: str, x: Tensor, block: int | None = None) -> Tensor:
    """decode(encode(x))."""
    name, _, argument = codec.partition(":")
    if name == "full" or not len(x):
        return x.clone()
    if name in ("bf16", "f16"):
        return x.to(torch.bfloat16 if name == "bf16" else torch.float16).float()
    if name == "topk":
        return _topk(x, float(argument))
    one = {
        "int8": lambda b: _affine(b, 255, 8),
        "int4": lambda b: _affine(b, 15, 4),
        "fp8": _fp8,
        "sign": _sign,
    }[name]
    whole = [one(b) if bool(b.isfinite().all()) else b * math.nan for b in x.split(block or BLOCKS[name])]
    return torch.cat(whole)


def encoded_size(codec: str, n: int, block: int | None = None) -> int:
    """Bytes of n elements."""
    name, _, argument = codec.partition(":")
    if name in ("full", "bf16", "f16"):
        return (4 if name == "full" else 2) * n
    if name == "topk":
        k = how_many(float(argument), n)
        low = int(math.log2(n // k))
        return 4 * k + (k * low + 7) // 8 + (k + ((n - 1) >> low) + 1 + 7) // 8
    if name == "randomk":
        return 12 + 4 * how_many(float(argument), n)
    size = block or BLOCKS[name]
    headers = 4 * math.ceil(n / size)
    return headers + {"int8": n, "fp8": n, "int4": (n + 1) // 2, "sign": (n + 7) // 8}[name]


def keeps_residual(codec: str) -> bool:
    return codec.partition(":")[0] in ("sign", "topk", "randomk")


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


# Graphs.


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


# The training of all ranks.


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One after another, each starting on a multiple of 64 bytes, zeros between."""
    padded = [nn.functional.pad(t.detach().flatten(), (0, -t.numel() % 16)) for t in tensors]
    return torch.cat(padded) if padded else torch.empty(0)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts, at = [], 0
    for t in like:
        parts.append(flat[at : at + t.numel()].view_as(t))
        at += t.numel() + -t.numel() % 16
    return parts


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Summed in rank order."""
    total = parts[0].clone()
    for p in parts[1:]:
        total += p
    return total / len(parts)


class Algorithm:
    """What happens at a boundary, and when the backward passes have ended."""

    sim: Simulation

    def attach(self, sim: Simulation) -> None:
        self.sim = sim

    def boundary(self, done: int) -> None:
        """Before the forward after `done` steps."""

    def backward_ended(self, step: int) -> None:
        """After the backward of step 0, 1, ..."""

    def update(self, rank: int) -> bool:
        """True: the optimizer's step has been done here."""
        return False

    def drain(self) -> None:
        """What is in flight lands."""


class Simulation:
    """n replicas, trained together."""

    def __init__(
        self,
        algorithm: Algorithm,
        n: int,
        make: Callable[[], nn.Module],
        optimizer: Optimizer,
        warmup: int = 0,
        reverse: bool = True,
    ) -> None:
        self.n, self.warmup, self.reverse, self.done = n, warmup, reverse, 0
        first = make()
        self.models = [copy.deepcopy(first) for _ in range(n)]
        self.optimizers = [optimizer(m) for m in self.models]
        self.start = self.weights(0).clone()
        self.arrived: list[int] = []
        for i, p in enumerate(self.parameters(0)):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrives(i))
        self.algorithm = algorithm
        algorithm.attach(self)

    def _arrives(self, i: int) -> None:
        if self.done == 0 and i not in self.arrived:
            self.arrived.append(i)

    def parameters(self, rank: int) -> list[nn.Parameter]:
        return [p for p in self.models[rank].parameters() if p.requires_grad]

    def weights(self, rank: int) -> Tensor:
        return flatten(self.parameters(rank))

    def all_weights(self) -> list[Tensor]:
        return [self.weights(i) for i in range(self.n)]

    def set_weights(self, flats: Sequence[Tensor]) -> None:
        for i, flat in enumerate(flats):
            own = self.parameters(i)
            for p, new in zip(own, unflatten(flat, own), strict=True):
                p.data.copy_(new)

    def boundary(self) -> None:
        """Before the first forward of a step."""
        if self.done > 0 and self.done >= self.warmup:
            self.algorithm.boundary(self.done)

    def backward(self, losses: Losses) -> None:
        for i, model in enumerate(self.models):
            self.optimizers[i].zero_grad()
            for loss in losses(model, i):
                loss.backward()
        if self.done < self.warmup:
            average_gradients(self)
        self.algorithm.backward_ended(self.done)

    def update(self, skip: Sequence[int] = ()) -> None:
        for i, optimizer in enumerate(self.optimizers):
            if i not in skip and not self.algorithm.update(i):
                optimizer.step()
        self.done += 1

    def step(self, losses: Losses) -> None:
        self.boundary()
        self.backward(losses)
        self.update()

    def consensus(self) -> list[Tensor]:
        """The average weights."""
        parts = zip(*(self.parameters(i) for i in range(self.n)), strict=True)
        return [mean([p.detach() for p in those]) for those in parts]


def average_gradients(sim: Simulation, only: Sequence[int] | None = None) -> None:
    for k, those in enumerate(zip(*(sim.parameters(i) for i in range(sim.n)), strict=True)):
        if only is not None and k not in only:
            continue
        got = [p.grad for p in those]
        if any(g is not None for g in got):
            new = mean([torch.zeros_like(p) if g is None else g for p, g in zip(those, got, strict=True)])
            for p in those:
                p.grad = new.clone()


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

    def __call__(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        n, length = len(parts), len(parts[0])
        shard = 64 * math.ceil(math.ceil(length / n) / 64)
        if not self.e:
            self.e = [torch.zeros(n * shard) for _ in parts]
            self.f = torch.zeros(n * shard)
        sent = []
        for i, part in enumerate(parts):
            m = nn.functional.pad(part, (0, n * shard - length)) + self.e[i]
            q = torch.cat([decoded(self.first, s, self.block) for s in m.split(shard)])
            sent.append(q)
            if self.feedback[0]:
                self.e[i] = finite(m - q)
        m = mean(sent) + self.f
        out = torch.cat([decoded(self.second, s, self.second_block) for s in m.split(shard)])
        if self.feedback[1]:
            self.f = finite(m - out)
        return [q[:length] for q in sent], out[:length]


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
        if self.momentum is not None:
            self.u = self.u or [torch.zeros_like(p) for p in parts]
            parts = self.u = [self.momentum * u + p for u, p in zip(self.u, parts, strict=True)]
        sent, out = self.owners(parts)
        if self.momentum is not None:
            self.u = [torch.where(q != 0, torch.zeros_like(u), u) for u, q in zip(self.u, sent, strict=True)]
        self.deliver(out)

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
        one = bits == 1
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
        if self.frozen is None:
            self.frozen = [v / (1 - b2 ** max(self.sim.warmup, 1)) for v in self.v]
        for i in range(self.sim.n):
            for k, p in enumerate(self.sim.parameters(i)):
                new = b1 * self.m[k] + (1 - b1) * p.grad
                p.grad = torch.where(self.frozen[k] == 0, torch.zeros_like(new), new)
        _, out = self.owners([self.bucket(step, i) for i in range(self.sim.n)])
        for k, new in zip(self.order, unflatten(out, [own[k] for k in self.order]), strict=True):
            self.m[k] = torch.where(self.frozen[k] == 0, torch.zeros_like(new), new)

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
            used = any(p.grad is not None for p in those)
            m = [
                (torch.zeros_like(p) if p.grad is None else p.grad).view(rows, columns) + e
                for p, e in zip(those, self.e[k], strict=True)
            ]
            p_, _ = torch.linalg.qr(mean([a @ self.q[k] for a in m]))
            self.q[k] = mean([a.T @ p_ for a in m])
            self.e[k] = [finite(a - p_ @ (p_.T @ a)) for a in m]
            for p in those if used else []:
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
    ) -> None:
        self.every, self.codec, self.outer, self.state, self.overlap = every, codec, outer, state, overlap
        self.script = script
        second = "int8" if codec == "sign" else codec
        self.owners = (
            None
            if codec is None
            else Owners(
                codec, second or "", block, block if second == codec else None, (False, owner_feedback)
            )
        )
        self.flight: list[Tensor] | None = None  # what is added to each rank's weights when it lands

    def attach(self, sim: Simulation) -> None:
        super().attach(sim)
        self.r = sim.start.clone()
        self.momentum = torch.zeros_like(self.r)

    def agree(self, x: list[Tensor]) -> list[Tensor]:
        """What each rank adds to its weights; moves r."""
        if self.owners is None:
            average = mean(x)
            if self.outer is None:
                return [average - own for own in x]
            self.outer_step(self.r - average)
            return [self.r - own for own in x]
        q, move = self.owners([own - self.r for own in x])
        before = self.r
        if self.outer is None:
            self.r = self.r + move
        else:
            self.outer_step(-move)
        return [(self.r - before) - mine for mine in q]

    def outer_step(self, d: Tensor) -> None:
        assert self.outer is not None
        lr, mu = self.outer
        self.momentum = mu * self.momentum + d
        self.r = self.r - lr * (d + mu * self.momentum)

    def land(self) -> None:
        if self.flight is not None:
            x = self.sim.all_weights()
            self.sim.set_weights([own + add for own, add in zip(x, self.flight, strict=True)])
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


# Weights, gossip.


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


class Choco(Gossip):
    """A codec on a fixed graph."""

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


class Edges(Gossip):
    """A codec on a graph that changes: a reference per edge."""

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
    """Gossip in pairs, by a script: exchange k follows matching k."""

    def __init__(
        self, graph: Graph, script: Script, codec: str | None = None, block: int | None = None
    ) -> None:
        self.graph, self.script, self.codec, self.block = graph, script, codec, block
        self.k = 0
        self.flight: list[Tensor] | None = None
        self.r: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        x, n = self.sim.all_weights(), self.sim.n
        w = self.graph(self.k)
        self.k += 1
        add = [torch.zeros_like(own) for own in x]
        for i in range(n):
            for j in range(i + 1, n):
                if w[i, j] == 0:
                    continue
                if self.codec is None:
                    a, b = x[i], x[j]
                else:
                    r = self.r.get((i, j), self.sim.start)
                    a, b = (decoded(self.codec, x[k] - r, self.block) for k in (i, j))
                    self.r[i, j] = r + (a + b) / 2
                add[i], add[j] = (b - a) / 2, (a - b) / 2
        self.flight = add

    def land(self) -> None:
        if self.flight is not None:
            x = self.sim.all_weights()
            self.sim.set_weights([own + add for own, add in zip(x, self.flight, strict=True)])
            self.flight = None

    drain = land

    def boundary(self, done: int) -> None:
        if self.flight is not None and self.script(done):
            self.land()
        if self.flight is None:
            self.begin()
