"""fused=True: when weights are updated, and what it cannot work with."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trigram
from tests.sharded.twins import Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.twin_training import mlp, square

CASES = Cases()
WAYS = {"sharded": {}, "shards": {"gradients": "shards"}, "gradient_allreduce": {}}
"""Words for the three ways, and the options of those that are not the name of an algorithm."""


def wrapping(way: str) -> dict[str, Any]:
    """What with_bagua gets."""
    return {"algorithm": "sharded" if WAYS[way] else way, "fused": True, **WAYS[way]}


def trained(rank: int, world: int, algorithm: str, **options: Any) -> tuple[Any, Any, Twins]:
    """A model with two steps behind it: the first is an ordinary one."""
    options = {"make": mlp, **wrapping(algorithm), **options}
    twins = Twins(rank, world, options.pop("make"), adamw, **options)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    return model, optimizer, twins


@CASES.over(*WAYS)
def backward_updates(rank: int, world: int, algorithm: str) -> None:
    """When backward returns all weights are new, and step changes nothing more."""
    model, optimizer, twins = trained(rank, world, algorithm)
    _, plain_optimizer = twins.pairs[0]
    for m, o in twins.pairs:
        o.zero_grad()
        twins.loss(m, 2).backward()
    plain_optimizer.step()
    twins.check("after backward")
    kept = [p.clone() for p in model.parameters()]
    optimizer.step()
    for p, was in zip(model.parameters(), kept, strict=True):
        equal(p, was, "step has changed a weight")
    twins.train(3, 3)
    twins.check_state("fused")


@CASES.over(*WAYS)
def gradients_are_gone(rank: int, world: int, algorithm: str) -> None:
    """Clipping, scaling and reading gradients raise instead of doing nothing."""
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    params = list(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for use in (
        lambda: nn.utils.clip_grad_norm_(params, 1.0),
        lambda: trigram.clip_grad_norm_(model, 1.0),
        lambda: nn.utils.clip_grad_value_(params, 1.0),
        lambda: scaler.unscale_(optimizer),
        params[0].grad.norm,
        lambda: params[0].grad * 2,
    ):
        says(raises(trigram.MisuseError, use), "fused=True", "clipping")
    optimizer.step()
    twins.models[0].load_state_dict(model.state_dict())


@CASES.over(*WAYS)
def order_of_calls(rank: int, world: int, algorithm: str) -> None:
    """Two passes for an update, a step that is left out, and options that change too late."""
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    says(raises(trigram.MisuseError, lambda: twins.loss(model, 3).backward()), "second backward pass")
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    optimizer.zero_grad()
    says(raises(trigram.MisuseError, lambda: twins.loss(model, 3).backward()), "before optimizer.step()")
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    says(raises(trigram.MisuseError, optimizer.step), "lr", "before backward()")
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    text = raises(trigram.UnsupportedError, optimizer.step, lambda: twins.loss(model, 2).backward())
    says(text, "closure")
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    says(raises(trigram.MisuseError, other.step), "SGD", "AdamW")


@CASES.over(*WAYS)
def gradients_since_backward(rank: int, world: int, algorithm: str) -> None:
    """Gradients that are assigned too late, or used twice, raise; those set to 0 are 0."""
    model, optimizer, twins = trained(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    model[2].bias.grad = torch.ones_like(model[2].bias)
    says(raises(trigram.MisuseError, optimizer.step), "assigned", "fused=True")
    model, optimizer, twins = trained(rank, world, algorithm)
    twins.step(2)
    says(raises(trigram.MisuseError, optimizer.step), "without new gradients")
    for _, each in twins.pairs:
        each.zero_grad(set_to_none=False)
        each.step()
    twins.check("gradients of 0")
    for _, each in twins.pairs:
        each.zero_grad()
    twins.train(3, 2)


@CASES.over(*WAYS)
def loaded_after_a_failure(rank: int, world: int, algorithm: str) -> None:
    """As the message says: a checkpoint of model and optimizer ends it."""
    model, optimizer, twins = trained(rank, world, algorithm)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    lr = optimizer.param_groups[0]["lr"]
    optimizer.zero_grad()
    twins.loss(model, 9).backward()
    optimizer.param_groups[0]["lr"] = lr / 2
    raises(trigram.MisuseError, optimizer.step)
    optimizer.param_groups[0]["lr"] = lr
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    twins.train(2, 3)


@CASES
def a_layer_that_thaws_too_soon(rank: int, world: int) -> None:
    """A step is left out, and a layer thaws: the next pass raises nevertheless."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    model, optimizer, twins = trained(rank, world, "sharded", make=make)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    says(raises(trigram.MisuseError, lambda: twins.loss(model, 3).backward()), "before optimizer.step()")


@CASES.over("sharded", "gradient_allreduce")  # shards need every parameter that trains in their optimizer
def passes_of_others(rank: int, world: int, algorithm: str) -> None:
    """A pass that gives the optimizer's parameters no gradient needs no step of it."""
    model = nn.ModuleDict({"own": nn.Linear(6, 6), "other": nn.Linear(6, 1)})
    own, other = adamw(model["own"]), adamw(model["other"])
    trigram.with_bagua(model, optimizer=own, **wrapping(algorithm))
    inputs = torch.ones(2, 6)
    for _ in range(3):
        for optimizer in (other, own):
            model.zero_grad()
            hidden = model["own"](inputs)
            model["other"](hidden.detach() if optimizer is other else hidden).sum().backward()
            optimizer.step()


@CASES.over(*WAYS)
def a_pass_that_fails(rank: int, world: int, algorithm: str) -> None:
    """One rank's pass raises when some buckets were updated: no rank goes on with what may differ."""
    model, optimizer, _ = trained(rank, world, algorithm)
    optimizer.zero_grad()

    def fails(_: torch.Tensor) -> None:
        raise ValueError("no")

    hidden = model[0](torch.ones(2, 6))
    if rank == 0:
        hidden.register_hook(fails)
    loss = model[1:](hidden).sum()
    if rank == 0:
        raises(ValueError, loss.backward)
        says(raises(trigram.MisuseError, lambda: square(model, rank, 3).backward()), "checkpoint")
    else:
        raises(trigram.AbortedError, loss.backward)
        says(raises(trigram.MisuseError, lambda: square(model, rank, 3).backward()), "checkpoint")


@CASES.over(*WAYS)
def checkpointed(rank: int, world: int, algorithm: str) -> None:
    """Checkpointing, which repeats forward passes in backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                inputs = checkpoint(block, inputs, use_reentrant=False).tanh()
            return inputs

    trained(rank, world, algorithm, make=Checkpointed)[2].train(2, 3)


@CASES
def combinations(rank: int, world: int) -> None:
    def refused(*words: str, **options: Any) -> None:
        model = mlp()
        algorithm = options.pop("algorithm", "gradient_allreduce")
        given = {"optimizer": adamw(model), **options}
        error = (trigram.UnsupportedError, trigram.MisuseError)
        says(raises(error, trigram.with_bagua, model, algorithm, fused=True, **given), *words)

    refused("optimizer=", optimizer=None)
    refused("a codec", "uncompressed", algorithm="bytegrad")
    refused("weights", algorithm="local_sgd")
    refused("check_finite", check_finite=True)
    refused("sample_weight", sample_weight=2.0)
    refused("elastic", elastic=True)
    refused("LBFGS", "at once", optimizer=torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))
    model = mlp()
    trigram.with_bagua(model, "gradient_allreduce", optimizer=adamw(model), fused=True)
    says(raises(trigram.UnsupportedError, trigram.join, model), "fused")


@CASES.over("bytegrad", "local_sgd")
def another_word_in_the_environment(rank: int, world: int, word: str) -> None:
    """The script's options belong to the algorithm that it was written for."""
    os.environ["TRIGRAM_ALGORITHM"] = word
    try:
        model = mlp()
        optimizer = adamw(model)
        trigram.with_bagua(model, optimizer=optimizer, fused=True, warmup_steps=0)
        for step in range(3):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert all(p in optimizer.state for p in model.parameters())
    finally:
        del os.environ["TRIGRAM_ALGORITHM"]


@CASES
def switched(rank: int, world: int) -> None:
    model, _, twins = trained(rank, world, "gradient_allreduce")
    trigram.switch(model, "gradient_allreduce")
    for m, o in twins.pairs:
        o.zero_grad()
        twins.loss(m, 2).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        o.step()
    twins.check("switched")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_fused(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
