"""The training of all ranks in one process, step by step, under an algorithm that is written down once more.

Plain torch; nothing here knows trigram. The algorithms are in central.py and gossip.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Script = Callable[[int], bool]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Losses = Callable[[nn.Module, int], Sequence[Tensor]]  # (model, rank) -> the losses of the micro-batches


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


Part = Sequence[
    tuple[int, slice | tuple[slice, ...]]
]  # of the weights: parameters, by their number, and where


def cut(params: Sequence[Tensor], part: Part) -> list[Tensor]:
    return [params[k][where] for k, where in part]


def put(params: Sequence[Tensor], part: Part, flat: Tensor) -> Tensor:
    """What belongs to the part in its place, flat; zeros elsewhere."""
    whole = [torch.zeros_like(p) for p in params]
    for (k, where), values in zip(part, unflatten(flat, cut(params, part)), strict=True):
        whole[k][where] = values
    return flatten(whole)


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Summed in rank order."""
    total = parts[0].clone()
    for p in parts[1:]:
        total += p
    return total / len(parts)


class Algorithm:
    """What happens at a boundary, and when the backward passes have ended."""

    sim: Simulation
    overlap = False  # True: an averaging step begins with the next training step

    def attach(self, sim: Simulation) -> None:
        self.sim = sim

    def boundary(self, done: int) -> None:
        """After `done` steps: after the update, or with `overlap` before the next forward."""

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

    def add(self, differences: Sequence[Tensor]) -> None:
        """Adds to the weights of each rank."""
        self.set_weights([own + add for own, add in zip(self.all_weights(), differences, strict=True)])

    def boundary(self) -> None:
        """Before the first forward of a step."""
        if self.done > 0 and self.done >= self.warmup and self.algorithm.overlap:
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
        if self.done >= self.warmup and not self.algorithm.overlap:
            self.algorithm.boundary(self.done)

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
