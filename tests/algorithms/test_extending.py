"""The example of an algorithm of one's own, as docs/extending.md tells it, and what `register` refuses."""

from __future__ import annotations

import importlib
import runpy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trigram
from tests.support.checks import close, raises, says
from tests.support.harness import run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "easgd.py"
ALPHA, EVERY, RATE = 0.3, 4, 0.1


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :2] - 0.5


def _elastic(rank: int, world: int) -> None:
    """Step by step against elastic averaging of all ranks in one process."""
    runpy.run_path(str(EXAMPLE))
    torch.manual_seed(1)
    model = trigram.with_bagua(nn.Linear(8, 2), "easgd", alpha=ALPHA)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    start = [p.detach().clone() for p in model.parameters()]
    replicas = [[p.clone().requires_grad_() for p in start] for _ in range(world)]
    centre = [p.clone() for p in start]
    for step in range(14):
        for r, (weight, bias) in enumerate(replicas):
            x, y = _batch(r, step)
            grads = torch.autograd.grad((x @ weight.T + bias - y).square().mean(), (weight, bias))
            with torch.no_grad():
                for p, g in zip((weight, bias), grads, strict=True):
                    p.sub_(RATE * g)
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for k, c in enumerate(centre):
                    mean = torch.stack([replica[k] for replica in replicas]).mean(0)
                    for replica in replicas:
                        replica[k] -= ALPHA * (replica[k] - c)
                    centre[k] = c + min(ALPHA * world, 1.0) * (mean - c)
        x, y = _batch(rank, step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        for p, q in zip(model.parameters(), replicas[rank], strict=True):
            close(p.detach(), q.detach(), 1e-5, f"step {step}")
    assert "centre" in str(trigram.algorithm_state(model))


def test_elastic_averaging(transport: str) -> None:
    run(3, _elastic, transport=transport)


def _register(rank: int, world: int) -> None:
    text = raises(trigram.UnsupportedError, trigram.register, "async", trigram.Trigram())
    says(text, "async", "already")
    trigram.register("mine", trigram.Trigram("gossip:torus", "int4", "every:2"))
    model = trigram.with_bagua(nn.Linear(8, 2), "mine")
    for step in range(4):
        model.zero_grad()
        model(_batch(rank, step)[0]).sum().backward()
    assert trigram.stats(model)["rounds"] == 1
    runpy.run_path(str(EXAMPLE))
    text = raises(trigram.UnsupportedError, trigram.with_bagua, nn.Linear(8, 2), "easgd", beta=1)
    says(text, "beta", "alpha")


def test_register() -> None:
    run(2, _register)


def _old_names(rank: int, world: int) -> None:
    """What docs/extending.md said of 0.1, with its names: a subclass, its groups, and `register`."""
    old = importlib.import_module("trigram.exchange")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Halfway(old.Mean):  # type: ignore[name-defined, misc]
            def __init__(self, tensors: Any, channels: Any) -> None:
                super().__init__(tensors, channels)
                assert self.channels.first is channels.main

        assert issubclass(Halfway, old.Exchange)
        trigram.register(
            "halfway", trigram.Trigram("central", "full", "every:2", "weights"), exchange=Halfway
        )
        torch.manual_seed(rank)
        model = trigram.with_bagua(nn.Linear(3, 1), "halfway")
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
    assert trigram.stats(model)["rounds"] == 2
    told = {str(w.message) for w in caught if w.category is DeprecationWarning}
    for word in (
        "trigram.mixing.Mean",
        "trigram.mixing.AveragingStep",
        "ModelGroups.main",
        "step=",
        "now groups",
    ):
        assert any(word in text for text in told), (word, told)


def _step_of_the_default(rank: int, world: int) -> None:
    """A trigram that leaves everything out averages weights, with the step that is registered."""
    made = []

    class Mine(trigram.mixing.Mean):
        def __init__(self, tensors: Any, groups: Any) -> None:
            super().__init__(tensors, groups)
            made.append(self)

    trigram.register("step of mine", trigram.Trigram(), step=Mine)
    torch.manual_seed(rank)
    model = trigram.with_bagua(nn.Linear(3, 1), "step of mine")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    assert made and trigram.stats(model)["rounds"] == 3
    trigram.register("gradients of mine", trigram.Trigram(carry="gradients"), step=Mine)
    text = raises(trigram.UnsupportedError, trigram.with_bagua, nn.Linear(3, 1), "gradients of mine")
    says(text, "step=", "weights")


def test_a_registered_step_is_made() -> None:
    run(2, _step_of_the_default)


def test_old_names_still_work() -> None:
    run(2, _old_names)
