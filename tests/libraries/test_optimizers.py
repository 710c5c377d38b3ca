"""Optimizers that do more than one step per pass: SAM, LBFGS, averages of weights, schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.libraries.script import PATIENCE, Counts, Run, script
from tests.support.cases import Cases

schedulefree = pytest.importorskip("schedulefree", reason="make test-libraries installs it")

CASES = Cases()
STEPS = 8


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as in the public implementations: two passes for each update."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def smooth() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(run: Run) -> tuple[Tensor, Tensor]:
    inputs = run.data(16, 6)
    return inputs, torch.sin(inputs[:, :3])


@script(CASES, ("two steps",), ("closure",))
def sam(run: Run, style: str) -> Counts:
    model = run.wrap(net())
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    inputs, targets = batch(run)

    def closure() -> Tensor:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(STEPS):
        loss = closure()
        if style == "closure":
            optimizer.step(closure)
            optimizer.zero_grad()
        else:
            optimizer.first_step(zero_grad=True)
            closure()
            optimizer.second_step(zero_grad=True)
        run.losses.append(float(loss.detach()))
    return [(2 * STEPS, STEPS)]


@script(CASES)
def ema(run: Run) -> None:
    """An exponential average of the weights in a copy of the model, evaluated beside the training."""
    model = run.wrap(net())
    average = AveragedModel(run.modules[0], multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    run.kept.append(average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, targets = batch(run)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        average.update_parameters(run.modules[0])
        run.losses.append(float(loss.detach()))
        with torch.no_grad():
            average(inputs)
    update_bn([inputs], average)


@script(CASES, (None,), ("strong_wolfe",))
def lbfgs(run: Run, line_search: str | None) -> Counts:
    """A closure that is called several times; the line search asks for a loss that all ranks agree on."""
    model = run.wrap(smooth())
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        lr=0.3,
        max_iter=4,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn=line_search,
    )
    inputs, targets = batch(run)
    passes = 0

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return run.mean(loss)

    for _ in range(STEPS):
        run.losses.append(float(optimizer.step(closure)))
    return [(passes, STEPS)]


@script(CASES)
def schedule_free(run: Run) -> None:
    """AdamWScheduleFree, whose `eval` and `train` exchange the weights around each evaluation."""
    model = run.wrap(net())
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=2)
    inputs, targets = batch(run)
    for step in range(STEPS):
        model.train()
        optimizer.train()
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))
        if step % 3 == 2:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                model(inputs)


@pytest.mark.parametrize("case", list(CASES))
def test_optimizers(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 2, patience=PATIENCE)
