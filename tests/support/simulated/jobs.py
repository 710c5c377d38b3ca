"""Jobs drawn at random, and their runs.

    python -m tests.support.simulated.jobs --algorithm async --kinds kill,join,drain --seconds 60

runs other jobs than the tests do, and prints those in which something did not hold.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

from tests.support.simulated.script import Faults, Run, check

KINDS = "kill", "join", "drain", "part", "restart", "spare", "replica", "outage"
EXACT = "gradient_allreduce", "bytegrad", "lossless"
"""Algorithms after each step of which all ranks have the same weights."""
POINTS = 13
"""About so many points a step has at which another thread may run."""


@dataclass(frozen=True)
class Job:
    """One job, and what happens in it."""

    seed: int
    ranks: int
    steps: int
    hosts: int
    gathers: bool
    spares: int
    replica_size: int
    faults: Faults
    evaluates: int = 0

    @staticmethod
    def drawn(choices: random.Random, kinds: tuple[str, ...]) -> Job:
        """A job with some of these kinds of faults."""
        size = 2 if "replica" in kinds else 1
        ranks, steps = choices.choice((4, 6) if size > 1 else (2, 3, 4)), choices.choice((4, 12, 20))
        spares = choices.choice((0, 1)) * size if "spare" in kinds else 0
        kills: dict[str, int] = {}
        drains: dict[str, int] = {}
        joins: list[tuple[float, int]] = []
        parts: list[tuple[float, tuple[int, ...]]] = []
        if "kill" in kinds:
            for rank in choices.sample(range(ranks), choices.choice((0, 1, 1, min(2, ranks - 1)))):
                kills[f"rank {rank}"] = choices.randrange(1, steps * POINTS)
        if "join" in kinds:
            for rank in range(ranks, ranks + choices.choice((1, 1, 2, 3) if size == 1 else (2, 4))):
                joins.append((choices.choice((0.0, 0.1, 0.2, 0.3, 0.5)), rank))
                if "kill" in kinds and choices.random() < 0.3:
                    kills[f"rank {rank}"] = choices.randrange(1, 150)
        if "restart" in kinds and kills and (rank := int(next(iter(kills)).split()[1])) < ranks:
            joins.append((choices.choice((0.5, 1.0, 1.5)), rank))
        if "drain" in kinds:
            for rank in choices.sample(range(ranks), choices.choice((1, 1, 2))):
                drains[f"rank {rank}"] = choices.randrange(1, steps * POINTS)
        if "part" in kinds:
            part = choices.sample(range(ranks), choices.randrange(1, ranks))
            parts.append((choices.choice((0.05, 0.2, 0.4)), tuple(part)))
        outages: list[tuple[float, float, tuple[int, ...]]] = []
        if "outage" in kinds:
            there = [*range(ranks), *(rank for _, rank in joins)]
            begins = choices.choice((0.05, 0.2, 0.4))
            cut = choices.choice((there, choices.sample(there, 1)))
            outages.append((begins, begins + choices.choice((0.3, 3.0)), tuple(cut)))
        hosts = 1 if parts else choices.choice((0, 1, 2))
        faults = Faults(kills, tuple(joins), drains, tuple(parts), tuple(outages))
        gathers = choices.random() < 0.6
        seed = choices.randrange(1 << 30)
        evaluates = choices.choice((0, 1, 3))
        return Job(seed, ranks, steps, hosts, gathers, spares, size, faults, evaluates)

    def run(self, algorithm: str = "gradient_allreduce", **options: Any) -> None:
        """Runs it; raises if something does not hold."""
        shape = self.hosts, self.gathers, self.evaluates, self.spares, self.replica_size
        run = Run(self.seed, self.ranks, self.steps, self.faults, *shape, algorithm, **options)
        check(run.go(), set(self.faults.kills), self.steps, bool(self.faults.parts), algorithm in EXACT)


def main() -> None:
    """See the module."""
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--algorithm", default="gradient_allreduce")
    asks.add_argument("--options", default="", help="every=2,overlap=False")
    asks.add_argument("--kinds", default="kill,join,drain")
    asks.add_argument("--seconds", type=float, default=60.0)
    asks.add_argument("--seed", type=int, default=0)
    given = asks.parse_args()
    choices, end, runs = random.Random(given.seed), time.monotonic() + given.seconds, 0
    options: dict[str, Any] = {}
    for name, _, value in (each.partition("=") for each in given.options.split(",") if each):
        options[name] = {"True": True, "False": False}.get(value, value)
        options[name] = int(value) if value.isdigit() else options[name]
    while time.monotonic() < end:
        job = Job.drawn(choices, tuple(given.kinds.split(",")))
        runs += 1
        try:
            job.run(given.algorithm, **options)
        except (AssertionError, RuntimeError) as error:
            print(f"{job}\n    {error}")
    print(f"{runs} jobs")


if __name__ == "__main__":
    main()
