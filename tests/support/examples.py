"""Runs a script of examples/ in a rank."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from tests.support.harness import ROOT


def play(rank: int, world: int, name: str, *arguments: str) -> Any:
    """What its `main` returns; its variables, if it has none."""
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = [f"{name}.py", *arguments]
    path = str(ROOT / "examples" / sys.argv[0])
    if "def main(" in (ROOT / "examples" / sys.argv[0]).read_text():
        return runpy.run_path(path, run_name="example")["main"]()
    found = runpy.run_path(path, run_name="__main__")
    return {k: v for k, v in found.items() if isinstance(v, int | float)}
