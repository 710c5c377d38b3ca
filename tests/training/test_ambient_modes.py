"""A mode of torch that is active around trigram's work changes no bit of it: autocast, deterministic
algorithms, inference mode. What was made inside a mode is used outside of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import equal
from tests.support.harness import run
from tests.support.twin_training import x
from tests.training.test_default_device import ALGORITHMS, BY_PAIRS

CASES = Cases()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


class Linear(nn.Linear):
    """Without a product of matrices, whose gradients autocast would compute in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.unsqueeze(-2) * self.weight).sum(-1)
        return y if self.bias is None else y + self.bias


def net() -> nn.Module:
    """A weight has its rows and columns in the other order, and a bias has gaps between its values."""
    first = Linear(6, 16)
    module = nn.Sequential(first, nn.Tanh(), Linear(16, 16), nn.Tanh(), Linear(16, 3))
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    first.bias = nn.Parameter(torch.stack([first.bias.detach()] * 2, 1)[:, 0])
    return module


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    batch = x(rank, step, 8, 6)
    return (model(batch) - batch[:, :3].sin()).square().mean()


def trained(
    rank: int, algorithm: str, options: dict[str, Any], mode: Callable[[], Any]
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    with mode():
        model = trigram.with_bagua(module, algorithm, optimizer=optimizer, **options)
        for step in range(8):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        trigram.consensus(model)
    return [p.detach().clone() for p in model.parameters()]


def alike(algorithm: str, want: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    for a, b in zip(want, got, strict=True):
        if algorithm in BY_PAIRS:  # which pairs meet depends on the time
            assert bool(b.isfinite().all())
        else:
            equal(b, a, algorithm)


@CASES.over(*(f"{mode} {algorithm}" for mode in MODES for algorithm in ALGORITHMS))
def trains_in(rank: int, world: int, which: str) -> None:
    mode, algorithm = which.split(" ", 1)
    options = ALGORITHMS[algorithm] | ({"rank": 1} if algorithm == "powersgd" else {})
    want, got = (trained(rank, algorithm, options, each) for each in (contextlib.nullcontext, MODES[mode]))
    alike(algorithm, want, got)


def evaluated(
    rank: int, algorithm: str, options: dict[str, Any], mode: Callable[[], Any]
) -> list[torch.Tensor]:
    """An evaluation of the agreed weights between two epochs, which is where `inference_mode` is used."""
    torch.manual_seed(0)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    model = trigram.with_bagua(module, algorithm, optimizer=optimizer, **options)
    seen = []
    for epoch in range(3):
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, 4 * epoch + step).backward()
            optimizer.step()
        with mode():
            trigram.consensus(model)
            model.eval()
            total = (model(x(rank, 99, 8, 6)) - 1).square().mean().reshape(1)
            trigram.all_reduce(total, "avg")
            model.train()
        seen.append(total.clone())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@CASES.over(*ALGORITHMS)
def evaluates_in_inference_mode(rank: int, world: int, algorithm: str) -> None:
    want, got = (
        evaluated(rank, algorithm, ALGORITHMS[algorithm], mode)
        for mode in (torch.no_grad, torch.inference_mode)
    )
    alike(algorithm, want, got)


class Products(torch.optim.Optimizer):
    """Multiplies matrices, which autocast would do in bfloat16."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad @ p.grad.t() @ p.grad + p.grad, alpha=-group["lr"])


@CASES.over("gradient_allreduce", "sharded")
def updates_in_backward_are_outside_of_autocast(rank: int, world: int, algorithm: str) -> None:
    """Only the passes are inside: the optimizer computes as in a step outside."""

    def weights(mode: Callable[[], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [Linear(6, 16, bias=False), nn.Tanh(), Linear(16, 3, bias=False)]
        optimizer = Products([p for layer in layers for p in layer.parameters()])
        model = trigram.with_bagua(nn.Sequential(*layers), algorithm, optimizer=optimizer, fused=True)
        for step in range(4):
            optimizer.zero_grad()
            with mode():
                batch = x(rank, step, 8, 6)
                ((model[2](model[1](model[0](batch)))) - batch[:, :3].sin()).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(weights(contextlib.nullcontext), weights(MODES["autocast"]), strict=True):
        equal(b, a, algorithm)


@CASES
def memory_outlives_inference_mode(rank: int, world: int) -> None:
    with torch.inference_mode():
        t = trigram.empty(8, dtype=torch.float32)
        t.fill_(1.0)
        trigram.all_reduce(t)
    t.add_(1.0)
    trigram.all_reduce(t)
    equal(t, torch.full((8,), float(world * (world + 1))))


@pytest.mark.parametrize("case", list(CASES))
def test_mode(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 3)


def _regroups(rank: int, world: int, algorithm: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Rank 1 dies while the others evaluate, who make what they need for two ranks."""
    trigram.init(elastic=True)
    torch.manual_seed(0)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = trigram.with_bagua(module, algorithm, optimizer=optimizer, elastic=True, **options)
    for step in range(12):
        if step == 5:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.inference_mode():
                trigram.consensus(model)
                model(x(rank, 99, 8, 6))
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    trigram.consensus(model)
    assert list(trigram.stats(model)["ranks"]) == [0, 2]
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("diloco", {"every": 2}),
        ("local_sgd", {"every": 2}),
        ("low_precision_decentralized", {}),
        ("push_sum", {}),
    ],
)
def test_ranks_regroup_in_inference_mode(algorithm: str, options: dict[str, Any]) -> None:
    results = run(3, _regroups, algorithm, options, dies=[1], timeout=60)
    for a, b in zip(results[0], results[2], strict=True):
        equal(a, b, algorithm)
