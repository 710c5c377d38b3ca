"""Where the training steps of a model go: input, forward, backward, waiting for other ranks, optimizer.

The hooks of a model say what begins (:meth:`StepTimes.enter`); a phase lasts until the next one begins, so
the phases of a step add up to its time. There are some ten changes in a step, so they are always counted.
:func:`totals` has their sums, for metrics, :func:`latest` and :func:`longest` the model that ``trigram top``
and the report show; the same phases are spans of the timeline and of torch's profiler.

The time that the training thread is blocked in calls of the engine, also in the script's own, is ``wait``,
whatever the phase: a rank that waits for a late one in ``all_reduce(loss)`` is not the late one.

A step lasts from the end of an update to the end of the next. Where weights are changed without an optimizer
of ``torch.optim``, it lasts from one forward pass after a backward pass to the next, and ``other`` has the
update.
"""

from __future__ import annotations

import itertools
import operator
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trigram import _core
from trigram.observe import profiling, spans
from trigram.observe.phases import BACKWARD, FORWARD, INPUT, OPTIMIZER, OTHER, PHASES, WAIT, WITH_BAGUA
from trigram.runtime import job
from trigram.runtime.group import Group
from trigram.runtime.job import Job

_KEPT = 512
"""Values of which medians are computed."""
_RECENT = 64
"""Last steps of which each is known by itself."""


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
        params: Its parameters.

    Attributes:
        earlier: Steps of the model before these, with another algorithm.
        stepped: When the last step ended, in nanoseconds; 0: none has.
        phase: The phase under way; "": nothing has begun yet.
        step: The whole step, as a :class:`Distribution` of nanoseconds per step. The first is left out: ranks
            begin it at different times, compile and allocate in it.
        phases: The same of each phase: all of its time in a step is one value.
        recent: The last steps without their waiting, in nanoseconds.
        sums: The number of steps, and the nanoseconds of them and of each of :data:`PHASES`. Each step makes
            it anew, so another thread reads values of the same steps.
        buckets: Bytes of each gradient bucket; whoever makes buckets says so.
        fidelity: Says what averages lose, if that was asked for: see :mod:`trigram.steps.fidelity`.
        trained_by: ``with_bagua``, or what else brings its ranks together: see
            :mod:`trigram.observe.torch_steps`.
        on_gpu: Whether the model was on a GPU when it got its hooks.
        asynchronous: Whether ranks average in the background, and do not wait for each other.
        coded: Whether a codec compresses what ranks send.
        group: The group whose calls carry most, which knows the rates of its links; None: closed.
    """

    def __init__(self, name: str, params: Iterable[torch.Tensor] = ()) -> None:
        self.name = name
        self.on_gpu = any(p.device.type not in ("cpu", "meta") for p in params)
        self.phase = ""
        self.earlier = self.stepped = 0
        self.step = Distribution()
        self.phases = {phase: Distribution() for phase in PHASES}
        self.recent: deque[int] = deque(maxlen=_RECENT)
        self.buckets: list[int] = []
        self.group: Group | None = None
        self.fidelity: Callable[[], dict[str, Any]] = dict
        self.trained_by = WITH_BAGUA
        self.asynchronous = self.coded = False
        self._since = 0
        self._now = dict.fromkeys(PHASES, 0)
        self._began = 0
        self._updated = 0  # when the last update ended, in nanoseconds; 0: none since the step began
        self._input = 0  # of the step, as of then
        self._has_passed = self._has_optimizer = False
        self._accumulates = False  # the last thing it did was a backward pass
        # When the phase began: the thread, how long it had waited in calls, and the time, both in ticks.
        self._blocked = 0, 0, 0
        self._busy = 0  # what all models of this process have computed, in nanoseconds, when the phase began
        self._event: profiling.Event | None = None
        self.sums = _NOTHING
        self._of, self._stay = job.here().part(_Times), job.here().stay
        self._links: tuple[list[int], list[float]] = [], []
        self._number = self._of.next_number()
        self._of.totals.setdefault(name, _NOTHING)
        self._of.open.add(self)

    def links(self) -> tuple[list[int], list[float]]:
        """The world ranks that train the model, and the bytes per second of the link of each, if they were
        measured."""
        return self._links if self.group is None else links(self.group)

    def close(self) -> None:
        """The model has no hooks any more: what is known of it stays, its group is let go."""
        if self not in self._of.open:
            return
        self._of.open.discard(self)
        self._links, self.group = self.links(), None
        known = self.fidelity()
        self.fidelity = lambda: known
        longest = self._of.longest
        if self._stay.over or not self.step.count:
            return
        if longest is None or longest._stay.over or _better(longest) < _better(self):
            self._of.longest = self

    def enter(self, phase: str) -> str:
        """A phase begins, and the one before it ends.

        Returns:
            The phase before, to which a caller may return.
        """
        before = self.phase
        if before == phase:
            return before
        now = time.monotonic_ns()
        closes = phase in (FORWARD, BACKWARD) and (
            self._updated or (self._has_passed and phase == FORWARD and not self._has_optimizer)
        )
        if before:
            self._add(before, now - self._since, fetches=phase == FORWARD and not closes)
            if before not in (INPUT, OTHER):
                spans.tell(self.name, before, self._since, now)
        if self._event is not None:
            event, self._event = self._event, None
            profiling.end(event)
        if profiling.enabled() and phase not in (INPUT, OTHER):
            self._event = profiling.begin(phase, ())
        if before == OPTIMIZER and phase == INPUT:
            self._updated, self._has_optimizer = now, True
            self._input = self._now[INPUT]
        if closes:
            self._close(now)
        if phase != OTHER:
            self._accumulates = phase == BACKWARD or (phase == WAIT and self._accumulates)
        self.phase, self._since = phase, now
        if not self._began:
            self._began = now
        return before or OTHER

    def _add(self, phase: str, spent: int, fetches: bool) -> None:
        """Time of a phase that has ended; ``fetches``: the next forward pass of the same step follows."""
        blocked = threading.get_ident(), *_core.blocked()
        thread, waited, passed = map(operator.sub, blocked, self._blocked)
        if phase != WAIT and thread == 0 and 0 < waited <= passed:
            waited = spent * waited // passed
            self._now[WAIT] += waited
            spent -= waited
        self._blocked = blocked
        if phase in (INPUT, OTHER):  # what another model computes meanwhile, as that of a GAN, is no input
            computed = min(spent, self._of.busy - self._busy)
            self._now[OTHER] += computed
            spent -= computed
        else:
            self._of.busy += spent
        self._busy = self._of.busy
        self._now[INPUT if phase == OTHER and fetches and self._accumulates else phase] += spent

    def end_pass(self) -> None:
        """A backward pass has ended that an update follows: not one of those in ``no_sync``."""
        self._has_passed = True

    def step_unseen(self) -> None:
        """A step ends of which only updates were seen: all that came since the last one is ``other``."""
        self.enter(FORWARD)
        self._now[OTHER] += self._now[INPUT]
        self._now[INPUT] = 0

    def _close(self, now: int) -> None:
        """Ends a step; what came after its update is the input of the next."""
        later = self._now[INPUT] - self._input if self._updated else 0
        self._now[INPUT] -= later
        ended = self._updated or now
        step = ended - self._began
        if self.sums[0]:
            self.step.add(step)
            for phase, spent in self._now.items():
                self.phases[phase].add(spent)
            self.recent.append(sum(self._now.values()) - self._now[WAIT])
        new = 1, step, *self._now.values()
        self.sums = _sum(self.sums, new)
        with self._of.adding:
            self._of.totals[self.name] = _sum(self._of.totals[self.name], new)
        self._now = {**dict.fromkeys(PHASES, 0), INPUT: later}
        self._began, self._updated, self._has_passed = ended, 0, False
        self.stepped = now

    def summary(self) -> dict[str, Any]:
        """The model's ``name``, and of the ``step`` and each phase what :meth:`Distribution.summary` says."""
        parts = {phase: self.phases[phase].summary() for phase in PHASES}
        return {"name": self.name, "step": self.step.summary(), **parts}


_NOTHING = (0,) * (2 + len(PHASES))


class _Times:
    """The steps of all models of a rank.

    Attributes:
        open: Of models that have hooks. Other threads read it: they take a copy, which no change can
            interrupt.
        longest: Of those that are closed, the one with the most steps, for the report at the end.
        next_number: Numbers the models.
        totals: By name, see :func:`totals`.
        adding: Held while a step is added to ``totals``.
        busy: Nanoseconds that the models have spent in passes and updates.
    """

    def __init__(self) -> None:
        self.open: set[StepTimes] = set()
        self.longest: StepTimes | None = None
        self.next_number = itertools.count().__next__
        self.totals: dict[str, tuple[int, ...]] = {}
        self.adding = threading.Lock()
        self.busy = 0


def _sum(before: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.add, before, new))


def totals(of: Job | None = None) -> dict[str, tuple[int, ...]]:
    """By name, the :attr:`StepTimes.sums` of all models of that name that a rank, this one by default, has
    trained, also of those that are gone: they never decrease."""
    return _times(of).totals.copy()


def latest(of: Job | None = None) -> StepTimes | None:
    """The times of the model of a rank, this one by default, that has stepped last; None: no model has
    hooks."""
    return max(_present(of), key=lambda times: (times.stepped, times._number), default=None)


def longest() -> StepTimes | None:
    """The times of the model of this job with the most steps, also if its hooks are gone."""
    longest = _times().longest
    closed = [longest] if longest is not None and not longest._stay.over else []
    return max([*_present(), *closed], key=_better, default=None)


def with_bagua_trains() -> bool:
    """Whether a model of this job has the hooks of ``with_bagua``."""
    return any(times.trained_by == WITH_BAGUA for times in _present())


def _times(of: Job | None = None) -> _Times:
    return (of or job.here()).part(_Times)


def _present(of: Job | None = None) -> list[StepTimes]:
    return [times for times in _times(of).open.copy() if not times._stay.over]


def _better(times: StepTimes) -> tuple[int, int]:
    return times.step.count, -times._number  # of equals the first, on all ranks


def links(group: Group) -> tuple[list[int], list[float]]:
    """The ranks of a group, and the rates of their links, if they were measured."""
    return list(group.ranks), list(group.core.rates()[: group.size]) if group.rank >= 0 else []
