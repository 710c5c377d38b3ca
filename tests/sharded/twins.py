"""A model that is trained twice on the same ranks: with a plain optimizer, and with a sharded one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import trigram
from tests.support.checks import close, same_on_all_ranks
from tests.support.twin_training import x

_serial = count()
mode: dict[str, Any] = {}
"""Options that the sharded models of a launch have."""


class Net(nn.Module):
    """A bit of everything: a convolution in channels-last, tied and frozen weights, a layer that not every
    step uses, an empty and a scalar parameter. Of odd sizes, so that parts cut through parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(6, 37)
        self.sometimes = nn.Linear(37, 37)
        self.never = nn.Linear(3, 3)
        self.out = nn.Linear(37, 6, bias=False)
        self.out.weight = nn.Parameter(torch.randn(6, 37) / 6)
        self.tied = nn.Linear(37, 6)
        self.tied.weight = self.out.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor, step: int = 0) -> Tensor:
        images = inputs[:, :3].reshape(-1, 3, 1, 1).expand(-1, 3, 4, 4)
        seen = self.conv(images.contiguous(memory_format=torch.channels_last)).mean((1, 2, 3))
        h = torch.tanh(self.inner(self.frozen(inputs)))
        if step % 3 != 1:
            h = h + self.sometimes(h).tanh()
        return self.scale * (self.out(h) + self.tied(h)) + seen[:, None]


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    """Two groups, as transformers are trained."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.01,
        **more,
    )


class Twins:
    """The plain model and the sharded one.

    ``make`` is called for each, with the same seed.

    Attributes:
        pairs: Both models with their optimizers, the plain one first.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        make: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Any], Any] = adamw,
        algorithm: str = "sharded",
        plain: str = "gradient_allreduce",
        exact: bool = True,
        **options: Any,
    ) -> None:
        self.rank, self.world = rank, world
        # A reduce-scatter between hosts sums in another order than an all-reduce, a norm of parts too: then
        # in float64, to tell an order of sums from an error.
        transport = os.environ["TRIGRAM_TRANSPORT"]
        exact = transport != "auto" and (
            "gradients" not in mode or (exact and (world == 2 or transport == "shm"))
        )
        self.dtype, self.tolerance = (torch.float32, 0.0) if exact else (torch.float64, 1e-7)
        self.models: list[Any] = []
        for _ in range(2):
            torch.manual_seed(5)
            self.models.append(make().to(self.dtype))
        self.optimizers = [optimizer(m) for m in self.models]
        trigram.with_bagua(self.models[0], plain, bucket_mb=0.001, group=options.get("group"))
        more = {**mode, **options}
        algorithm = more.pop("algorithm", algorithm)
        trigram.with_bagua(self.models[1], algorithm, optimizer=self.optimizers[1], bucket_mb=0.001, **more)

    @property
    def pairs(self) -> Sequence[tuple[Any, Any]]:
        return list(zip(self.models, self.optimizers, strict=True))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        batch = x(self.rank, step).to(self.dtype)
        return (model(batch, step + self.rank) if isinstance(model, Net) else model(batch)).square().mean()

    def step(self, step: int) -> None:
        for model, optimizer in self.pairs:
            optimizer.zero_grad()
            self.loss(model, step).backward()
            optimizer.step()

    def train(self, first: int = 0, steps: int = 5) -> None:
        for step in range(first, first + steps):
            self.step(step)
            self.check(f"after step {step}")

    def check(self, what: str) -> None:
        """The weights have the same bits."""
        plain, ours = (m.state_dict() for m in self.models)
        assert plain.keys() == ours.keys()
        for name, value in plain.items():
            close(ours[name], value, self.tolerance, f"{what}: {name}")

    def check_state(self, what: str) -> None:
        """The states of the optimizers, put together, are the same."""
        plain, ours = (o.state_dict() for o in self.optimizers)
        same_state(ours, plain, what, self.tolerance)

    def check_ranks(self) -> None:
        same_on_all_ranks(self.rank, self.world, f"sharded-{next(_serial)}", self.models[1].parameters())


def same_state(ours: dict[str, Any], plain: dict[str, Any], what: str, tolerance: float = 0.0) -> None:
    """Two states of optimizers are the same, to a tolerance; an empty parameter may have one or not."""
    assert ours["param_groups"] == plain["param_groups"], what

    def of(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
        return {
            k: s
            for k, s in state["state"].items()
            if all(not isinstance(v, Tensor) or v.numel() for v in s.values())
        }

    one, other = of(ours), of(plain)
    assert one.keys() == other.keys(), f"{what}: {one.keys()} instead of {other.keys()}"
    for k, state in other.items():
        assert one[k].keys() == state.keys(), f"{what}: {k}: {one[k].keys()} instead of {state.keys()}"
        for name, value in state.items():
            if isinstance(value, Tensor):
                close(one[k][name], value, tolerance, f"{what}: {name} of {k}")
                assert one[k][name].stride() == value.stride(), f"{what}: {name} of {k}"
            else:
                assert one[k][name] == value, f"{what}: {name} of {k}"
