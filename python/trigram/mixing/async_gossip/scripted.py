"""Asynchronous gossip by a script, for tests and reproducible runs: matchings in place of offers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.graphs import Graph
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.mixing.async_gossip.offers import Agreed
from trigram.mixing.async_gossip.transfers import OfTransfers, Transfers
from trigram.mixing.step import AveragingStep


class ScriptedGossip(OfTransfers):
    """The schedule of averaging steps that follow the matchings of a graph, one fragment after the other.

    Args:
        weights: By fragment, the snapshot of its parameters, and the result of a step.
        groups: The model's process groups.
        graph: Has the matchings.
        codec: Compresses the differences to a reference; None: weights are sent in full.
        script: True for the training steps at which the averaging step under way is awaited.
    """

    waits = 0

    def __init__(
        self,
        weights: Sequence[AveragingStep],
        groups: ModelGroups,
        graph: Graph,
        codec: Codec | None,
        script: Callable[[int], bool],
    ) -> None:
        self.groups, self.graph, self.script = groups, graph.closure(), script
        self.transfers = Transfers(weights, groups, codec)
        self.started = self.ended = 0  # matchings
        self.step = 0

    def boundary(self, step: int) -> None:
        """Ends a matching if the script says so, and starts the next; a rank without a partner skips it."""
        self.step = step
        self.transfers.rare.boundary()
        if self.started > self.ended and self.script(step):
            self._end()
        if self.started == self.ended:
            self._start()

    def _start(self) -> None:
        matching, self.started = self.started, self.started + 1
        for j in self.graph.neighbours(self.groups.rank, matching)[0]:
            self.transfers.start(Agreed(j, matching % len(self.fragments), 1))

    def _end(self) -> None:
        if self.transfers.partner is not None:
            self.transfers.end()
        self.ended = self.started

    def behind(self, steps: int) -> None:
        """Nothing to do: no rank waits for the steps of another."""

    def begin_step(self) -> None:
        """Nothing to do: averaging steps begin and end at boundaries."""

    def gradient(self, rests: Callable[[], bool]) -> None:
        """The same."""

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """The same."""

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """The same."""
        return False

    def serve(self, rests: Callable[[], bool]) -> None:
        """Nothing to do: the engine sends what was started."""

    def progress(self) -> bool:
        """The same."""
        return False

    def finish_pending(self) -> bool:
        """The same: :meth:`drain` ends what is under way."""
        return True

    def drain(self, timeout: float | None) -> None:
        """Makes the matchings that others have started, and ends them; all ranks call it."""
        counts = torch.empty(self.groups.size, dtype=torch.int64, device="cpu")
        mine = torch.tensor([self.started], device="cpu")
        collectives.all_gather(counts, mine, self.groups.control)
        while self.ended < int(counts.max()):
            if self.started == self.ended:
                self._start()
            self._end()

    def close(self) -> None:
        """Nothing to do: no message is under way after :meth:`drain`."""

    def state(self) -> dict[str, Any]:
        """The number of steps and matchings, and the references; and what the schedule with offers keeps, for
        a state has the same parts with a script and without."""
        return {**self.transfers.state(), "drawn": self.started, "random": random.Random(0).getstate()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.transfers.load(state)
        self.started = self.ended = state["drawn"]
