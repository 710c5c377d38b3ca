"""The plan of a training whose number of ranks changes, and the schedulers that follow it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from trigram.integrations.elastic_schedule import Paced, Plan, move

SAMPLES, BATCH = 240, 4


def _steps(samples: float, ranks: int) -> int:
    return math.ceil(samples / (BATCH * ranks) - 1e-9)


def _played(epochs: float, ranks: list[int], plan: Plan) -> list[float]:
    """The plan's places in a training in whose step k there are ``ranks[k]`` ranks, the last for ever."""
    places, made = [], 0
    for epoch in range(math.ceil(epochs)):
        samples = SAMPLES
        while samples > 0:
            now = ranks[min(made, len(ranks) - 1)]
            samples = max(0, samples - BATCH * now)
            made += 1
            left = _steps(samples, ranks[min(made, len(ranks) - 1)])
            ahead = plan.ahead(left, epochs - epoch - 1, _steps(SAMPLES, ranks[min(made, len(ranks) - 1)]))
            plan.step(left, ahead)
            places.append(plan.at)
            if ahead == 1:
                return places
        plan.share = 0.0
    return places


@pytest.mark.parametrize("epochs", [1, 2.5, 3, 0.3, 2.1])
def test_without_changes_each_step_is_one(epochs: float) -> None:
    plan = Plan(math.ceil(epochs * _steps(SAMPLES, 3) - 1e-9))
    places = _played(epochs, [3], plan)
    assert len(places) == plan.planned
    for step, at in enumerate(places):
        assert abs(at - step - 1) < 1e-9
        assert plan.planned != 60 or at == step + 1, "whole epochs: as whole numbers"


def test_with_changes_it_ends_where_it_was_planned() -> None:
    chance = random.Random(7)
    for _ in range(200):
        ranks = [chance.randint(1, 6) for _ in range(chance.randint(1, 120))]
        epochs = chance.choice([1, 2, 2.5, 3])
        plan = Plan(math.ceil(epochs * _steps(SAMPLES, ranks[0])))
        places = _played(epochs, ranks, plan)
        assert places == sorted(places) and abs(places[-1] - plan.planned) < 1e-6, (
            ranks,
            epochs,
            places[-3:],
        )


def test_half_the_ranks_make_half_a_step() -> None:
    plan = Plan(20)
    places = _played(1, [3] * 4 + [1], plan)  # of 20 steps: 4, and the rest of one rank
    assert len(places) == 4 + 48 and places[2] == 3 < places[3] < 4
    parts = [b - a for a, b in itertools.pairwise(places[2:])]
    assert all(abs(part - 17 / 49) < 1e-9 for part in parts), "alike, from the step in which the others went"


def test_a_scheduler_that_counts_makes_the_steps_of_the_plan() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    paced, plan = Paced(OneCycleLR(optimizer, 0.1, total_steps=21)), Plan(20)
    optimizer.step()
    made = 0
    for at in _played(1, [3] * 4 + [1] * 9 + [5], Plan(20)):
        before, plan.at = plan.whole, at
        paced.due = plan.whole - before
        paced.step()
        made += paced.due
    assert made == 20 and paced.last_epoch == 20, "and not once too often, which it would not bear"


def test_a_function_of_the_steps_is_moved() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / 20)
    plan = Plan(20)
    plan.go_on(0.125)
    move(schedule, plan.at)
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [pytest.approx(0.1 * 0.875)]
    plan.go_on(3 / 20 + 1e-9)
    assert plan.at == 3.0 and plan.whole == 3
