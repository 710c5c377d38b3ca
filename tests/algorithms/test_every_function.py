"""`every=` as a function of the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, says

CASES = Cases()
AFTER = {2, 3, 7}


def train(model: nn.Module, rank: int, steps: range) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def made() -> nn.Module:
    torch.manual_seed(5)
    return net()


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sgd": ("local_sgd", {}),
    "overlapping": ("local_sgd", {"overlap": True}),
    "diloco": ("diloco", {}),
    "8 bits": ("central/int8/every:2", {}),
    "median": ("central:median/full/every:2", {}),
    "weighted": ("local_sgd", {"sample_weight": 2.0}),
}


@CASES.over(*WAYS)
def as_a_number(rank: int, world: int, way: str) -> None:
    """A function that says every third has the bits of `every=3`."""
    name, options = WAYS[way]
    found = []
    for every in (3, lambda step: step % 3 == 0):
        model = trigram.with_bagua(made(), name, every=every, **options)
        weights = [train(model, rank, range(3, 11))]
        trigram.consensus(model)
        found.append([*weights, train(model, rank, range(2)), torch.tensor(trigram.stats(model)["rounds"])])
    for a, b in zip(*found, strict=True):
        equal(a, b, way)


@CASES
def by_hand(rank: int, world: int) -> None:
    """After some steps, as all ranks in one process."""
    model = trigram.with_bagua(made(), "local_sgd", every=AFTER.__contains__)
    replicas = [made() for _ in range(world)]
    for step in range(9):
        mine = train(model, rank, range(step, step + 1))
        each = torch.stack([train(m, r, range(step, step + 1)) for r, m in enumerate(replicas)])
        if step + 1 in AFTER:
            each[:] = each.mean(0)
            for m, values in zip(replicas, each, strict=True):
                nn.utils.vector_to_parameters(values.clone(), m.parameters())
        close(mine, each[rank], 1e-6, f"step {step}")
    assert trigram.stats(model)["rounds"] == len(AFTER)


@CASES
def from_a_checkpoint(rank: int, world: int) -> None:
    """An averaging step that is due is made after it, and counts."""
    whole = trigram.with_bagua(made(), "local_sgd", every=AFTER.__contains__, overlap=True)
    train(whole, rank, range(3))
    weights = {k: v.clone() for k, v in whole.state_dict().items()}
    state = trigram.algorithm_state(whole)
    again = trigram.with_bagua(made(), "local_sgd", every=AFTER.__contains__, overlap=True)
    again.load_state_dict(weights)
    trigram.load_algorithm_state(again, state)
    equal(train(again, rank, range(3, 9)), train(whole, rank, range(3, 9)), "after the checkpoint")


@CASES
def ranks_disagree(rank: int, world: int) -> None:
    """They would average weights of different steps."""
    model = trigram.with_bagua(made(), "local_sgd", every=lambda step: step == 2 + (rank == world - 1))
    text = raises(trigram.MismatchError, train, model, rank, range(4))
    says(text, "every=", f"rank {world - 1}" if world > 2 else "rank")


@CASES
def ends_with_the_inputs(rank: int, world: int) -> None:
    """A rank whose inputs have ended takes part in the others' averages."""
    model = trigram.with_bagua(made(), "local_sgd", every=AFTER.__contains__)
    with trigram.join(model):
        train(model, rank, range(4 + 2 * rank))
    assert trigram.stats(model)["rounds"] == sum(step <= 4 + 2 * (world - 1) for step in AFTER)


@CASES
def refused(rank: int, world: int) -> None:
    """What does not go with it."""

    def function(step: int) -> bool:
        return True

    unsupported = trigram.UnsupportedError
    for name, options, words in (
        ("decentralized", {}, ("every",)),
        ("gossip:ring/full/every:2", {}, ("neighbours", "every=")),
        ("local_sgd", {"quorum": 1}, ("quorum=", "every=")),
        ("local_sgd", {"fragments": 2}, ("fragments",)),
        ("gradient_allreduce", {}, ("every",)),
    ):
        says(raises(unsupported, trigram.with_bagua, made(), name, every=function, **options), *words)
    text = raises(unsupported, trigram.with_bagua, made(), "local_sgd", every=lambda: True)
    says(text, "every=", "number of steps", "<lambda>()")
    says(raises(unsupported, trigram.with_bagua, made(), "local_sgd", every=None), "every=None", "function")


@CASES.over(None, "no", 1)
def neither_yes_nor_no(rank: int, world: int, said: Any) -> None:
    """A function that returns nothing never averaged, and one that returns a word always: both are errors."""
    model = trigram.with_bagua(made(), "local_sgd", every=lambda step: said)
    says(raises(trigram.MisuseError, train, model, rank, range(2)), repr(said), "True or False")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_every_function(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)
