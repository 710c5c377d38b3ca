"""Asynchronous gossip, AD-PSGD (arXiv 1710.06952): two neighbours average whenever both are free.

A free rank offers an averaging step to a neighbour. If the neighbour accepts, both send a snapshot of their
weights, and each adds half the difference of the two snapshots to its weights when both have arrived. No rank
waits: a rank looks for messages at its boundaries (between two training steps), and the engine transfers the
weights in the background.

The weights are averaged in fragments, as many at a time as arrive in about a training step (see
:class:`trigram.training.schedule.BackgroundSteps`); an offer says which. It is a message of 12 bytes; weights
are sent only after an offer was accepted. The accepting rank starts
at once; the offering rank starts when its current averaging step has ended. A rank with an open offer accepts
offers from higher ranks only. So the ranks that wait for each other have increasing numbers, and no cycle can
form. If a neighbour does not answer an offer (it is slow, or evaluates), the offer stays open and the rank
makes another one to a different neighbour.

With a bound on staleness a rank that has not averaged for so many boundaries waits until it has, so that
ranks of unequal speed stay together. It listens and answers meanwhile, and does not wait for neighbours that
do not answer or have ended their training.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trigram import collectives
from trigram.algorithms.graphs import Graph
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.errors import MisuseError
from trigram.mixing.gossip import References, seed
from trigram.mixing.rare_averages import RareAverages, most
from trigram.mixing.step import AveragingStep
from trigram.observe import spans
from trigram.runtime import serving
from trigram.runtime.memory import empty

_OFFER, _ACCEPT, _DECLINE, _GOODBYE, _ENDED = 1, 2, 3, 4, 5
_CONTROL, _DATA = 2, 3
_OFFER_PATIENCE = 8
"""Boundaries that a rank waits for the answer to an offer before it makes another offer."""
_ANSWER = 0.2
"""Seconds, at least, in which a neighbour that trains answers an offer: it does so in every training step."""
_ANSWER_STEPS = 8
"""The same in training steps of this rank: the neighbour may be slower."""
_FIRST = 60.0
"""Seconds after which a rank no longer waits for its first averaging step, whose length it cannot know."""
TAKES = 2.0
"""Training steps that an averaging step takes on a fast network, with its offer."""
_AVERAGE = 4
"""An averaging step takes at most so many times as long as the longest so far, if its partner trains."""


class _Neighbour:
    """Sends and receives the control messages between this rank and one neighbour: three int32 each, the kind
    and, of an offer and its acceptance, the first fragment and their number."""

    def __init__(self, groups: ModelGroups, group_rank: int) -> None:
        self.group, self.rank = groups.main, groups.main.ranks[group_rank]
        self.inbox = torch.zeros(3, dtype=torch.int32, device="cpu")
        self.gone = False
        self.silent = False  # it has not answered in time, or has ended its training
        self.asked = 0.0  # when this rank made its last offer to it
        self.listen()

    def listen(self) -> None:
        """Starts to receive the next message."""
        self.receiving = collectives.recv(self.inbox, self.rank, _CONTROL, self.group, async_op=True)
        assert self.receiving is not None
        self.receiving.serve_when_done()

    def send(self, kind: int, first: int = 0, count: int = 0) -> None:
        """Sends a message."""
        message = torch.tensor([kind, first, count], dtype=torch.int32, device="cpu")
        collectives.send(message, self.rank, _CONTROL, self.group, async_op=True)

    def take(self) -> list[int] | None:
        """The next message if one has arrived, else None."""
        if self.gone or self.receiving is None or not self.receiving.is_completed():
            return None
        self.receiving.wait()
        message: list[int] = self.inbox.tolist()
        self.silent = message[0] == _ENDED
        if message[0] == _GOODBYE:
            self.gone = True
        else:
            self.listen()
        return message


@dataclass
class _Fragment:
    """A fragment of the weights, and what its averaging steps need.

    Attributes:
        weights: The snapshot of its parameters, and the result of a step.
        arrived: What the weights change by, of averaging steps that ended where they could not.
        references: The references of a codec.
        mine: The last message sent.
        theirs: Receives the partner's.
    """

    weights: AveragingStep
    references: References
    mine: torch.Tensor
    theirs: torch.Tensor
    arrived: torch.Tensor | None = None

    def take(self) -> None:
        """Takes the snapshot: the weights as they are, with what has arrived."""
        self.weights.take()
        if self.arrived is not None:
            self.weights.inp += self.arrived

    def average(self, partner: int) -> torch.Tensor:
        """What the weights change by, now that the partner's message is there: ``weights.out``."""
        out = self.weights.out.copy_(self.weights.inp)
        self.references.apply(partner, self.mine, self.theirs, out, 0.5)
        out -= self.weights.inp
        return out

    def keep(self, change: torch.Tensor) -> None:
        """Keeps it until weights may change."""
        self.arrived = change.clone() if self.arrived is None else self.arrived.add_(change)

    def apply(self) -> bool:
        """Changes the weights by what has arrived; whether there was something."""
        if self.arrived is None:
            return False
        self.weights.out.copy_(self.arrived)
        self.weights.add()
        self.arrived = None
        return True

    @classmethod
    def make(cls, weights: AveragingStep, codec: Codec | None, groups: ModelGroups) -> _Fragment:
        """The fragment of these weights."""
        weights.take()
        references = References(weights.inp, codec, groups)
        like = references.code
        mine, theirs = (empty(like.numel(), dtype=like.dtype, device=like.device) for _ in range(2))
        return cls(weights, references, mine, theirs)


class _Agreed(NamedTuple):
    """An averaging step that two ranks have agreed on: the neighbour, the first fragment and their number."""

    neighbour: int
    first: int
    number: int


class AsyncGossip:
    """The schedule of averaging steps between two neighbours, whenever both are free.

    Args:
        weights: By fragment, the snapshot of its parameters, and the result of a step.
        groups: The model's process groups.
        graph: Its edges are the possible averaging steps.
        codec: Compresses the differences to a reference; None: weights are sent in full.
        staleness: Boundaries without an averaging step after which a rank waits for one; None: it never
            waits.
        script: For tests and reproducible runs: see :class:`trigram.training.schedule.BackgroundSteps`; the
            steps then follow the matchings of the graph, without offers, one fragment after the other.

    Attributes:
        window: The fragments to average in one step, as this rank has found.
    """

    POLL = 0.002
    assigns = False
    """Seconds between two looks at messages inside a backward pass."""

    def __init__(
        self,
        weights: Sequence[AveragingStep],
        groups: ModelGroups,
        graph: Graph,
        codec: Codec | None,
        staleness: int | None,
        script: Callable[[int], bool] | None,
    ) -> None:
        self.groups, self.graph = groups, graph.closure()
        self.fragments = [_Fragment.make(each, codec, groups) for each in weights]
        self.rare = RareAverages(groups, len(self.fragments))
        self.window = 1
        self.averaged = [0] * len(self.fragments)  # when each was averaged last, in averaging steps
        self.staleness, self.script = staleness, script
        self.steps_done = self.waits = self.bytes = self.matchings_started = self.matchings_ended = 0
        self.waited = 0.0
        self.ended_at = 0  # the boundary at which the last averaging step ended
        self.step = 0
        self.boundary_at = time.perf_counter()
        self.step_seconds = self.longest = self.begun_at = 0.0
        self.polled_at = 0.0
        self.begun_step = 0  # the boundary at or after which the averaging step under way was started
        self.partner: int | None = None
        self._span: spans.Span | None = None  # of the step under way, if anybody looks
        self.works: deque[tuple[_Fragment, list[Any]]] = deque()
        self.queue: list[_Agreed] = []
        self.offered: dict[int, tuple[int, _Agreed]] = {}
        self.finishing = False
        self.away = False  # in a wait elsewhere, with other weights
        self.neighbours: dict[int, _Neighbour] = {}
        if script is None:
            ranks = self.graph.ever(groups.rank)
            self.neighbours = {j: _Neighbour(groups, j) for j in sorted(ranks)}
        self.random = random.Random(groups.rank)

    # One averaging step with a neighbour.

    def _start_step(self, agreed: _Agreed) -> None:
        j, group, of = agreed.neighbour, self.groups.main, len(self.fragments)
        self.partner, self.begun_at, self.begun_step = j, time.perf_counter(), self.step
        n = self.steps_done
        self._span = spans.begin("rounds", lambda: f"round {n} with rank {group.ranks[j]}")
        for k in range(agreed.first, agreed.first + agreed.number):
            part = self.fragments[k % of]
            self.averaged[k % of] = n + 1
            part.take()
            part.references.encode(j, part.weights.inp, part.mine, seed(n * of + k % of, self.groups.rank))
            works = [
                collectives.recv(part.theirs, group.ranks[j], _DATA, group, async_op=True),
                collectives.send(part.mine, group.ranks[j], _DATA, group, async_op=True),
            ]
            for work in works:
                assert work is not None
                work.serve_when_done()
            self.works.append((part, works))
            self.bytes += part.mine.nbytes

    def _take_arrived(self, apply: bool = True) -> bool:
        """Takes the fragments that have arrived; True if the averaging step has ended with them.

        Args:
            apply: Weights may change here; else what has arrived is kept.
        """
        while self.works and all(w.is_completed() for w in self.works[0][1]):
            self._take_next(apply)
        return self.partner is not None and not self.works

    def _take_next(self, apply: bool) -> None:
        assert self.partner is not None
        since = time.perf_counter()
        part, works = self.works[0]
        for work in works:
            self.groups.wait(work)
        self.waited += time.perf_counter() - since
        change = part.average(self.partner)
        if apply:
            part.weights.add()
        else:
            part.keep(change)
        self.works.popleft()  # only now: what fails in a wait elsewhere fails again at the next boundary
        self.rare.count()

    def _apply_kept(self) -> bool:
        """Applies what has arrived where weights could not change; whether there was something."""
        return sum(part.apply() for part in self.fragments) > 0

    def _end_step(self) -> None:
        assert self.partner is not None
        while self.works:
            self._take_next(apply=True)
        self.longest = max(self.longest, time.perf_counter() - self.begun_at)
        if self.neighbours:
            self.neighbours[self.partner].silent = False
        self.partner = None
        span, self._span = self._span, None
        spans.end(span)
        if self.step - self.begun_step <= 1:
            self.window = min(most(len(self.fragments), self.groups.size, TAKES), self.window + 1)
        self.steps_done += 1
        self.ended_at = self.step

    # Boundaries.

    def boundary(self, step: int) -> None:
        """Handles messages, applies a step that has completed, and offers the next one."""
        now = time.perf_counter()
        self.step, self.step_seconds, self.boundary_at = step, now - self.boundary_at, now
        self.rare.boundary()
        if self.script is not None:
            self._follow_script(step, self.script)
            return
        self._progress()
        if self.partner is not None and step - self.begun_step > 1:
            self.window = max(1, self.window - 1)
        if self.staleness is not None and step - self.ended_at >= self.staleness and self._may_average():
            self.waits += 1
            self._await_average(now)
            self.boundary_at = time.perf_counter()

    def _await_average(self, since: float) -> None:
        """Waits until an averaging step has ended, or no neighbour is left that answers."""
        before, waited = self.steps_done, self.waited
        patience = max(_ANSWER, _ANSWER_STEPS * self.step_seconds)

        def is_over() -> bool:
            now = time.perf_counter()
            for j in self.offered:
                neighbour = self.neighbours[j]
                neighbour.silent = neighbour.silent or now - max(neighbour.asked, since) > patience
            if self.partner is not None:
                longest = _AVERAGE * self.longest or _FIRST
                late = now - max(self.begun_at, since) > max(patience, longest)
                self.neighbours[self.partner].silent = late  # it comes back to the averaging step later
            self._progress()
            return self.steps_done > before or not self._may_average()

        with serving.looking(self.groups.check_interrupted):
            serving.until(is_over)
        self.waited = waited + time.perf_counter() - since

    def _may_average(self) -> bool:
        """Whether an averaging step is under way, or a neighbour is left with which there may be one."""
        if self.partner is not None:
            return not self.neighbours[self.partner].silent
        if self.queue:
            return True
        return not self.finishing and not all(n.gone or n.silent for n in self.neighbours.values())

    def _progress(self, offers: bool = True, apply: bool = True) -> bool:
        """Does all that is possible without waiting; True if it started or ended a step.

        Args:
            offers: Whether to offer averaging steps.
            apply: Whether weights may change.
        """
        self._listen()
        moved = False
        if apply:
            self._apply_kept()
        if self._take_arrived(apply):
            self._end_step()
            moved = True
        if self.partner is None and self.queue and not self.away:
            self._start_step(self.queue.pop(0))
            moved = True
        if self.partner is None and not self.finishing and offers:
            self._offer()
        return moved

    def _follow_script(self, step: int, script: Callable[[int], bool]) -> None:
        """Starts and ends one matching after the other; a rank without a partner in a matching skips it."""
        if self.matchings_started > self.matchings_ended and script(step):
            if self.partner is not None:
                self._end_step()
            self.matchings_ended = self.matchings_started
        if self.matchings_started == self.matchings_ended:
            matching, self.matchings_started = self.matchings_started, self.matchings_started + 1
            for j in self.graph.neighbours(self.groups.rank, matching)[0]:
                self._start_step(_Agreed(j, matching % len(self.fragments), 1))

    def _listen(self) -> None:
        for j, neighbour in self.neighbours.items():
            while (message := neighbour.take()) is not None:
                if message[0] == _OFFER:
                    self._consider(_Agreed(j, *message[1:]))
                elif message[0] == _ACCEPT:
                    self.offered.pop(j)
                    self.queue.append(_Agreed(j, *message[1:]))
                else:  # declined, ended or gone
                    self.offered.pop(j, None)

    def _consider(self, offer: _Agreed) -> None:
        """Answers an offer of a neighbour."""
        j = offer.neighbour
        if j in self.offered:  # two offers crossed: the one of the higher rank counts
            if j < self.groups.rank:
                return
            del self.offered[j]
        free = self.partner is None and not self.queue and not self.finishing and not self.away
        if free and (not self.offered or j > self.groups.rank):
            # The slower of two ranks knows how long the network takes; the other waits for it too.
            agreed = offer._replace(number=max(offer.number, self.window))
            self.neighbours[j].send(_ACCEPT, agreed.first, agreed.number)
            self.queue.append(agreed)
        else:
            self.neighbours[j].send(_ENDED if self.finishing or self.away else _DECLINE)

    def _offer(self) -> None:
        waits_for = (at for j, (at, _) in self.offered.items() if not self.neighbours[j].silent)
        if any(self.step - at < _OFFER_PATIENCE for at in waits_for):
            return
        free = [j for j, n in self.neighbours.items() if j not in self.offered and not n.gone]
        if free:
            j, of = self.random.choice(free), len(self.fragments)
            count = self.window if self.staleness is None else max(self.window, -(-of // self.staleness))
            offer = _Agreed(j, self.averaged.index(min(self.averaged)), count)
            self.offered[j] = (self.step, offer)
            self.neighbours[j].asked = time.perf_counter()
            self.neighbours[j].send(_OFFER, offer.first, offer.number)

    def behind(self, steps: int) -> None:
        """Nothing to do: no rank waits for the steps of another."""

    def begin_step(self) -> None:
        """Nothing to do: steps begin and end at boundaries."""

    def gradient(self, rests: Callable[[], bool]) -> None:
        """Answers offers. Averaging steps start at boundaries: a script may move weights for one pass."""
        if self.script is None and (now := time.perf_counter()) - self.polled_at > self.POLL:
            self.polled_at = now
            self._listen()

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """The same."""
        if self.script is None:
            self._listen()

    def before_update(self, changed: Callable[[], bool]) -> bool:
        """Applies what has arrived: the sooner, the less have the weights moved away from it."""
        under_way, kept = len(self.works), self._apply_kept()
        if self.script is None and self._take_arrived():
            self._end_step()
        return kept or len(self.works) != under_way

    def serve(self, rests: Callable[[], bool]) -> None:
        """Answers offers, and takes part in the averaging steps that it has agreed on: with a bound on
        staleness a neighbour may wait for them. Its own weights change later. While a script has moved them
        (another model's for an evaluation, a perturbation), it says that it takes part in none."""
        if self.script is not None:
            return
        self.away = not rests()
        try:
            self._progress(offers=False, apply=False)
        finally:
            self.away = False

    # The end.

    def progress(self) -> bool:
        """Makes progress for the neighbours while this rank has no boundaries; True if it did something.

        It makes no offers: ranks that wait for each other elsewhere, for instance in the ``consensus`` of
        another model, would move weights that have been averaged, and a codec would take them apart.
        """
        return self.script is None and self._progress(offers=False)

    def finish_pending(self) -> bool:
        """Stops making offers; True once this rank has no step under way and no open offer."""
        self.finishing = True
        if self.script is not None:
            return True
        self._progress()
        return self.partner is None and not self.queue and not self.offered

    def drain(self, timeout: float | None) -> None:
        """Ends scripted steps; all ranks call it when :meth:`finish_pending` has returned True on all."""
        counts = torch.empty(self.groups.size, dtype=torch.int64, device="cpu")
        collectives.all_gather(
            counts, torch.tensor([self.matchings_started], device="cpu"), self.groups.control
        )
        while self.script is not None and self.matchings_ended < int(counts.max()):
            if self.matchings_started == self.matchings_ended:
                self._follow_script(self.step, lambda _: False)
            if self.partner is not None:
                self._end_step()
            self.matchings_ended = self.matchings_started
        self.finishing = False

    def close(self) -> None:
        """Exchanges goodbye messages with all neighbours, so that no message is left under way."""
        for neighbour in self.neighbours.values():
            neighbour.send(_GOODBYE)
        serving.until(
            lambda: all(n.gone or (n.take() is not None and n.gone) for n in self.neighbours.values())
        )

    def sent(self) -> int:
        """Bytes of weights sent."""
        return self.bytes

    def state(self) -> dict[str, Any]:
        """The number of steps, the references and the state of the random number generator."""
        kept = {
            "rounds": self.steps_done,
            "drawn": self.matchings_started,
            "references": [part.references.state() for part in self.fragments],
        }
        return {**kept, "random": self.random.getstate()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.steps_done = state["rounds"]
        self.matchings_started = self.matchings_ended = state["drawn"]
        saved = state["references"]
        saved = [saved] if isinstance(saved, dict) else saved  # of a version without fragments
        if len(saved) != len(self.fragments):
            raise MisuseError(
                f"the state has the weights in {len(saved)} fragments, not in {len(self.fragments)}; "
                f"pass fragments={len(saved)}"
            )
        for part, kept in zip(self.fragments, saved, strict=True):
            part.references.load(kept)
        self.random.setstate(state["random"])
