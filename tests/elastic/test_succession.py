"""Which part of an elastic job goes on where a network has parted it and looks like deaths."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.elastic.test_partial_cuts import break_connection
from tests.support import elastic_run, netns
from tests.support.checks import says
from tests.support.harness import Ranks, scratch, until
from tests.support.marks import long
from trigram.elastic import knowledge
from trigram.elastic.knowledge import Knowledge
from trigram.elastic.replicas import Replicas
from trigram.elastic.succession import KEY, Entry, Succession
from trigram.runtime.live_store import ReconnectingStore


def entering(store: Any, epoch: int, survivors: set[int], joining: set[int]) -> Iterator[str]:
    """A leader that enters the members of an epoch, and is stopped before each thing that it asks of the
    store; ends with the verdict."""
    mine = Entry(epoch, frozenset(survivors | joining)).text()
    while True:
        yield ""
        now = store.get(KEY) if store.check([KEY]) else b""
        last = Entry.read(now)
        if last is not None and not last.is_followed_by(epoch, survivors):
            yield "lost"
            return
        if now == mine:
            yield "entered"
            return
        yield ""
        store.compare_set(KEY, now, mine)


def test_of_all_parts_one_at_most_goes_on() -> None:
    """Parts break again and again, each leader is delayed as it happens, ranks join, epochs fail to begin and
    are begun again; never are there two parts that both may begin another epoch."""
    for seed in range(300):
        break_again_and_again(seed)


def break_again_and_again(seed: int) -> None:
    """One history."""
    draw = random.Random(seed)
    store = dist.HashStore()
    Succession(ReconnectingStore(store, None)).begin(range(6))
    parts: list[tuple[int, set[int], Any, set[int]]] = []
    alone = [(0, set(range(6)))]  # epoch and members of each part
    fresh = 6
    for _ in range(60):
        if alone and draw.random() < 0.4:
            epoch, ranks = alone.pop(draw.randrange(len(alone)))
            here = {r for r in ranks if draw.random() < 0.5}
            for part in (here, ranks - here):
                if part:
                    joining = {fresh} if draw.random() < 0.3 else set()
                    fresh += len(joining)
                    parts.append((epoch + 1, part, entering(store, epoch + 1, part, joining), joining))
        if parts:
            at = draw.randrange(len(parts))
            epoch, part, leader, joining = parts[at]
            if verdict := next(leader):
                parts.pop(at)
                if verdict == "entered":
                    failed = draw.random() < 0.3
                    alone.append((epoch - 1, part) if failed else (epoch, part | joining))
        last = Entry.read(store.get(KEY))
        assert last is not None
        able = [part for epoch, part in alone if last.is_followed_by(epoch + 1, part)]
        assert len(able) <= 1, (able, last)


def test_what_is_entered() -> None:
    """The rules one by one, with a real store."""
    store = ReconnectingStore(dist.HashStore(), None)
    succession = Succession(store)
    succession.begin(range(4))
    assert succession.enter(1, [0, 1], [7], 0.0) == "entered"
    assert succession.enter(1, [2, 3], [], 0.0) == "lost"
    assert succession.enter(1, [0, 1], [7], 0.0) == "entered", "again, as nobody joined in the end"
    assert succession.enter(2, [0, 7], [], 0.0) == "entered", "who has joined is a member"
    assert succession.enter(2, [1], [], 0.0) == "lost"
    assert succession.enter(1, [0], [], 0.0) == "lost", "an earlier epoch"
    succession.begin(range(2))
    assert succession.enter(1, [0], [], 0.0) == "entered", "another job in the same store"


def test_what_anybody_writes_there_holds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process may write to the store."""
    monkeypatch.setenv("TRIGRAM_SECRET", "a secret")
    store = ReconnectingStore(dist.HashStore(), None)
    for text in (
        b"",
        b"nonsense",
        b"\xff" * 90,
        b"0" * 64 + b'{"epoch": 9, "ranks": [5]}',
        b"0" * 64 + b"[" * 9999,
    ):
        store.put(KEY, text.decode("latin-1"))
        assert Succession(store).enter(1, [0, 1], [], 0.0) == "entered", text
    assert Succession(store).enter(1, [2], [], 0.0) == "lost"


class Unable:
    """A store without compare_set, as some of torch's are."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if name == "compare_set":
            raise NotImplementedError
        return getattr(self.store, name)


def test_a_store_that_cannot_tell() -> None:
    succession = Succession(ReconnectingStore(Unable(), None))
    succession.begin(range(4))
    assert succession.enter(1, [0, 1], [5], 0.0) == "unknown"
    assert succession.enter(2, [5], [], 0.0) == "unknown"


def test_who_is_waited_for() -> None:
    """Only ranks of other hosts may be alive though their connections are gone."""

    def cut_off(here: list[int], hosts: list[int], **losses: str) -> tuple[list[int], bool]:
        gone = {int(r[1:]): kind for r, kind in losses.items()}
        table = torch.stack([knowledge.row(False, 0, [False] * 4, gone, (), len(hosts)) for _ in here])
        known = Knowledge(table, range(len(hosts)), here, Replicas())
        return known.cut_off(hosts), known.outvote(known.cut_off(hosts))

    assert cut_off([1], [0, 1], _0="dead") == ([0], False)
    assert cut_off([0], [0, 1], _1="dead") == ([1], True)
    assert cut_off([1], [0, 0], _0="dead") == ([], True), "its kernel knows"
    assert cut_off([1], [0, 1], _0="left") == ([], True), "it said so"
    assert cut_off([2, 3], [0, 0, 1, 1], _0="dead", _1="dead") == ([0, 1], False)
    assert cut_off([0, 3], [0, 0, 1, 1], _1="dead", _2="dead") == ([], True)


def parted(rank: int, world: int, breaks: dict[int, list[int]], steps: int) -> tuple[Any, str]:
    """Trains while this host's connections with some others break; who took part last, or why it stopped."""
    for other in breaks[rank]:
        threading.Thread(target=break_connection, args=(netns.address(other),), daemon=True).start()
    try:
        return elastic_run.train(rank, world, steps, pause=0.02)["history"][-1], ""
    except trigram.PeerLostError as error:
        return None, str(error)


def test_the_beginning_is_entered_when_the_store_answers() -> None:
    """The store does not answer at first, and has still what an earlier job left."""
    store = ReconnectingStore(dist.HashStore(), lambda: None)
    Succession(store).begin([0, 2])
    away = iter([True, True, False])

    class Slow(ReconnectingStore):
        def __call__(self, operation: Any, seconds: float = 1.0) -> Any:
            return None if next(away, False) else store(operation)

    Succession(Slow(None, lambda: None)).begin([0, 1])
    assert Succession(store).enter(1, [0, 1], [], 0.0) == "entered"


def while_it_is_away(rank: int, world: int, breaks: dict[int, list[int]], steps: int) -> tuple[Any, str]:
    """As `parted`; from the break on the store does not answer, until the test says so."""
    asked = ReconnectingStore.__call__

    def gated(self: ReconnectingStore, *about: Any) -> Any:
        is_away = (scratch() / "flag-break").exists() and not (scratch() / "flag-back").exists()
        return None if is_away else asked(self, *about)

    ReconnectingStore.__call__ = gated  # type: ignore[method-assign]
    return parted(rank, world, breaks, steps)


@pytest.mark.waits
def test_one_part_stops_when_the_store_is_back(several_hosts: None) -> None:
    """Both have gone on, as they must where the store may have died with the others."""
    breaks = {0: [1, 2], 1: [0], 2: [0]}
    with Ranks(3, while_it_is_away, breaks, 500, transport="tcp", hosts=[0, 1, 2]) as ranks:
        for rank in range(3):
            ranks.await_said(rank, ("did", 20))
        (ranks.dir / "flag-break").touch()
        until(lambda: "continues with ranks 0" in ranks.log(0), 30, "one part")
        until(lambda: "continues with ranks 1, 2" in ranks.log(1), 30, "the other")
        time.sleep(0.5)
        (ranks.dir / "flag-back").touch()
        results = ranks.results(90)
    lasts = [last for last, _ in results]
    assert lasts in ([(0,), None, None], [None, (1, 2), (1, 2)]), results
    for last, why in results:
        if last is None:
            says(why, "elastic", "continue the job")


@pytest.mark.waits
@pytest.mark.parametrize(
    "one, other", [([0], [1]), ([0, 1], [2, 3]), ([0], [1, 2]), long([0, 3], [1, 2]), long([2, 3], [0, 1])]
)
def test_of_two_parts_that_take_each_other_for_dead_one_goes_on(
    several_hosts: None, one: list[int], other: list[int]
) -> None:
    """Every connection between them is reset, as by a firewall that is started anew, and all ranks run on."""
    world = len(one) + len(other)
    breaks = dict.fromkeys(one, other) | dict.fromkeys(other, one)
    with Ranks(world, parted, breaks, 250, transport="tcp", hosts=list(range(world))) as ranks:
        for rank in range(world):
            ranks.await_said(rank, ("did", 20))
        (ranks.dir / "flag-break").touch()
        results = ranks.results(60)
    winners = max(one, other, key=lambda part: (len(part), -min(part)))
    for rank, (last, why) in enumerate(results):
        if rank in winners:
            assert last == tuple(sorted(winners)), results
        else:
            assert last is None, results
            says(why, "elastic", "lost their connections with", "continue the job")
