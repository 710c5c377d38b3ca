"""Batches of elastic jobs: each sample of an epoch counts once, whoever is lost or joins."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_run import awaited, come
from tests.support.harness import Died, Ranks, flag, run, say, scratch
from trigram.data import ElasticLoader
from trigram.data.dealing import Dealing

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_counts_once(seed: int) -> None:
    """Whoever is lost in which step, comes or goes between two."""
    chance = random.Random(seed)
    one = Dealing(chance.randrange(1, 200), chance.randrange(1, 9), chance.choice([None, seed]))
    ranks = list(range(chance.randrange(1, 7)))
    for epoch in range(2):
        assert one.epoch == epoch and sorted(one.order()) == list(range(one.samples))
        used: Counter[int] = Counter()
        while one.deal(ranks):
            shares = {r: one.of(r) for r in ranks}
            assert len({len(share) for share in shares.values()}) == 1
            counted = [r for r in ranks if chance.random() > 0.1] or ranks[:1]
            twin = Dealing(one.samples, one.batch, one.seed)
            twin.load(one.state())  # a rank that joins now
            for each in (one, twin):
                each.settle(counted)
            assert twin.state() == one.state()
            for r in counted:
                used.update(shares[r])
            ranks = counted + [r for r in range(8) if r not in counted and chance.random() < 0.1]
        assert set(used.values()) <= {1} and one.samples - len(used) < len(ranks)
        one.begin(epoch + 1)


def test_steps_of_an_epoch() -> None:
    one = Dealing(50, 8, 0)
    for ranks in (1, 2, 3, 7):
        one.begin(0)
        made = 0
        while one.deal(range(ranks)):
            one.settle(range(ranks))
            made += 1
        one.begin(0)
        assert one.steps(ranks) == made


def _trains(
    rank: int,
    world: int,
    epochs: int,
    samples: int,
    dies: dict[int, int] | None = None,
    where: str = "before",
    again: bool = False,
    workers: int = 0,
    spares: Sequence[int] = (),
    drains: dict[int, int] | None = None,
    recovers: bool = False,
) -> dict[str, Any]:
    """Writes which samples it has used, after each pass that counted."""
    torch.set_num_threads(1)
    trigram.init(elastic=True, spare=rank in spares)
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), 0.001)
    # Forked: ranks of these tests are children of a fork server, and would start one of their own, which
    # outlives a rank that is killed.
    fork = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = ElasticLoader(TensorDataset(torch.arange(float(samples))), 4, seed=3, **fork)
    trigram.with_bagua(net, optimizer=opt, elastic=[loader])
    flag(f"entered-{rank}")
    used, step, fresh = [], 0, again
    log = (scratch() / f"used-{rank}-{again}").open("w")
    try:
        while loader.epoch < epochs:
            for (x,) in loader:
                mine = (dies or {}).get(rank) == step and not again
                if mine:
                    time.sleep(0.5)
                if mine and where == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if (drains or {}).get(rank) == step:
                    trigram.drain()
                idle = trigram.is_spare()
                if mine and where == "inside":
                    net.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                opt.zero_grad()
                net(x[:, None] / samples).square().mean().backward()
                if not fresh and not (idle and trigram.is_spare()):
                    for sample in x.tolist():
                        print(loader.epoch, int(sample), file=log, flush=True)
                fresh = False  # the first step of a rank that joins does not count
                opt.step()
                step += 1
                if recovers:
                    trigram.recover()
                say(("did", step))
                time.sleep(0.3 if awaited() else 0.01)
    except SystemExit:
        pass
    return {"used": used, "steps": step}


def _used(ranks: Ranks, epochs: int, samples: int) -> list[Counter[int]]:
    found = [Counter[int]() for _ in range(epochs)]
    for file in ranks.dir.glob("used-*"):
        for line in file.read_text().splitlines():
            epoch, sample = map(int, line.split())
            found[epoch][sample] += 1
    return found


@pytest.mark.parametrize("where, workers", [("before", 0), ("inside", 0), ("inside", 2)])
def test_samples_of_a_lost_rank_are_dealt_again(where: str, workers: int) -> None:
    epochs, samples = 2, 101
    with Ranks(3, _trains, epochs, samples, {1: 4}, where, False, workers) as ranks:
        results = ranks.results(60, dies=[1])
        found = _used(ranks, epochs, samples)
    assert results[1] == Died(-signal.SIGKILL) and results[0]["steps"] == results[2]["steps"]
    for used in found:
        assert set(used.values()) == {1}, [n for n, times in used.items() if times > 1]
        assert samples - len(used) < 3


@pytest.mark.parametrize("recovers", [False, True], ids=["in a step", "in recover"])
def test_a_rank_that_joins_goes_on_where_the_others_are(recovers: bool) -> None:
    """Also if it is admitted between two steps, when no batch of the next one has been dealt."""
    epochs, samples = 6, 100
    more = 0, (), None, recovers
    with Ranks(3, _trains, epochs, samples, {1: 4}, "before", False, *more) as ranks:
        ranks.await_said(0, ("did", 6), 60)
        come(ranks, 1, epochs, samples, None, "before", True, *more, run=_trains)
        results = ranks.results(90)
        found = _used(ranks, epochs, samples)
    assert results[1]["steps"] > 3
    for used in found:
        assert set(used.values()) == {1} and samples - len(used) < 3


def _checkpoint(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 dies in the third step; the loader's state after that step."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), 0.001)
    loader = ElasticLoader(TensorDataset(torch.arange(60.0)), 4)
    trigram.with_bagua(net, optimizer=opt, elastic=[loader])
    for step, (x,) in enumerate(loader):
        if rank == 1 and step == 2:
            net.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        net(x[:, None]).square().mean().backward()
        opt.step()
        if step == 2:
            return loader.state_dict()
    raise AssertionError("too few samples")


def test_a_checkpoint_after_a_loss_has_the_samples_that_did_not_count() -> None:
    with Ranks(3, _checkpoint) as ranks:
        results = ranks.results(60, dies=[1])
    one = Dealing(60, 4, 0)
    one.load(results[0])
    assert results[0] == results[2] and one.left == 60 - 12 - 12 - 8 and len(one.returned) == 4


def test_with_a_spare_and_a_rank_that_leaves() -> None:
    epochs, samples = 2, 90
    with Ranks(4, _trains, epochs, samples, {0: 3}, "inside", False, 0, [3], {2: 8}) as ranks:
        ranks.results(60, dies=[0])
        found = _used(ranks, epochs, samples)
    for used in found:
        assert set(used.values()) == {1} and samples - len(used) < 3, used


def test_another_change_before_the_next_batch() -> None:
    """Who counted in the last pass is known after it: here a rank leaves between the pass and the batch."""
    epochs, samples = 2, 110
    arguments = epochs, samples, {1: 4}, "inside", False, 0, (), {2: 4}, True
    with Ranks(4, _trains, *arguments) as ranks:
        ranks.results(60, dies=[1])
        found = _used(ranks, epochs, samples)
    for used in found:
        assert set(used.values()) == {1} and samples - len(used) < 4, used


def _fixed(rank: int, world: int) -> list[list[int]]:
    trigram.init()
    loader = ElasticLoader(TensorDataset(torch.arange(21)), 4, shuffle=False)
    assert len(loader) == 3
    kept = None
    for x, (batch,) in enumerate(loader):
        if x == 1:
            kept = loader.state_dict()
        last = batch
    assert last.numel() == 2 and loader.epoch == 1
    loader.load_state_dict(kept or {})
    rest = [batch.tolist() for (batch,) in loader]
    loader.set_epoch(0)
    whole = [batch.tolist() for (batch,) in loader]
    # A checkpoint in a step resumes after it.
    assert rest == whole[2:], (rest, whole)
    return whole


def test_in_a_job_that_is_not_elastic() -> None:
    results = run(2, _fixed)
    assert results[0] == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17]]
    assert sorted(itertools.chain(*results[0], *results[1])) == list(range(20))


def _refused(rank: int, world: int) -> None:
    data = TensorDataset(torch.arange(8.0))
    says(raises(trigram.ConfigError, lambda: ElasticLoader(data, 0)), "batch_size=0")
    says(raises(trigram.MisuseError, lambda: ElasticLoader(data, 2, sampler=[0])), "sampler")
    says(raises(trigram.MisuseError, lambda: ElasticLoader(iter([]), 2)), "no length")  # type: ignore[arg-type]
    trigram.init(elastic=True)
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    call = lambda: trigram.with_bagua(  # noqa: E731
        net, "local_sgd", optimizer=opt, elastic=[ElasticLoader(data, 2)]
    )
    says(raises(trigram.UnsupportedError, call), "ElasticLoader", "local_sgd")


def test_what_is_refused() -> None:
    run(2, _refused)
