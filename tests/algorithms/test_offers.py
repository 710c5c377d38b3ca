"""Who averages with whom in asynchronous gossip: offers without ranks, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.channels import Channels
from trigram.mixing.async_gossip.offers import Agreed, Kind, Message, Offers
from trigram.mixing.async_gossip.timing import Timing

Said = list[tuple[int, Message]]


def _offers(rank: int = 1, neighbours: tuple[int, ...] = (0, 2)) -> tuple[Offers, Said]:
    said: Said = []
    return Offers(rank, neighbours, lambda j, message: said.append((j, message)), seed=0), said


def test_a_free_rank_accepts_as_many_fragments_as_the_slower_of_both_sends() -> None:
    offers, said = _offers()
    offers.hear(0, Message(Kind.OFFER, first=2, number=1), window=3)
    assert said == [(0, Message(Kind.ACCEPT, 2, 3))]
    assert offers.start() == Agreed(0, 2, 3) and offers.partner == 0 and not offers.is_free()
    offers.hear(2, Message(Kind.OFFER), window=3)
    assert said[1:] == [(2, Message(Kind.DECLINE))]
    offers.end()
    assert offers.is_free()


def test_of_two_offers_that_cross_that_of_the_higher_rank_counts() -> None:
    for j in (0, 2):
        offers, said = _offers(neighbours=(j,))
        offers.offer(1, 0.0, first=0, number=1)
        assert said.pop() == (j, Message(Kind.OFFER, 0, 1))
        offers.hear(j, Message(Kind.OFFER, 1, 1), window=1)
        assert said == ([] if j == 0 else [(2, Message(Kind.ACCEPT, 1, 1))])
        assert (offers.start() is None) == (j == 0)


def test_with_an_open_offer_only_higher_ranks_are_accepted() -> None:
    offers, said = _offers(rank=1, neighbours=(0, 2, 3))
    offers.offered[2] = 0
    offers.hear(0, Message(Kind.OFFER), window=1)
    offers.hear(3, Message(Kind.OFFER), window=1)
    assert [message.kind for _, message in said] == [Kind.DECLINE, Kind.ACCEPT]


def test_an_offer_that_is_not_answered_is_followed_by_one_to_another() -> None:
    offers, said = _offers()
    offers.offer(1, 0.0, 0, 1)
    offers.offer(8, 0.0, 0, 1)
    assert len(said) == 1
    offers.offer(9, 0.0, 0, 1)
    assert sorted(j for j, _ in said) == [0, 2]
    offers.offer(99, 0.0, 0, 1)
    assert len(said) == 2, "both are open"
    offers.hear(0, Message(Kind.DECLINE), window=1)
    offers.offer(100, 0.0, 0, 1)
    assert said[2] == (0, Message(Kind.OFFER, 0, 1))


def test_who_ends_its_training_or_is_away_says_so_and_is_not_waited_for() -> None:
    for word in ("finishing", "away"):
        offers, said = _offers()
        setattr(offers, word, True)
        offers.hear(0, Message(Kind.OFFER), window=1)
        assert said == [(0, Message(Kind.ENDED))]
    offers, said = _offers()
    assert offers.may_average()
    offers.hear(0, Message(Kind.ENDED), window=1)
    assert offers.may_average()
    offers.hear(2, Message(Kind.GOODBYE), window=1)
    assert not offers.may_average()
    offers.offer(1, 0.0, 0, 1)
    assert said == [(0, Message(Kind.OFFER, 0, 1))], "it is asked again, and may train again"


def test_a_silent_neighbour_is_not_waited_for_until_it_speaks() -> None:
    offers, _ = _offers(neighbours=(0,))
    offers.offer(1, 10.0, 0, 1)
    offers.look(10.5, since=10.1, patience=0.5)
    assert offers.may_average()
    offers.look(10.7, since=10.1, patience=0.5)
    assert not offers.may_average()
    offers.hear(0, Message(Kind.ACCEPT, 0, 1), window=1)
    assert offers.may_average()


def test_as_many_fragments_at_a_time_as_arrive_in_a_training_step() -> None:
    timing = Timing(fragments=8, ranks=8, now=0.0)
    for step in range(1, 20):
        timing.boundary(step, float(step))
        timing.begin(step + 0.1)
        timing.end(step + 0.5)
    assert timing.window == timing.most == 8 and timing.staleness() == 0
    timing.begin(20.0)
    for step in range(20, 24):
        timing.boundary(step, float(step))
        timing.is_under_way()
    assert timing.window == 5 and timing.staleness() == 4


class _Stuck(AssertionError):
    """A wait without an end."""


class _World:
    """Ranks that train at random paces, each a generator that yields what it waits for.

    With a bound on staleness a rank waits at a boundary. Weights travel in no time, but an averaging step
    ends only when both have begun it.
    """

    STEPS = 60

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size, self.now = self.random.randint(2, 6), 0.0
        self.staleness = self.random.choice([None, 1, 3])
        self.pace = [self.random.choice([0.01, 0.011, 0.05, 0.3]) for _ in range(self.size)]
        self.channels = Channels[Message](self.random, lambda: self.now)
        ring = self.size > 3 and self.random.random() < 0.5
        self.ranks = []
        for rank in range(self.size):
            near = {(rank + 1) % self.size, (rank - 1) % self.size}
            neighbours = sorted(near if ring else set(range(self.size)) - {rank})
            self.ranks.append(Offers(rank, neighbours, self.channels.of(rank), seed=seed + rank))
        self.begun: dict[tuple[int, int], int] = {}  # by rank and partner, averaging steps
        self.averages = [0] * self.size

    def _listen(self, rank: int) -> None:
        for sender, message in self.channels.take(rank):
            self.ranks[rank].hear(sender, message, window=1)

    def _progress(self, rank: int, step: int | None) -> None:
        """As a rank does without waiting; offers at a boundary, ``step``."""
        offers = self.ranks[rank]
        self._listen(rank)
        if (j := offers.partner) is not None and self.begun.get((j, rank), 0) >= self.begun[rank, j]:
            offers.end()
            self.averages[rank] += 1
        if (agreed := offers.start()) is not None:
            key = rank, agreed.neighbour
            self.begun[key] = self.begun.get(key, 0) + 1
        if step is not None:
            offers.offer(step, self.now, 0, 1)

    def train(self, rank: int) -> Iterator[Any]:
        """What a rank does, from its first step until it is free."""
        offers, last, seen = self.ranks[rank], 0, 0
        for step in range(1, self.STEPS + 1):
            for _ in range(2):
                yield self.now + self.random.random() * self.pace[rank]
                self._listen(rank)
            self._progress(rank, step)
            if self.averages[rank] > seen:
                last, seen = step, self.averages[rank]
            if self.staleness is not None and step - last >= self.staleness and offers.may_average():
                yield self._awaits(rank, step)
                last, seen = step, self.averages[rank]
        offers.finishing = True

        def is_free() -> bool:
            self._progress(rank, None)
            return offers.is_free()

        yield is_free
        while True:  # it answers until all are free
            yield self.now + 0.01
            self._progress(rank, None)

    def _awaits(self, rank: int, step: int) -> Callable[[], bool]:
        since, before, offers = self.now, self.averages[rank], self.ranks[rank]

        def is_over() -> bool:
            offers.look(self.now, since, patience=5.0)
            self._progress(rank, step)
            return self.averages[rank] > before or not offers.may_average()

        return is_over

    def run(self) -> None:
        """Until all are free.

        Raises:
            _Stuck: Nobody has moved for so long that nobody will.
        """
        ranks = [self.train(rank) for rank in range(self.size)]
        waits: list[Any] = [next(each) for each in ranks]
        moved = [0.0] * self.size
        while not all(offers.finishing and offers.is_free() for offers in self.ranks):
            for rank in self.random.sample(range(self.size), self.size):
                wait = waits[rank]
                if (wait <= self.now) if isinstance(wait, float) else wait():
                    moved[rank] = self.now
                    waits[rank] = next(ranks[rank])
            if self.now - min(moved) > 60.0:
                raise _Stuck(f"rank {moved.index(min(moved))} waits")
            self.now += 0.005


@pytest.mark.parametrize("seed", range(60))
def test_random_ranks_are_all_free_in_the_end(seed: int) -> None:
    world = _World(seed)
    world.run()
    assert sum(world.averages) >= 4


def test_ranks_that_accept_any_offer_wait_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    consider = Offers._consider

    def accepts_all(self: Offers, offer: Agreed, window: int) -> None:
        rank, self.rank = self.rank, -1 if offer.neighbour not in self.offered else self.rank
        consider(self, offer, window)
        self.rank = rank

    monkeypatch.setattr(Offers, "_consider", accepts_all)
    stuck = 0
    for seed in range(60):
        try:
            _World(seed).run()
        except _Stuck:
            stuck += 1
    assert stuck, "these ranks would not find a wait without an end"
