"""Steps and passes that raise an exception on one rank: all ranks get an error, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import trigram
from tests.sharded.twins import Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import raises, says
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


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_failures(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
