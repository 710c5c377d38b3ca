"""torchvision and timm: convolutional networks with BatchNorm, and timm's optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision", reason="make test-libraries installs it")
pytest.importorskip("timm", reason="make test-libraries installs it")

import timm
import torchvision
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

from tests.libraries.script import PATIENCE, Run, script
from tests.support.cases import Cases

CASES = Cases()
STEPS = 6


@script(CASES, ("shufflenet_v2_x0_5",), ("mobilenet_v3_small",))
def torchvision_model(run: Run, name: str) -> None:
    """BatchNorm: its buffers are rank 0's where gradients are averaged, and each rank's elsewhere."""
    model = run.wrap(torchvision.models.get_model(name, weights=None, num_classes=4))
    torch.manual_seed(run.rank)  # of the dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
    inputs, targets = run.data(8, 3, 32, 32), run.labels(4, 8)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(STEPS):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            model(inputs)


@script(CASES, ("test_efficientnet", "lamb"), ("test_vit", "lookahead_adamw"))
def timm_model(run: Run, name: str, optimizer_name: str) -> None:
    """timm's training script: its optimizers, scheduler and average of the weights, with stochastic depth."""
    model = run.wrap(timm.create_model(name, pretrained=False, num_classes=4, drop_path_rate=0.1))
    torch.manual_seed(run.rank)  # of the stochastic depth
    optimizer = create_optimizer_v2(model, opt=optimizer_name, lr=5e-3, weight_decay=0.01)
    scheduler = CosineLRScheduler(optimizer, t_initial=2 * STEPS)
    average = ModelEmaV3(run.modules[0], decay=0.9)
    run.kept.append(average)
    size = run.modules[0].default_cfg["input_size"][-1]
    inputs, targets = run.data(4, 3, size, size), run.labels(4, 4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        average.update(run.modules[0], step=step)
        scheduler.step(step + 1)
        run.losses.append(float(loss.detach()))
    if hasattr(optimizer, "sync_lookahead"):
        optimizer.sync_lookahead()


@pytest.mark.parametrize("case", list(CASES))
def test_vision(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 2, patience=PATIENCE)
