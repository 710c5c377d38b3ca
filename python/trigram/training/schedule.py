"""When averaging steps of weights happen: every h steps, or in the background.

Steps are counted in backward passes, so a rank whose scaler skips its optimizer keeps no other rank waiting,
and a rank whose pass fails has taken part all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all
from trigram.mixing.step import AveragingStep


class StepSchedule(Protocol):
    """When steps happen."""

    rounds: int
    waits: int
    waited: float

    def boundary(self, step: int) -> None:
        """The weights are free; ``step`` backward passes have been."""

    def backward_over(self) -> None:
        """A backward pass has ended; its optimizer step has not."""

    def drain(self, timeout: float | None) -> None:
        """Ends what is under way on all ranks, and applies it."""

    def close(self) -> None:
        """No more rounds; all ranks call it, after :meth:`drain`."""

    def sent(self) -> int:
        """Bytes sent so far."""

    def state(self) -> dict[str, Any]:
        """What must be remembered between rounds."""

    def load(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave."""


class _Counted:
    """StepSchedule that all ranks make alike, numbered from 0."""

    def __init__(self, steps: Sequence[AveragingStep], groups: ModelGroups) -> None:
        self.steps = list(steps)
        self.groups = groups
        self.begun = 0
        self.rounds = 0
        self.waits = 0
        self.waited = 0.0

    def _start(self) -> None:
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.start_averaging()
        for exchange in self.steps:
            exchange.take()
            exchange.start(self.begun)
        self.begun += 1

    def _finish(self, moved: bool) -> None:
        since = time.perf_counter()
        for exchange in self.steps:
            exchange.wait()
        self.waited += time.perf_counter() - since
        for exchange in self.steps:
            exchange.apply(moved)
        self.rounds += 1

    def drain(self, timeout: float | None = None) -> None:
        """Ranks that are a round behind make it; then all have made the same."""
        side = self.groups.control
        most = max(begun for (begun,) in tell_all([self.begun], side))
        while self.rounds < most:
            if self.begun == self.rounds:
                self._start()
            self._finish(moved=True)

    def close(self) -> None:
        """Nothing is left to do."""

    def sent(self) -> int:
        """See :class:`StepSchedule`."""
        return sum(e.sent for e in self.steps)

    def state(self) -> dict[str, Any]:
        """The number of rounds, and the steps' own."""
        share = self.groups.sample_weight
        kept = {"weight": share.pending} if share is not None else {}
        return {**kept, "rounds": self.rounds, "steps": [e.state() for e in self.steps]}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.rounds = self.begun = state["rounds"]
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.pending = state["weight"]
        for exchange, kept in zip(self.steps, state["steps"], strict=True):
            exchange.load(kept)


class EverySteps(_Counted):
    """Every h-th boundary a round, in which all wait for all.

    Args:
        steps: What is exchanged.
        groups: Where to talk.
        every: h.
        overlap: The round goes on beside forward and backward, and is applied when backward ends;
            otherwise it is over when the boundary is.
    """

    def __init__(
        self, steps: Sequence[AveragingStep], groups: ModelGroups, every: int, overlap: bool
    ) -> None:
        super().__init__(steps, groups)
        self.every, self.overlap = every, overlap

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        if step % self.every == 0:
            if self.begun == self.rounds:
                self._start()
            if not self.overlap:
                self._finish(moved=False)

    def backward_over(self) -> None:
        """See :class:`StepSchedule`."""
        if self.begun > self.rounds:
            self._finish(moved=False)


class BackgroundSteps(_Counted):
    """One round after the other, with nobody waiting: a snapshot, its exchange, and the difference
    added to the weights as they are by then.

    One round is in flight, and the next snapshot is taken after it is applied; anything else diverges.

    Args:
        steps: What is exchanged.
        groups: Where to talk.
        staleness: Boundaries after which a round is waited for; None: never.
        script: Instead of looking whether a round has ended: the steps at which it is awaited.
    """

    def __init__(
        self,
        steps: Sequence[AveragingStep],
        groups: ModelGroups,
        staleness: int | None,
        script: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(steps, groups)
        self.staleness, self.script = staleness, script
        self.since = 0

    def boundary(self, step: int) -> None:
        """See :class:`StepSchedule`."""
        if self.begun > self.rounds and self._lands(step):
            self._finish(moved=True)
        if self.begun == self.rounds:
            self.since = step
            self._start()

    def _lands(self, step: int) -> bool:
        if self.script is not None:
            return self.script(step)
        if self._ready():
            return True
        if self.staleness is not None and step - self.since >= self.staleness:
            self.waits += 1
            return True
        return False

    def _ready(self) -> bool:
        """Whether the round has ended; each exchange moves on what it can."""
        ready = [exchange.ready() for exchange in self.steps]
        return all(ready)

    def backward_over(self) -> None:
        """Second legs begin."""
        self._ready()

    def serve(self) -> bool:
        """What this rank does for the others while it has no boundaries."""
        if self.script is not None:
            return False
        moved = self.begun > self.rounds and self._ready()
        if moved:
            self._finish(moved=True)
            self._start()
        return moved
