"""What the parameters of a model may be: each against one process on the whole batch.

Each check fails when its handling is removed: a gradient is then missing, local or counted twice, or a
rank waits for one that never comes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.twin_training import Pair, mlp, square, x

CASES = Cases()


class Branches(nn.Module):
    """A trunk and three heads, any of which a forward may take."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, inputs: Tensor, order: tuple[int, ...]) -> Tensor:
        h = torch.tanh(self.trunk(inputs))
        return sum(((i + 1) * self.heads[k](h).square().mean() for i, k in enumerate(order)), h.new_zeros(()))


@CASES.over(0.05, 0.0001)
def buckets(rank: int, world: int, bucket_mb: float) -> None:
    """Many buckets, and in each step the ranks' gradients become ready in another order."""

    def make() -> nn.Module:
        model = Branches()
        model.trunk, model.heads = (
            nn.Linear(6, 8),
            nn.ModuleList(nn.Linear(8, 20_000 if k == 0 else 900) for k in range(3)),
        )
        return model

    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (1, 0, 2)]

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return model(x(r, step), orders[(r + step * (r + 1)) % 5])

    pair = Pair(rank, world, make, bucket_mb=bucket_mb)
    pair.train(loss, 6)


@CASES
def unused_on_some_ranks(rank: int, world: int) -> None:
    """Another head on each rank, in turn: the mean counts the others as zero, and everybody gets it."""
    Pair(rank, world, Branches).train(lambda m, r, s: m(x(r, s), ((r + s) % 3,)), 5)


@CASES.over(True, False)
def unused_on_all_ranks(rank: int, world: int, set_to_none: bool) -> None:
    """It stays None (with weight decay, a zero would move the weights); then one rank uses the head."""

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return model(x(r, step), (0, 2) if step >= 3 and r == world - 1 else (0,))

    Pair(rank, world, Branches).train(loss, 6, set_to_none=set_to_none)


@CASES
def frozen(rank: int, world: int) -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    Pair(rank, world, make).train(square)


@CASES
def unfrozen_later(rank: int, world: int) -> None:
    def make() -> nn.Module:
        model = mlp()
        model[2].requires_grad_(False)  # type: ignore[index]
        return model

    pair = Pair(rank, world, make)
    pair.train(square, 2)
    for model in (pair.ours, pair.alone):
        model[2].requires_grad_(True)
    pair.train(square, 3, first=2)
    for model in (pair.ours, pair.alone):
        model[0].requires_grad_(False)
    pair.train(square, 2, first=5)


@CASES
def tied(rank: int, world: int) -> None:
    """One parameter under two names, used twice in a forward."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        model[2].weight = model[0].weight  # type: ignore[union-attr]
        return model

    pair = Pair(rank, world, make)
    pair.train(square, 5)
    assert pair.ours[0].weight is pair.ours[2].weight


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 2)

    def forward(self, words: Tensor | None, other: Tensor) -> Tensor:
        h = other if words is None else other + self.embedding(words)
        return self.out(h).square().mean()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Tanh(), nn.Flatten())


@CASES.over("in the middle", "on one rank", "on one rank in the middle")
def channels_last(rank: int, world: int, when: str) -> None:
    """Buckets follow the order in memory: all ranks change it, or all raise, as means would mix positions."""

    def change(model: nn.Module) -> None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    if when == "on one rank":
        model = convolution()
        if rank == world - 1:
            change(model)
        says(
            raises(trigram.MismatchError, trigram.with_bagua, model), f"rank(s) {world - 1}", "memory formats"
        )
        return
    pair = Pair(rank, world, convolution)
    pair.train(square, 2)
    if when == "in the middle" or rank == world - 1:
        change(pair.ours)
    if when == "in the middle":
        pair.train(square, 3, first=2)
    else:
        error = raises(trigram.MismatchError, pair.backward, square, 2)
        assert error is not None


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@CASES.over(True, False)
def sparse(rank: int, world: int, everywhere: bool) -> None:
    """Ranks meet different words, and different numbers of them; without `everywhere` one meets none."""

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        if not everywhere and r == 0:
            return model(None, x(r, step, 5 + r, 6))
        words = torch.randint(0, 50, (5 + r,), generator=torch.Generator().manual_seed(31 * r + step))
        return model(words, x(r, step, 5 + r, 6))

    Pair(rank, world, Words, plain_sgd).train(loss, 5)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_parameters(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
