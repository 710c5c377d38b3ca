"""What a script's own optimizers and hooks know of parameters; weights that lie in memory transposed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import trigram
from tests.sharded.twins import Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import close, raises
from tests.support.twin_training import mlp, x

CASES = Cases()


class Scaled(Optimizer):
    """Reads an attribute of each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self, p: Tensor) -> float:
        return float(getattr(p, "lr_scale", 1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """A step of SGD."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor(p))


class Tabled(Scaled):
    """Has a table of some parameters' ``id()``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.fast = {id(p) for p in params[::2]}

    def factor(self, p: Tensor) -> float:
        return 2.0 if id(p) in self.fast else 1.0


def scaled_mlp() -> nn.Module:
    """With an attribute on every other parameter."""
    model = mlp()
    for p in list(model.parameters())[::2]:
        p.lr_scale = 0.25  # type: ignore[attr-defined]
    return model


@CASES.over("full", "shards")
def optimizer_reads_attributes(rank: int, world: int, gradients: str) -> None:
    twins = Twins(rank, world, scaled_mlp, lambda m: Scaled(m.parameters()), gradients=gradients)
    twins.train(steps=4)
    twins.check("attributes")


@CASES.over("full", "shards")
def optimizer_has_a_table(rank: int, world: int, gradients: str) -> None:
    twins = Twins(rank, world, mlp, lambda m: Tabled(m.parameters()), gradients=gradients)
    twins.train(steps=4)
    twins.check("a table")


def clamped(model: Any) -> Optimizer:
    """With a hook after steps that changes what it finds in the groups."""
    optimizer = adamw(model)

    def clamp(of: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in of.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.05, 0.05)

    optimizer.register_step_post_hook(clamp)
    return optimizer


@CASES.over("gradient_allreduce", "sharded")
def hook_after_the_step(rank: int, world: int, algorithm: str) -> None:
    twins = Twins(rank, world, mlp, clamped, algorithm, fused=True)
    twins.train(steps=4)
    twins.check("clamped")


@CASES.over("gradient_allreduce", "sharded")
def hook_before_the_step(rank: int, world: int, algorithm: str) -> None:
    """It would change no gradient in backward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    model = trigram.with_bagua(model, algorithm, optimizer=optimizer, fused=True)

    def train() -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(x(rank, step)).square().mean().backward()
            optimizer.step()

    assert "register_step_pre_hook" in raises(trigram.UnsupportedError, train)


class Transposed(nn.Module):
    """A weight that lies in memory as its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 9).t())
        self.last = nn.Linear(9, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(inputs @ self.weight.t()))


@CASES.over("gradient_allreduce", "bytegrad")
def transposed_weight(rank: int, world: int, algorithm: str) -> None:
    """torch's fused kernels take gradients memory for memory."""
    torch.manual_seed(3)
    ours = Transposed()
    plain = copy.deepcopy(ours)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)) for m in (ours, plain)]
    trigram.with_bagua(ours, algorithm)
    for step in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x(rank, step)).square().mean().backward()
            for p in plain.parameters() if model is plain else ():
                assert p.grad is not None
                mean = p.grad.contiguous()
                trigram.all_reduce(mean, "avg")
                p.grad.copy_(mean)
            optimizer.step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-6 if algorithm == "gradient_allreduce" else 2e-2, "transposed")
    model = Transposed()
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    said = raises(
        trigram.UnsupportedError, trigram.with_bagua, model, "gradient_allreduce", optimizer=adam, fused=True
    )
    assert "weight" in said and "contiguous" in said


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_script_optimizers(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
