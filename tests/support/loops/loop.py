"""What a loop of the table gets: its ranks' data, and trigram, which is left out in the one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import trigram
from tests.support.loops.table import ALGORITHMS, ASYNC, GRADIENTS, WEIGHTS, Row


class Loop:
    """One run of a row: on a rank under an algorithm, or in one process on the data of several ranks.

    Attributes:
        rank: This rank; -1 in the one process that has all ranks' data.
        shares: The ranks whose data this run trains on.
        algorithm: None in the one process.
        at: The iteration of the loop.
        models: The models that were wrapped.
    """

    def __init__(self, row: Row, world: int, shares: Sequence[int], algorithm: str | None) -> None:
        self.row, self.world, self.shares, self.algorithm = row, world, list(shares), algorithm
        self.rank = self.shares[0] if len(self.shares) == 1 else -1
        self.at = -1
        self.iterations = 0
        self.models: list[nn.Module] = []
        self.gradients, self.weights = algorithm in GRADIENTS, algorithm in WEIGHTS
        torch.manual_seed(1)

    # The data.

    def x(self, step: int, *shape: int) -> Tensor:
        """Inputs of a step, of 8 samples with 6 values: each rank has its own."""
        parts = []
        for r in self.shares:
            g = torch.Generator().manual_seed(7919 + 101 * r + step)
            parts.append(torch.randn(shape or (8, 6), generator=g))
        return torch.cat(parts)

    def batch(self, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
        """Inputs and targets. All ranks have the same inputs, and each has targets of its own.

        So with a model that is linear in its weights, the mean of the gradients at the ranks' weights is the
        gradient at the mean of their weights.
        """
        g = torch.Generator().manual_seed(13 + step)
        inputs = torch.randn(size, 6, generator=g)
        true = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
        targets = []
        for r in self.shares:
            own = torch.Generator().manual_seed(1000 + r)
            shift = 2 * torch.randn(3, generator=own)
            noise = torch.randn(size, 3, generator=torch.Generator().manual_seed(77 * step + r))
            targets.append(inputs @ true + shift + 0.1 * noise)
        return inputs.repeat(len(self.shares), 1), torch.cat(targets)

    def mean(self, loss: Callable[[int], Tensor]) -> Tensor:
        """The mean of `loss(rank)` over the ranks of this run: for losses that differ by rank in kind."""
        losses = [loss(r) for r in self.shares]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def of(self, rank: int) -> Loop:
        """The same run with the data of one rank alone: for use in `mean`."""
        part = object.__new__(Loop)
        part.__dict__.update(self.__dict__, shares=[rank])
        return part

    def steps(self, count: int = 10, start: int = 0) -> Iterator[int]:
        """The iterations of the loop."""
        for step in range(start, start + count):
            self.at = step
            self.iterations += 1
            yield step

    # Trigram.

    def options(self) -> dict[str, Any]:
        """The algorithm's options in this row."""
        assert self.algorithm is not None
        chosen = self.row.options.get(self.algorithm, ALGORITHMS[self.algorithm])
        if not self.row.even and self.algorithm in ASYNC:
            chosen = {k: v for k, v in chosen.items() if k != "script"}
        return chosen

    def wrap(self, module: Any, optimizer: Any = None, **options: Any) -> Any:
        """`with_bagua` under the run's algorithm. The weights are rank 0's."""
        self.models.append(module)
        if self.algorithm is None:
            return module
        if optimizer is not None and self.algorithm == "local_sgd":
            options["optimizer"] = optimizer
        return trigram.with_bagua(module, self.algorithm, **self.options(), **options)

    def step(self, model: nn.Module) -> None:
        """`trigram.step`."""
        if self.algorithm is not None:
            trigram.step(model)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """`trigram.no_sync`."""
        with contextlib.nullcontext() if self.algorithm is None else trigram.no_sync(model):
            yield

    @contextlib.contextmanager
    def join(self, *models: nn.Module) -> Iterator[None]:
        """`trigram.join`."""
        with contextlib.nullcontext() if self.algorithm is None else trigram.join(*models):
            yield

    @contextlib.contextmanager
    def consensus(self, model: nn.Module) -> Iterator[None]:
        """`with trigram.consensus`."""
        with contextlib.nullcontext() if self.algorithm is None else trigram.consensus(model):
            yield


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """Plain: what it does to the mean of the weights is linear in the gradients."""
    return torch.optim.SGD(model.parameters(), lr=lr)


class Flat(nn.Module):
    """Linear in its weights, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(inputs) + self.two(torch.cos(inputs))


class Net(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 3)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.encoder(inputs))

    def decode(self, hidden: Tensor) -> Tensor:
        return self.decoder(hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decode(self.encode(inputs))


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean of the squares."""
    return nn.functional.mse_loss(output, targets)


Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""Of a model, inputs and targets."""


def root_called(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a plain call of the model."""
    return mse(model(inputs), targets)


def layers_called(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a `Flat` whose layers are called, and whose root is not."""
    return mse(model.one(inputs) + model.two(torch.cos(inputs)), targets)


def before_steps(
    t: Loop,
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss: Loss = root_called,
    count: int = 10,
    start: int = 0,
) -> Iterator[int]:
    """Plain iterations, each left to the script between its backward pass and its optimizer step."""
    for step in t.steps(count, start):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss(model, inputs, targets).backward()
        yield step
        optimizer.step()


def after_steps(
    t: Loop, model: Any, optimizer: torch.optim.Optimizer, count: int = 10, start: int = 0
) -> Iterator[int]:
    """Plain iterations, each left to the script after its optimizer step."""
    for step in t.steps(count, start):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        yield step


def train(
    t: Loop,
    model: Any,
    start: int = 0,
    count: int = 10,
    loss: Loss = root_called,
    lr: float = 0.05,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Plain iterations, with SGD of their own unless an optimizer is given."""
    for _ in before_steps(t, model, optimizer or sgd(model, lr), loss, count, start):
        pass


def train_by_rank(t: Loop, model: nn.Module, loss: Callable[[int, int, Tensor, Tensor], Tensor]) -> None:
    """Plain iterations with `loss(rank, step, inputs, targets)`, which is another function on each rank."""
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        t.mean(lambda r, step=step: loss(r, step, *t.of(r).batch(step))).backward()  # type: ignore[misc]
        optimizer.step()
