"""How long averaging steps of asynchronous gossip take on a rank, and what follows from it."""

from __future__ import annotations

from trigram.mixing.rare_averages import most

_ANSWER = 0.2
"""Seconds, at least, in which a neighbour that trains answers an offer: it does so in every training step."""
_ANSWER_STEPS = 8
"""The same in training steps of this rank: the neighbour may be slower."""
_FIRST = 60.0
"""Seconds after which a rank no longer waits for its first averaging step, whose length it cannot know."""
_AVERAGE = 4
"""An averaging step takes at most so many times as long as the longest so far, if its partner trains."""
TAKES = 2.0
"""Training steps that an averaging step takes on a fast network, with its offer."""


class Timing:
    """The boundaries of one rank, and its averaging steps between them.

    Args:
        fragments: Those of the weights.
        ranks: Those of the group.
        now: The time.

    Attributes:
        window: The fragments to average in one step: as many as arrive in about a training step.
    """

    def __init__(self, fragments: int, ranks: int, now: float) -> None:
        self.most, self.window = most(fragments, ranks, TAKES), 1
        self.step, self.step_seconds, self.boundary_at = 0, 0.0, now
        self.begun_step, self.begun_at = (
            0,
            0.0,
        )  # the boundary at or after which the last averaging step began
        self.ended_step = 0
        self.longest = 0.0

    def boundary(self, step: int, now: float) -> None:
        """A training step has ended."""
        self.step, self.step_seconds, self.boundary_at = step, now - self.boundary_at, now

    def begin(self, now: float) -> None:
        """An averaging step begins."""
        self.begun_step, self.begun_at = self.step, now

    def end(self, now: float) -> None:
        """It has ended."""
        self.longest = max(self.longest, now - self.begun_at)
        if self.step - self.begun_step <= 1:
            self.window = min(self.most, self.window + 1)
        self.ended_step = self.step

    def is_under_way(self) -> None:
        """It has not ended at this boundary."""
        if self.step - self.begun_step > 1:
            self.window = max(1, self.window - 1)

    def staleness(self) -> int:
        """Boundaries since the last averaging step ended."""
        return self.step - self.ended_step

    def patience(self) -> float:
        """Seconds within which a neighbour that trains answers an offer."""
        return max(_ANSWER, _ANSWER_STEPS * self.step_seconds)

    def is_late(self, now: float, since: float) -> bool:
        """In a wait since then: whether the partner has left the averaging step under way alone."""
        return now - max(self.begun_at, since) > max(self.patience(), _AVERAGE * self.longest or _FIRST)
