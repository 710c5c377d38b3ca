"""Every loop that people write trains under every algorithm, or all ranks are told why it does not.

The loops are in `tests/support/loops/`, one file for each subject; `judge.py` says what is checked. A row
fails where the hooks miss a step, count one twice, average what is not there any more, or wait for what never
comes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.loops import judge
from tests.support.loops.table import ALGORITHMS, QUICK, ROWS, Row
from tests.support.marks import long

OF_CODECS = ("gradients", "passes", "several_models")  # where averages of several phases are special


def _is_quick(world: int, algorithm: str, row: Row) -> bool:
    """Each loop with the default and with two others, which take turns; `make test-all` has all."""
    place = list(ROWS.values()).index(row)
    turns = {QUICK[1 + place % 4], QUICK[1 + (place + 1) % 4]}
    of_codecs = algorithm == "topk" and row.subject in OF_CODECS
    chosen = algorithm == QUICK[0] or algorithm in turns or of_codecs
    return world == 2 and algorithm in QUICK and chosen and not row.long


CELLS = [
    (world, algorithm, name) if _is_quick(world, algorithm, row) else long(world, algorithm, name)
    for world in (2, 3)
    for algorithm in ALGORITHMS
    for name, row in ROWS.items()
    if algorithm in row.only
]

_judged: dict[tuple[int, str], dict[str, str | None]] = {}


def _judge(request: pytest.FixtureRequest, world: int, algorithm: str) -> dict[str, str | None]:
    """The verdicts on all selected rows: they share one launch of ranks for each algorithm."""
    if (world, algorithm) not in _judged:
        chosen: list[dict[str, Any]] = [
            i.callspec.params  # type: ignore[attr-defined]
            for i in request.session.items
            if getattr(i, "originalname", None) == "test_loop" and i.module is request.node.module  # type: ignore[attr-defined]
        ]
        names = [c["name"] for c in chosen if (c["world"], c["algorithm"]) == (world, algorithm)]
        verdicts = judge.run(world, [(name, algorithm) for name in names])
        _judged[world, algorithm] = {name: verdicts[name, algorithm] for name in names}
    return _judged[world, algorithm]


@pytest.mark.parametrize("world, algorithm, name", CELLS)
def test_loop(request: pytest.FixtureRequest, world: int, algorithm: str, name: str) -> None:
    wrong = _judge(request, world, algorithm)[name]
    if wrong is not None:
        pytest.fail(f"{ROWS[name].subject}.{name} under {algorithm} on {world} ranks: {wrong}", pytrace=False)


def test_the_table_is_whole() -> None:
    """Each subject has rows, and each row says in its docstring what the loop does."""
    assert {r.subject for r in ROWS.values()} == {s.rpartition(".")[2] for s in judge.SUBJECTS}
    assert len(ROWS) >= 80
    assert all(row.loop.__doc__ for row in ROWS.values())
