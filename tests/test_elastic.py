"""Elastic jobs: who lives goes on with the same step, who comes takes part, and halves never both go on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests import netns
from tests.checks import raises, says
from tests.elastic_run import come, reference, train
from tests.harness import ROOT, Died, Ranks, await_flag, flag, free_port, say, until
from trigram import _core, membership
from trigram.membership import _FRESH, _KINDS, Membership, _check_quorum, quorum

pytestmark = pytest.mark.waits


def await_step(ranks: Ranks, rank: int, step: int, timeout: float = 60.0) -> None:
    """Waits until a rank has done a step."""
    ranks.await_said(rank, ("did", step), timeout)


def the_same(results: list[Any], living: list[int]) -> dict[str, Any]:
    """All living ranks hold the same bits after the same number of steps."""
    first: dict[str, Any] = results[living[0]]
    for r in living:
        assert torch.equal(results[r]["weights"], first["weights"]), f"rank {r} differs"
        assert results[r]["steps"] == first["steps"]
        assert torch.equal(results[r]["count"], torch.full((3,), float(first["steps"]))), f"rank {r}"
    return first


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world, dies", [(2, {1: 4}), (3, {0: 3}), (4, {1: 3, 3: 6}), (4, {2: 5, 3: 5})])
def test_the_living_go_on_with_the_same_step(world: int, dies: dict[int, int], transport: str) -> None:
    steps = 10
    with Ranks(world, train, steps, "gradient_allreduce", dies, transport=transport) as ranks:
        results = ranks.results(90, dies=dies)
    living = [r for r in range(world) if r not in dies]
    for r in dies:
        assert results[r] == Died(-signal.SIGKILL)
    got = the_same(results, living)
    expected = [tuple(r for r in range(world) if dies.get(r, steps) > step) for step in range(steps)]
    assert got["history"] == expected
    torch.testing.assert_close(got["weights"], reference(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where, counts", [("inside", False), ("commit", True), ("after", True)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_step_counts_for_all_or_for_none(where: str, counts: bool, transport: str) -> None:
    """Whose averages all had before it died has taken part in that step; else the step is done without it."""
    world, steps, victim, last = 4, 12, 1, 5
    arguments = (steps, "gradient_allreduce", {victim: last}, 0.0, False, None, where)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        results = ranks.results(60, dies=[victim])
    living = [r for r in range(world) if r != victim]
    got = the_same(results, living)
    whole = last + counts
    expected = [tuple(range(world))] * whole + [tuple(living)] * (steps - whole)
    torch.testing.assert_close(got["weights"], reference(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_comes_back_gets_everything(victim: int, transport: str) -> None:
    world, steps = 3, 400
    arguments = (steps, "gradient_allreduce", {victim: 5}, 0.01)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        other = (victim + 1) % world
        await_step(ranks, other, 8)
        come(ranks, victim, *arguments, True)
        results = ranks.results(120)
    got = the_same(results, list(range(world)))
    entered = results[victim]["first"]
    assert 5 < entered < steps
    history = list(results[other]["history"])
    assert history[entered - 1] != history[entered] == tuple(range(world))
    assert results[victim]["history"] == history[entered:]
    # In its first step it has nothing to give.
    history[entered] = tuple(r for r in range(world) if r != victim)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_one_more_than_there_were() -> None:
    world, steps = 2, 400
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.01) as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "3"
        come(ranks, 2, steps, "gradient_allreduce", None, 0.01, True)
        results = ranks.results(120)
    got = the_same(results, [0, 1, 2])
    entered = results[2]["first"]
    history = list(results[0]["history"])
    assert history[-1] == (0, 1, 2) and history[entered - 1] == (0, 1)
    history[entered] = (0, 1)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


ALGORITHMS = [
    "bytegrad",
    "local_sgd",
    "diloco",
    "decentralized",
    "low_precision_decentralized",
    "async",
    "async_decentralized",
    "async_low_precision_decentralized",
    "push_sum",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_goes_on_and_lets_in(algorithm: str) -> None:
    world, steps, victim = 3, 300, 1
    arguments = (steps, algorithm, {victim: 5}, 0.01)
    with Ranks(world, train, *arguments, False, None, "before", True) as ranks:
        await_step(ranks, 0, 8)
        come(ranks, victim, *arguments, True, None, "before", True)
        results = ranks.results(120)
    entered = results[victim]["first"]
    assert 5 < entered < steps, "it came back, and in time"
    for r in range(world):
        assert bool(results[r]["weights"].isfinite().all()), f"rank {r}"
        assert results[r]["steps"] == steps and results[r]["history"][-1] == (0, 1, 2)
        assert torch.equal(results[r]["count"], torch.full((3,), float(steps))), "it got the buffers"
        assert results[r]["adam"] == {steps}, "it got the optimizer's state"
    the_same(results, list(range(world)))


@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco", "decentralized"])
def test_rounds_of_those_who_were_apart_are_of_all_again(algorithm: str) -> None:
    """When rank 2 dies rank 0 waits in the round that rank 1 has yet to reach."""
    world, steps, victim = 3, 60, 2
    arguments = (steps, algorithm, {victim: 12}, (0.0, 0.05, 0.03), False, None, "before", True)
    with Ranks(world, train, *arguments) as ranks:
        results = ranks.results(90, dies=[victim])
    the_same(results, [0, 1])


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", "decentralized"])
def test_who_leaves_is_gone_on_without(algorithm: str) -> None:
    world, steps, victim = 4, 60, 2
    arguments = (steps, algorithm, {victim: 12}, (0.0, 0.01, 0.02, 0.005), False, None, "leaves", True)
    with Ranks(world, train, *arguments, transport="tcp") as ranks:
        results = ranks.results(90)
    the_same(results, [0, 1, 3])


@pytest.mark.parametrize("algorithm", ["decentralized", "async_decentralized"])
def test_gossip_goes_on_beyond_the_neighbours_of_the_dead(algorithm: str) -> None:
    world, steps, victim = 5, 60, 3  # ranks 0 and 1 do not talk with it
    with Ranks(world, train, steps, algorithm, {victim: 5}, 0.005) as ranks:
        results = ranks.results(120, dies=[victim])
    living = [r for r in range(world) if r != victim]
    for r in living:
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"
    weights = [results[r]["weights"] for r in living]
    spread = max(float((a - b).norm()) for a, b in itertools.combinations(weights, 2))
    moved = float((weights[0] - reference([])).norm())
    assert spread < moved / 2, (spread, moved)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_rank_is_left_behind(transport: str) -> None:
    world, steps = 3, 300
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.005, transport=transport) as ranks:
        await_step(ranks, 1, 20)
        ranks.signal(1, signal.SIGSTOP)
        others = [ranks.ranks[r] for r in (0, 2)]
        end = time.monotonic() + 60
        while any(r.answer is None and not r.ended for r in others) and time.monotonic() < end:
            ranks.hear(0.2)
        if transport == "shm":  # it could wake up and write into others' memory
            assert ranks.ranks[1].process.exitcode == -signal.SIGKILL
        for number in (signal.SIGCONT, signal.SIGKILL):
            if ranks.ranks[1].process.is_alive():
                ranks.signal(1, number)
        results = ranks.results(30, dies=[1])
    got = the_same(results, [0, 2])
    history = got["history"]
    assert history[0] == (0, 1, 2) and history[-1] == (0, 2)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-8, atol=1e-11)


def test_who_enters_as_the_lowest_keeps_the_door() -> None:
    """Ranks 0 and 1 die; when 0 is back, nothing but its door lets 1 in."""
    world, steps = 3, 500
    arguments = (steps, "gradient_allreduce", {0: 5, 1: 5}, 0.01)
    with Ranks(world, train, *arguments) as ranks:
        await_step(ranks, 2, 8)
        for victim in (0, 1):
            come(ranks, victim, *arguments, True)
            until(
                lambda victim=victim: ranks.hear(0.1) and any("did" in s for s in ranks.ranks[victim].said),
                60,
            )
        results = ranks.results(120)
    got = the_same(results, [0, 1, 2])
    history = list(results[2]["history"])
    for newcomer in (0, 1):
        entered = results[newcomer]["first"]
        assert 5 < entered < steps and newcomer not in history[entered - 1]
        history[entered] = tuple(r for r in history[entered] if r != newcomer)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_replicas_are_compared_while_ranks_enter() -> None:
    """A newcomer's weights are on their way: that they differ is no error."""
    world, steps = 3, 300
    arguments = (steps, "gradient_allreduce", {1: 5}, 0.01)
    options = {"check_replicas": 1, "check_finite": True}
    with Ranks(world, train, *arguments, False, options) as ranks:
        await_step(ranks, 0, 8)
        come(ranks, 1, *arguments, True, options)
        results = ranks.results(120)
    the_same(results, [0, 1, 2])
    assert 5 < results[1]["first"] < steps


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "async"])
def test_who_knocks_and_goes_disturbs_nobody(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members come together for it and find nobody, or find that it cannot be reached."""
    import torch.distributed as dist

    world, steps = 2, 300
    secret = {"TRIGRAM_SECRET": "a long secret of this job"}
    with Ranks(world, train, steps, algorithm, None, 0.01, env=secret) as ranks:
        for r in range(world):
            await_step(ranks, r, 5)
        monkeypatch.setenv("TRIGRAM_SECRET", secret["TRIGRAM_SECRET"])
        port = int(ranks.env["MASTER_PORT"])
        store = dist.PrefixStore("trigram", dist.TCPStore("127.0.0.1", port, None, False))

        def turn() -> tuple[int, int]:
            live = json.loads(store.get("elastic/live"))
            return live["generation"], live["refused"]

        for comer in range(6, 12):
            before, knock = turn(), store.add("elastic/knocks", 1)
            card = _core.Rendezvous(comer, comer + 1, None, "127.0.0.1", "shm").card().hex()
            store.set(f"elastic/met/{knock}", "no")
            store.set(f"elastic/knock/{knock}", json.dumps({"rank": comer, "card": card}))
            store.set(f"elastic/alive/{knock}", "once")
            until(lambda before=before: turn() != before, 10, "all members to come together")
        results = ranks.results(60)
    for r in range(world):
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"
        assert set(results[r]["history"]) == {(0, 1)}


def through(rank: int, world: int, steps: int, algorithm: str, again: bool = False) -> dict[str, Any]:
    """Rank 0 is through long before the others, and lets its model go; rank 2 dies after that."""
    dies = {2: 60}
    done = train(rank, world, steps, algorithm, dies, 0.0 if rank == 0 else 0.05, again)
    trigram.shutdown()
    return done


@pytest.mark.parametrize("algorithm", ["async", "async_decentralized"])
def test_who_is_through_lets_others_in(algorithm: str) -> None:
    world, steps = 3, 150
    with Ranks(world, through, steps, algorithm) as ranks:
        ranks.await_said(0, ("did", steps - 1))
        await_step(ranks, 1, 63)
        (ranks.dir / "flag-comes-2").touch()
        ranks.restart(2, through, steps, algorithm, True)
        results = ranks.results(60)
    assert 60 <= results[2]["first"] < steps, "it begins where the slowest is"
    for r in range(world):
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"


# Quorum.


def damaged(rank: int, world: int, words: str, steps: int) -> dict[str, Any] | str:
    """A training whose connections the test can damage; the weights, or why this rank stops."""
    os.environ["TRIGRAM_CHAOS"] = f"{words}/{rank}"
    try:
        return train(rank, world, steps, "gradient_allreduce", None, 0.005)
    except trigram.PeerLostError as e:
        return str(e)


@pytest.mark.parametrize("fault", [1, 1, 2], ids=["flip", "flip-2", "cut"])
def test_who_is_given_up_does_not_go_on_alone(fault: int, tmp_path: Path) -> None:
    """It lives, and hears that it was given up before it hears that its connections are closed."""
    world, steps, victim = 4, 400, 2
    for r in range(world):
        (tmp_path / str(r)).write_bytes(bytes(4))
    with Ranks(world, damaged, str(tmp_path), steps, transport="tcp") as ranks:
        for r in range(world):
            await_step(ranks, r, 5)
        with (tmp_path / str(victim)).open("r+b") as word:
            word.write(bytes([fault]))
        results = ranks.results(120)
    assert isinstance(results[victim], str), "it has gone on alone"
    says(results[victim], f"ranks {victim} of 4 cannot reach ranks")
    got = the_same(results, [0, 1, 3])
    assert got["history"][-1] == (0, 1, 3)


def test_no_two_parts_both_go_on() -> None:
    """All ways to part up to six ranks in two, with any of them known to be dead."""
    for n in range(1, 7):
        ranks = list(range(n))
        for dead_mask, mask in itertools.product(range(1 << n), repeat=2):
            dead = [r for r in ranks if dead_mask >> r & 1]
            one = [r for r in ranks if r not in dead and mask >> r & 1]
            other = [r for r in ranks if r not in dead and r not in one]
            verdicts = [bool(a) and quorum(ranks, a, b) for a, b in ((one, other), (other, one))]
            assert sum(verdicts) == (1 if one or other else 0), (one, other, dead)


def test_who_has_no_state_has_no_voice() -> None:
    """Ranks 0 to 2 train, 3 and 4 have just entered on the side of rank 0, and the network is cut there."""
    silent = _KINDS.index("silent")

    def told(rank: int, away: set[int], fresh: set[int]) -> list[int]:
        return [rank in fresh, 0, 0, 0, 0, *(silent * (r in away) + _FRESH * (r in fresh) for r in range(5))]

    def goes_on(here: list[int], fresh: set[int]) -> bool:
        mine = Membership(list(range(5)), 5, (None, None, "auto"), None)
        away = set(range(5)) - set(here)
        try:
            _check_quorum(mine, here, torch.tensor([told(r, away, fresh) for r in here]))
        except trigram.PeerLostError:
            return False
        return True

    assert (goes_on([0, 3, 4], {3, 4}), goes_on([1, 2], {3, 4})) == (False, True)
    assert (goes_on([0, 3, 4], set()), goes_on([1, 2], set())) == (True, False)
    assert not goes_on([3, 4], {3, 4}) and goes_on([0, 1, 2], {3, 4}) and goes_on([0, 1], {3, 4})


def in_parts(rank: int, world: int, steps: int) -> tuple[str, int]:
    """Trains; how it ended, and after how many steps."""
    try:
        done = train(rank, world, steps, "gradient_allreduce", None, 0.01)
    except trigram.PeerLostError as e:
        return str(e), -1
    return "went on", done["steps"]


@pytest.mark.parametrize("one, other", [([0, 1], [2, 3]), ([0], [1]), ([0], [1, 2])])
def test_of_two_halves_one_goes_on(several_hosts: None, one: list[int], other: list[int]) -> None:
    world, steps = len(one) + len(other), 500
    switch = netns._switch()

    def ip(*words: str) -> None:
        subprocess.run(["ip", "-n", switch, *words], check=True)

    with Ranks(world, in_parts, steps, transport="auto", hosts=list(range(world))) as ranks:
        for r in range(world):
            await_step(ranks, r, 10)
        ip("link", "add", "br1", "type", "bridge")
        try:
            ip("link", "set", "br1", "up")
            for r in other:
                ip("link", "set", f"port{r}", "master", "br1")
            results = ranks.results(90)
        finally:
            for r in other:
                ip("link", "set", f"port{r}", "master", "br0")
            ip("link", "del", "br1")
    winners = one if len(one) >= len(other) else other
    for r in range(world):
        text, done = results[r]
        if r in winners:
            assert (text, done) == ("went on", steps), text
        else:
            assert done == -1
            says(text, "elastic", "cannot reach", f"{winners[0]}")


# Without a model.


def bare(rank: int, world: int) -> list[int]:
    """Collectives of the script's own: an error, `recover`, and on."""
    group = trigram.init(elastic=True)
    registered = trigram.empty(1000)
    for i in range(1000):
        if rank == 1 and i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        registered.fill_(float(rank))
        try:
            trigram.all_reduce(registered)
        except trigram.PeerLostError as e:
            assert e.rank == 1
            break
    assert trigram.recover() is group
    before = trigram.stats()["direct_bytes"]
    registered.fill_(float(rank))
    trigram.all_reduce(registered)
    assert torch.equal(registered, torch.full((1000,), 5.0))
    assert (trigram.rank(), trigram.world_size()) == ([0, 2, 3].index(rank), 3)
    if os.environ["TRIGRAM_TRANSPORT"] == "shm":
        assert trigram.stats()["direct_bytes"] > before, "memory registered before is registered still"
    raises(trigram.MisuseError, trigram.broadcast, registered, 1)
    says(raises(trigram.MisuseError, trigram.new_group, [0, 1]), "[0, 2, 3]")
    trigram.broadcast(registered, 3)
    return list(group.ranks)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_recover(transport: str) -> None:
    with Ranks(4, bare, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
        assert all("goes on with ranks 0, 2, 3" in ranks.log(r) for r in (0, 2, 3))
    assert [r for r in results if not isinstance(r, Died)] == [[0, 2, 3]] * 3


def refused(rank: int, world: int) -> None:
    """What cannot be elastic says so."""
    linear = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(trigram.MisuseError, match="optimizer"):
        trigram.with_bagua(linear, elastic=True)
    with pytest.raises(trigram.MisuseError, match="state_dict"):
        trigram.with_bagua(linear, optimizer=opt, elastic=[3])
    for words, options in [
        ("group", {"group": object()}),
        ("qadam", {"algorithm": "qadam"}),
        ("warm-up", {"algorithm": "powersgd"}),
    ]:
        with pytest.raises(trigram.UnsupportedError, match=words):
            trigram.with_bagua(linear, optimizer=opt, elastic=True, **options)
    sparse = torch.nn.Embedding(4, 4, sparse=True)
    with pytest.raises(trigram.UnsupportedError, match="sparse"):
        trigram.with_bagua(sparse, optimizer=torch.optim.SGD(sparse.parameters(), lr=0.1), elastic=True)
    with pytest.raises(trigram.UnsupportedError, match="helper"):
        trigram.init(elastic=True, helper=True)
    trigram.init()
    with pytest.raises(trigram.MisuseError, match="init"):
        trigram.with_bagua(linear, optimizer=opt, elastic=True)
    with pytest.raises(trigram.MisuseError, match="elastic"):
        trigram.recover()
    trigram.shutdown()
    trigram.init(elastic=True)
    one = trigram.with_bagua(linear, optimizer=opt, elastic=True)
    with pytest.raises(trigram.UnsupportedError, match="join"), trigram.join(one):
        pass
    two = torch.nn.Linear(3, 3)
    with pytest.raises(trigram.MisuseError, match="another model"):
        trigram.with_bagua(two, optimizer=torch.optim.SGD(two.parameters(), lr=0.1), elastic=True)
    assert one is not None
    flag(f"done{rank}")
    for r in range(world):
        await_flag(f"done{r}")
    say("over")


def test_what_cannot_be_elastic() -> None:
    with Ranks(2, refused) as ranks:
        ranks.results(60)


def late(rank: int, world: int, steps: int, change: str) -> str:
    """A newcomer that does not fit: what it is told."""
    try:
        if change == "model":
            trigram.init(elastic=True)
            net: Any = torch.nn.Linear(3, 3)
            trigram.with_bagua(net, optimizer=torch.optim.Adam(net.parameters()), elastic=True)
        else:
            train(rank, world, steps, "gradient_allreduce", None, 0.01, True)
    except trigram.TrigramError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        flag(f"entered-{rank}")
    return "it was let in"


UNFIT = {
    "secret": ({"TRIGRAM_SECRET": "another one, longer"}, ("AuthError", "rank 2", "TRIGRAM_SECRET")),
    "tls": ({"TRIGRAM_TLS": "1"}, ("Error", "TRIGRAM_TLS")),
    "transport": ({"TRIGRAM_TRANSPORT": "tcp"}, ("ConfigError", "TRIGRAM_TRANSPORT")),
    "model": ({}, ("MismatchError", "rank 2", "another model")),
}


@pytest.mark.parametrize("change", list(UNFIT))
def test_who_does_not_fit_is_told_and_disturbs_nobody(change: str) -> None:
    world, steps = 2, 500
    env, words = UNFIT[change]
    with Ranks(
        world, train, steps, "gradient_allreduce", None, 0.01, env={"TRIGRAM_SECRET": "the job's own"}
    ) as ranks:
        await_step(ranks, 0, 5)
        ranks.extra = {"WORLD_SIZE": "3"} | ranks.extra | env
        (ranks.dir / "flag-comes-2").touch()
        ranks.restart(2, late, steps, change)
        results = ranks.results(60)
    says(results[2], *words)
    got = the_same(results, [0, 1])
    assert got["steps"] == steps and got["history"][-1] == (0, 1)
    if change != "model":
        torch.testing.assert_close(got["weights"], reference([(0, 1)] * steps), rtol=1e-8, atol=1e-11)


def without_a_model(rank: int, world: int) -> list[int]:
    """Rank 2 comes late, and has collectives of its own only."""
    group = trigram.init(elastic=True)
    if rank == 2:
        assert trigram.rank() == -1
        for call in (
            trigram.stats,
            lambda: trigram.empty(3),
            lambda: trigram.new_group([0]),
            trigram.barrier,
        ):
            says(raises(trigram.MisuseError, call), "late", "has not entered")
        assert trigram.recover() is group
    else:
        say("in")
        until(lambda: trigram.recover().size == 3, 60)
    one = torch.ones(1)
    trigram.all_reduce(one)
    assert float(one) == 3.0 and trigram.rank() == rank
    return list(group.ranks)


def test_who_comes_late_without_a_model() -> None:
    with Ranks(2, without_a_model) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, without_a_model)
        assert ranks.results(60) == [[0, 1, 2]] * 3


def by_a_store(rank: int, world: int, port: int) -> int:
    """Rank 2 comes when the store that the others met in has gone and come back."""
    import torch.distributed as dist

    trigram.init(dist.TCPStore("127.0.0.1", port, is_master=False), rank, world, elastic=True)
    if rank == 2:
        return trigram.recover().size
    say("in")
    return int(until(lambda: trigram.recover().size == 3 and 3, 60))


def test_a_store_may_go_and_come_back() -> None:
    import torch.distributed as dist

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, by_a_store, port) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        del store
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, by_a_store, port)
        assert ranks.results(60) == [3, 3, 3]
    del store


def two_jobs(rank: int, world: int, port: int, again: bool = False) -> int:
    """Rank 1 dies and comes back; then all leave, and meet once more in the same store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    trigram.init(store, rank, world, elastic=True)
    say("in")
    if rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        trigram.recover()
    else:
        until(membership.has_lost, 30)
        until(lambda: trigram.recover().size == world, 60)
    trigram.barrier()
    trigram.shutdown()
    flag(f"out{rank}")
    for r in range(world):
        await_flag(f"out{r}")
    return trigram.init(store, rank, world, elastic=True, init_timeout=30).size


def test_all_may_meet_once_more() -> None:
    import torch.distributed as dist

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, two_jobs, port) as ranks:
        ranks.await_said(1, "in")
        ranks.restart(1, two_jobs, port, True)
        assert ranks.results(60) == [2, 2]
    del store


SCRIPT = """
    import os, pathlib, signal, sys, time, torch
    import torch.distributed as dist
    sys.path[:0] = {path!r}
    import trigram
    from tests.elastic_run import model, optimizer, loss_of, weights

    rank, steps, again = {rank}, {steps}, os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
    trigram.init(store, rank, {world}, elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    first = trigram.stats(net)["steps"]
    entered = pathlib.Path({entered!r})
    if again:
        entered.touch()
    for step in range(first, steps):
        if rank == 1 and step == 5 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        if not entered.exists():
            time.sleep(0.05 if step < steps - 50 else 0.5)
    print("END", rank, first, float(weights(net).sum()), flush=True)
"""


def test_a_worker_that_torchrun_restarts_rejoins(tmp_path: Path) -> None:
    """Each rank under an agent of its own, as on preemptible machines; the store is a process of its own."""
    import torch.distributed as dist

    world, steps, port = 3, 400, free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    path = [str(ROOT / "python"), str(ROOT)]
    agents = []
    for rank in range(world):
        script = tmp_path / f"rank{rank}.py"
        values = {"path": path, "rank": rank, "steps": steps, "port": port, "world": world}
        values["entered"] = str(tmp_path / "entered")
        script.write_text(textwrap.dedent(SCRIPT).format(**values))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=2"]
        with (tmp_path / f"log{rank}").open("w") as log:
            agents.append(
                subprocess.Popen(
                    [sys.executable, *command, str(script)], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
                )
            )
    try:
        codes = [agent.wait(120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    logs = [(tmp_path / f"log{r}").read_text() for r in range(world)]
    assert codes == [0] * world, "\n".join(logs)
    ends = [next(line for line in log.splitlines() if line.startswith("END")).split() for log in logs]
    assert int(ends[1][2]) > 5 and int(ends[0][2]) == 0
    assert len({e[3] for e in ends}) == 1
    del store


def test_who_has_no_secret_is_not_let_in() -> None:
    """A stranger who can write to the store knocks, with garbage and with a card that nobody sealed."""
    import torch.distributed as dist

    world, steps = 2, 300
    secret = {"TRIGRAM_SECRET": "a long secret of this job"}
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.01, env=secret) as ranks:
        await_step(ranks, 0, 5)
        port = int(ranks.env["MASTER_PORT"])
        store = dist.PrefixStore("trigram", dist.TCPStore("127.0.0.1", port, None, False))
        knocks = ["garbage", "[]", '{"rank": -1, "card": "00"}', '{"rank": 7, "card": "zz"}']
        knocks += ['{"rank": 7, "card": "%s"}' % ("ab" * 200), '{"rank": 8, "card": "00"}']
        ids = []
        for text in knocks:
            ids.append(store.add("elastic/knocks", 1))
            store.set(f"elastic/knock/{ids[-1]}", text)
        for beat in range(15):
            for i in ids:
                store.set(f"elastic/alive/{i}", str(beat))
            time.sleep(0.1)
        answered = [i for i in ids if store.check([f"elastic/answer/{i}"])]
        assert all(b"refused" in store.get(f"elastic/answer/{i}") for i in answered)
        assert json.loads(store.get("elastic/live"))["asked"] is None, "members came together for a stranger"
        results = ranks.results(60)
    got = the_same(results, [0, 1])
    assert got["history"] == [(0, 1)] * steps
