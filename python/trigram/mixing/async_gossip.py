"""AsyncGossip that average when both are free: AD-PSGD (arXiv 1710.06952), with no global round at all.

A rank that is free offers an exchange to a neighbour. Who accepts, and who offered, then each send
a snapshot, and each adds half the difference of the same two snapshots when both are there. Nobody
ever waits: everything is looked at at boundaries, and moved in the background in between.

Offers are few bytes; weights move only between two that have agreed. Who accepts begins at once;
who offered begins when it has ended what it is in. A rank with an offer of its own out accepts one
from a higher rank only, so ranks that wait for each other stand in rising order, never in a circle.
An offer to a rank that does not answer (it evaluates, or is slow) is left standing, and another made.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.graphs import Graph
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.errors import AbortedError
from trigram.mixing.gossip import References, seed
from trigram.mixing.step import AveragingStep
from trigram.runtime.memory import empty

_OFFER, _ACCEPT, _DECLINE, _BYE = 1, 2, 3, 4
_CONTROL, _DATA = 2, 3
_PATIENCE = 8
"""Boundaries after which an unanswered offer keeps nobody from making another."""


class _Neighbour:
    """The way to a neighbour and back, for few bytes."""

    def __init__(self, groups: ModelGroups, place: int) -> None:
        self.group, self.rank = groups.main, groups.main.ranks[place]
        self.word = torch.zeros(1, dtype=torch.int32)
        self.gone = False
        self.listen()

    def listen(self) -> None:
        """Awaits the next word."""
        self.heard = collectives.recv(self.word, self.rank, _CONTROL, self.group, async_op=True)

    def say(self, word: int) -> None:
        """Sends a word."""
        said = torch.tensor([word], dtype=torch.int32)
        collectives.send(said, self.rank, _CONTROL, self.group, async_op=True)

    def take(self) -> int | None:
        """The next word, if there is one."""
        if self.gone or self.heard is None or not self.heard.is_completed():
            return None
        self.heard.wait()
        word = int(self.word[0])
        if word == _BYE:
            self.gone = True
        else:
            self.listen()
        return word


class AsyncGossip:
    """Exchanges between two, whenever both are free.

    Args:
        flat: The parameters, all in one.
        groups: Where to talk.
        graph: Who may talk to whom.
        codec: Of the differences; None: full.
        staleness: Boundaries after which an exchange under way is waited for; None: never.
        script: See :class:`trigram.weights.BackgroundSteps`; steps then follow the graph's matchings.
    """

    def __init__(
        self,
        flat: AveragingStep,
        groups: ModelGroups,
        graph: Graph,
        codec: Codec | None,
        staleness: int | None,
        script: Callable[[int], bool] | None,
    ) -> None:
        self.flat, self.groups, self.graph = flat, groups, graph.closure()
        self.staleness, self.script = staleness, script
        self.rounds = self.waits = self.bytes = self.drawn = self.landed = 0
        self.waited = 0.0
        self.since = 0
        self.step = 0
        flat.take()
        self.references = References(flat.inp, codec, groups)
        like = self.references.code
        self.mine = empty(like.numel(), dtype=like.dtype, device=like.device)
        self.theirs = empty(like.numel(), dtype=like.dtype, device=like.device)
        self.partner: int | None = None
        self.works: list[Any] = []
        self.queue: list[int] = []
        self.offered: dict[int, int] = {}
        self.closing = False
        self.neighbours: dict[int, _Neighbour] = {}
        if script is None:
            places = self.graph.ever(groups.rank)
            self.neighbours = {j: _Neighbour(groups, j) for j in sorted(places)}
        self.random = random.Random(groups.rank)

    # An exchange.

    def _begin(self, j: int) -> None:
        group = self.groups.main
        self.partner, self.since = j, self.step
        self.flat.take()
        self.references.tell(j, self.flat.inp, self.mine, seed(self.rounds, self.groups.rank))
        self.works = [
            collectives.recv(self.theirs, group.ranks[j], _DATA, group, async_op=True),
            collectives.send(self.mine, group.ranks[j], _DATA, group, async_op=True),
        ]
        self.bytes += self.mine.nbytes

    def _ready(self) -> bool:
        return all(w.is_completed() for w in self.works)

    def _land(self) -> None:
        assert self.partner is not None
        since = time.perf_counter()
        works, self.works = self.works, []
        for work in works:
            self.groups.wait(work)
        self.waited += time.perf_counter() - since
        self.flat.out.copy_(self.flat.inp)
        self.references.meet(self.partner, self.mine, self.theirs, self.flat.out, 0.5)
        self.flat.apply(moved=True)
        self.partner = None
        self.rounds += 1

    # Boundaries.

    def boundary(self, step: int) -> None:
        """Looks at what has come, applies what is there, and offers what is next."""
        self.step = step
        if self.script is not None:
            self._follow(step, self.script)
            return
        self._turn()
        if self.partner is not None and self.staleness is not None and step - self.since >= self.staleness:
            self.waits += 1
            since = time.perf_counter()
            while self.partner is not None and not self._ready():
                if self.groups.interrupted is not None and self.groups.interrupted():
                    raise AbortedError(
                        f"{self.groups.name}: an averaging step with a neighbour was aborted, because a "
                        "rank of this elastic job was lost or is joining; training continues when all ranks "
                        "have regrouped"
                    )
                self._listen()  # others must not wait for what this rank waits for
                time.sleep(0.0005)
            self.waited += time.perf_counter() - since
            self._turn()

    def _turn(self) -> bool:
        """Everything that can be done now; true if anything could."""
        self._listen()
        moved = False
        if self.partner is not None and self._ready():
            self._land()
            moved = True
        if self.partner is None and self.queue:
            self._begin(self.queue.pop(0))
            moved = True
        if self.partner is None and not self.closing:
            self._offer()
        return moved

    def _follow(self, step: int, script: Callable[[int], bool]) -> None:
        """Matchings begin and land together; who sits one out lands with the others."""
        if self.drawn > self.landed and script(step):
            if self.partner is not None:
                self._land()
            self.landed = self.drawn
        if self.drawn == self.landed:
            matching, self.drawn = self.drawn, self.drawn + 1
            for j in self.graph.neighbours(self.groups.rank, matching)[0]:
                self._begin(j)

    def _listen(self) -> None:
        for j, neighbour in self.neighbours.items():
            while (word := neighbour.take()) is not None:
                if word == _OFFER:
                    self._consider(j)
                elif word == _ACCEPT:
                    del self.offered[j]
                    self.queue.append(j)
                else:
                    self.offered.pop(j, None)

    def _consider(self, j: int) -> None:
        """An offer has come."""
        if j in self.offered:  # both have offered: the higher rank's offer stands
            if j < self.groups.rank:
                return
            del self.offered[j]
        free = self.partner is None and not self.queue and not self.closing
        if free and (not self.offered or j > self.groups.rank):
            self.neighbours[j].say(_ACCEPT)
            self.queue.append(j)
        else:
            self.neighbours[j].say(_DECLINE)

    def _offer(self) -> None:
        if any(self.step - at < _PATIENCE for at in self.offered.values()):
            return
        free = [j for j, n in self.neighbours.items() if j not in self.offered and not n.gone]
        if free:
            j = self.random.choice(free)
            self.offered[j] = self.step
            self.neighbours[j].say(_OFFER)

    def backward_over(self) -> None:
        """Offers are looked at once more in a step; the weights are left alone."""
        if self.script is None:
            self._listen()

    # The end.

    def serve(self) -> bool:
        """What this rank does for the others while it has no boundaries."""
        return self.script is None and self._turn()

    def settle(self) -> bool:
        """Makes no more offers; true once nothing of this rank is under way."""
        self.closing = True
        if self.script is not None:
            return True
        self._turn()
        return self.partner is None and not self.queue and not self.offered

    def drain(self, timeout: float | None) -> None:
        """All ranks are here, and have settled: only scripted steps may be under way."""
        counts = torch.empty(self.groups.size, dtype=torch.int64)
        collectives.all_gather(counts, torch.tensor([self.drawn]), self.groups.control)
        while self.script is not None and self.landed < int(counts.max()):
            if self.drawn == self.landed:
                self._follow(self.step, lambda _: False)
            if self.partner is not None:
                self._land()
            self.landed = self.drawn
        self.closing = False

    def close(self) -> None:
        """Says goodbye to the neighbours and hears theirs: nothing stays behind on the way."""
        for neighbour in self.neighbours.values():
            neighbour.say(_BYE)
        for neighbour in self.neighbours.values():
            while not neighbour.gone:
                if neighbour.take() is None:
                    time.sleep(0.001)

    def sent(self) -> int:
        """Bytes of weights sent."""
        return self.bytes

    def state(self) -> dict[str, Any]:
        """The references, and where the matchings stand."""
        kept = {"rounds": self.rounds, "drawn": self.drawn, "references": self.references.state()}
        return {**kept, "random": self.random.getstate()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.rounds, self.drawn, self.landed = state["rounds"], state["drawn"], state["drawn"]
        self.references.load(state["references"])
        self.random.setstate(state["random"])
