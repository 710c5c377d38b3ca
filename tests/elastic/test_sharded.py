"""Elastic jobs whose optimizer is sharded: no part of its state is lost, and none is a step ahead or behind."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.support.elastic_sharded import BEFORE, DURING, Moments, reference, same_state, train
from tests.support.harness import Died, Ranks

pytestmark = pytest.mark.waits


def check(results: list[Any], living: list[int], history: list[tuple[int, ...]]) -> None:
    """All living ranks hold the same bits, and these are those of a training in one process."""
    expected, state = reference(history)
    for r in living:
        assert results[r]["steps"] == len(history), f"rank {r}"
        assert torch.equal(results[r]["weights"], results[living[0]]["weights"]), f"rank {r} differs"
        same_state(results[r]["state"], results[living[0]]["state"], f"rank {r}")
    first = results[living[0]]
    torch.testing.assert_close(first["weights"], expected, rtol=1e-8, atol=1e-11)
    for k, of in state["state"].items():
        for name, value in of.items():
            torch.testing.assert_close(first["state"]["state"][k][name], value, rtol=1e-7, atol=1e-10)


def died(world: int, moments: Moments, steps: int) -> list[tuple[int, ...]]:
    """Who takes part in which step."""
    last = {r: at + (where in DURING) for r, (at, where) in moments.items()}
    return [tuple(r for r in range(world) if step < last.get(r, steps)) for step in range(steps)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("where", BEFORE + DURING)
def test_a_death_at_any_moment_loses_nothing(where: str, world: int, transport: str) -> None:
    steps, moments = 12, {1: (5, where)}
    with Ranks(world, train, steps, moments, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
    assert results[1] == Died(-signal.SIGKILL)
    check(results, [r for r in range(world) if r != 1], died(world, moments, steps))
