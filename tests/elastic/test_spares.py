"""Spare ranks: they train along, count for nothing, and take the place of who is gone in the same step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch

import trigram
from tests.support.checks import close, raises, says
from tests.support.elastic_run import (
    awaited,
    backward,
    batch,
    come,
    loss_of,
    model,
    optimizer,
    reference,
    weights,
)
from tests.support.harness import Died, Ranks, await_flag, flag, run, say
from trigram.data import BalancedBatchSampler
from trigram.elastic.membership import current
from trigram.elastic.spares import Spares

pytestmark = pytest.mark.waits


def _trains(
    rank: int,
    world: int,
    steps: int,
    spares: list[int],
    dies: dict[int, int] | None = None,
    algorithm: str = "gradient_allreduce",
    where: str = "before",
    again: bool = False,
    options: dict[str, Any] | None = None,
    drains: dict[int, int] | None = None,
    pause: float = 0.0,
) -> dict[str, Any]:
    """A rank; `where` it dies is as in `elastic_run.train`."""
    torch.set_num_threads(1)
    trigram.init(elastic=True, spare=rank in spares)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True, bucket_mb=0.001, **(options or {}))
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    trained, places = [], []
    try:
        for step in range(first, steps):
            loss = loss_of(net, step, rank)
            mine = (dies or {}).get(rank) == step and not again
            if (drains or {}).get(rank) == step:
                trigram.drain()
            if mine and where == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            opt.zero_grad()
            backward(net, loss, where, mine, world if step in (dies or {}).values() else 0)
            trained.append(tuple(current()[1].training()))
            places.append((trigram.rank(), trigram.world_size(), trigram.is_spare()))
            opt.step()
            say(("did", step))
            time.sleep(0.5 if steps - step <= 70 and awaited() else pause)
    except SystemExit:
        pass
    return {"weights": weights(net), "trained": trained, "places": places, "first": first}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("where", ["before", "inside", "after", "commit"])
def test_a_spare_takes_the_place_in_the_same_step(where: str, transport: str) -> None:
    """No step is made with fewer ranks; all have the bits of each other, and the weights of one process."""
    world, steps = 4, 9
    arguments = (world, _trains, steps, [3], {1: 4}, "gradient_allreduce", where)
    results = run(*arguments, transport=transport, dies=[1])
    assert results[1] == Died(-signal.SIGKILL)
    # What all had when it died counts as it was; a spare has its place in what is averaged again.
    alone = 5 if where in ("commit", "after") else 4
    found = results[0]["trained"]
    counted = [*[(0, 1, 2)] * alone, *[(0, 2, 3)] * (steps - alone)]
    if where in ("after", "commit"):  # who looks after the pass may see the next membership already
        found[4] = counted[4]
    assert found == counted
    for r in (0, 2, 3):
        assert torch.equal(results[r]["weights"], results[0]["weights"])
    close(results[0]["weights"], reference(counted), 1e-9)
    assert results[3]["places"][3] == (3, 3, True) and results[3]["places"][-1] == (2, 3, False)
    assert results[0]["places"][3] == (0, 3, False)


@pytest.mark.parametrize(
    "algorithm, options",
    [
        ("bytegrad", {}),
        ("topk", {"fraction": 0.5}),
        ("powersgd", {"warmup_steps": 0}),
        ("lossless", {}),
        ("sharded", {}),
        ("central:median/full/sync", {}),
        ("central:trimmed:1/full/sync", {}),
        ("gradient_allreduce", {"sample_weight": 2.0}),
        ("gradient_allreduce", {"check_finite": True}),
    ],
)
def test_what_every_algorithm_leaves_out(algorithm: str, options: dict[str, Any]) -> None:
    """A job with spares trains as one without them: to the bit until a rank is lost, if sums are exact."""
    steps, dies = 8, {1: 4}
    with_spares = run(5, _trains, steps, [3, 4], dies, algorithm, "before", False, options, dies=[1])
    for r in (0, 2, 3, 4):
        assert torch.equal(with_spares[r]["weights"], with_spares[0]["weights"]), f"rank {r}"
    assert with_spares[0]["trained"] == [(0, 1, 2)] * 4 + [(0, 2, 3)] * 4
    if algorithm in ("lossless", "sharded", "gradient_allreduce"):
        close(with_spares[0]["weights"], reference(with_spares[0]["trained"]), 1e-6)
    elif algorithm.startswith("central:"):
        close(with_spares[0]["weights"], _robust(algorithm, with_spares[0]["trained"]), 1e-4)
    else:
        close(with_spares[0]["weights"], reference(with_spares[0]["trained"]), 0.2)


def _robust(algorithm: str, trained: list[tuple[int, ...]]) -> torch.Tensor:
    """The weights of one process; of three ranks, a mean trimmed by one is the median."""
    net = model()
    opt = optimizer(net)
    for step, ranks in enumerate(trained):
        each = []
        for r in ranks:
            opt.zero_grad()
            loss_of(net, step, r).backward()
            each.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for p, grads in zip(net.parameters(), zip(*each, strict=True), strict=True):
            p.grad = torch.stack(grads).median(0).values
        opt.step()
    return weights(net)


def test_centred_clipping_leaves_them_out() -> None:
    """As without them: what it clips to depends on all steps."""
    name = "central:clip:1/full/sync"
    with_spares, without = run(5, _trains, 8, [3, 4], None, name), run(3, _trains, 8, [], None, name)
    close(with_spares[4]["weights"], without[0]["weights"], 1e-9)


def test_who_comes_back_has_its_place_again() -> None:
    world, steps = 4, 400
    arguments = (steps, [3], {1: 5}, "gradient_allreduce", "before")
    with Ranks(world, _trains, *arguments, False, None, None, 0.005) as ranks:
        ranks.await_said(0, ("did", 20), 60)
        come(ranks, 1, *arguments, True, None, None, 0.005, run=_trains)
        results = ranks.results(120)
    assert results[0]["trained"][10] == (0, 2, 3) and results[0]["trained"][-1] == (0, 1, 2)
    assert results[3]["places"][-1] == (3, 3, True) and results[1]["places"][-1] == (1, 3, False)
    for r in range(world):
        assert torch.equal(results[r]["weights"], results[0]["weights"])


def test_a_spare_that_joins_later_is_one() -> None:
    """It gets the state in its first step; then it takes a place."""
    world, steps = 3, 400
    arguments = (steps, [2], {1: 380})
    with Ranks(world, _joins_later, *arguments) as ranks:
        results = ranks.results(120, dies=[1])
    assert results[2]["first"] > 0 and results[2]["places"][0] == (2, 2, True)
    assert results[0]["trained"][0] == (0, 1) and results[0]["trained"][-1] == (0, 2)
    assert torch.equal(results[2]["weights"], results[0]["weights"])
    close(results[0]["weights"], reference(results[0]["trained"]), 1e-9)


def _joins_later(rank: int, world: int, steps: int, spares: list[int], dies: dict[int, int]) -> Any:
    if rank == 2:
        await_flag("entered-0")
        time.sleep(0.3)
    else:
        os.environ["WORLD_SIZE"] = "2"
        flag("comes-2")
    return _trains(rank, 3, steps, spares, dies, pause=0.01)


@pytest.mark.parametrize("dies, trains", [([3], (0, 1, 2)), ([3, 1], (0, 2, 4)), ([0, 1, 2], (3, 4))])
def test_spares_die_too(dies: list[int], trains: tuple[int, ...]) -> None:
    results = run(5, _trains, 10, [3, 4], {r: 3 + k for k, r in enumerate(dies)}, dies=dies)
    living = [r for r in range(5) if r not in dies]
    for r in living:
        assert results[r]["trained"][-1] == trains
        assert torch.equal(results[r]["weights"], results[living[0]]["weights"])
    close(results[living[0]]["weights"], reference(results[living[0]]["trained"]), 1e-9)


def test_a_rank_that_leaves_is_replaced() -> None:
    results = run(4, _trains, 10, [3], None, "sharded", "before", False, None, {0: 4})
    assert results[1]["trained"] == [(0, 1, 2)] * 5 + [(1, 2, 3)] * 5
    close(results[1]["weights"], reference(results[1]["trained"]), 1e-9)


def _spare_of(rank: int, world: int, spares: list[int], elastic: bool) -> str:
    return raises(trigram.TrigramError, trigram.init, elastic=elastic, spare=rank in spares)


def test_what_is_no_job() -> None:
    for said in run(2, _spare_of, [0, 1], True):
        says(said, "all 2 ranks are spares")
    for said in run(2, _spare_of, [1], False):
        says(said, "spare", "elastic=True")


def _wrong_word(rank: int, world: int) -> str:
    os.environ["TRIGRAM_SPARE"] = "maybe" if rank else ""
    return raises(trigram.TrigramError, trigram.init, elastic=True)


def test_a_wrong_setting_is_told() -> None:
    for said in run(2, _wrong_word):
        says(said, "TRIGRAM_SPARE='maybe'", "0 or 1")


def _refused(rank: int, world: int) -> None:
    os.environ["TRIGRAM_SPARE"] = str(int(rank == 2))
    trigram.init(elastic=True)
    assert trigram.is_spare() == (rank == 2) and trigram.world_size() == 2
    for name in ("local_sgd", "decentralized", "async"):
        net = model()
        error = raises(
            trigram.UnsupportedError, trigram.with_bagua, net, name, optimizer=optimizer(net), elastic=True
        )
        says(error, "init(spare=True)", "mean of gradients")
    net = model()
    momentum = trigram.QAdam(net.parameters())
    error = raises(
        trigram.UnsupportedError, trigram.with_bagua, net, "qadam", optimizer=momentum, elastic=True
    )
    says(error, "init(spare=True)", "momentum")
    trigram.with_bagua(net, optimizer=optimizer(net), elastic=True)
    says(raises(trigram.UnsupportedError, trigram.switch, net, "local_sgd"), "init(spare=True)")


def test_what_averages_weights_has_no_spares() -> None:
    run(3, _refused)


def test_who_counts() -> None:
    """Whatever comes and goes: as many as ever, if there are so many; the others first; the lowest spares."""
    for others, spares in itertools.product(range(4), range(4)):
        if not others:
            continue
        started = list(range(others + spares))
        known = Spares().with_members(started, started[others:])
        assert known.training(started) == started[:others] and known.idle(started) == started[others:]
        for count in range(1, len(started) + 1):
            for members in itertools.combinations(started, count):
                now = known.with_members(members)
                training, idle = now.training(members), now.idle(members)
                assert sorted([*training, *idle]) == list(members) and training
                assert len(training) == min(others, len(members))
                assert all(r in training for r in members if r < others)
                assert not idle or max([r for r in training if r >= others], default=0) < min(idle)
    grown = Spares(frozenset([2]), 2).with_members([0, 1, 2, 3, 4])
    assert grown.training([0, 1, 2, 3, 4]) == [0, 1, 3, 4]


# A rank that joins is no outlier.


def _joins_a_median(rank: int, world: int, steps: int) -> dict[str, Any]:
    if rank == 2:
        await_flag("entered-0")
        time.sleep(0.3)
    else:
        os.environ["WORLD_SIZE"] = "2"
        flag("comes-2")
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, "central:median/full/sync", optimizer=opt, elastic=True)
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    members = []
    for step in range(first, steps):
        opt.zero_grad()
        x, y = batch(step, 0)  # the same on all ranks: the median is the gradient, whoever takes part
        torch.nn.functional.cross_entropy(net(x), y).backward()
        members.append(tuple(trigram.stats(net)["ranks"]))
        opt.step()
        time.sleep(0.5 if steps - step <= 50 and awaited() else 0.02)
    return {"weights": weights(net), "members": members}


def test_a_rank_that_joins_is_not_in_a_robust_average() -> None:
    """Its zeros were in the median of its first step."""
    results = run(3, _joins_a_median, 100)
    assert (0, 1, 2) in results[0]["members"] and results[0]["members"][0] == (0, 1)
    close(results[0]["weights"], reference([(0,)] * 100), 1e-9)


# What a reader with fresh eyes has found.


class _Branches(torch.nn.Module):
    """Only some ranks use the second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.one(inputs)
        return out + self.two(inputs) if both else out


def _only_the_spare(
    rank: int, world: int, algorithm: str, set_to_none: bool, until: int, passes: int
) -> torch.Tensor:
    """All use the second layer in the first steps; the last of so many passes in a step averages."""
    trigram.init(elastic=True, spare=rank == 2)
    net = _Branches()
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)  # moves what has a gradient of zeros
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True)
    for step in range(6):
        opt.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            with trigram.no_sync(net) if number < passes - 1 else contextlib.nullcontext():
                net(torch.ones(2, 4), step < until or (rank == 2 and step > 3)).sum().backward()
        opt.step()
    return weights(net)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "algorithm, until, passes",
    [
        ("topk", 2, 1),
        ("lossless", 2, 1),
        ("sharded", 2, 1),
        ("sharded", 0, 2),
        *[("gradient_allreduce", until, passes) for until in (0, 2) for passes in (1, 2)],
    ],
)
def test_what_only_a_spare_uses_stays_as_it_is(
    algorithm: str, until: int, passes: int, set_to_none: bool
) -> None:
    first, *others = run(3, _only_the_spare, algorithm, set_to_none, until, passes)
    for other in others:
        assert torch.equal(other, first)


def _counts(rank: int, world: int, again: bool, ends: list[int], spares: list[int]) -> Any:
    """Each rank's gradient is its number plus one: the update says who has counted."""
    trigram.init(elastic=True, spare=rank in spares)
    net = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    seen = []
    for step in range(first, 300):
        if rank in ends and step == 5 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        before = float(net.weight)
        (net(torch.ones(1, 1, dtype=torch.float64)) * 10.0**rank).sum().backward()
        opt.step()
        seen.append(round(before - float(net.weight), 6))
        say(("did", step))
        time.sleep(0.5 if step >= 250 and awaited() else 0.01)
    return seen


@pytest.mark.parametrize("world, ends, spares", [(2, [0], [1]), (3, [1], [2]), (4, [1, 2], [0, 3])])
def test_as_many_count_while_ranks_come_back(world: int, ends: list[int], spares: list[int]) -> None:
    """Who joins has nothing to contribute to its first step: the spare keeps its place until that is over."""
    with Ranks(world, _counts, False, ends, spares) as ranks:
        ranks.await_said(spares[0], ("did", 20), 60)
        for rank in ends:
            come(ranks, rank, True, ends, spares, run=_counts)
        results = ranks.results(120)
    count = world - len(spares)
    for r in spares:
        parts = [sum(str(round(count * update)).count(digit) for digit in "1") for update in results[r]]
        assert parts == [count] * len(parts), f"rank {r}: {sorted(set(results[r]))}"
    last = sum(10.0**r for r in range(world) if r not in spares) / count
    assert results[spares[0]][0] == results[spares[0]][-1] == round(last, 6)


def _weights_of_the_first(rank: int, world: int) -> float:
    trigram.init(elastic=True, spare=rank == 0)
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, 42.0 if trigram.rank() == 0 else -1.0)
    net = trigram.with_bagua(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), elastic=True)
    return float(net.weight[0, 0])


def test_weights_are_those_of_the_rank_that_is_0() -> None:
    assert run(3, _weights_of_the_first) == [42.0] * 3


def _not_a_number(rank: int, world: int) -> float:
    trigram.init(elastic=True, spare=rank == 2)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True, check_finite=True)
    net(torch.ones(1, 1) * (float("nan") if rank == 2 else 1.0 + 2 * rank)).sum().backward()
    opt.step()
    return float(net.weight)


def test_a_spare_may_have_gradients_that_are_not_finite() -> None:
    assert run(3, _not_a_number) == [-2.0] * 3


def _replaced(rank: int, world: int) -> float:
    trigram.init(elastic=True, spare=rank == 2)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    with trigram.no_sync(net):  # averaged at the update, where no pass has
        (net(torch.ones(1, 1)) * (1000.0 if rank == 2 else 1.0 + 2 * rank)).sum().backward()
    opt.step()
    return float(net.weight)


def test_what_is_averaged_at_the_update_leaves_spares_out() -> None:
    assert run(3, _replaced) == [-2.0] * 3


def _data(rank: int, world: int) -> list[list[int]]:
    trigram.init(elastic=True, spare=rank == 0)
    net = model()
    trigram.with_bagua(net, optimizer=optimizer(net), elastic=True)
    sampler = BalancedBatchSampler([1.0] * 12, batch_size=2, speeds="measured")
    sampler.set_epoch(1)
    return list(sampler)


def test_spares_have_the_batches_of_others() -> None:
    spare, one, two = run(3, _data)
    assert spare in (one, two) and sorted(i for batch in [*one, *two] for i in batch) == list(range(12))


def _too_few(rank: int, world: int) -> None:
    trigram.init(elastic=True, spare=rank >= 2)
    net = model()
    error = raises(
        trigram.UnsupportedError,
        trigram.with_bagua,
        net,
        "central:trimmed:1/full/sync",
        optimizer=optimizer(net),
        elastic=True,
    )
    says(error, "at least 3 ranks; there are 2")


def test_a_robust_average_counts_without_spares() -> None:
    run(4, _too_few)
