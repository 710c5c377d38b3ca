"""docs/compatibility.md says what happens: an algorithm with an option, and two options with each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import trigram
from tests.support import feature_pairs
from tests.support.harness import run
from tests.support.marks import long

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def _outcomes(rank: int, world: int, elastic: bool) -> list[tuple[tuple[str, str], str]]:
    found = feature_pairs.outcomes(rank, elastic)
    return [(pair, feature_pairs.cell(errors)) for pair, errors in found.items()]


def cells() -> dict[tuple[str, str], str]:
    """What the page says of each pair."""
    found: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    text = PAGE.read_text().split("## Beside with_bagua")[0]
    for line in ("## Algorithms" + text.split("## Algorithms")[1]).splitlines():
        parts = [part.strip() for part in line.split("|")[1:-1]]
        if parts and not parts[0]:
            columns = parts[1:]
        elif parts and not parts[0].startswith("-"):
            found |= {(parts[0], name): said for name, said in zip(columns, parts[1:], strict=True) if said}
    return found


def _some(rank: int, world: int) -> list[str]:
    feature_pairs.begin()
    trigram.init(op_timeout=30)
    wanted = [
        ("gradient_allreduce", "check_replicas", "ignore"),
        ("gradient_allreduce", "fused", "checkpoint"),
        ("local_sgd", "quorum", "join"),
        ("register(step=)", "quorum"),
        ("register(step=)", "outer_lr"),
    ]
    return [
        feature_pairs.cell(feature_pairs.outcome(rank, *(feature_pairs.FEATURES[name] for name in names)))
        for names in wanted
    ]


def test_some_pairs() -> None:
    """Those that went wrong once: what is ignored may differ between replicas, a fused pass leaves no
    gradients to a state that is loaded, and a registered step is not passed over for a quorum."""
    assert run(2, _some) == [["yes", "yes", "yes", "-", "-"]] * 2


def test_which_trigrams_there_are() -> None:
    assert feature_pairs.trigrams() in PAGE.read_text()


def test_what_a_job_has_beside() -> None:
    assert feature_pairs.beside() in PAGE.read_text()


@pytest.mark.parametrize("elastic", [long(False), long(True)])
def test_the_page_says_what_happens(elastic: bool) -> None:
    said = cells()
    for found in run(2, _outcomes, elastic, timeout=550):
        wrong = {pair: (said.get(pair), happens) for pair, happens in found if said.get(pair) != happens}
        assert not wrong, wrong
        assert not elastic or said.keys() == {pair for pair, _ in found}
    assert PAGE.read_text().startswith(feature_pairs.HEAD)
    assert PAGE.read_text().endswith(feature_pairs.page({}).split("## All refusals")[1])
    assert feature_pairs.reasons() in PAGE.read_text()
