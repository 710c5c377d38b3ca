"""QAdam follows what averages: gradients are not taken for moments, nor moments for gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import trigram
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import close, raises, says

CASES = Cases()
LR = 0.005


def trained(rank: int, bits: int = 8, steps: int = 7) -> tuple[nn.Module, trigram.QAdam]:
    torch.manual_seed(3)
    model = net()
    optimizer = trigram.QAdam(model.parameters(), lr=LR)
    trigram.with_bagua(model, "qadam", optimizer=optimizer, warmup_steps=3, bits=bits)
    for step in range(steps):
        one_step(model, optimizer, rank, step)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss(model, rank, step).backward()
    optimizer.step()


def beside_adamw(model: nn.Module, optimizer: trigram.QAdam, rank: int) -> None:
    """The next update is AdamW's from the same moments and gradients."""
    twin = net()
    twin.load_state_dict(model.state_dict())
    adamw = torch.optim.AdamW(twin.parameters(), lr=LR, weight_decay=0.0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        state = copy.deepcopy(optimizer.state[p])
        root = state.pop("root", None)
        if root is not None:  # a frozen variance goes on as that of the last step
            root = root.masked_fill(root.isinf(), 0.0)
            state["exp_avg_sq"] = root.square() * (1 - 0.999 ** state["step"])
        adamw.state[q] = state | {"step": torch.tensor(float(state["step"]))}
    optimizer.zero_grad()
    loss(model, rank, 50).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()
    optimizer.step()
    adamw.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p, q, 1e-5, 1e-7)


AFTER: dict[str, Callable[[nn.Module, trigram.QAdam], object]] = {
    "switch": lambda m, _: trigram.switch(m, "gradient_allreduce"),
    "weights": lambda m, _: trigram.switch(m, "local_sgd"),
    "another warm-up": lambda m, o: trigram.switch(m, "qadam", optimizer=o, warmup_steps=5),
    "unwrap": lambda m, _: trigram.unwrap(m),
}


@CASES.over(*((after, bits) for after in AFTER for bits in (8, 1)))
def adamw_again(rank: int, world: int, choice: tuple[str, int]) -> None:
    after, bits = choice
    model, optimizer = trained(rank, bits)
    assert optimizer.frozen
    AFTER[after](model, optimizer)
    assert not optimizer.frozen
    beside_adamw(model, optimizer, rank)


@CASES
def moments_again_without_another_warmup(rank: int, world: int) -> None:
    """The hooks that end do not undo what those that follow have begun."""
    model, optimizer = trained(rank)
    trigram.switch(model, "qadam", optimizer=optimizer, warmup_steps=0)
    assert optimizer.frozen and not copy.deepcopy(optimizer).frozen


@CASES.over(8, 1)
def a_checkpoint_goes_on_with_gradients(rank: int, world: int, bits: int) -> None:
    model, optimizer = trained(rank, bits)
    weights, moments = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    trigram.unwrap(model)
    other = net()
    follows = trigram.QAdam(other.parameters(), lr=LR)
    trigram.with_bagua(other)
    other.load_state_dict(weights)
    follows.load_state_dict(moments)
    beside_adamw(other, follows, rank)


@CASES
def a_second_pass_cannot_add_to_moments(rank: int, world: int) -> None:
    model, optimizer = trained(rank)
    optimizer.zero_grad()
    with trigram.no_sync(model):
        loss(model, rank, 8).backward()
    loss(model, rank, 9).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss(model, rank, 10).backward()
    optimizer.zero_grad()  # the update is skipped
    loss(model, rank, 11).backward()
    says(raises(trigram.MisuseError, lambda: loss(model, rank, 12).backward()), "no_sync", "first moments")
    optimizer.zero_grad()
    one_step(model, optimizer, rank, 13)


@CASES
def a_second_pass_of_one_rank_fails_on_all(rank: int, world: int) -> None:
    model, optimizer = trained(rank)
    optimizer.zero_grad()
    loss(model, rank, 8).backward()
    if rank == 0:
        raises(trigram.MisuseError, lambda: loss(model, rank, 9).backward())
        trigram.step(model)  # or its next forward pass
    else:
        optimizer.step()
        optimizer.zero_grad()
        says(raises(trigram.AbortedError, lambda: loss(model, rank, 9).backward()), "rank 0")


@CASES
def one_rank_trains_with_adamw(rank: int, world: int) -> None:
    """Also from a checkpoint of several."""
    model, optimizer = trained(rank)
    state = trigram.algorithm_state(model)
    weights, moments = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    alone = trigram.new_group([rank]) if world == 1 else [trigram.new_group([r]) for r in range(world)][rank]
    other = net()
    follows = trigram.QAdam(other.parameters(), lr=LR)
    trigram.with_bagua(other, "qadam", optimizer=follows, warmup_steps=3, group=alone)
    other.load_state_dict(weights)
    follows.load_state_dict(moments)
    trigram.load_algorithm_state(other, state)
    beside_adamw(other, follows, rank)


@pytest.mark.parametrize("case", list(CASES))
def test_qadam(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 2, transport="shm")
