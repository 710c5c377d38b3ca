"""Who averages with whom in asynchronous gossip, without input and output.

A rank with an accepted offer starts at once; the rank that made it starts when its present averaging step has
ended. A rank with an open offer accepts offers from higher ranks only. So the ranks that wait for each other
have increasing numbers, and no cycle can form. If a neighbour does not answer an offer (it is slow, or
evaluates), the offer stays open and the rank makes another one to a different neighbour.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

_PATIENCE = 8
"""Boundaries that a rank waits for the answer to an offer before it makes another offer."""


class Kind(IntEnum):
    """What a message says; the number that is sent."""

    OFFER = 1
    ACCEPT = 2
    DECLINE = 3
    GOODBYE = 4
    ENDED = 5


class Message(NamedTuple):
    """What one neighbour tells another: of an offer and its acceptance, the first fragment and how many."""

    kind: Kind
    first: int = 0
    number: int = 0


class Agreed(NamedTuple):
    """An averaging step that two ranks have agreed on: the neighbour, the first fragment and their number."""

    neighbour: int
    first: int
    number: int


@dataclass
class Neighbour:
    """What a rank knows of a neighbour.

    Attributes:
        gone: It sends no more messages.
        silent: It has not answered in time, or has ended its training.
        asked: When this rank made its last offer to it.
    """

    gone: bool = False
    silent: bool = False
    asked: float = 0.0


class Offers:
    """The offers of one rank to its neighbours, and theirs to it.

    Args:
        rank: This rank in the group.
        neighbours: Those with which it may average.
        tell: Sends a message, without waiting.
        seed: Of the order in which it makes offers.

    Attributes:
        partner: The neighbour of the averaging step under way.
        finishing: It makes no more offers.
        away: It is in a wait elsewhere, with other weights.
    """

    def __init__(
        self, rank: int, neighbours: Iterable[int], tell: Callable[[int, Message], None], seed: int
    ) -> None:
        self.rank, self.tell, self.random = rank, tell, random.Random(seed)
        self.neighbours = {j: Neighbour() for j in neighbours}
        self.partner: int | None = None
        self.agreed: list[Agreed] = []  # averaging steps that follow
        self.offered: dict[int, int] = {}  # by neighbour, the boundary of an offer that is open
        self.finishing = self.away = False

    def hear(self, j: int, message: Message, window: int) -> None:
        """Takes a message of a neighbour. ``window``: the fragments that this rank would average."""
        neighbour, agreed = self.neighbours[j], Agreed(j, message.first, message.number)
        neighbour.silent = message.kind == Kind.ENDED
        neighbour.gone = message.kind == Kind.GOODBYE
        match message.kind:
            case Kind.OFFER:
                self._consider(agreed, window)
            case Kind.ACCEPT:
                del self.offered[j]
                self.agreed.append(agreed)
            case _:  # declined, ended or gone
                self.offered.pop(j, None)

    def _consider(self, offer: Agreed, window: int) -> None:
        """Answers an offer."""
        j = offer.neighbour
        if j in self.offered:  # two offers crossed: the one of the higher rank counts
            if j < self.rank:
                return
            del self.offered[j]
        free = self.partner is None and not self.agreed and not self.finishing and not self.away
        if free and (not self.offered or j > self.rank):
            # The slower of two ranks knows how long the network takes; the other waits for it too.
            accepted = offer._replace(number=max(offer.number, window))
            self.tell(j, Message(Kind.ACCEPT, accepted.first, accepted.number))
            self.agreed.append(accepted)
        else:
            self.tell(j, Message(Kind.ENDED if self.finishing or self.away else Kind.DECLINE))

    def offer(self, step: int, now: float, first: int, number: int) -> None:
        """Makes an offer at this boundary, unless an averaging step is under way or an answer may come."""
        if self.partner is not None or self.finishing:
            return
        waits_for = (at for j, at in self.offered.items() if not self.neighbours[j].silent)
        if any(step - at < _PATIENCE for at in waits_for):
            return
        free = [j for j, n in self.neighbours.items() if j not in self.offered and not n.gone]
        if free:
            j = self.random.choice(free)
            self.offered[j], self.neighbours[j].asked = step, now
            self.tell(j, Message(Kind.OFFER, first, number))

    def start(self) -> Agreed | None:
        """The averaging step that begins now, if one can."""
        if self.partner is not None or not self.agreed or self.away:
            return None
        agreed = self.agreed.pop(0)
        self.partner = agreed.neighbour
        return agreed

    def end(self) -> None:
        """The averaging step under way has ended."""
        assert self.partner is not None
        self.neighbours[self.partner].silent = False
        self.partner = None

    def look(self, now: float, since: float, patience: float) -> None:
        """In a wait since then: which neighbours have not answered for as long as ``patience`` seconds."""
        for j in self.offered:
            neighbour = self.neighbours[j]
            neighbour.silent = neighbour.silent or now - max(neighbour.asked, since) > patience

    def may_average(self) -> bool:
        """Whether an averaging step is under way, or a neighbour is left with which there may be one."""
        if self.partner is not None:
            return not self.neighbours[self.partner].silent
        if self.agreed:
            return True
        return not self.finishing and not all(n.gone or n.silent for n in self.neighbours.values())

    def is_free(self) -> bool:
        """Whether this rank has no averaging step under way or agreed on, and no open offer."""
        return self.partner is None and not self.agreed and not self.offered
