"""Hooks for DistributedDataParallel: they train as the references of their algorithms do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.simulation import Simulation, flatten
from tests.reference.torch_gloo import gloo
from tests.support.algorithm_rows import ROWS
from tests.support.algorithm_run import OPTIMIZERS, Yardstick, loss
from tests.support.cases import Cases
from tests.support.checks import same_on_all_ranks
from tests.support.twin_training import x

HOOKS = Cases()

HOOKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce sgd", {}),
    "bytegrad": ("bytegrad sgd", {}),
    "lossless": ("lossless", {}),
    "bytegrad block": ("bytegrad block", {"block": 64}),
    "central fp8": ("central fp8", {}),
    "powersgd": ("powersgd", {"rank": 2}),
    "signsgd": ("signsgd", {}),
    "signsgd block": ("signsgd block", {"block": 64}),
    "topk": ("topk fraction", {"fraction": 0.05}),
}
FEEDBACK = ("signsgd", "topk")


def several() -> nn.Module:
    """Sizes that need no padding, so that DDP's buckets are laid out as ours."""
    last = nn.Linear(16, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16), last)


def single() -> nn.Module:
    """One parameter: nothing to lay out anew after the first step, which a residual might not survive."""
    first, last = nn.Linear(6, 32).requires_grad_(False), nn.Linear(32, 3).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(32, 32, bias=False), last)


@HOOKS.over(*HOOKED)
def hook(rank: int, world: int, label: str) -> None:
    """DDP with our hook trains as the reference does. DDP's first bucket has the model's order."""
    like, options = HOOKED[label]
    row = ROWS[like]
    make = single if label.startswith(FEEDBACK) else several
    torch.manual_seed(8)
    sim = Simulation(row.reference(world), world, make, OPTIMIZERS[row.optimizer], reverse=False)
    torch.manual_seed(8)
    module = make()
    optimizer = OPTIMIZERS[row.optimizer](module)
    trigram.init()
    seen = []
    with gloo(rank, world):
        model = DistributedDataParallel(module)
        model.register_comm_hook(*trigram.ddp_hook(row.algorithm, **options))
        yardstick = Yardstick(row.coded)
        for step in range(row.steps):
            sim.step(lambda m, r, step=step: [loss(m, r, step)])
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            seen.append(flatten([p for p in module.parameters() if p.requires_grad]))
            yardstick.check(seen[-1], sim.weights(rank), f"after step {step}")
    same_on_all_ranks(rank, world, f"hook-{label}", seen)


@HOOKS.over("topk", "signsgd", "bytegrad", "powersgd")
def hook_several_buckets(rank: int, world: int, name: str) -> None:
    """Each bucket keeps its own residuals, also when DDP lays them out anew after the first step."""
    torch.manual_seed(8)
    module = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 900), nn.Tanh(), nn.Linear(900, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    trigram.init()
    losses = []
    with gloo(rank, world):
        model = DistributedDataParallel(module, bucket_cap_mb=1)
        model.register_comm_hook(*trigram.ddp_hook(name))
        for step in range(20):
            optimizer.zero_grad()
            inputs = x(rank, step % 3)
            value = (model(inputs) - inputs[:, :3].sin()).square().mean()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    same_on_all_ranks(rank, world, f"hook-several-{name}", module.parameters())


@HOOKS
def hook_of_weights(rank: int, world: int) -> None:
    """What does not carry gradients is no hook."""
    for name in ("decentralized", "local_sgd", "async"):
        try:
            trigram.ddp_hook(name)
        except trigram.UnsupportedError as e:
            assert name in str(e) or "gradient" in str(e), e
        else:
            raise AssertionError(name)


@pytest.mark.parametrize("case", list(HOOKS))
@pytest.mark.parametrize("world", [2, 3])
def test_ddp_hook(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("HOOKS", case, world)
