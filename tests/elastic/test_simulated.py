"""Elastic jobs in virtual time: ranks that are killed at every point, join, leave and are parted, drawn at
random; the real code over a simulated engine, see tests/support/simulated.

No rank waits without an end, no two parts go on, no step is lost or made twice, and no healthy rank fails.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.marks import long, long_unless
from tests.support.simulated.jobs import Job
from tests.support.simulated.script import Faults, Run, check
from trigram.elastic.knowledge import Knowledge
from trigram.elastic.membership import PreparedWorld
from trigram.elastic.succession import Succession
from trigram.steps.elastic_model import ElasticModel

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "gradient_allreduce, sparse": {"sparse": True},
    "bytegrad": {},
    "local_sgd": {"every": 3},
    "local_sgd, quorum": {"every": 3, "quorum": 2},
    "diloco": {"every": 3},
    "diloco, quorum": {"every": 3, "quorum": 2, "overlap": True},
    "decentralized": {},
    "decentralized, no overlap": {"overlap": False},
    "async": {},
    "async_decentralized": {},
    "decentralized, warm-up": {"warmup_steps": 3},
    "async, warm-up": {"warmup_steps": 4},
    "bytegrad, warm-up": {"warmup_steps": 3},
}
FAULTS = [("kill", "join", "drain", "restart"), ("part",), long(("kill", "join", "part"))]


@pytest.mark.parametrize("kinds", FAULTS, ids="-".join)
@pytest.mark.parametrize(
    "label",
    long_unless([a for a in ALGORITHMS if a not in ("async, warm-up", "bytegrad, warm-up")], ALGORITHMS),
)
def test_jobs_at_random(label: str, kinds: tuple[str, ...]) -> None:
    choices = random.Random(f"{label} {kinds}")
    for _ in range(6):
        job = Job.drawn(choices, kinds)
        try:
            job.run(label.partition(",")[0], **ALGORITHMS[label])
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{job}: {error}") from error


@pytest.mark.parametrize(
    ("label", "kinds"),
    [
        ("gradient_allreduce", ("kill", "join", "drain", "spare")),
        ("gradient_allreduce, sparse", ("kill", "join", "drain", "spare")),
        long("bytegrad", ("kill", "join", "drain", "spare")),
        ("gradient_allreduce", ("kill", "join", "replica")),
        long("decentralized", ("kill", "join", "replica")),
        ("async", ("kill", "join", "drain", "outage")),
        long("gradient_allreduce", ("kill", "join", "drain", "outage")),
    ],
)
def test_spares_replicas_and_outages(label: str, kinds: tuple[str, ...]) -> None:
    test_jobs_at_random(label, kinds)


@pytest.mark.parametrize("ranks", [2, long(3)])
def test_a_rank_dies_at_every_point(ranks: int) -> None:
    whole = Run(0, ranks, 3, Faults(), gathers=True).go()
    for name, outcome in whole.items():
        for point in range(1, outcome.points + 1):
            for seed in range(2):
                died = Run(seed, ranks, 3, Faults(kills={name: point})).go()
                check(died, {name}, 3)


def _dies_where_a_warmup_ends() -> None:
    """In the last pass of the warm-up, which some have counted and others not, and in the change after it."""
    for seed in range(14):
        for point in (18, 19, 20, 22):
            died, gathers = Faults({"rank 0": point}), bool(seed % 2)
            run = Run(seed, 3, 6, died, gathers=gathers, algorithm="decentralized", warmup_steps=2)
            check(run.go(), {"rank 0"}, 6, exact=False)


def test_a_warmup_ends_on_all_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _dies_where_a_warmup_ends()
    follow = ElasticModel._follow_warmup
    monkeypatch.setattr(ElasticModel, "_follow_warmup", lambda self, together: follow(self, True))
    with pytest.raises(AssertionError):
        _dies_where_a_warmup_ends()


KILLS = {"rank 2": 78}, {"rank 1": 22, "rank 2": 97}
DRAINS = {"rank 2": 16, "rank 0": 86}, {"rank 2": 146}
JOINS: tuple[tuple[tuple[float, int], ...], ...] = ((0.0, 3), (0.5, 4), (1.0, 2)), ((0.3, 3), (0.5, 1))
AS_ONE_JOINED = [
    ("bytegrad", 3, Job(757153307, 3, 12, 1, True, 0, 1, Faults(KILLS[0], JOINS[0], DRAINS[0]))),
    ("decentralized", 2, Job(1038782708, 3, 12, 2, False, 0, 1, Faults(KILLS[1], JOINS[1], DRAINS[1]))),
]


@pytest.mark.parametrize(("algorithm", "warmup", "job"), AS_ONE_JOINED, ids=["bytegrad", "decentralized"])
def test_a_warmup_does_not_end_where_one_joins(algorithm: str, warmup: int, job: Job) -> None:
    """Jobs that were drawn once: who joined asked for the end alone, in its first step."""
    job.run(algorithm, warmup_steps=warmup)


# What the simulation is worth: it finds parts of the protocol that are taken out.


def _nobody_is_excluded(self: Succession, *_: object) -> str:
    return "unknown"


def _pass_of_one_counts(self: Knowledge) -> int:
    return self.commits


def _is_never_committed(self: PreparedWorld, lost: object) -> bool:
    return False


BROKEN: dict[str, tuple[type, str, Any, tuple[str, ...], str]] = {
    "one part goes on": (Succession, "enter", _nobody_is_excluded, ("part",), "gradient_allreduce"),
    "a pass counts on all or on none": (
        Knowledge,
        "completed",
        property(_pass_of_one_counts),
        ("kill", "join", "drain"),
        "gradient_allreduce",
    ),
    "an epoch that one uses is used": (
        PreparedWorld,
        "is_committed",
        _is_never_committed,
        ("kill", "join", "drain"),
        "gradient_allreduce",
    ),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_what_is_taken_out_is_missed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, kinds, algorithm = BROKEN[what]
    monkeypatch.setattr(owner, name, instead)
    choices = random.Random(what)
    for _ in range(500):
        try:
            Job.drawn(choices, kinds).run(algorithm)
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("no job has failed")
