"""A replica that has drifted is named, by all ranks."""

from __future__ import annotations

import pytest
import torch

import trigram
from tests.support.checks import raises, says
from tests.support.harness import run


def drift(rank: int, world: int, who: int, every: int) -> int:
    """One bit of one rank's weights flips after step 5; the step in which it is noticed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(33, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model = trigram.with_bagua(model, check_replicas=every)
    for step in range(20):
        try:
            loss = model(torch.ones(2, 33)).sum()
        except trigram.CorruptError as e:
            says(str(e), f"rank(s) {who} ", "check_replicas", "weights")
            assert e.rank == who
            return step
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == 5 and rank == who:
            model.weight.data.view(torch.int32)[1, 7] ^= 1
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("world, who", [(3, 1), (3, 0), (5, 4)])
def test_a_drifted_replica_is_named(world: int, who: int) -> None:
    assert run(world, drift, who, 4) == [8] * world


def undisturbed(rank: int, world: int) -> None:
    """Equal replicas raise nothing; what cannot be checked says so."""
    model = trigram.with_bagua(torch.nn.Linear(5, 2), check_replicas=2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        opt.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        opt.step()
    raises(
        trigram.UnsupportedError, trigram.with_bagua, torch.nn.Linear(2, 2), "decentralized", check_replicas=2
    )
    raises(trigram.MisuseError, trigram.with_bagua, torch.nn.Linear(2, 2), check_replicas=-1)


def test_equal_replicas() -> None:
    run(3, undisturbed)
