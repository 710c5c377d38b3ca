"""When averaging steps of weights run: every h training steps, or in the background.

:mod:`trigram.training.weight_sync` finds the training steps and counts them so that all ranks count the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all
from trigram.errors import MisuseError
from trigram.mixing.rare_averages import RareAverages
from trigram.mixing.step import AveragingStep
from trigram.observe import spans
from trigram.training.pace import Pace


class StepSchedule(Protocol):
    """When averaging steps run.

    A *boundary* is the end of a training step: after the optimizer's update, when nothing else uses the
    weights.

    Attributes:
        assigns: Whether a result may be assigned to the weights before an update, in place of the difference
            that is added to weights that have changed.
    """

    assigns: bool

    @property
    def fragments(self) -> Sequence[Any]:
        """The fragments of the weights, and what is averaged of each."""

    @property
    def steps_done(self) -> int:
        """Averaging steps that have ended."""

    @property
    def waits(self) -> int:
        """Averaging steps that this rank waited for because of ``staleness``."""

    @property
    def waited(self) -> float:
        """Seconds that this rank waited for averaging steps."""

    def boundary(self, step: int) -> None:
        """Called at a boundary, after ``step`` training steps in total."""

    def behind(self, steps: int) -> None:
        """Called when the ranks of an elastic job begin again: this one has so many boundaries to make until
        it has made as many as the first."""

    def begin_step(self) -> None:
        """Called when a training step begins: in its first forward pass, or when its backward pass begins."""

    def gradient(self, rests: Callable[[], bool]) -> None:
        """Called inside a backward pass, now and then when a parameter on the CPU has its gradient; weights
        must not change.

        Args:
            rests: Whether they are those of this rank's training, not what a script has moved for a while.
        """

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """Called when a backward pass has ended; the weights must not change. ``rests`` as above."""

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """Called before the optimizer updates the weights; returns whether it has changed them.

        Args:
            changed: Whether a script has, since the training step began.
        """

    def serve(self, rests: Callable[[], bool]) -> None:
        """Called while this rank waits for the others, wherever that is: does what they may wait for. Weights
        must not change.

        Args:
            rests: As for :meth:`gradient`.
        """

    def progress(self) -> bool:
        """The same while this rank does not train, so weights may change; True if it did something."""

    def drain(self, timeout: float | None) -> None:
        """Ends the averaging steps under way, on all ranks, and applies them."""

    def close(self) -> None:
        """Called by all ranks after :meth:`drain`; no averaging step follows."""

    def sent(self) -> int:
        """Bytes sent so far."""

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""


class Counters:
    """What the schedules of a model have counted, one after another."""

    def __init__(self) -> None:
        self._earlier = {"rounds": 0, "waits": 0, "bytes": 0, "waited": 0.0}

    def now(self, schedule: StepSchedule) -> dict[str, Any]:
        """Averaging steps, those that were waited for, bytes and seconds, with those of ``schedule``."""
        now = {
            "rounds": schedule.steps_done,
            "waits": schedule.waits,
            "bytes": schedule.sent(),
            "waited": schedule.waited,
        }
        return {name: value + self._earlier[name] for name, value in now.items()}

    def keep(self, schedule: StepSchedule) -> None:
        """``schedule`` is about to be replaced."""
        self._earlier = self.now(schedule)


@dataclass(frozen=True)
class _Started:
    """An averaging step under way.

    Attributes:
        fragment: The fragment of the weights that it averages.
        boundary: The boundary at which it was started.
        span: What observers see of it, if anybody looks.
    """

    fragment: int
    boundary: int
    span: spans.Span | None


class _CountedSchedule:
    """A schedule whose averaging steps all ranks start, and end, in the same order, numbered from 0.

    Args:
        fragments: For each fragment of the weights, what averages it: averaging steps concern one fragment
            after the other.
        groups: The model's process groups.
    """

    POLL = 0.002
    """Seconds between two looks at averaging steps inside a backward pass."""
    assigns = False

    def __init__(self, fragments: Sequence[Sequence[AveragingStep]], groups: ModelGroups) -> None:
        self.fragments = [list(steps) for steps in fragments]
        self.groups = groups
        self.under_way: deque[_Started] = deque()
        self.steps_started = 0
        self.steps_done = 0
        self.waits = 0
        self.waited = 0.0
        self.polled_at = 0.0
        self.due_at = 0  # the last boundary at which one was due
        if groups.sample_weight is not None:
            groups.sample_weight.divide(len(fragments))

    def behind(self, steps: int) -> None:
        """Nothing to do: boundaries are counted alike on all ranks, or nothing depends on them."""

    def begin_step(self) -> None:
        """See :class:`StepSchedule`."""

    def gradient(self, rests: Callable[[], bool]) -> None:
        """Starts second phases, so that a training step is enough for both."""
        if self.under_way and (now := time.perf_counter()) - self.polled_at > self.POLL:
            self.polled_at = now
            self.groups.line.advance()

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """The same."""
        self.groups.line.advance()

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """See :class:`StepSchedule`."""
        return False

    def serve(self, rests: Callable[[], bool]) -> None:
        """Nothing to do: second phases have their line, see :class:`trigram.averaging.exchange.Line`."""

    def progress(self) -> bool:
        """Nothing to do: all ranks are at the same step."""
        return False

    def _next_fragment(self) -> int:
        """The fragment of the next averaging step: one after the other."""
        return self.steps_started % len(self.fragments)

    def _start(self, boundary: int = 0) -> None:
        """Starts the next averaging step."""
        n, fragment = self.steps_started, self._next_fragment()
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.start_averaging(fragment)
        span = spans.begin("rounds", lambda: f"round {n}")
        with spans.naming(self.groups.main, lambda: f"round {n}"):
            for step in self.fragments[fragment]:
                step.take()
                step.start(n // len(self.fragments))
                if not step.has_program:
                    self.groups.line.add(step)
        self.under_way.append(_Started(fragment, boundary, span))
        self.steps_started += 1

    def _finish(self, moved: bool) -> None:
        """Waits for the averaging step that was started first, and applies it."""
        since = time.perf_counter()
        oldest = self.under_way[0]
        steps = self.fragments[oldest.fragment]
        for step in steps:
            if not step.has_program:
                self.groups.line.remove(step)  # or its `ready` would be called inside its `wait`
            step.wait()
        self.waited += time.perf_counter() - since
        for step in steps:
            step.apply(moved)
        self.under_way.popleft()
        spans.end(oldest.span)
        self.steps_done += 1

    def drain(self, timeout: float | None = None) -> None:
        """Makes averaging steps until this rank has made as many as every other rank."""
        control = self.groups.control
        # A rank that is behind makes the averaging step of the one that is ahead.
        most, self.due_at = max((a, b) for a, b in tell_all([self.steps_started, self.due_at], control))
        while self.steps_done < most:
            if not self.under_way:
                self._start()
            self._finish(moved=True)

    def close(self) -> None:
        """Nothing to do: :meth:`drain` leaves no step under way."""

    def sent(self) -> int:
        """See :class:`StepSchedule`."""
        return sum(e.sent for steps in self.fragments for e in steps)

    def state(self) -> dict[str, Any]:
        """The number of averaging steps, and the state of each."""
        weight = self.groups.sample_weight
        kept = {"weight": list(weight.pending)} if weight is not None else {}
        exchanges = [e.state() for steps in self.fragments for e in steps]
        return {**kept, "rounds": self.steps_done, "exchanges": exchanges}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.steps_done = self.steps_started = state["rounds"]
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.load(state["weight"])
        all_steps = [step for steps in self.fragments for step in steps]
        for step, kept in zip(all_steps, state["exchanges"], strict=True):
            step.load(kept)


class EverySteps(_CountedSchedule):
    """One averaging step at every h-th boundary; all ranks wait for all. With p fragments one at every
    h/p-th, so that each fragment is averaged every h steps (Streaming DiLoCo, arXiv 2501.18512).

    Args:
        fragments: For each fragment of the weights its averaging steps, which start together.
        groups: The model's process groups.
        every: h, a multiple of p.
        overlap: The averaging step begins with the next training step, runs during its forward and backward
            passes and is applied before its update. Without it the averaging step ends at the boundary.
        due: Says from the number of training steps whether there is one; None: at every h-th.

    Attributes:
        is_due: Whether there is one at the last boundary.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[AveragingStep]],
        groups: ModelGroups,
        every: int,
        overlap: bool,
        due: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(fragments, groups)
        self.due, self.is_due = due, False
        self.every, self.overlap = every // len(fragments), overlap
        self.assigns = overlap and any(step.exact for steps in fragments for step in steps)
        self.steps_due = 0
        self.fragment = 0

    def _next_fragment(self) -> int:
        """By the boundary, which all ranks count alike, also those that have joined."""
        return self.fragment

    def _ask(self, step: int) -> bool:
        """What the script's function says; raises if that is no yes or no."""
        assert self.due is not None
        says: object = self.due(step)
        if isinstance(says, bool) or (hasattr(says, "dtype") and "bool" in str(says.dtype)):
            return bool(says)
        raise MisuseError(
            f"every=: the function {getattr(self.due, '__name__', self.due)} has returned {says!r} for step "
            f"{step}; it must return True or False"
        )

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_started > self.steps_done:
            self._finish(moved=True)  # this training step had no update before which it could end
        self.is_due = step % self.every == 0 if self.due is None else self._ask(step)
        if self.is_due:
            self.due_at = step
            self.fragment = step // self.every % len(self.fragments)
            self.steps_due = self.steps_started + 1
            if not self.overlap:
                self._start()
                self._finish(moved=False)

    def _start(self, boundary: int = 0) -> None:
        """See :class:`_CountedSchedule`. Ranks whose function says different things would average what does
        not belong together, so calls have the number of their boundary."""
        if self.due is not None:
            self.groups.main.core.set_pass(1 + self.due_at % 0xFFFF)
        super()._start(boundary)

    def begin_step(self) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_due > self.steps_started == self.steps_done:
            self._start()

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """See :class:`StepSchedule`."""
        if self.steps_started == self.steps_done:
            return False
        self._finish(moved=not self.assigns or changed())
        return True

    def state(self) -> dict[str, Any]:
        """See :class:`_CountedSchedule`."""
        at = {} if self.due is None else {"due_at": self.due_at}
        return {**super().state(), "due": self.steps_due, "fragment": self.fragment, **at}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.steps_due = state["due"]
        self.due_at = state.get("due_at", 0)
        self.fragment = state.get("fragment", 0)


class BackgroundSteps(_CountedSchedule):
    """Averaging steps in the background, without waiting: a snapshot of a fragment of the weights is
    averaged, and the difference is added to the weights as they are when it arrives.

    What makes a training worse is above all that averages are late: a replica then moves away from what the
    average would correct (docs/adr/0038). So the weights travel in fragments, one after the other, and only
    as many at a time as arrive within about one training step: :class:`trigram.training.pace.Pace` finds how
    many. The next snapshot of a fragment is taken after its last averaging step was applied; otherwise
    training diverges.

    Args:
        fragments: For each fragment of the weights its averaging steps, which start together.
        groups: The model's process groups.
        staleness: Boundaries after which this rank waits for an averaging step, and after which each fragment
            has its next; None: it never waits.
        script: For tests and reproducible runs: True for the training steps at which the averaging step is
            awaited, instead of asking whether it has ended. One averaging step is under way at a time.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[AveragingStep]],
        groups: ModelGroups,
        staleness: int | None,
        script: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(fragments, groups)
        self.staleness, self.script = staleness, script
        self.pace = Pace(len(fragments), groups)
        self.rare = RareAverages(groups, len(fragments))
        self.last_boundary = 0
        self.seen_ready = False  # the oldest averaging step, at the last call of `progress`
        self.begun: dict[int, int] = {}  # by fragment: the boundary of its last averaging step

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        self.last_boundary = step
        self.rare.boundary()
        waits = self.waits
        while self.under_way and self._must_finish(step):
            self._finish(moved=True)
        if self.script is not None:
            if not self.under_way:
                self._start(step)
            return
        oldest = self.under_way[0].boundary if self.under_way else None
        self.pace.boundary(None if oldest is None else step - oldest, self.waits > waits)
        while len(self.under_way) < len(self.fragments) and (
            self.pace.allows(len(self.under_way)) or self._is_due(step)
        ):
            self._start(step)

    def _must_finish(self, step: int) -> bool:
        if self.script is not None:
            return self.script(step)
        if self._ready():
            return True
        if self.staleness is not None and step - self.under_way[0].boundary >= self.staleness:
            self.waits += 1
            return True
        return False

    def _start(self, boundary: int = 0) -> None:
        """See :class:`_CountedSchedule`."""
        fragment = self._next_fragment()
        if fragment == 0:
            self.pace.tell()
        self.begun[fragment] = boundary
        super()._start(boundary)
        self.pace.started()

    def _finish(self, moved: bool) -> None:
        """See :class:`_CountedSchedule`."""
        self.pace.ended(self.last_boundary - self.under_way[0].boundary)
        super()._finish(moved)
        self.rare.count()

    def _is_due(self, step: int) -> bool:
        """Whether the next fragment's last averaging step began too long ago."""
        if self.staleness is None:
            return False
        return step - self.begun.setdefault(self._next_fragment(), step - 1) >= self.staleness

    def _ready(self) -> bool:
        """Whether the averaging step that was started first has ended."""
        self.groups.line.advance()
        return all(step.ready() for step in self.fragments[self.under_way[0].fragment])

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """Applies what has arrived: the sooner, the less have the weights moved away from it. With a bound of
        1 all wait for all, so averages are applied at boundaries only, and a training is reproducible."""
        done = self.steps_done
        while self.script is None and self.staleness != 1 and self.under_way and self._ready():
            self._finish(moved=True)
        return self.steps_done != done

    def progress(self) -> bool:
        """Makes progress for the other ranks while this rank has no boundaries; True if a step was started or
        has ended. With a bound they may wait for it to start one, before its first boundary too."""
        if self.script is not None or (not self.under_way and self.staleness is None):
            return False
        if self.under_way:
            if not self._ready():
                self.seen_ready = False
                return False
            if not self.seen_ready:  # all ranks may have ended their training: they are about to say so
                self.seen_ready = True
                return False
            self._finish(moved=True)
        self.seen_ready = False
        self._start(self.last_boundary)
        return True
