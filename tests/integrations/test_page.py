"""docs/integrations.md: each cell of its table names tests that exist, and its examples do."""

from __future__ import annotations

import re

from tests.support.harness import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text()


def test_each_cell_names_a_test() -> None:
    rows = re.findall(r"^\| \w+, `(\w+/test_\w+\.py)` \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for file, cells in rows:
        tests = set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE))
        for cell in cells.split("|"):
            [named] = re.findall(r"`(test_\w+)`", cell)
            assert named in tests, f"{file} has no {named}"


def test_examples_exist() -> None:
    examples = re.findall(r"`(examples/\w+\.py)`", PAGE)
    assert len(examples) >= 5
    assert all((ROOT / e).is_file() for e in examples)
