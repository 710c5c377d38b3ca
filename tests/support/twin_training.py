"""One model trained twice: by the ranks, each on its share, and by every rank alone on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import trigram
from tests.support.checks import same_on_all_ranks

Loss = Callable[[Any, int, int], Tensor]  # (model, rank, step): the loss of that rank's share, in that step
_serial = count()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay: a gradient that is zero instead of None shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def x(rank: int, step: int, *shape: int, salt: int = 0) -> Tensor:
    """A rank's inputs of a step."""
    return torch.randn(
        shape or (8, 6), generator=torch.Generator().manual_seed(7919 * salt + 101 * rank + step)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(x(rank, step)).square().mean()


def gap(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Distance over length; `scale` is the least length that is taken seriously."""
    a, e = (t.detach().to_dense().double() for t in (actual, expected))
    return float((a - e).norm() / max(float(e.norm()), scale, 1e-12)) if bool((a != e).any()) else 0.0


class Pair:
    """Our replica on this rank, and the whole-batch model that it must equal."""

    def __init__(
        self,
        rank: int,
        world: int,
        make: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        tolerance: float = 1e-5,
        **options: Any,
    ) -> None:
        self.rank, self.world, self.tolerance = rank, world, tolerance
        torch.manual_seed(99)
        self.alone = make()
        torch.manual_seed(99 if rank == 0 else 100 + rank)  # rank 0's weights are to reach everybody
        self.ours: Any = trigram.with_bagua(make(), "gradient_allreduce", **options)
        self.alone_optimizer, self.our_optimizer = optimizer(self.alone), optimizer(self.ours)
        self.check_weights("at the start")

    def zero(self, set_to_none: bool = True) -> None:
        self.our_optimizer.zero_grad(set_to_none=set_to_none)
        self.alone_optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, loss: Loss, step: int) -> None:
        """Our backward on this rank's share; the other model's on the mean of all shares."""
        loss(self.ours, self.rank, step).backward()
        self.backward_alone(loss, step)

    def backward_alone(self, loss: Loss, step: int) -> None:
        for r in range(self.world):
            (loss(self.alone, r, step) / self.world).backward()

    def update(self) -> None:
        self.our_optimizer.step()
        self.alone_optimizer.step()

    def check_gradients(self, what: str) -> None:
        expected = {k: p.grad for k, p in self.alone.named_parameters()}
        norms = [float(g.detach().to_dense().double().norm()) for g in expected.values() if g is not None]
        for k, p in self.ours.named_parameters():
            e = expected[k]
            fate = "should be None" if e is None else "is None, expected a tensor"
            assert (p.grad is None) == (e is None), f"{what}: the gradient of {k} {fate}"
            if e is not None and p.grad is not None:
                assert p.grad.dtype == e.dtype and p.grad.is_sparse == e.is_sparse, (
                    f"{what}: {k} {p.grad.dtype}"
                )
                far = gap(p.grad, e, 1e-3 * max(norms))
                assert far <= self.tolerance, f"{what}: the gradient of {k} is off by {far:.2e}"

    def check_weights(self, what: str) -> None:
        expected = dict(self.alone.state_dict())
        actual = dict(self.ours.state_dict())
        assert actual.keys() == expected.keys(), f"{what}: {actual.keys()} instead of {expected.keys()}"
        for k, e in expected.items():
            far = gap(actual[k], e, 1e-3)
            assert far <= self.tolerance, f"{what}: {k} is off by {far:.2e}"
        same_on_all_ranks(self.rank, self.world, f"weights-{next(_serial)}", self.ours.parameters())

    def train(self, loss: Loss, steps: int = 4, first: int = 0, set_to_none: bool = True) -> None:
        """Some steps of both; gradients and weights are compared in each."""
        for step in range(first, first + steps):
            self.zero(set_to_none)
            self.backward(loss, step)
            self.check_gradients(f"step {step}")
            self.update()
            self.check_weights(f"after step {step}")
