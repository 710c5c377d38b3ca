"""Random sets of models, algorithms, overlaps, joins and skips: no wait without an end; replicas agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.marks import long_unless

CASES = Cases()
SEEDS = list(range(240))
SOON = [*SEEDS[:23], 99]  # those that `make test` runs; the last stalls where waiting threads do not serve
LATE = 20.0  # seconds after which a call of a rank that waits for nobody says where

# In each group: an algorithm, its options, and whether its averages need all ranks at the same steps.
GRADIENTS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("lossless", {}),
    ("topk", {"fraction": 0.25}),
    ("signsgd", {}),
    ("powersgd", {"warmup_steps": 2}),
    ("central:median/full/sync", {}),
    ("central:clip:1.0/int8/sync", {}),
]
WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("local_sgd", {"every": 2}),
    ("local_sgd", {"every": 2, "overlap": True}),
    ("diloco", {"every": 3, "overlap": True}),
    ("central/int8/every:2", {"overlap": True}),
    ("central/int4/every:4", {"fragments": 2, "overlap": True}),
    ("central:median/full/every:2", {"overlap": True}),
    ("sparta", {"share": 0.3}),
    ("decentralized", {}),
    ("decentralized", {"overlap": False}),
    ("low_precision_decentralized", {}),
    ("push_sum", {}),
    ("noloco", {"every": 2}),
]
BACKGROUND: list[tuple[str, dict[str, Any]]] = [
    ("async", {}),
    ("async", {"staleness": 1}),
    ("async", {"staleness": 2, "fragments": 2}),
    ("async_low_precision", {"staleness": 3}),
    ("async_decentralized", {}),
    ("async_low_precision_decentralized", {}),
    ("async_decentralized", {"staleness": 1}),
    ("async_low_precision_decentralized", {"staleness": 2}),
]


class Net(nn.Module):
    """Two layers, of which one may be frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 40), nn.Linear(40, 3)
        self.norm = nn.BatchNorm1d(40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.norm(self.one(inputs))))
        return out


class Trained:
    """One model of a job, with its optimizer and the scale of its losses."""

    def __init__(self, kind: str, algorithm: str, options: dict[str, Any], accumulates: int) -> None:
        self.kind, self.accumulates = kind, accumulates
        self.model = trigram.with_bagua(Net(), algorithm, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)

    def step(self, inputs: Callable[[], torch.Tensor], overflows: bool) -> None:
        """A training step; ``overflows``: the scaler leaves out the update, on the ranks that see it."""
        self.optimizer.zero_grad()
        for k in range(self.accumulates):
            last = k == self.accumulates - 1
            with contextlib.nullcontext() if last else trigram.no_sync(self.model):
                loss = self.model(inputs()).square().mean()
                self.scaler.scale(loss * (float("inf") if overflows and last else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@CASES.over(*SEEDS)
def job(rank: int, world: int, seed: int) -> None:
    """All ranks draw the same job, and each of them what only it does."""
    draw, own = Random(seed), Random(1000 * seed + rank + 1)
    trigram.init(op_timeout=LATE)
    torch.manual_seed(seed)
    models = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind = draw.choice(("gradients", "weights", "weights", "background"))
        table = {"gradients": GRADIENTS, "weights": WEIGHTS, "background": BACKGROUND}[kind]
        models.append(Trained(kind, *draw.choice(table), draw.choice((1, 1, 2))))
    joins = draw.random() < 0.5
    skips, freezes, looks = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.3
    count = draw.randrange(4, 9)
    mine = count - own.randrange(3) if joins else count
    generator = torch.Generator().manual_seed(own.randrange(1 << 30))
    together = trigram.join(*(m.model for m in models)) if joins else contextlib.nullcontext()
    with together:
        for step in range(mine):
            if freezes and not joins:
                for m in models:
                    m.model.one.requires_grad_(step % 3 != 1)
            for m in models:
                # An infinity in gradients that are averaged is everybody's.
                overflows = skips and not joins and own.random() < 0.3
                m.step(lambda: torch.randn(4, 6, generator=generator), overflows)
            if looks and not joins and step == count // 2:
                trigram.barrier()
                trigram.consensus(models[0].model)
    for m in models:
        trigram.consensus(m.model)
        flat = torch.cat([p.detach().flatten() for p in m.model.parameters()])
        everybody = torch.empty(world, flat.numel())
        trigram.all_gather(everybody, flat)
        assert bool(flat.isfinite().all())
        assert float((everybody - everybody[0]).abs().max()) < 1e-5
        trigram.unwrap(m.model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", long_unless([f"job-{s}" for s in SOON], list(CASES)))
def test_job(in_launch: Callable[..., None], case: str, world: int) -> None:
    in_launch("CASES", case, world)
