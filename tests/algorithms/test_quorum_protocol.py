"""Who says what to whom before an averaging step with a quorum: seats without ranks, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.channels import Channels
from trigram.mixing.quorum.protocol import (
    BEHIND,
    IN,
    OUT,
    PATIENCE,
    Decision,
    Follower,
    Kind,
    Leader,
    Message,
    Seat,
)

Said = list[tuple[int, Message]]


def _leader(size: int = 4, quorum: int = 3, grace: float | None = 0.5) -> tuple[Leader, Said]:
    said: Said = []
    return Leader(size, quorum, grace, lambda j, message: said.append((j, message)), now=0.0), said


def _follower(rank: int = 2, size: int = 4) -> tuple[Follower, Said]:
    said: Said = []
    return Follower(rank, size, lambda j, message: said.append((j, message))), said


def _here(*agreed: int) -> Message:
    return Message(Kind.HERE, each=agreed)


def _never() -> bool:
    raise AssertionError("it asks whether it may come, and has nothing to come for")


def test_the_leader_waits_for_a_quorum_and_then_for_the_others() -> None:
    leader, said = _leader()
    assert leader.come(10.0, [5])
    leader.hear(1, _here(5))
    assert not leader.is_over(10.1), "two of three are there"
    leader.hear(3, _here(4))
    assert not leader.is_over(10.1) and not leader.is_over(10.5) and leader.is_over(10.6)
    assert leader.lacking() == ([2], "a quorum of 3")
    decision = leader.conclude(10.6, 0, 5)
    assert decision == Decision([IN, IN, OUT, BEHIND], 0, 5)
    assert said == [(j, Message(Kind.DECISION, 0, 5, [IN, IN, OUT, BEHIND])) for j in (1, 2, 3)]


def test_the_grace_window_is_a_part_of_the_period() -> None:
    leader, _ = _leader(quorum=1, grace=None)
    leader.come(10.0, [0])
    assert not leader.is_over(10.0) and not leader.is_over(10.9) and leader.is_over(11.0)


def test_nobody_is_waited_for_that_has_left() -> None:
    leader, said = _leader()
    for j in (1, 2):
        leader.hear(j, Message(Kind.LEAVES))
    assert said == [(j, Message(Kind.LEFT)) for j in (1, 2)]
    leader.come(0.0, [0])
    assert not leader.is_over(0.0)
    leader.hear(3, _here(0))
    assert leader.is_over(0.0)
    assert leader.conclude(0.0, 0, 0).how == [IN, OUT, OUT, IN]
    assert [j for j, message in said if message.kind == Kind.DECISION] == [3]


def test_a_leader_alone_averages_with_nobody() -> None:
    leader, said = _leader()
    for j in (1, 2, 3):
        leader.hear(j, Message(Kind.LEAVES))
    leader.come(0.0, [0])
    assert leader.is_over(0.0)
    assert not leader.conclude(0.0, 0, 0).is_of_several
    assert Kind.DECISION not in {message.kind for _, message in said}


def test_a_leader_elsewhere_lets_those_go_on_that_wait_for_it() -> None:
    leader, said = _leader()
    leader.hear(1, Message(Kind.WAITS))  # a decision for it is on its way
    leader.hear(2, _here(0))
    leader.hear(2, Message(Kind.WAITS))
    leader.serve([0], _never)
    leader.serve([0], _never)
    assert said == [(2, Message(Kind.GO_ON))]


def test_a_leader_asks_once_for_those_that_wait_elsewhere() -> None:
    leader, said = _leader()
    leader.come(0.0, [0])
    leader.hear(1, _here(0))
    assert not leader.is_over(PATIENCE) and said == []
    assert not leader.is_over(2 * PATIENCE) and not leader.is_over(3 * PATIENCE)
    assert said == [(j, Message(Kind.ASK)) for j in (2, 3)]


def test_a_rank_waits_for_the_decision_that_takes_it_in() -> None:
    follower, said = _follower()
    assert follower.come(0.0, [7])
    assert said == [(0, _here_of([7])), (0, Message(Kind.WAITS))]
    assert not follower.is_over(9.0)
    found = follower.hear(0, Message(Kind.DECISION, 0, 7, [IN, OUT, IN, OUT, 0, 0]))
    assert found == Decision([IN, OUT, IN, OUT], 0, 7)
    assert follower.is_over(9.0)
    follower.conclude(9.0, 0, 0)
    assert follower.come(10.0, [8]) and said[2:] == [(0, _here_of([8])), (0, Message(Kind.WAITS))]


def _here_of(agreed: list[int]) -> Message:
    return Message(Kind.HERE, each=agreed)


def test_a_late_rank_does_not_wait_once_and_is_in_the_next() -> None:
    follower, said = _follower()
    follower.hear(0, Message(Kind.DECISION, 0, 0, [IN, IN, OUT, IN]))
    assert follower.come(0.0, [0]) and follower.is_over(0.0)
    follower.conclude(0.0, 0, 0)
    assert said[0] == (0, _here_of([0]))
    assert follower.come(1.0, [0]) and not follower.is_over(1.0), "it has said that it is there"
    assert [message.kind for _, message in said] == [Kind.HERE, Kind.WAITS, Kind.WAITS]
    assert follower.hear(0, Message(Kind.DECISION, 0, 1, [IN, IN, BEHIND, IN])) is not None
    assert follower.is_over(1.0)


def test_a_rank_that_is_let_go_on_does_not_wait_until_it_is_taken_in() -> None:
    follower, _ = _follower()
    follower.come(0.0, [0])
    follower.hear(0, Message(Kind.GO_ON))
    assert follower.is_over(0.0)
    follower.conclude(0.0, 0, 0)
    follower.waits = False
    assert not follower.come(1.0, [0])
    follower.hear(0, Message(Kind.DECISION, 0, 0, [IN, IN, IN, IN]))
    assert follower.come(2.0, [1])
    follower.conclude(2.0, 0, 0)
    follower.waits = False
    follower.hear(0, Message(Kind.GO_ON))  # of a wait that is over
    assert follower.come(3.0, [1]) and not follower.is_over(3.0)


def test_a_rank_elsewhere_comes_when_it_is_asked_and_may() -> None:
    follower, said = _follower()
    follower.serve([0], _never)
    follower.hear(0, Message(Kind.ASK))
    follower.serve([0], lambda: False)
    assert said == []
    follower.serve([0], lambda: True)
    follower.serve([0], _never)
    assert said == [(0, _here_of([0]))]
    follower.hear(0, Message(Kind.ASK))  # which crossed the answer
    follower.serve([0], _never)
    assert len(said) == 1


def test_who_leaves_is_free_when_no_decision_takes_it_in() -> None:
    follower, said = _follower()
    assert not follower.is_free()
    follower.leave()
    assert said == [(0, Message(Kind.LEAVES))] and not follower.is_free()
    follower.hear(0, Message(Kind.DECISION, 0, 0, [IN, IN, IN, IN]))  # which crossed it
    follower.hear(0, Message(Kind.LEFT))
    assert follower.is_free()
    follower.begin_again()
    assert not follower.is_free()


def test_without_a_leader_nobody_waits() -> None:
    follower, said = _follower()
    follower.come(0.0, [0])
    follower.hear(0, Message(Kind.ENDED))
    assert follower.is_over(0.0) and not follower.come(1.0, [0])
    follower.leave()
    assert follower.is_free() and Kind.LEAVES not in {message.kind for _, message in said}


class _Stuck(AssertionError):
    """A wait without an end."""


class _World:
    """Ranks that train, at random paces, each a generator that yields what it waits for.

    A boundary comes after each step, an averaging step after each second one since the rank's last. After
    each fifth step all meet in a collective of the script, and answer while they wait there. An average needs
    all that take part; each begins it at a boundary, within a step, or while it waits.
    """

    STEPS, EVERY, MEETING = 40, 2, 5

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.randint(2, 5)
        self.now = 0.0
        self.channels = Channels[Message](self.random, lambda: self.now)
        quorum, grace = self.random.randint(1, self.size), self.random.choice([0.0, 0.01, 1.0, None])
        leader = Leader(self.size, quorum, grace, self.channels.of(0), self.now)
        self.quorum = quorum
        self.seats: list[Seat] = [
            leader,
            *(Follower(r, self.size, self.channels.of(r)) for r in range(1, self.size)),
        ]
        self.begun: dict[int, set[int]] = {}  # by averaging step, who has begun it
        self.agreed, self.made, self.in_step = [0] * self.size, [0] * self.size, [False] * self.size
        self.due: list[Decision | None] = [None] * self.size
        self.met = [0] * self.size
        self.ended = [False] * self.size
        self.pace = [self.random.choice([0.01, 0.02, 0.05, 0.5]) for _ in range(self.size)]

    def _hear(self, rank: int) -> None:
        for sender, message in self.channels.take(rank):
            decision = self.seats[rank].hear(sender, message)
            if decision is not None and decision.how[rank] != OUT:
                self._take(rank, decision)

    def _take(self, rank: int, decision: Decision) -> None:
        assert self.due[rank] is None, "a decision takes a rank in that is in one"
        expected = IN if self.agreed[rank] == decision.number else BEHIND
        assert decision.how[rank] == expected
        self.due[rank] = decision
        self.made[rank] = -1 if self.in_step[rank] else 0

    def _begin(self, rank: int) -> None:
        decision = self.due[rank]
        if decision is not None:
            self.begun.setdefault(decision.number, set()).add(rank)

    def _finish(self, rank: int) -> Iterator[Callable[[], bool]]:
        """The average that this rank is in, at a boundary or where it waits for the others."""
        self._begin(rank)
        decision = self.due[rank]
        if decision is None:
            return
        members = {j for j, how in enumerate(decision.how) if how != OUT}
        yield lambda: self.begun[decision.number] == members
        self.agreed[rank], self.due[rank] = decision.number + 1, None

    def train(self, rank: int) -> Iterator[Any]:
        """What a rank does, from its first step until nobody takes it in any more."""
        seat = self.seats[rank]
        for step in range(1, self.STEPS + 1):
            self.in_step[rank] = True
            for _ in range(3):  # looks within a step
                yield self.now + self.random.random() * self.pace[rank]
                self._hear(rank)
                self._begin(rank)
            yield from self._finish(rank)
            self.in_step[rank] = False
            self.made[rank] += 1
            self._hear(rank)
            is_due = self.made[rank] > 0 and self.made[rank] % self.EVERY == 0
            if is_due and seat.come(self.now, [self.agreed[rank]]):

                def is_over() -> bool:
                    self._hear(rank)
                    return seat.is_over(self.now)

                yield is_over
                seat.waits = False
                decision = seat.conclude(self.now, 0, self.agreed[rank])
                if decision is not None and decision.is_of_several:
                    there = self.seats[0].there | {0}  # type: ignore[attr-defined]
                    assert sum(how != OUT for how in decision.how) >= min(self.quorum, len(there))
                    self._take(rank, decision)
            yield from self._finish(rank)
            if step % self.MEETING == 0:
                self.met[rank] += 1
                yield from self._elsewhere(rank, lambda: min(self.met) >= self.met[rank])
        seat.leave()
        while not seat.is_free():
            yield from self._finish(rank)
            yield lambda: self._heard(rank)
        yield from self._finish(rank)
        self.ended[rank] = True

    def _heard(self, rank: int) -> bool:
        self._hear(rank)
        return self.due[rank] is not None or self.seats[rank].is_free()

    def _elsewhere(self, rank: int, done: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        def is_done() -> bool:
            self._hear(rank)
            self._begin(rank)
            if self.due[rank] is None:
                self.seats[rank].serve([self.agreed[rank]], lambda: True)
            return done()

        yield is_done

    def run(self) -> None:
        """Until all have ended.

        Raises:
            _Stuck: Nobody has moved for so long that nobody will.
        """
        ranks = {rank: self.train(rank) for rank in range(self.size)}
        waits: dict[int, Any] = {rank: next(each) for rank, each in ranks.items()}
        moved = self.now
        while ranks:
            for rank in self.random.sample(sorted(ranks), len(ranks)):
                wait = waits[rank]
                if (wait <= self.now) if isinstance(wait, float) else wait():
                    moved = self.now
                    try:
                        waits[rank] = next(ranks[rank])
                    except StopIteration:
                        del ranks[rank]
            if self.now - moved > 30.0:
                raise _Stuck(f"ranks {sorted(ranks)} wait for each other")
            self.now += 0.005


@pytest.mark.parametrize("seed", range(60))
def test_random_ranks_all_end(seed: int) -> None:
    world = _World(seed)
    world.run()
    assert all(world.ended)
    assert max(world.agreed) >= world.STEPS // world.EVERY // 4


@pytest.mark.parametrize("seat", [Leader, Follower])
def test_without_an_answer_from_elsewhere_ranks_wait_for_each_other(
    seat: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat, "serve", lambda self, agreed, may_come: None)
    stuck = 0
    for seed in range(60):
        try:
            _World(seed).run()
        except _Stuck:
            stuck += 1
    assert stuck, "these ranks would not find a wait without an end"
