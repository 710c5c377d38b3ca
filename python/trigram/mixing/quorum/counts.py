"""What a rank counts between averaging steps with a quorum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trigram.averaging.sample_weight import SampleWeight


class Counts:
    """The training steps of one rank, and the averaging steps of each fragment.

    Args:
        every: Training steps between averaging steps, of whichever fragment.
        fragments: Those of the weights.
        weight: The model's ``sample_weight``, if it has one.

    Attributes:
        averaged: Averaging steps that have ended.
        made: Boundaries since the last averaging step; in elastic jobs it is set so that all are due
            together.
        trained: For each fragment, the training steps of this rank since its last average.
        weighed: And their sample weights.
        agreed: For each fragment, the averaging steps of it until this rank's agreement.
        next: The fragment of the next averaging step, as elsewhere.
    """

    def __init__(self, every: int, fragments: int, weight: SampleWeight | None) -> None:
        self.every, self.fragments, self.weight = every, fragments, weight
        self.averaged = self.made = 0
        self.trained, self.weighed = [0] * fragments, [0.0] * fragments
        self.agreed = [0] * fragments
        self.next = 1 % fragments
        if weight is not None:
            weight.divide(fragments)

    def step(self) -> None:
        """A training step has ended: it is in the weights, and so in the averaging steps that follow."""
        self.made += 1
        self.trained = [steps + 1 for steps in self.trained]
        self.weighed = self._weights()
        if self.weight is not None:
            self.weight.begin_again()

    def is_due(self) -> bool:
        """Whether this rank's next averaging step is due. By its own steps since the last one: a rank that
        came late is in step again after the next."""
        return self.made > 0 and self.made % self.every == 0

    def wait_for(self, steps: int) -> None:
        """The first rank of an elastic job has made so many boundaries more. All ranks have their next
        averaging step at the same training step, or one would wait for it while another waits in a collective
        of the script."""
        self.made = int(math.fmod(-steps, self.every))

    def take(self, fragment: int) -> float:
        """What this rank weighs in an averaging step of a fragment, which begins."""
        steps, self.trained[fragment] = self.trained[fragment], 0
        if self.weight is None:
            return float(steps)
        mine, self.weighed[fragment] = self.weighed[fragment], 0.0
        return mine

    def _weights(self) -> list[float]:
        """The sample weights since the last average of each fragment, with those of the step under way."""
        if self.weight is None:
            return self.weighed
        return [sum(both) for both in zip(self.weighed, self.weight.pending, strict=True)]

    def state(self, exchanges: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The averaging steps so far, and this rank's training steps since the last of each fragment, with
        their weight. ``exchanges``: the state of what is averaged of each fragment."""
        kept = {"weight": self._weights()} if self.weight is not None else {}
        # Of one fragment, as earlier versions wrote it, unless the steps trained are others than those that
        # count for when the next one is due: in elastic jobs, and after a step in which this rank took part.
        state = {**kept, "rounds": self.averaged, "trained": self.made}
        if any(exchanges):
            state["exchanges"] = list(exchanges)
        if self.trained == [max(self.made, 0)]:
            return state
        return {**state, "each": list(self.trained), "next": self.next}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.averaged, self.made = state["rounds"], state["trained"]
        self.trained = list(state.get("each", [max(self.made, 0)]))
        self.next = state.get("next", self.next)
        if self.weight is not None:
            self.weight.load(state["weight"])
            self.weighed = list(self.weight.pending)
            self.weight.begin_again()
