"""Steps and passes that raise an exception on one rank: all ranks get an error, and none waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

import trigram
from tests.sharded.twins import Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.marks import long
from tests.support.twin_training import mlp

CASES = Cases()
BOTH = ("sharded", "gradient_allreduce")


class Failed(Exception):
    """Of the script."""


def fails(*_: Any) -> None:
    raise Failed


def fused(rank: int, world: int, algorithm: str) -> tuple[Twins, Any, Any]:
    twins = Twins(rank, world, mlp, adamw, algorithm=algorithm, fused=True)
    twins.train(steps=2)
    return twins, *twins.pairs[1]


@CASES.over(*BOTH)
def a_forward_pass_of_one_rank(rank: int, world: int, algorithm: str) -> None:
    """The other ranks have updated weights in the pass that fails: no rank goes on, and none waits for it."""
    twins, model, optimizer = fused(rank, world, algorithm)
    optimizer.zero_grad()
    if rank == 0:
        handle = model[2].register_forward_pre_hook(fails)
        raises(Failed, twins.loss, model, 2)
        handle.remove()
    else:
        raises(trigram.AbortedError, lambda: twins.loss(model, 2).backward())
    says(raises(trigram.MisuseError, lambda: twins.loss(model, 3).backward()), "checkpoint")


@CASES.over(*BOTH)
def a_hook_before_the_step(rank: int, world: int, algorithm: str) -> None:
    """A hook of the script raises in a step, on all ranks: the optimizer holds its parameters again."""
    twins, model, optimizer = fused(rank, world, algorithm)
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    handle = optimizer.register_step_pre_hook(fails)
    raises(Failed, optimizer.step)
    handle.remove()
    assert len(optimizer.state_dict()["state"]) == 6
    optimizer.zero_grad()
    twins.loss(model, 3).backward()
    optimizer.step()
    _, plain = twins.pairs[0]
    for step in (2, 3):  # backward had made the update
        plain.zero_grad()
        twins.loss(twins.models[0], step).backward()
        plain.step()
    twins.check("the step that failed had its update")


WAYS: dict[str, dict[str, Any]] = {
    "at once": {"optimizer": partial(adamw, fused=True), "fused": True},
    "at once, overlap": {"optimizer": partial(adamw, fused=True), "fused": True, "overlap": True},
    "by bucket": {"fused": True},
    "shards, fused": {"gradients": "shards", "fused": True},
    "all gradients, fused": {"algorithm": "gradient_allreduce", "fused": True},
    "in step": {},
    "shards, in step": {"gradients": "shards"},
}


def saved(model: Any, optimizer: Any) -> Callable[[], None]:
    """Saves both; what it returns loads them again."""
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def load() -> None:
        optimizer.zero_grad()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    return load


def failing_pass(twins: Twins, model: Any, where: str) -> None:
    """A pass that raises: in forward, or when no parameter, some or all of them have their gradients."""

    def later(_: Any, __: Any, outputs: torch.Tensor) -> None:
        outputs.register_hook(fails)

    inputs = torch.ones(2, 6, dtype=twins.dtype, requires_grad=True) * 1
    if where == "all":
        inputs.register_hook(fails)
    hook = (
        model[2].register_forward_pre_hook(fails)
        if where == "forward"
        else model[2].register_forward_hook(later)
        if where == "some"
        else model.register_forward_hook(later)
        if where == "none"
        else None
    )
    try:
        model(inputs).sum().backward()
    finally:
        if hook is not None:
            hook.remove()


@CASES.over(*WAYS)
def a_checkpoint_ends_it(rank: int, world: int, way: str) -> None:
    """A pass of one rank raises, wherever; all get an error. They load a checkpoint and go on: calls, passes
    and steps have the same numbers on all ranks again."""
    twins = Twins(rank, world, mlp, **WAYS[way])
    model, optimizer = twins.pairs[1]
    twins.train(steps=3)
    # Where the last call of a pass is not made at its end, the other ranks may have all that they need.
    places = ["forward", "none", "some", *(["all"] if way.startswith("at once") else [])]
    step = 3

    def whole_step() -> None:
        twins.loss(model, step).backward()
        optimizer.step()

    for where in places:
        for who in (0, world - 1):
            optimizer.zero_grad()
            load = saved(model, optimizer)
            if rank == who:
                raises(Failed, failing_pass, twins, model, where)
            else:
                raises(trigram.AbortedError, whole_step)
            load()
            twins.train(step, 2)
            step += 2
    twins.check_state(way)
    assert trigram.stats(model)["steps"] == step


def failing_step(optimizer: Any, before: bool) -> None:
    """A step that raises: in a hook of the script, or when one group was updated."""
    if before:
        handle = optimizer.register_step_pre_hook(fails)
        try:
            optimizer.step()
        finally:
            handle.remove()
    prepare, calls = optimizer._init_group, count()
    optimizer._init_group = lambda *given: fails() if next(calls) else prepare(*given)
    try:
        optimizer.step()
    finally:
        del optimizer._init_group


def backward(twins: Twins, step: int) -> None:
    """A pass of the sharded model."""
    twins.optimizers[1].zero_grad()
    twins.loss(twins.models[1], step).backward()


STEPS: dict[str, dict[str, Any]] = {
    "in step": {},
    "shards": {"gradients": "shards"},
    "overlap": {"overlap": True},
    "whole parameters": {"elementwise": False},
}


@CASES.over(*STEPS)
def a_checkpoint_ends_a_step(rank: int, world: int, way: str) -> None:
    """A step of one rank raises while the others wait for its weights: all get an error, and load a
    checkpoint."""
    twins = Twins(rank, world, mlp, **STEPS[way])
    model, optimizer = twins.pairs[1]
    twins.train(steps=3)
    step = 3
    for before in (True, False):
        for who in (0, world - 1):
            optimizer.zero_grad()
            load = saved(model, optimizer)
            twins.loss(model, step).backward()
            if rank == who:
                raises(Failed, failing_step, optimizer, before)
                optimizer.zero_grad()
            elif way == "overlap":
                optimizer.step()
                says(raises(trigram.AbortedError, twins.loss, model, step), f"rank {who}")
            else:
                says(raises(trigram.AbortedError, optimizer.step), f"rank {who}")
                says(raises(trigram.MisuseError, partial(backward, twins, step)), "checkpoint")
            load()
            twins.train(step, 2)
            step += 2
    twins.check_state(way)
    # On all ranks alike, before anything was updated: nothing is lost but the step.
    optimizer.zero_grad()
    twins.loss(model, step).backward()
    raises(Failed, failing_step, optimizer, True)
    twins.train(step, 2)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3, long(4)])
def test_failures(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
