"""Many checks in one launch: ranks run them one after another, pytest reports each by its own name."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.harness import Ranks, RanksFailed, say

MAX_SECONDS = 300.0  # after a failed case the rest runs on fresh ranks, for this long


class Cases(dict[str, Callable[[int, int], None]]):
    """The checks of one test module, by name. Each is called as `check(rank, world)` on every rank."""

    def __call__(self, fn: Callable[[int, int], None]) -> Callable[[int, int], None]:
        self[fn.__name__] = fn
        return fn

    def over(self, *choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """One check for each choice, called as `check(rank, world, choice)`."""

        def add(fn: Callable[..., None]) -> Callable[..., None]:
            for choice in choices:
                self[f"{fn.__name__}-{choice}"] = lambda rank, world, choice=choice: fn(rank, world, choice)
            return fn

        return add


def _run_cases(rank: int, world: int, module: str, where: str, names: Sequence[str]) -> None:
    """In a rank: the named checks, in order, up to the first that fails."""
    cases = getattr(importlib.import_module(module), where)
    for name in names:
        say(("begins", name))
        cases[name](rank, world)
        say(("done", name))


def launch(
    module: str, where: str, names: Sequence[str], world: int, patience: float = 100.0, **options: Any
) -> dict[str, str | None]:
    """What became of each check: None or the report of its failure. `patience` is for one check."""
    outcome: dict[str, str | None] = {}
    left = list(names)
    end = time.monotonic() + MAX_SECONDS
    while left and time.monotonic() < end:
        with Ranks(world, _run_cases, module, where, left, **options) as ranks:
            ranks.name = f"{module}.{where} on {world} ranks ({options.get('transport', 'shm')})"
            report: str | None = None
            try:
                ranks.results(patience, renew=True)
            except RanksFailed as e:
                report = str(e)
            done = [n for n in left if all(("done", n) in r.said for r in ranks.ranks.values())]
        outcome |= dict.fromkeys(done)
        left = [n for n in left if n not in done]
        if report is not None:  # where every check passed, it was the ranks' end that failed
            outcome[left.pop(0) if left else names[-1]] = report
    return outcome | dict.fromkeys(left, f"not run: the checks before it failed, and took {MAX_SECONDS} s")
