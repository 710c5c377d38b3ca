"""What faults cost a job of any size: a simulation of ranks that are lost and come back.

Goodput is samples per second that count, over those of the same ranks without faults and without checkpoints.
A job that starts again from checkpoints loses what it trained since the last one, and waits until it has
started. An elastic job goes on: it waits until the loss is noticed and averages again, and the lost rank's
samples are missing until another process has joined. Faults are independent of each other, as machines' are
and as a failing switch is not. Time runs from event to event, so 10,000 ranks take no longer than ten.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from trigram.algorithms.names import names
from trigram.algorithms.parse import find
from trigram.errors import MisuseError

NOT_ELASTIC = ("powersgd", "qadam")
"""A warm-up, and an optimizer of its own: elastic jobs refuse them."""
FAULTS = 3000
"""Faults that are simulated: the mean is within about 2 % of what faults cost."""


@dataclass(frozen=True)
class Setting:
    """A job and its machines; all times in seconds.

    Attributes:
        ranks: Ranks, or replicas of several ranks, that are lost one by one.
        step: A training step.
        mtbf: Mean time between failures of one rank.
        back: From a fault until another process asks to join in the lost rank's place.
        transfer: Until a joining rank has received the training state.
        moments: Until it has received what of it is no weight.
        mean: An AllReduce of all weights.
        restart: From a fault until a job that is not elastic trains again from its checkpoint.
        checkpoint: How long ranks wait for a checkpoint.
        regroup: How long all ranks wait when the members change, once they know of it.
        silence: Until ranks take for lost what sends nothing any more (TRIGRAM_SILENCE).
        silent: The part of faults that are noticed so: a machine that loses its power, and not a process
            whose connections the kernel closes.
    """

    ranks: int
    step: float
    mtbf: float
    back: float = 600.0
    transfer: float = 0.0
    moments: float = 0.0
    mean: float = 0.0
    restart: float = 600.0
    checkpoint: float = 30.0
    regroup: float = 1.0
    silence: float = 15.0
    silent: float = 0.5

    def __post_init__(self) -> None:
        times = (self.step, self.mtbf)
        others = [self.back, self.transfer, self.moments, self.mean, self.restart, self.checkpoint]
        others += [self.regroup, self.silence]
        if self.ranks < 2 or min(times) <= 0 or min(others) < 0 or not 0 <= self.silent <= 1:
            raise MisuseError(
                "goodput: there must be two ranks or more, a step and a time between failures above 0, no "
                f"time below 0, and a part of silent faults from 0 to 1; got {self}"
            )
        if not all(map(math.isfinite, (*times, *others))):
            raise MisuseError(f"goodput: there must be two ranks or more, and all times finite; got {self}")

    @property
    def between(self) -> float:
        """Seconds between two faults of the job."""
        return self.mtbf / self.ranks

    @property
    def interval(self) -> float:
        """The best time between two checkpoints, to the first order (Young, 1974)."""
        return max(self.step, math.sqrt(2 * self.checkpoint * self.between))


@dataclass(frozen=True)
class Meeting:
    """How elastic algorithms meet a fault.

    Attributes:
        title: For a table.
        algorithms: Names of :func:`trigram.algorithms.names.names`.
        every: Steps from one average for which ranks wait to the next; 0: nobody waits for others.
        weights: All take the mean of their weights when the members change.
    """

    title: str
    algorithms: tuple[str, ...]
    every: int
    weights: bool


@dataclass(frozen=True)
class Goodput:
    """The part of the ranks' time that counts, and where the rest goes.

    Attributes:
        goodput: 1 minus the others.
        waiting: Ranks wait: for a fault to be noticed, for a joining rank, for a job to start.
        again: Training that did not count, and checkpoints.
        absent: Ranks that are lost have not come back yet.
    """

    goodput: float
    waiting: float
    again: float
    absent: float


def elastic(setting: Setting, meeting: Meeting, seed: int = 0, faults: int = FAULTS) -> Goodput:
    """An elastic job, through so many faults."""
    chance = random.Random(seed)
    now = until = waited = away = again = 0.0  # `until`: no rank trains before
    admits = -1.0  # the last change in which ranks join
    change = setting.regroup + (setting.mean if meeting.weights else 0.0)
    period, state = meeting.every * setting.step, setting.moments if meeting.weights else setting.transfer
    # A joining rank receives its state while the others train. They wait for it in their next average.
    joins = change + (max(0.0, state - period) if meeting.every else 0.0)
    coming: list[float] = []  # when ranks that are lost join
    met = 0
    while met < faults:
        here = setting.ranks - len(coming)
        fault = now + chance.expovariate(here / setting.mtbf) if here else math.inf
        then = min(fault, coming[0] if coming else math.inf)
        stands = min(until, then) - min(now, until)
        waited += here * stands
        away += len(coming) * (then - now)
        now = then
        if then < fault:
            heapq.heappop(coming)
            if now > admits:  # who comes before the next change joins in it too, and one broadcast serves all
                admits = max(until, now)
                until = admits + joins
            continue
        met += 1
        # The last average, which also a change has; what the rank has learned after it is lost.
        since = min(chance.random() * period, max(0.0, now - until))
        again += since
        silent = chance.random() < setting.silent
        # The others wait for it in their next average only.
        unnoticed = max(0.0, setting.silence - (period - since)) if silent and meeting.every else 0.0
        until = max(until, now) + unnoticed + change
        heapq.heappush(coming, now + setting.back + state)
    whole = setting.ranks * now
    lost = waited / whole, again / whole, away / whole
    return Goodput(1 - sum(lost), *lost)


def restarted(setting: Setting, seed: int = 0, faults: int = FAULTS) -> Goodput:
    """A job that starts again from its last checkpoint, through so many faults; checkpoints come at the best
    interval."""
    chance = random.Random(seed)
    period = setting.interval + setting.checkpoint
    now = trained = waited = 0.0
    for _ in range(faults):
        until = chance.expovariate(1 / setting.between)
        now += until
        waited += min(until, setting.restart)  # a fault while it starts makes it start again
        trained += max(0.0, until - setting.restart) // period * setting.interval
    again = now - trained - waited
    return Goodput(trained / now, waited / now, again / now, 0.0)


def meetings(every: int) -> list[Meeting]:
    """How algorithms meet a fault; ``every``: steps between two averages of those that average seldom."""
    titles = {
        "gradients in each step": 1,
        "weights in each step": 1,
        f"weights every {every} steps": every,
        "weights, asynchronous": 0,
    }
    gradients, each, seldom, never = titles
    found: dict[str, list[str]] = {title: [] for title in titles}
    for name in (name for name in names() if name not in NOT_ELASTIC):
        algorithm = find(name)
        when = algorithm.value.when
        of_weights = never if when == "async" else seldom if when.startswith("every:") else each
        found[gradients if algorithm.gradients else of_weights].append(name)
    return [Meeting(title, tuple(found[title]), n, title != gradients) for title, n in titles.items()]
