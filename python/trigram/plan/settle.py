"""What ``algorithm="auto"`` may change, what it would change, and whether a trial has confirmed it.

Values only: rank 0 proposes, all ranks try the proposals (``trigram/model/auto.py``), and each computes the
same verdict from the same integers.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm
from trigram.errors import UnsupportedError
from trigram.plan import choice
from trigram.plan.choice import WORTH, Comparison, Decision
from trigram.plan.inputs import Job
from trigram.plan.losses import ALLOWED
from trigram.plan.step import predict

AFTER = 20.0
"""Seconds of training before measuring begins: it takes about 0.3 s, and must not take 2 % of a job."""
OPTIONS = ("after", "save_plan")
"""Of auto, as ``with_bagua`` takes them."""
EXACT_WORTH = 0.04
"""The part of a step that another size of buckets must be predicted to gain. It leaves the training as it is,
so a trial risks nothing; what changes numbers must gain ``choice.WORTH``."""
CONFIRMED, EXACT_CONFIRMED = 0.05, 0.03
"""The part that they must gain in the trial, the latter for sizes of buckets: both blocks of steps must be
faster too."""
LOOKS, REFERENCE = 5, 10
"""The last looks at the norm of the gradients, whose median is compared with that of the looks before."""
FEWEST = 3
"""Looks before, without which there is no verdict."""
DEPARTED = 10.0
"""How many times that median means that the gradients have departed: more than a loss scale grows between
the two (a GradScaler doubles it every 2000 steps), or a norm does at a training's start."""


@dataclass(frozen=True)
class Settings:
    """What ``with_bagua(model, "auto", ...)`` asks for.

    Attributes:
        allowed: ``exact``, ``close`` or ``any``.
        after: Seconds of training before measuring begins.
        save_plan: Where rank 0 writes the decision as a plan; None: nowhere.
        ignored: Options of the script that auto does not have, if the environment asks for auto.
    """

    allowed: str = "exact"
    after: float = AFTER
    save_plan: str | None = None
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f", chosen by auto:{self.allowed} after {self.after} s"


def settings(algorithm: Any, options: dict[str, Any]) -> Settings | None:
    """What a script or ``TRIGRAM_ALGORITHM`` asks of auto; None: it names an algorithm.

    Args:
        algorithm: As ``with_bagua`` takes it.
        options: The script's options; those that auto does not have are left out if the environment asks.

    Raises:
        UnsupportedError: It asks for something that there is not.
    """
    from_environment = algorithm is None
    name = os.environ.get("TRIGRAM_ALGORITHM") if from_environment else algorithm
    if not isinstance(name, str) or name.partition(":")[0] != "auto":
        return None
    allowed = name.partition(":")[2] or ("exact" if name == "auto" else "")
    if allowed not in ALLOWED:
        raise UnsupportedError(f"algorithm {name!r} is unknown; write auto, auto:close or auto:any")
    known = {k: v for k, v in options.items() if k in OPTIONS}
    if len(known) < len(options) and not from_environment:
        raise UnsupportedError(
            f"algorithm {name!r}: unknown option {', '.join(sorted(options.keys() - known.keys()))}; its "
            "options are after and save_plan"
        )
    after = known.get("after", AFTER)
    if not isinstance(after, int | float) or not after >= 0:
        raise UnsupportedError(f"algorithm {name!r}: after={after!r} must be a number of seconds, 0 or more")
    path = known.get("save_plan")
    ignored = tuple(sorted(options.keys() - known.keys()))
    return Settings(allowed, float(after), None if path is None else os.fspath(path), ignored)


@dataclass(frozen=True)
class Proposal:
    """A change that is worth a trial.

    Attributes:
        decision: The algorithm and the size of its buckets.
        kind: ``exact``, ``close`` or ``different``.
        gain: The part of a step that it is predicted to gain.
    """

    decision: Decision
    kind: str
    gain: float


@dataclass(frozen=True)
class Proposals:
    """What rank 0 proposes.

    Attributes:
        comparison: All that was compared, also what is not supported here.
        now: Predicted seconds of a step with what is used now.
        first: What to try, the most free first.
        refused: What is not allowed, in words; "": nothing of it would gain enough.
    """

    comparison: Comparison
    now: float
    first: tuple[Proposal, ...]
    refused: str


def propose(
    job: Job, current: Decision, allowed: str, supported: Callable[[Algorithm], bool] = lambda _: True
) -> Proposals:
    """What could be changed for the better.

    Args:
        job: What was measured.
        current: What is used now.
        allowed: ``exact``, ``close`` or ``any``.
        supported: Whether an algorithm can be taken in the middle of a training of this model.
    """
    everything = choice.compare(job)
    found = everything.among([DEFAULT, *(n for n in choice.CANDIDATES if supported(find(n)))])
    size = current.bucket_mb or choice.BUCKETS_MB[0]
    now = predict(job, find(current.algorithm, current.options), int(size * (1 << 20))).seconds
    wanted = list(ALLOWED)
    first: list[Proposal] = []
    for level in reversed(wanted[: wanted.index(allowed) + 1]):
        row, decision = found.best[level], found.decision(level)
        gain = 1 - row.seconds / now
        if gain >= worth(row.kind) and decision != current and decision not in [p.decision for p in first]:
            first.append(Proposal(decision, row.kind, gain))
    refused, best = list[str](), found.best[allowed]
    for level in wanted[wanted.index(allowed) + 1 :]:
        row = found.best[level]
        if row != best and 1 - row.seconds / now >= WORTH:
            refused.append(f'{row.algorithm}, predicted to gain {1 - row.seconds / now:.0%} ("auto:{level}")')
            best = row
    row = everything.best["any"]
    if row not in found.rows and row.seconds <= (1 - WORTH) * min(now, found.best["any"].seconds):
        gain = 1 - row.seconds / now
        refused.append(f"{row.algorithm}, predicted to gain {gain:.0%} (from the start only)")
    return Proposals(everything, now, tuple(first), ", ".join(refused))


def worth(kind: str) -> float:
    """The part of a step that a change of this kind must be predicted to gain."""
    return EXACT_WORTH if kind == "exact" else WORTH


def enough(kind: str) -> float:
    """The part that it must gain in a trial."""
    return EXACT_CONFIRMED if kind == "exact" else CONFIRMED


@dataclass(frozen=True)
class Verdict:
    """What a trial has shown, in seconds of the median step over ranks.

    Attributes:
        before: With what was used.
        after: With what was tried.
        confirmed: Whether the change stays.
    """

    before: float
    after: float
    confirmed: bool


def judge(blocks: Sequence[Sequence[int]], least: float = CONFIRMED) -> Verdict:
    """The verdict on a trial.

    Args:
        blocks: For each rank, the median step of each block in nanoseconds: before, after, before, after;
            0 where it has made no step that counts, and then nothing is confirmed.
        least: The part of a step that it must gain.
    """
    median = [statistics.median(rank[k] for rank in blocks) for k in range(4)]
    before, after = (median[0] + median[2]) / 2, (median[1] + median[3]) / 2
    both = median[1] < median[0] and median[3] < median[2]
    both = both and all(of > 0 for rank in blocks for of in rank)
    return Verdict(before * 1e-9, after * 1e-9, both and after <= (1 - least) * before)


def departed(norms: Sequence[float]) -> str:
    """What shows that gradients have departed, in words; empty: nothing does.

    Both medians move with the training, so one spike changes neither, and what grows slowly, as a loss scale
    or the norm itself, is no departure.

    Args:
        norms: The norm at each look, the last at the end.
    """
    last, before = norms[-LOOKS:], [norm for norm in norms[:-LOOKS] if math.isfinite(norm)]
    finite = sum(map(math.isfinite, last))
    if len(last) == LOOKS and 2 * finite < LOOKS:
        return f"the norm of the gradients is not finite in {LOOKS - finite} of {LOOKS} looks"
    if len(before) < FEWEST:
        return ""
    now = statistics.median(norm if math.isfinite(norm) else math.inf for norm in last)
    usual = statistics.median(before)
    if now <= DEPARTED * usual:
        return ""
    return f"the norm of the gradients is {now:.3g}, and was {usual:.3g} before"


def named(decision: Decision) -> str:
    """A decision in words."""
    size = "" if decision.bucket_mb is None else f" with buckets of {decision.bucket_mb:.3g} MiB"
    return decision.algorithm + size
