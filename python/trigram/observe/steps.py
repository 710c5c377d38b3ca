"""Where the training steps of a model go: input, forward, backward, waiting for other ranks, optimizer.

The hooks of a model say what begins (:meth:`StepTimes.enter`); a phase lasts until the next one begins, so
the phases of a step add up to its time. There are some ten changes in a step, so they are always counted.
:func:`of_process` has the numbers of all models, for reports and metrics; the same phases are spans of the
timeline and of torch's profiler.

A step lasts from the end of an update to the end of the next. Where weights are changed without an optimizer
of ``torch.optim``, it lasts from one forward pass after a backward pass to the next, and ``other`` has the
update.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from typing import Any

from trigram.observe import profiling, spans
from trigram.runtime.group import Group

INPUT, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER = (
    "input",
    "forward",
    "backward",
    "wait",
    "optimizer",
    "other",
)
PHASES = (INPUT, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER)
"""``input``: from the update to the next forward pass (the script fetches its batch, and whatever else it
does there); ``wait``: the training thread waits for communication that backward has not hidden; ``other``:
the rest, such as the loss, clipping and logging."""
_KEPT = 512
"""Values of which medians are computed."""


class Distribution:
    """Many durations in little memory: how many, their sum, and a random sample of bounded size.

    Attributes:
        count: Number of values.
        total: Their sum, in nanoseconds.
        last: The last of them.
    """

    def __init__(self) -> None:
        self.count = self.total = self.last = 0
        self._kept: list[int] = []
        self._random = random.Random(0)

    def add(self, ns: int) -> None:
        """Adds a duration in nanoseconds."""
        self.count += 1
        self.total += ns
        self.last = ns
        if len(self._kept) < _KEPT:
            self._kept.append(ns)
        elif (k := int(self._random.random() * self.count)) < _KEPT:
            self._kept[k] = ns

    def quantile(self, q: float) -> float:
        """The ``q``-quantile of the sample in seconds; 0.0 without values."""
        if not self._kept:
            return 0.0
        ordered = sorted(self._kept)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return (ordered[low] + (at - low) * (ordered[high] - ordered[low])) * 1e-9

    def summary(self) -> dict[str, float]:
        """``count``, and ``total``, ``mean``, ``median`` and ``p90`` in seconds."""
        mean = self.total * 1e-9 / self.count if self.count else 0.0
        return {
            "count": self.count,
            "total": self.total * 1e-9,
            "mean": mean,
            "median": self.quantile(0.5),
            "p90": self.quantile(0.9),
        }


class StepTimes:
    """The phases of one model's steps.

    Args:
        name: The model's name in the timeline.

    Attributes:
        phase: The phase under way; "": nothing has begun yet.
        step: The whole step, as a :class:`Distribution` of seconds per step.
        phases: The same of each phase: all of its time in a step is one value.
        buckets: Bytes of each gradient bucket; whoever makes buckets says so.
        fidelity: Says what averages lose, if that was asked for: see :mod:`trigram.training.fidelity`.
        group: The group whose calls carry most, which knows the rates of its links; None: nobody has said.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = ""
        self.step = Distribution()
        self.phases = {phase: Distribution() for phase in PHASES}
        self.buckets: list[int] = []
        self.group: Group | None = None
        self.fidelity: Callable[[], dict[str, Any]] = dict
        self._since = 0
        self._now = dict.fromkeys(PHASES, 0)
        self._began = 0
        self._updated = 0  # when the last update ended, in nanoseconds; 0: none since the step began
        self._input = 0  # of the step, as of then
        self._has_passed = self._has_optimizer = False
        self._event: profiling.Event | None = None
        _all.add(self)
        if _held is not None:
            _held.append(self)

    def enter(self, phase: str) -> str:
        """A phase begins, and the one before it ends.

        Returns:
            The phase before, to which a caller may return.
        """
        before = self.phase
        if before == phase:
            return before
        now = time.monotonic_ns()
        if before:
            self._now[before] += now - self._since
            if spans._listeners and before not in (INPUT, OTHER):
                spans.tell(self.name, before, self._since, now)
        if self._event is not None:
            event, self._event = self._event, None
            profiling.end(event)
        if profiling.enabled() and phase not in (INPUT, OTHER):
            self._event = profiling.begin(phase, ())
        if before == OPTIMIZER and phase == INPUT:
            self._updated, self._has_optimizer = now, True
            self._input = self._now[INPUT]
        if phase in (FORWARD, BACKWARD) and (
            self._updated or (self._has_passed and phase == FORWARD and not self._has_optimizer)
        ):
            self._close(now)
        self.phase, self._since = phase, now
        if not self._began:
            self._began = now
        return before or OTHER

    def end_pass(self) -> None:
        """A backward pass has ended that an update follows: not one of those in ``no_sync``."""
        self._has_passed = True

    def _close(self, now: int) -> None:
        """Ends a step; what came after its update is the input of the next."""
        later = self._now[INPUT] - self._input if self._updated else 0
        self._now[INPUT] -= later
        for phase in PHASES:
            self.phases[phase].add(self._now[phase])
            self._now[phase] = 0
        self._now[INPUT] = later
        ended = self._updated or now
        self.step.add(ended - self._began)
        self._began, self._updated, self._has_passed = ended, 0, False

    def summary(self) -> dict[str, Any]:
        """The model's ``name``, and of the ``step`` and each phase what :meth:`Distribution.summary` says."""
        parts = {phase: self.phases[phase].summary() for phase in PHASES}
        return {"name": self.name, "step": self.step.summary(), **parts}


_all: weakref.WeakSet[StepTimes] = weakref.WeakSet()
_held: list[StepTimes] | None = None


def keep() -> None:
    """From now on keeps the times of models that are dropped, for a report at the end."""
    global _held
    if _held is None:
        _held = list(_all)


def of_process() -> list[StepTimes]:
    """Those of all models of this process that still exist, the one with the most steps first."""
    return sorted(_all, key=lambda times: -times.step.count)
