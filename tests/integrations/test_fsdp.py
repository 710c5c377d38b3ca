"""FSDP2 through our collectives, against FSDP2 over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.cases import Cases
from tests.support.checks import close, raises, says
from tests.support.marks import long
from trigram.integrations import fsdp

CASES = Cases()


def trained(
    rank: int, use: Callable[[Any], None] | None, width: int = 37
) -> tuple[list[torch.Tensor], list[float]]:
    """The whole weights after some steps, and the losses; `width` is that of the wrapped layers."""
    torch.manual_seed(5)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)]
    model: Any = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if use is not None:
        use(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(12):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(inputs) - inputs[:, :3].sin()).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    return [p.full_tensor().detach() for p in model.parameters()], losses


@CASES.over(1, 37, 256, 1025)
def as_over_gloo(rank: int, world: int, width: int) -> None:
    """The same bits on two ranks, within the order of sums on more; also layers of fewer values than ranks,
    and of a few MB."""
    with gloo(rank, world):
        expected, _ = trained(rank, None, width)
        actual, _ = trained(rank, fsdp.use, width)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 0.0 if world == 2 else 1e-4)


@CASES.over("int8", "fp8", "bf16")
def coded(rank: int, world: int, codec: str) -> None:
    """Gradients through a codec: other weights, nearly the same loss."""
    with gloo(rank, world):
        expected, losses = trained(rank, None)
        actual, coded_losses = trained(rank, lambda m: fsdp.use(m, codec))
    assert any(bool((a != e).any()) for a, e in zip(actual, expected, strict=True))
    assert abs(coded_losses[-1] / losses[-1] - 1) < 0.01, (coded_losses[-1], losses[-1])


@CASES
def coded_weights(rank: int, world: int) -> None:
    with gloo(rank, world):
        _, losses = trained(rank, None)
        _, coded_losses = trained(rank, lambda m: fsdp.use(m, weights="bf16"))
    assert abs(coded_losses[-1] / losses[-1] - 1) < 0.01, (coded_losses[-1], losses[-1])


@CASES
def refused(rank: int, world: int) -> None:
    says(raises(trigram.MisuseError, fsdp.use, nn.Linear(2, 2)), "fully_shard")
    with gloo(rank, world):
        model = nn.Linear(2, 2)
        fully_shard(model)
        says(raises(trigram.UnsupportedError, fsdp.use, model, "topk:0.1"), "int8")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3, long(4)])
def test_fsdp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
