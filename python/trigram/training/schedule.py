"""When averaging steps of weights run: every h training steps, or in the background.

:mod:`trigram.training.weight_sync` finds the training steps and counts them so that all ranks count the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all
from trigram.mixing.step import AveragingStep
from trigram.observe import spans


class StepSchedule(Protocol):
    """When averaging steps run.

    A *boundary* is the end of a training step: after the optimizer's update, when nothing else uses the
    weights.

    Attributes:
        steps_done: Averaging steps that have ended.
        waits: Averaging steps that this rank waited for because of ``staleness``.
        waited: Seconds that this rank waited for averaging steps.
    """

    steps_done: int
    waits: int
    waited: float

    def boundary(self, step: int) -> None:
        """Called at a boundary, after ``step`` training steps in total."""

    def begin_step(self) -> None:
        """Called when a training step begins: in its first forward pass, or when its backward pass begins."""

    def backward_over(self) -> None:
        """Called when a backward pass has ended; the weights must not change."""

    def before_update(self) -> None:
        """Called before the optimizer updates the weights."""

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


class _CountedSchedule:
    """A schedule whose averaging steps all ranks make in the same order, numbered from 0.

    Args:
        fragments: For each fragment of the weights, what averages it: averaging steps concern one fragment
            after the other.
        groups: The model's process groups.
    """

    def __init__(self, fragments: Sequence[Sequence[AveragingStep]], groups: ModelGroups) -> None:
        self.fragments = [list(steps) for steps in fragments]
        self.fragment = 0  # of the next averaging step, or of that under way
        self.groups = groups
        self.steps_started = 0
        self.steps_done = 0
        self.waits = 0
        self.waited = 0.0
        self._span: spans.Span | None = None  # of the step under way, if anybody looks

    def begin_step(self) -> None:
        """See :class:`StepSchedule`."""

    def backward_over(self) -> None:
        """See :class:`StepSchedule`."""

    def before_update(self) -> None:
        """See :class:`StepSchedule`."""

    def _start(self) -> None:
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.start_averaging()
        n = self.steps_started
        self._span = spans.begin("rounds", lambda: f"round {n}")
        with spans.naming(self.groups.main, lambda: f"round {n}"):
            for step in self.fragments[self.fragment]:
                step.take()
                step.start(n // len(self.fragments))
        self.steps_started += 1

    def _finish(self, moved: bool) -> None:
        since = time.perf_counter()
        steps = self.fragments[self.fragment]
        for step in steps:
            step.wait()
        self.waited += time.perf_counter() - since
        for step in steps:
            step.apply(moved)
        span, self._span = self._span, None
        spans.end(span)
        self.steps_done += 1

    def drain(self, timeout: float | None = None) -> None:
        """Makes averaging steps until this rank has made as many as every other rank."""
        control = self.groups.control
        most = max(started for (started,) in tell_all([self.steps_started], control))
        while self.steps_done < most:
            if self.steps_started == self.steps_done:
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
        kept = {"weight": weight.pending} if weight is not None else {}
        exchanges = [e.state() for steps in self.fragments for e in steps]
        return {**kept, "rounds": self.steps_done, "exchanges": exchanges}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.steps_done = self.steps_started = state["rounds"]
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.pending = state["weight"]
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
    """

    def __init__(
        self, fragments: Sequence[Sequence[AveragingStep]], groups: ModelGroups, every: int, overlap: bool
    ) -> None:
        super().__init__(fragments, groups)
        self.every, self.overlap = every // len(fragments), overlap
        self.steps_due = 0

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_started > self.steps_done:
            self._finish(moved=True)  # this training step had no update before which it could end
        if step % self.every == 0:
            # By the step, which all ranks count alike, also those that have joined.
            self.fragment = step // self.every % len(self.fragments)
            self.steps_due = self.steps_started + 1
            if not self.overlap:
                self._start()
                self._finish(moved=False)

    def begin_step(self) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_due > self.steps_started == self.steps_done:
            self._start()

    def before_update(self) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_started > self.steps_done:
            self._finish(moved=False)

    def state(self) -> dict[str, Any]:
        """See :class:`_CountedSchedule`."""
        return {**super().state(), "due": self.steps_due, "fragment": self.fragment}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.steps_due = state["due"]
        self.fragment = state.get("fragment", 0)


class BackgroundSteps(_CountedSchedule):
    """One averaging step after the other in the background, without waiting: a snapshot of the weights is
    averaged, and the difference is added to the weights as they are when it arrives.

    Only one averaging step is under way, and the next snapshot is taken after it was applied; otherwise
    training diverges.

    Args:
        steps: The averaging steps, which start together.
        groups: The model's process groups.
        staleness: Boundaries after which this rank waits for the averaging step; None: it never waits.
        script: For tests and reproducible runs: True for the training steps at which the averaging step is
            awaited, instead of asking whether it has ended.
    """

    def __init__(
        self,
        steps: Sequence[AveragingStep],
        groups: ModelGroups,
        staleness: int | None,
        script: Callable[[int], bool] | None,
    ) -> None:
        super().__init__([steps], groups)
        self.staleness, self.script = staleness, script
        self.started_at = 0

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        if self.steps_started > self.steps_done and self._must_finish(step):
            self._finish(moved=True)
        if self.steps_started == self.steps_done:
            self.started_at = step
            self._start()

    def _must_finish(self, step: int) -> bool:
        if self.script is not None:
            return self.script(step)
        if self._ready():
            return True
        if self.staleness is not None and step - self.started_at >= self.staleness:
            self.waits += 1
            return True
        return False

    def _ready(self) -> bool:
        """Whether the averaging step has ended; advances all of them."""
        ready = [step.ready() for step in self.fragments[0]]
        return all(ready)

    def backward_over(self) -> None:
        """Starts second phases."""
        self._ready()

    def progress(self) -> bool:
        """Makes progress for the other ranks while this rank has no boundaries; True if a step ended."""
        if self.script is not None:
            return False
        moved = self.steps_started > self.steps_done and self._ready()
        if moved:
            self._finish(moved=True)
            self._start()
        return moved
