"""The schedule of asynchronous gossip: :mod:`trigram.mixing.async_gossip`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trigram.algorithms.graphs import Graph
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.mixing.async_gossip.mail import Mail
from trigram.mixing.async_gossip.offers import Offers
from trigram.mixing.async_gossip.timing import Timing
from trigram.mixing.async_gossip.transfers import OfTransfers, Transfers
from trigram.mixing.step import AveragingStep
from trigram.runtime import serving

_POLL = 0.002
"""Seconds between two looks at messages inside a backward pass."""


class AsyncGossip(OfTransfers):
    """The schedule of averaging steps between two neighbours, whenever both are free.

    Args:
        weights: By fragment, the snapshot of its parameters, and the result of a step.
        groups: The model's process groups.
        graph: Its edges are the possible averaging steps.
        codec: Compresses the differences to a reference; None: weights are sent in full.
        staleness: Boundaries without an averaging step after which a rank waits for one; None: it never
            waits.
    """

    def __init__(
        self,
        weights: Sequence[AveragingStep],
        groups: ModelGroups,
        graph: Graph,
        codec: Codec | None,
        staleness: int | None,
    ) -> None:
        self.groups, self.staleness = groups, staleness
        self.transfers = Transfers(weights, groups, codec)
        neighbours = sorted(graph.closure().ever(groups.rank))
        self.mail = Mail(groups, neighbours)
        self.offers = Offers(groups.rank, neighbours, self.mail.tell, seed=groups.rank)
        self.timing = Timing(len(weights), groups.size, time.perf_counter())
        self.waits = 0
        self.polled_at = 0.0

    # Boundaries.

    def boundary(self, step: int) -> None:
        """Handles messages, applies a step that has completed, and offers the next one."""
        now = time.perf_counter()
        self.timing.boundary(step, now)
        self.transfers.rare.boundary()
        self._progress()
        if self.transfers.partner is not None:
            self.timing.is_under_way()
        is_stale = self.staleness is not None and self.timing.staleness() >= self.staleness
        if is_stale and self.offers.may_average():
            self.waits += 1
            self._await_average(now)
            self.timing.boundary_at = time.perf_counter()

    def _await_average(self, since: float) -> None:
        """Waits until an averaging step has ended, or no neighbour is left that answers."""
        before, waited = self.steps_done, self.waited

        def is_over() -> bool:
            now = time.perf_counter()
            self.offers.look(now, since, self.timing.patience())
            if self.offers.partner is not None:  # if it is late, it comes back to the averaging step later
                partner = self.offers.neighbours[self.offers.partner]
                partner.silent = self.timing.is_late(now, since)
            self._progress()
            return self.steps_done > before or not self.offers.may_average()

        with serving.looking(self.groups.check_interrupted):
            serving.until(is_over)
        self.transfers.waited = waited + time.perf_counter() - since

    def _progress(self, offers: bool = True, apply: bool = True) -> bool:
        """Does all that is possible without waiting; True if it started or ended a step.

        Args:
            offers: Whether to offer averaging steps.
            apply: Whether weights may change.
        """
        self._listen()
        moved = False
        if apply:
            self.transfers.apply_kept()
        if self.transfers.take_arrived(apply):
            self._end()
            moved = True
        if (agreed := self.offers.start()) is not None:
            self.timing.begin(time.perf_counter())
            self.transfers.start(agreed)
            moved = True
        if offers:
            self._offer()
        return moved

    def _listen(self) -> None:
        for j, message in self.mail.take():
            self.offers.hear(j, message, self.timing.window)

    def _offer(self) -> None:
        """Offers an averaging step of the fragments that have waited longest."""
        window, fragments = self.timing.window, len(self.fragments)
        if self.staleness is not None:  # all of them within the bound
            window = max(window, -(-fragments // self.staleness))
        self.offers.offer(self.timing.step, time.perf_counter(), self.transfers.oldest(), window)

    def _end(self) -> None:
        self.transfers.end()
        self.timing.end(time.perf_counter())
        self.offers.end()

    # Between boundaries.

    def behind(self, steps: int) -> None:
        """Nothing to do: no rank waits for the steps of another."""

    def begin_step(self) -> None:
        """Nothing to do: steps begin and end at boundaries."""

    def gradient(self, rests: Callable[[], bool]) -> None:
        """Answers offers. Averaging steps start at boundaries: a script may move weights for one pass."""
        if (now := time.perf_counter()) - self.polled_at > _POLL:
            self.polled_at = now
            self._listen()

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """The same."""
        self._listen()

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """Applies what has arrived: the sooner, the less have the weights moved away from it."""
        under_way, kept = len(self.transfers.under_way), self.transfers.apply_kept()
        if self.transfers.take_arrived(apply=True):
            self._end()
        return kept or len(self.transfers.under_way) != under_way

    def serve(self, rests: Callable[[], bool]) -> None:
        """Answers offers, and takes part in the averaging steps that it has agreed on: with a bound on
        staleness a neighbour may wait for them. Its own weights change later. While a script has moved them
        (another model's for an evaluation, a perturbation), it says that it takes part in none."""
        self.offers.away = not rests()
        try:
            self._progress(offers=False, apply=False)
        finally:
            self.offers.away = False

    # The end.

    def progress(self) -> bool:
        """Makes progress for the neighbours while this rank has no boundaries; True if it did something.

        It makes no offers: ranks that wait for each other elsewhere, for instance in the ``consensus`` of
        another model, would move weights that have been averaged, and a codec would take them apart.
        """
        return self._progress(offers=False)

    def finish_pending(self) -> bool:
        """Stops making offers; True once this rank has no step under way and no open offer."""
        self.offers.finishing = True
        self._progress()
        return self.offers.is_free()

    def drain(self, timeout: float | None) -> None:
        """Averaging steps may follow; all ranks call it when none has one under way, or agreed on."""
        self.offers.finishing = False

    def close(self) -> None:
        """Exchanges goodbye messages with all neighbours, so that no message is left under way."""
        self.mail.say_goodbye()
        serving.until(self.mail.is_over)

    def state(self) -> dict[str, Any]:
        """The number of steps, the references and the state of the random number generator."""
        return {**self.transfers.state(), "drawn": 0, "random": self.offers.random.getstate()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.transfers.load(state)
        self.offers.random.setstate(state["random"])
