"""A training on this rank beside a simulation of all ranks, and when the two are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import trigram
from tests.reference.adam import MeanAdam
from tests.reference.simulation import Simulation, flatten
from tests.support.algorithm_rows import ROWS, Row
from tests.support.checks import from_rank_0, same_on_all_ranks
from tests.support.twin_training import x

TIGHT = 3e-6  # distance over length, where no codec rounds
FLIPS = 0.05  # of the elements may have been rounded to the other side when the two first part
DRIFT = 4e-3  # distance over length, after that

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "long adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "qadam": lambda m: trigram.QAdam(m.parameters(), lr=0.01),
    "qadam with decay": lambda m: trigram.QAdam(m.parameters(), lr=0.02, betas=(0.8, 0.99), weight_decay=0.1),
}


def net() -> nn.Module:
    """Odd sizes: every parameter is padded."""
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 29), nn.Tanh(), nn.Linear(29, 3))


def loss(model: nn.Module, rank: int, step: int, micro: int = 0, salt: int = 0) -> Tensor:
    """Ranks want different things, so that replicas part."""
    inputs = x(rank, step, 8, 6, salt=salt + 100 * micro)
    return (model(inputs) - ((1 + rank) * inputs[:, :3]).sin() - 0.5 * rank).square().mean()


class Yardstick:
    """Whether two runs are the same, one of them rounded by codecs.

    Additions in another order can put a number on the other side of a rounding boundary: where the two
    first differ, only few elements may, and from then on the whole is watched.
    """

    def __init__(self, coded: bool) -> None:
        self.coded, self.parted = coded, False

    def check(self, actual: Tensor, expected: Tensor, what: str) -> None:
        assert actual.isfinite().all(), f"{what}: not finite"
        far = (actual.double() - expected.double()).abs()
        length = float(expected.double().norm())
        distance = float(far.norm()) / length
        if not self.coded:
            assert distance <= TIGHT, f"{what}: off by {distance:.2e}, largest {float(far.max()):.2e}"
            return
        off = far > 1e-5 + 3e-5 * expected.double().abs()
        share = float(off.double().mean())
        if not self.parted:
            assert share <= FLIPS, (
                f"{what}: {100 * share:.1f} % of the elements differ where the two first part, by up to "
                f"{float(far.max()):.2e}; off by {distance:.2e}"
            )
        self.parted = self.parted or bool(off.any())
        assert distance <= DRIFT, f"{what}: off by {distance:.2e}, largest {float(far.max()):.2e}"


class Run:
    """Our replica on this rank beside a simulation of all ranks.

    Args:
        once: Only rank 0 simulates, and tells the others in :meth:`end`; else all do, and `sim` is there.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        row: Row,
        make: Callable[[], nn.Module] = net,
        micros: int = 1,
        salt: int = 0,
        once: bool = False,
    ) -> None:
        self.rank, self.row, self.micros, self.salt = rank, row, micros, salt
        torch.manual_seed(99 + salt)
        self.once, self.simulates = once, rank == 0 or not once
        if self.simulates:
            optimizer = self.optimizer_for(row, world)
            self.sim = Simulation(row.reference(world), world, make, optimizer, row.warmup)
        torch.manual_seed(99 + salt if rank == 0 else 100 + rank)  # rank 0's weights are to reach everybody
        module = make()
        self.optimizer = OPTIMIZERS[row.optimizer](module)
        given = {"optimizer": self.optimizer} if row.given else {}
        self.model: Any = trigram.with_bagua(module, row.algorithm, **given, **row.options)
        self.yardstick = Yardstick(row.coded)
        self.same: list[Tensor] = []  # what must be the same bits everywhere
        self.seen: list[Tensor] = []  # our weights after each step,
        self.expected: list[list[Tensor]] = []  # and what the simulation has, by rank
        self.done = 0

    @staticmethod
    def optimizer_for(row: Row, world: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
        """The simulation steps for QAdam itself. A long training shows Adam's second moment of the mean."""
        if row.optimizer == "long adam":
            return lambda m: MeanAdam(m.parameters(), 0.01, world, row.warmup)
        return OPTIMIZERS["sgd" if row.optimizer.startswith("qadam") else row.optimizer]

    def losses(self, model: nn.Module, rank: int) -> list[Tensor]:
        return [loss(model, rank, self.done, m, self.salt) for m in range(self.micros)]

    def weights(self) -> Tensor:
        return flatten([p for p in self.model.parameters() if p.requires_grad])

    def backward(self) -> None:
        """Ours, and the simulation's."""
        if self.simulates:
            self.sim.boundary()
            self.sim.backward(self.losses)
        self.optimizer.zero_grad()
        for m in range(self.micros - 1):
            with trigram.no_sync(self.model):
                loss(self.model, self.rank, self.done, m, self.salt).backward()
        last = loss(self.model, self.rank, self.done, self.micros - 1, self.salt)
        if self.row.agree and self.done and self.done % self.row.agree == 0:
            self.same.append(self.weights())
        last.backward()

    def update(self) -> None:
        if self.simulates:
            self.sim.update()
        self.optimizer.step()
        if self.row.same:
            self.same.append(self.weights())
        if self.simulates:
            self.yardstick.check(self.weights(), self.sim.weights(self.rank), f"after step {self.done}")
        if self.once:
            self.seen.append(self.weights())
            if self.simulates:
                self.expected.append(self.sim.all_weights())
        self.done += 1

    def step(self) -> None:
        self.backward()
        self.update()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def end(self, world: int, name: str) -> None:
        if self.once:
            expected = from_rank_0(self.rank, name, self.expected)
            assert len(expected) == len(self.seen) > 0
            for step, (mine, all_ranks) in enumerate(zip(self.seen, expected, strict=True)):
                if not self.simulates:
                    self.yardstick.check(mine, all_ranks[self.rank], f"after step {step}")
        if self.same:
            same_on_all_ranks(self.rank, world, name, self.same)


class Reversed(nn.Module):
    """Gradients do not arrive in the reverse order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(29, 3), nn.Linear(6, 33), nn.Linear(33, 29)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


def start(
    rank: int, label: str, make: Callable[[], nn.Module], seed: int = 8
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    row = ROWS[label]
    module = make()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    return trigram.with_bagua(module, row.algorithm, **given, **row.options), optimizer


def go(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> list[Tensor]:
    """The weights after each step."""
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        seen.append(flatten(list(model.parameters())))
    return seen


def total(model: nn.Module) -> Tensor:
    t = flatten(list(model.parameters())).double()
    trigram.all_reduce(t)
    return t


def distance(model: nn.Module, to: Tensor) -> float:
    """Root of the summed squares, over all ranks."""
    t = (flatten(list(model.parameters())).double() - to).square().sum().view(1)
    trigram.all_reduce(t)
    return float(t.sqrt())
