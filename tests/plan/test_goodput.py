"""What faults cost (`trigram goodput`), beside arithmetic to the first order: exact for rare faults."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace
from typing import Any

import pytest
from typer.testing import CliRunner

import trigram
from tests.support.checks import raises, says
from trigram.algorithms.names import names
from trigram.cli import app
from trigram.plan.goodput import NOT_ELASTIC, Meeting, Setting, elastic, meetings, restarted

HOUR = 3600.0
RARE = Setting(ranks=1000, step=2.0, mtbf=50_000 * HOUR, back=600.0, transfer=30.0, moments=21.0, mean=20.0)


def _near(found: float, expected: float) -> None:
    assert abs(found - expected) <= 0.08 * expected + 1e-12, (found, expected)


def test_from_checkpoints() -> None:
    """Each fault costs the restart, and half of the time since the last checkpoint (Young, 1974)."""
    found = restarted(RARE)
    interval = math.sqrt(2 * RARE.checkpoint * RARE.between)
    _near(found.waiting, RARE.restart / RARE.between)
    _near(found.again, interval / 2 / RARE.between + RARE.checkpoint / interval)
    assert found.absent == 0.0


@pytest.mark.parametrize(("every", "weights"), [(0, True), (1, False), (1, True), (32, True)])
def test_elastic(every: int, weights: bool) -> None:
    found = elastic(RARE, Meeting("", (), every, weights))
    period = every * RARE.step
    # The mean over when the fault comes of what is left of the silence when the others reach their average.
    looks = [max(0.0, RARE.silence - period * (k + 0.5) / 1000) for k in range(1000)]
    unnoticed = RARE.silent * sum(looks) / 1000 if every else 0.0
    state = RARE.moments if weights else RARE.transfer
    late = max(0.0, state - period) if every else 0.0
    changes = 2 * (RARE.regroup + (RARE.mean if weights else 0.0)) + late
    _near(found.waiting, (unnoticed + changes) / RARE.between)
    _near(found.absent, (RARE.back + state) / RARE.mtbf)
    _near(found.again, period / 2 / RARE.mtbf)


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("mtbf", [1.0, 60.0, HOUR])
def test_faults_that_overlap(ranks: int, mtbf: float) -> None:
    """Ranks that are lost while others are away, or while all wait: the parts of the time add up."""
    setting = replace(RARE, ranks=ranks, mtbf=mtbf)
    for found in (restarted(setting, faults=200), *(elastic(setting, m, faults=500) for m in meetings(8))):
        assert all(-1e-9 <= part <= 1 + 1e-9 for part in astuple(found)[1:]), found
        assert abs(sum(astuple(found)) - 1) < 1e-9
        assert found.goodput < 1


@pytest.mark.parametrize("mtbf", [1.0, HOUR, 100 * HOUR])
def test_nothing_is_counted_twice(mtbf: float) -> None:
    """Also where ranks are lost faster than others come."""
    for every, weights in ((1, False), (1, True), (5000, True), (0, True)):
        found = elastic(
            replace(RARE, mtbf=mtbf, transfer=700.0, moments=500.0), Meeting("", (), every, weights)
        )
        assert 0.0 <= found.goodput <= 1.0 and min(astuple(found)) >= 0.0, (every, found)
        assert abs(sum(astuple(found)) - 1.0) < 1e-9, (every, found)


def test_more_ranks_and_more_faults_cost_more() -> None:
    for one in (restarted, *(lambda s, m=m: elastic(s, m) for m in meetings(32))):
        goodputs = [one(replace(RARE, ranks=n)).goodput for n in (100, 1000, 10_000, 100_000)]
        assert goodputs == sorted(goodputs, reverse=True)


def test_every_algorithm_has_its_row() -> None:
    found = [name for kind in meetings(32) for name in kind.algorithms]
    assert sorted((*found, *NOT_ELASTIC)) == sorted(names())
    (of,) = [kind for kind in meetings(16) if "diloco" in kind.algorithms]
    assert (of.every, of.weights) == (16, True)


def _command(*options: str) -> Any:
    given = ["goodput", "--ranks", "1000", "--step", "2s", "--params", "7B", "--rate", "25gbit", *options]
    return CliRunner().invoke(app, given)


def test_the_command() -> None:
    shown = _command()
    assert shown.exit_code == 0
    says(
        shown.output,
        "1000 ranks",
        "a fault every 2.08 d",
        "84 GB",
        "elastic, weights, asynchronous",
        "diloco",
    )
    content = json.loads(_command("--json").stdout)
    assert content["setting"]["mtbf"] == 50_000 * HOUR
    rows = {row["job"]: row["goodput"] for row in content["rows"]}
    assert len(rows) == 5 and min(rows.values()) == next(iter(rows.values()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mtbf", "often"), ("--mtbf", "often", "min")),
        (("--mtbf", "0h"), ("--mtbf", "positive")),
        (("--silent", "2"), ("silent", "equal to 1")),
        (("--ranks", "1"), ("ranks", "greater than or equal to")),
        (("--every", "0"), ("every", "equal to 1")),
    ],
)
def test_bad_options(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    shown = _command(*options)
    assert shown.exit_code == 2
    says(shown.output, *words)


def test_bad_settings() -> None:
    for change in ({"ranks": 1}, {"step": 0.0}, {"back": -1.0}, {"mtbf": math.inf}, {"silent": 1.5}):
        says(raises(trigram.MisuseError, replace, RARE, **change), "goodput", "two ranks")
