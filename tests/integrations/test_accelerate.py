"""Accelerate over the backend: it keeps a process group that it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trigram  # noqa: F401  # registers the backend
from tests.support.harness import run

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.waits


def _trained(rank: int, world: int, backend: str) -> tuple[list[Tensor], Tensor]:
    dist.init_process_group(backend)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == world and dist.get_backend() == backend
    torch.manual_seed(3)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :2].sin()), batch_size=4)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for inputs, targets in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather(torch.tensor([float(rank)]))
    accelerator.wait_for_everyone()
    return [p.detach().clone() for p in model.parameters()], losses


def test_accelerate_over_the_backend() -> None:
    theirs, ours = (run(2, _trained, backend, timeout=60) for backend in ("gloo", "trigram"))
    for (expected, _), (weights, gathered) in zip(theirs, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
        assert gathered.tolist() == [0.0, 1.0]
