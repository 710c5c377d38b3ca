"""Optimizers of public libraries, sharded and fused: bit for bit the training of `gradient_allreduce`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import trigram
from tests.libraries.script import PATIENCE
from tests.sharded.twins import Net, Twins
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.twin_training import mlp

_WHY = "make test-libraries installs it"
lion_pytorch = pytest.importorskip("lion_pytorch", reason=_WHY)
pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason=_WHY)
schedulefree = pytest.importorskip("schedulefree", reason=_WHY)
timm_optim = pytest.importorskip("timm.optim", reason=_WHY)

CASES = Cases()
Make = Callable[[nn.Module], Optimizer]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, which decay, and the rest."""
    params = [p for p in model.parameters() if p.numel()]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def of(kind: Any, **options: Any) -> Make:
    return lambda m: kind(groups(m), **options)


VALUES: dict[str, Make] = {
    "lion": of(lion_pytorch.Lion, lr=0.003),
    "lion of pytorch_optimizer": of(pytorch_optimizer.Lion, lr=0.003),
    "schedule-free AdamW": of(schedulefree.AdamWScheduleFree, lr=0.02, warmup_steps=2),
    "schedule-free SGD": of(schedulefree.SGDScheduleFree, lr=0.1),
    "schedule-free RAdam": of(schedulefree.RAdamScheduleFree, lr=0.02),
    "schedule-free AdamW of pytorch_optimizer": of(pytorch_optimizer.ScheduleFreeAdamW, lr=0.02),
    "AdaBelief": of(pytorch_optimizer.AdaBelief, lr=0.01),
    "ADOPT": of(timm_optim.Adopt, lr=0.01),
}
WHOLE: dict[str, Make] = {
    "LAMB": of(timm_optim.Lamb, lr=0.02, max_grad_norm=None),
    "LAMB of pytorch_optimizer": of(pytorch_optimizer.Lamb, lr=0.02),
    "Shampoo": of(pytorch_optimizer.Shampoo, lr=0.02),
    "SOAP": of(pytorch_optimizer.SOAP, lr=0.01),
    "LARS": of(timm_optim.Lars, lr=0.1, momentum=0.9, trust_coeff=0.1),
    "Adafactor of timm": of(timm_optim.AdafactorBigVision, lr=0.02, min_dim_size_to_factor=16),
}
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "shards": {"gradients": "shards"},
    "fused": {"fused": True},
    "replicated and fused": {"algorithm": "gradient_allreduce", "fused": True},
}


def trains(rank: int, world: int, name: str, mode: str) -> None:
    """Steps, evaluations of schedule-free ones, a checkpoint that the other resumes."""
    make = {**VALUES, **WHOLE}[name]
    twins = Twins(rank, world, Net, make, **MODES[mode])

    def exchange(twins: Twins, method: str) -> None:
        for _, optimizer in twins.pairs:
            getattr(optimizer, method, lambda: None)()

    for step in range(6):
        exchange(twins, "train")
        twins.step(step)
        twins.check(f"step {step}")
        if step % 2:
            exchange(twins, "eval")
            twins.check(f"evaluation {step}")
    if mode != "replicated and fused":
        held = [
            sum(v.numel() for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor))
            for o in twins.optimizers
        ]
        assert held[1] < 0.9 * held[0], held
    saved = [(copy.deepcopy(m.state_dict()), copy.deepcopy(o.state_dict())) for m, o in twins.pairs]
    other = Twins(rank, world, Net, make, **MODES[mode])
    for (model, optimizer), (weights, state) in zip(other.pairs, saved[::-1], strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    exchange(other, "train")
    if name != "SOAP":  # a matrix that was saved lies in memory otherwise, and products have another rounding
        other.train(6, 3)
    other.check_ranks()


for name in (*VALUES, *WHOLE):
    for mode in MODES:
        CASES[f"{name}, {mode}"] = lambda rank, world, name=name, mode=mode: trains(rank, world, name, mode)


@CASES
def all_at_once(rank: int, world: int) -> None:
    """Those that compute with all parameters are refused, whatever the script says."""
    refused: dict[str, Make] = {
        "Lamb": of(timm_optim.Lamb),  # clips by the norm of all gradients
        "Prodigy": of(pytorch_optimizer.Prodigy),
        "DAdaptAdam": of(pytorch_optimizer.DAdaptAdam),
    }
    for name, make in refused.items():
        for options in ({}, {"elementwise": False}, {"fused": True}):
            model = mlp()
            text = raises(
                trigram.UnsupportedError,
                trigram.with_bagua,
                model,
                "sharded",
                optimizer=make(model),
                **options,
            )
            says(text, name, "other parameters")
    model = mlp()
    given = {"optimizer": pytorch_optimizer.ScalableShampoo(model.parameters())}
    says(raises(trigram.UnsupportedError, trigram.with_bagua, model, "sharded", **given), "objects")
    for name in ("LAMB", "Shampoo", "SOAP"):
        model = mlp()
        given = {"optimizer": WHOLE[name](model), "elementwise": True}
        says(raises(trigram.MisuseError, trigram.with_bagua, model, "sharded", **given), "elementwise=True")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_optimizers(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=PATIENCE)
