"""How long calls wait: by default, without limit, and under asynchronous algorithms; what long waits log."""

from __future__ import annotations

import logging
import math
import threading
import time

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.checks import equal, raises, says
from tests.support.harness import await_flag, flag, run

pytestmark = pytest.mark.waits


def _limits(rank: int, world: int) -> list[float | None]:
    """What a collective may take, by what `init` was given; derived groups have the same."""
    seen: list[float | None] = []
    for given in (None, math.inf, 0, 30):
        group = trigram.init(op_timeout=given)
        seen.append(group.timeout)
        assert trigram.new_group([0, 1]).timeout == group.timeout
        trigram.barrier()
        trigram.shutdown()
    for wrong in (-1.0, math.nan):
        says(
            raises(trigram.ConfigError, lambda w=wrong: trigram.init(op_timeout=w)), "op_timeout", "math.inf"
        )
    return seen


def test_ten_minutes_by_default() -> None:
    assert run(2, _limits) == [[600.0, None, None, 30.0]] * 2


def _first_calls(rank: int, world: int) -> None:
    """Threads whose first calls come at once are in one world."""
    groups: list[trigram.Group] = []
    together = threading.Barrier(6)

    def start() -> None:
        together.wait()
        groups.append(trigram.init())

    threads = [threading.Thread(target=start, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(groups) == 6 and len({id(g) for g in groups}) == 1
    t = torch.ones(3)
    trigram.all_reduce(t)
    equal(t, torch.full((3,), float(world)), "after six first calls")


def test_threads_that_begin_together_make_one_world() -> None:
    run(2, _first_calls)


def _slow_rank(rank: int, world: int, algorithm: str) -> int:
    """Rank 1 takes longer than op_timeout, in the midst of training and at its end."""
    limit = patience.seconds(0.5)  # what with_bagua agrees on is not free of it
    trigram.init(op_timeout=limit)
    model = trigram.with_bagua(torch.nn.Linear(3, 1), algorithm)
    for step in range(30):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        time.sleep(3 * limit if rank == 1 and step in (5, 29) else 0.002)
    steps = int(trigram.stats(model)["steps"])
    trigram.shutdown()
    return steps


@pytest.mark.parametrize("algorithm", ["async", "async_decentralized", "async_low_precision_decentralized"])
def test_asynchronous_algorithms_have_no_limit(algorithm: str) -> None:
    """A rank listens for messages that come when a neighbour is free, and at the end it waits for all."""
    assert run(2, _slow_rank, algorithm, timeout=90) == [30, 30]


def _synchronous_again(rank: int, world: int) -> str | None:
    """The limit is back after a switch to an algorithm whose ranks wait for each other."""
    trigram.init(op_timeout=1.0)
    model = trigram.with_bagua(torch.nn.Linear(3, 1), "async")
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    trigram.switch(model, "gradient_allreduce")
    if rank == 1:
        await_flag("timed out", 60.0)
        return None
    text = raises(trigram.TimeoutError, lambda: model(torch.ones(2, 3)).sum().backward())
    flag("timed out")
    return text


def test_synchronous_algorithms_have_the_limit() -> None:
    text, _ = run(2, _synchronous_again, timeout=90)
    says(text, "timed out after", "rank 1")


class Lines(logging.Handler):
    """Raises a flag for the line about a long wait."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "has waited" in text:
            lines.append(text)
            flag(f"logged {len(lines)}")


lines: list[str] = []


class Classifier(torch.nn.Linear):
    """A model with a name to be recognised by."""


def _long_wait(rank: int, world: int) -> list[str]:
    """Rank 1 is late for a call of the script's own, and then for one of the model's."""
    logging.getLogger("trigram").addHandler(Lines())
    model = trigram.with_bagua(Classifier(3, 1))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    if rank == 1:
        await_flag("logged 1", 90.0)
    trigram.all_reduce(torch.ones(3))
    if rank == 1:
        await_flag("logged 2", 90.0)
    model(torch.ones(2, 3)).sum().backward()
    return lines


def test_a_long_wait_names_the_model_and_the_step() -> None:
    written, _ = run(2, _long_wait, timeout=150)
    assert len(written) == 2, written
    says(written[0], "rank 0 has waited", "all_reduce", "rank 1")
    assert "model" not in written[0]
    says(written[1], "rank 0 has waited", "rank 1", "(model Classifier, step 2)")
