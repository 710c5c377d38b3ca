"""``TRIGRAM_GRADIENTS``: noise scale, codec errors and consensus distance against NumPy, on known values."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import raises, says
from trigram.observe import rank_report, report, steps
from trigram.runtime import world as runtime
from trigram.steps import fidelity

CASES = Cases()
LENGTH = 1000


def gradient(rank: int, step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    draw = np.random.default_rng(1000 * step + rank)
    return (np.linspace(-1, 1, LENGTH) + 0.5 * draw.standard_normal(LENGTH)).astype(np.float32)


class Given(nn.Module):
    """Its gradients are what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(LENGTH))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return torch.dot(self.w, g)


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    lr: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.from_numpy(gradient(rank, step))).backward()
        optimizer.step()


def expected_noise(world: int, looks: list[int]) -> float:
    """Unbiased: the sample variance over ranks, and the squared mean less its share of it."""
    square = variance = 0.0
    for k, step in enumerate(looks):
        g = np.stack([gradient(r, step) for r in range(world)]).astype(np.float64)
        var = float(g.var(0, ddof=1).sum())
        sqr = float((g.mean(0) ** 2).sum()) - var / world
        square = sqr if k == 0 else 0.9 * square + 0.1 * sqr
        variance = var if k == 0 else 0.9 * variance + 0.1 * var
    return variance / square


def float16_error(world: int, step: int) -> float:
    """NumPy's rounding, the mean over ranks."""
    parts = []
    for r in range(world):
        g = gradient(r, step)
        lost = g.astype(np.float16).astype(np.float64) - g
        parts.append(float((lost**2).sum() / (g.astype(np.float64) ** 2).sum()))
    return float(np.mean(parts))


@CASES
def noise_and_errors(rank: int, world: int) -> None:
    os.environ[fidelity.VARIABLE] = "2"
    model = trigram.with_bagua(Given())
    train(model, rank, 7)
    found = trigram.stats(model)["fidelity"]
    assert found["looks"] == 3  # steps 2, 4 and 6
    assert found["noise_scale"] == pytest.approx(expected_noise(world, [2, 4, 6]), rel=1e-4)
    errors = [float16_error(world, step) for step in (2, 4, 6)]
    of = found["codec_errors"]
    assert of["f16"] == pytest.approx(0.81 * errors[0] + 0.09 * errors[1] + 0.1 * errors[2], rel=1e-3)
    assert 0 < of["f16"] < of["int8"] < of["topk:0.01"] < 1
    present = runtime.present()
    assert present is not None
    says(report.text([rank_report.of_this_rank(present, steps.longest())]), "noise scale of", "int8")
    del os.environ[fidelity.VARIABLE]


@CASES
def noise_of_gradients_that_are_used_or_divided(rank: int, world: int) -> None:
    """``fused=True`` uses each mean in backward; of ``gradients="shards"`` a rank has its part only."""
    os.environ[fidelity.VARIABLE] = "2"
    more: list[tuple[str, dict[str, object]]] = [
        ("gradient_allreduce", {"fused": True}),
        ("sharded", {"gradients": "shards"}),
    ]
    for algorithm, options in more:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped = trigram.with_bagua(model, algorithm, optimizer=optimizer, **options)
        train(wrapped, rank, 7, optimizer=optimizer)
        found = trigram.stats(wrapped)["fidelity"]
        assert found["looks"] == 3
        assert found["noise_scale"] == pytest.approx(expected_noise(world, [2, 4, 6]), rel=1e-4), algorithm
        trigram.unwrap(wrapped)
    del os.environ[fidelity.VARIABLE]


@CASES
def distance_of_weights(rank: int, world: int) -> None:
    os.environ[fidelity.VARIABLE] = "3"
    model = trigram.with_bagua(Given(), "local_sgd", every=100)
    train(model, rank, 4, lr=0.01)  # looks after the third step
    weights = np.stack(
        [1 - 0.01 * sum(gradient(r, s).astype(np.float64) for s in range(3)) for r in range(world)]
    )
    mean = weights.mean(0)
    expected = np.sqrt(((weights - mean) ** 2).sum(1).mean() / (mean**2).sum())
    found = trigram.stats(model)["fidelity"]
    assert found["looks"] == 1 and found["consensus_distance"] == pytest.approx(expected, rel=1e-3)
    del os.environ[fidelity.VARIABLE]


@CASES
def nobody_asks(rank: int, world: int) -> None:
    model = trigram.with_bagua(Given())
    train(model, rank, 3)
    assert "fidelity" not in trigram.stats(model)


@CASES
def ranks_that_ask_differently(rank: int, world: int) -> None:
    os.environ[fidelity.VARIABLE] = str(2 + rank % 2)
    says(raises(trigram.MismatchError, trigram.with_bagua, Given()), "different options")
    os.environ[fidelity.VARIABLE] = "often"
    says(raises(trigram.ConfigError, trigram.with_bagua, Given()), "TRIGRAM_GRADIENTS", "often")
    del os.environ[fidelity.VARIABLE]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [3])
def test_fidelity(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)
