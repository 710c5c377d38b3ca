"""Elastic jobs whose optimizer is sharded: no part of its state is lost, and all parts are of one step."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
import torch

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_run import await_step, awaited, come, loss_of, model
from tests.support.elastic_sharded import BEFORE, DURING, LATER, Moments, reference, same_state, train
from tests.support.harness import Died, Ranks, flag, run, say, until
from tests.support.marks import long
from trigram.sharded.elastic.moving import Cut

pytestmark = pytest.mark.waits


def check(results: list[Any], living: list[int], history: list[tuple[int, ...]], kind: str = "adamw") -> None:
    """All living ranks hold the same bits, and these are those of a training in one process."""
    expected, state = reference(history, kind)
    for r in living:
        assert results[r]["steps"] == len(history), f"rank {r}"
        assert torch.equal(results[r]["weights"], results[living[0]]["weights"]), f"rank {r} differs"
        same_state(results[r]["state"], results[living[0]]["state"], f"rank {r}")
    first = results[living[0]]
    torch.testing.assert_close(first["weights"], expected, rtol=1e-8, atol=1e-11)
    for k, of in state["state"].items():
        for name, value in of.items():
            torch.testing.assert_close(first["state"]["state"][k][name], value, rtol=1e-7, atol=1e-10)


def died(world: int, moments: Moments, steps: int) -> list[tuple[int, ...]]:
    """Who takes part in which step."""
    last = {r: at + (where in DURING + LATER) for r, (at, where) in moments.items()}
    return [tuple(r for r in range(world) if step < last.get(r, steps)) for step in range(steps)]


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("n", range(1, 12))
def test_who_holds_what(n: int, copies: int) -> None:
    owners = tuple(3 * r + 1 for r in range(n))
    cut = Cut(0, owners, copies)
    for q, owner in enumerate(owners):
        holders = cut.holders(q)
        assert holders[0] == owner and len(set(holders)) == len(holders) == min(copies, n)
        assert {r for r in owners if q in cut.parts(r)} == set(holders)
        assert cut.parts(owner)[0] == q and len(cut.parts(owner)) == min(copies, n)
    half = owners[: (n + 1) // 2]  # one of two hosts
    assert set(cut.sources(half)) <= set(half)
    lost = cut.holders(0)
    if len(lost) < n:
        with pytest.raises(trigram.PeerLostError, match=f"{len(lost)} copies"):
            cut.sources(set(owners) - set(lost))


@pytest.mark.parametrize("world, transport", [(3, "shm"), (4, "tcp"), long(3, "tcp"), long(4, "shm")])
@pytest.mark.parametrize("where", BEFORE + DURING)
def test_a_death_at_any_moment_loses_nothing(where: str, world: int, transport: str) -> None:
    steps, moments = 12, {1: (5, where)}
    with Ranks(world, train, steps, moments, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
    assert results[1] == Died(-signal.SIGKILL)
    check(results, [r for r in range(world) if r != 1], died(world, moments, steps))


SEEN = [
    ("gathering", "commit", 0),
    ("gathering", "commit", 5),
    ("gathered", "gather", 5),
    ("stepped", "gather", 5),
]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("where, seen, at", SEEN)
def test_ranks_that_learn_of_a_death_at_different_places(
    where: str, seen: str, at: int, transport: str
) -> None:
    """Rank 2 has yet to update, or to get the weights, when the ranks change: the others are beyond that."""
    world, steps, moments = 4, 12, {1: (at, where)}
    arguments = (steps, moments, 0.0, False, "adamw", (2, at, seen))
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
        assert "saw a loss" in ranks.ranks[2].said
    check(results, [0, 2, 3], died(world, moments, steps))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pass_that_others_have_yet_to_prepare(transport: str) -> None:
    """Also without sharding: the others may wait for rank 2 to prepare the next step, which has yet to count
    the last one."""
    world, steps, moments = 4, 12, {1: (5, "stepped")}
    options = {"algorithm": "gradient_allreduce"}
    arguments = (steps, moments, 0.0, False, "adamw", (2, 5, "commit"), 10, options)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
        assert "saw a loss" in ranks.ranks[2].said
    check(results, [0, 2, 3], died(world, moments, steps))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_death_while_parts_move(transport: str) -> None:
    """Rank 0 uses the new cut; rank 3 has all of it, and does not know that the others have; rank 2 dies."""
    world, steps, moments = 4, 12, {1: (5, "stepped"), 2: (5, "moved")}
    arguments = (steps, moments, 0.0, False, "adamw", (3, 6, "move"))
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        results = ranks.results(60, dies=[1, 2])
        assert "saw a loss" in ranks.ranks[3].said
    check(results, [0, 3], died(world, moments, steps))


@pytest.mark.parametrize("where, seen", [("state", ""), ("has state", ""), ("told", ""), ("told", "state")])
def test_a_death_in_state_dict(where: str, seen: str) -> None:
    world, steps, moments = 3, 25, {1: (9, where)}
    arguments = (steps, moments, 0.0, False, "adamw", (2, 9, seen) if seen else (-1, -1, ""))
    with Ranks(world, train, *arguments, transport="tcp") as ranks:
        results = ranks.results(60, dies=[1])
        assert ("saw a loss" in ranks.ranks[2].said) == bool(seen)
    assert [results[r]["states"] for r in (0, 2)] == [2, 2]
    check(results, [0, 2], died(world, moments, steps))


DEATHS: dict[str, tuple[int, Moments]] = {
    "down to one": (2, {0: (5, "gathering")}),
    "one after the other": (4, {1: (3, "after"), 2: (5, "stepped"), 0: (8, "updated")}),
    "in the first step": (3, {2: (0, "forward"), 1: (0, "update")}),
    "a host": (4, {2: (5, "gathering"), 3: (5, "update")}),
    "two of five": (5, {1: (5, "backward"), 2: (5, "stepped")}),
}


@pytest.mark.parametrize("deaths", list(DEATHS))
def test_several_deaths(deaths: str) -> None:
    steps, (world, moments) = 12, DEATHS[deaths]
    with Ranks(world, train, steps, moments) as ranks:
        results = ranks.results(90, dies=moments)
    check(results, [r for r in range(world) if r not in moments], died(world, moments, steps))


def test_a_codec() -> None:
    """The residuals begin at zero again when the ranks change; all ranks have the same means nevertheless."""
    steps, moments = 12, {1: (5, "gathering")}
    options = {"algorithm": "bytegrad", "state": "sharded"}
    arguments = (steps, moments, 0.0, False, "adamw", (-1, -1, ""), 10, options)
    with Ranks(3, train, *arguments, transport="tcp") as ranks:
        results = ranks.results(60, dies=moments)
    assert torch.equal(results[0]["weights"], results[2]["weights"])


def lose(rank: int, world: int, *arguments: Any) -> str:
    """What is said when all copies of a part are lost."""
    try:
        train(rank, world, *arguments)
    except trigram.PeerLostError as e:
        return f"{type(e).__name__}: {e}"
    return "it went on"


@pytest.mark.parametrize("copies", [2, 3])
def test_all_copies_of_a_part_at_once(copies: int) -> None:
    """With two copies the state of rank 1 is gone, and all say so; with three it is not."""
    world, steps, moments = 4, 12, {1: (5, "after"), 3: (5, "after")}
    options = {"copies": copies}
    arguments = (steps, moments, 0.0, False, "adamw", (-1, -1, ""), 10, options)
    with Ranks(world, lose if copies == 2 else train, *arguments) as ranks:
        results = ranks.results(60, dies=moments)
    if copies == 3:
        return check(results, [0, 2], died(world, moments, steps))
    for r in (0, 2):
        says(results[r], "ranks 1, 3", "2 copies", "optimizer's state", "checkpoint", "copies=")


@pytest.mark.parametrize("victim, transport", [(0, "shm"), long(2, "tcp")])
@pytest.mark.parametrize("kind", ["adamw", "whole"])
def test_who_comes_back_gets_its_parts(victim: int, transport: str, kind: str) -> None:
    world, steps = 3, 100
    arguments = (steps, {victim: (5, "gathering" if kind == "adamw" else "after")}, 0.01)
    with Ranks(world, train, *arguments, False, kind, transport=transport) as ranks:
        other = (victim + 1) % world
        await_step(ranks, other, 8)
        come(ranks, victim, *arguments, True, kind, run=train)
        results = ranks.results(120)
    entered = results[victim]["first"]
    history = list(results[other]["history"])
    assert 5 < entered < steps and history[-1] == (0, 1, 2)
    history[entered] = tuple(r for r in range(world) if r != victim)  # it has nothing to give
    check(results, list(range(world)), history, kind)
    total = sum(p.numel() for p in model().parameters() if kind == "adamw" or p.dim() == 2)
    assert sum(results[r]["own"] for r in range(world)) == total
    assert sum(results[r]["copied"] for r in range(world)) == total


def test_a_death_while_a_rank_joins_and_one_more_than_there_were() -> None:
    """Rank 1 dies when it has got its parts of the cut in which rank 3 joins."""
    world, steps = 3, 120
    arguments = (steps, {1: (12, "moved")}, 0.02)
    with Ranks(world, train, *arguments) as ranks:
        await_step(ranks, 0, 14)
        ranks.env["WORLD_SIZE"] = "4"
        come(ranks, 3, steps, None, 0.02, True, run=train)
        results = ranks.results(120, dies=[1])
    entered = results[3]["first"]
    history = list(results[0]["history"])
    assert 12 < entered < steps and history[-1] == (0, 2, 3)
    history[entered] = (0, 2)
    check(results, [0, 2, 3], history)


def held(rank: int, world: int, copies: int) -> dict[str, Any]:
    """Trains a larger model; what this rank holds, and what a loss of options and a load say."""
    trigram.init(elastic=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(200, 200, bias=False) for _ in range(3)])
    opt = torch.optim.AdamW(net.parameters(), lr=0.001)
    fresh = opt.state_dict()
    trigram.with_bagua(net, "sharded", optimizer=opt, elastic=True, copies=copies)
    opt.load_state_dict(fresh)  # before the first step it is allowed
    for _ in range(2):
        opt.zero_grad()
        net(torch.ones(4, 200)).square().mean().backward()
        opt.step()
    values = sum(v.numel() for s in opt.state.values() for v in s.values() if v.dim())
    says(raises(trigram.UnsupportedError, opt.load_state_dict, opt.state_dict()), "elastic", "first step")
    says(raises(trigram.UnsupportedError, trigram.local_shards, net), "elastic")
    says(raises(trigram.UnsupportedError, trigram.switch, net, "bytegrad"), "elastic")
    for group in opt.param_groups:
        group["lr"] += rank
    for _ in range(3):  # options are compared now and then
        try:
            opt.zero_grad()
            net(torch.ones(4, 200)).square().mean().backward()
            opt.step()
        except trigram.MismatchError as e:
            says(str(e), "options", "lr", "schedulers")
            return {"values": values, "of": 2 * sum(p.numel() for p in net.parameters())}
    raise AssertionError("ranks stepped with other options")


@pytest.mark.parametrize("world, copies", [(3, 2), (4, 2), (4, 3), (2, 2)])
def test_what_a_rank_holds(world: int, copies: int) -> None:
    for result in run(world, held, copies):
        share = result["values"] / result["of"]
        assert abs(share - copies / world) < 0.01, share


def loads(rank: int, world: int, again: bool = False) -> tuple[float, list[float]]:
    """A script that loads a checkpoint when it starts, also when it starts again."""
    trigram.init(elastic=True)
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.5 if again else 0.01)
    old = torch.optim.AdamW(net.parameters(), lr=0.3)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    old.step()
    net = trigram.with_bagua(net, "sharded", optimizer=opt, elastic=True, bucket_mb=0.0005)
    opt.load_state_dict(old.state_dict())
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    for step in range(first, 60):
        if rank == 1 and step == 5 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        say(("did", step))
        time.sleep(0.5 if step > 30 and awaited() else 0.01)
    counts = {float(s["step"]) for s in opt.state_dict()["state"].values()}
    return opt.param_groups[0]["lr"], sorted(counts)


def test_a_joining_rank_may_load_a_checkpoint() -> None:
    """It gets the job's state; what it has loaded does not count."""
    with Ranks(3, loads) as ranks:
        await_step(ranks, 0, 8)
        come(ranks, 1, True, run=loads)
        results = ranks.results(60)
    assert results == [(0.3, [61.0])] * 3


def refused(rank: int, world: int) -> None:
    trigram.init(elastic=True)
    for words, options in [
        (("shards", "gradients", "full"), {"gradients": "shards"}),
        (("overlap=True", "overlap=False"), {"overlap": True}),
        (("fused=True", "repeated"), {"fused": True}),
        (("copies", "2 or more"), {"copies": 1}),
        (("copies", "2 or more"), {"copies": "two"}),
    ]:
        net = model()
        opt = torch.optim.AdamW(net.parameters())
        call = (trigram.with_bagua, net, "sharded")
        says(raises(trigram.UnsupportedError, *call, optimizer=opt, elastic=True, **options), *words)
    net = model()
    opt = torch.optim.AdamW(net.parameters())
    call = (trigram.with_bagua, net, "sharded")
    says(raises(trigram.MisuseError, *call, optimizer=opt, copies=2), "copies=2", "elastic=True")
    says(raises(trigram.UnsupportedError, trigram.with_bagua, net, "local_sgd", copies=2), "copies")


def test_what_cannot_be_sharded_and_elastic() -> None:
    run(2, refused)


@pytest.mark.parametrize("seed, transport", [(1, "shm"), long(2, "tcp"), long(3, "shm"), long(4, "tcp")])
def test_deaths_at_random_times(seed: int, transport: str) -> None:
    """Each rank compares weights and gathered states, bit for bit, with a plain optimizer's, in all steps."""
    world, steps, draw = 4, 400, random.Random(seed)
    arguments = (steps, None, 0.002)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        (ranks.dir / "flag-comes-99").touch()  # somebody is to come until all have
        await_step(ranks, 0, 3)
        for _ in range(3):
            victim = draw.randrange(world)
            time.sleep(draw.random() * 0.1)
            ranks.signal(victim, signal.SIGKILL)
            time.sleep(draw.random() * 0.3)
            come(ranks, victim, *arguments, True, run=train)
            until(
                lambda victim=victim: (
                    ranks.hear(0.1) and any("did" in said for said in ranks.ranks[victim].said if said)
                ),
                60,
            )
        (ranks.dir / "flag-entered-99").touch()
        results = ranks.results(120)
    for r in range(world):
        assert results[r]["steps"] == steps and results[r]["history"][-1] == (0, 1, 2, 3)
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r} differs"
        same_state(results[r]["state"], results[0]["state"], f"rank {r}")


def test_from_two_ranks_to_one_and_back() -> None:
    steps, arguments = 100, (100, {0: (5, "updated")}, 0.02)
    with Ranks(2, train, *arguments) as ranks:
        await_step(ranks, 1, 8)
        come(ranks, 0, *arguments, True, run=train)
        results = ranks.results(60)
    entered = results[0]["first"]
    history = list(results[1]["history"])
    assert 8 < entered < steps and history[6] == (1,) and history[-1] == (0, 1)
    history[entered] = (1,)
    check(results, [0, 1], history)
