"""``elastic_all_gather``: what a script gathers is the same on all remaining ranks, whoever is lost when."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from typing import Any

import pytest
import torch

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_run import loss_of, model, optimizer, weights
from tests.support.harness import Died, Ranks, await_flag, flag, run, say, scratch, until
from tests.support.marks import long
from trigram.elastic import membership
from trigram.model import consensus, elastic_gather

pytestmark = pytest.mark.waits

Answers = list[tuple[int, str, list[Any]]]
WEIGHTS: dict[str, dict[str, Any]] = {
    "local_sgd": {"every": 3}, "diloco": {"every": 3}, "decentralized": {}, "async": {}
}  # fmt: skip
"""Algorithms that average weights."""


EVALUATED: dict[str, dict[str, Any]] = {"gradient_allreduce": {}, "local_sgd": {"every": 3}, "async": {}}


def _evaluates(
    rank: int, world: int, algorithm: str, by: str, where: str, again: bool = False
) -> tuple[list[float], int]:
    """A training that looks at the mean of the weights after each third step; the means, and the steps. Rank
    2 dies the second time when others are in that call: they wait for it, or have averages already."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True, **EVALUATED[algorithm])
    means: list[float] = []
    real = consensus.gather

    def late(*arguments: Any) -> Any:
        if len(means) == 1 and not again:
            flag(f"late-{rank}")
            if rank == 2:
                for other in range(2):
                    await_flag(f"late-{other}")
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    if where == "averaged":
        consensus.gather = late
    flag(f"entered-{rank}" + "-again" * again)
    for step in range(trigram.stats(net)["steps"], 30):
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        if step > 9 and not (scratch() / "flag-entered-2-again").exists():
            time.sleep(0.3)
        if step % 3 < 2:
            continue
        if where == "waits" and len(means) == 1 and not again:
            if rank == 2:
                for other in range(2):
                    await_flag(f"comes-{other}")
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            flag(f"comes-{rank}")
        if by == "block":
            with trigram.consensus(net):
                mean = weights(net)
        else:
            mean = torch.cat([t.double().flatten() for t in trigram.consensus_state_dict(net).values()])
        means.append(float(mean.double().sum()))
    return means, trigram.stats(net)["steps"]


@pytest.mark.parametrize("where", ["waits", "averaged"])
@pytest.mark.parametrize("by", ["block", "state_dict"])
@pytest.mark.parametrize("algorithm", list(EVALUATED))
def test_a_rank_is_lost_while_others_evaluate(algorithm: str, by: str, where: str) -> None:
    """All that remain have the same mean, go on, and the rank comes back to calls that are theirs."""
    with Ranks(3, _evaluates, algorithm, by, where) as ranks:
        until(lambda: not ranks.hear(0.1) or ranks.ranks[2].ended, 60, "a loss")
        ranks.restart(2, _evaluates, algorithm, by, where, True)
        results = ranks.results(90)
    assert [steps for _, steps in results] == [30] * 3
    means = [found for found, _ in results]
    assert len(means[0]) == 10 and means[0][:-1] == means[1][:-1], means
    # Who has joined in this step calls it alone; at the end others may have gone.
    assert 1 < len(means[2]) < 9 and means[2][1:-1] == means[0][-len(means[2]) + 1 : -1], means


def _gathers(
    rank: int,
    world: int,
    steps: int | None,
    algorithm: str,
    miss: dict[str, Any] | None = None,
    again: bool = False,
) -> tuple[Answers, torch.Tensor]:
    """A training that gathers before a step, in it, and twice after it; its answers, and the weights. Without
    `steps` it goes on until a rank sees the flag "stop".

    `miss`: a rank that is `late` gets no answer of a call, because the one that `dies` is lost, while the
    others have it and go on.
    """
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    if "buffers" in (miss or {}):  # which ranks exchange before each pass
        net.insert(1, torch.nn.BatchNorm1d(16).double())
        opt = optimizer(net)
    net = trigram.with_bagua(
        net, algorithm, optimizer=opt, elastic=True, bucket_mb=0.001, **WEIGHTS.get(algorithm, {})
    )
    answers: Answers = []

    def ask(step: int, where: str) -> bool:
        here = miss is not None and not again and (step, where) == miss["at"]
        real = elastic_gather.gather
        if here and miss is not None and rank == miss["late"]:

            def lost(*arguments: Any) -> Any:
                real(*arguments)
                until(membership.has_lost, 60)
                raise trigram.PeerLostError("lost in the call", miss["dies"])

            elastic_gather.gather = lost
        stop = (scratch() / "flag-stop").exists()
        mine = {"rank": rank, "step": step, "stop": stop, "t": torch.full((2,), float(rank))}
        value = trigram.elastic_all_gather(mine)
        elastic_gather.gather = real
        assert all(torch.equal(v["t"], torch.full((2,), float(v["rank"]))) for v in value)
        assert {v["step"] for v in value} == {step}, value
        answers.append((step, where, [v["rank"] for v in value]))
        if here and miss is not None and rank == miss["dies"]:
            await_flag("has it")
            os.kill(os.getpid(), signal.SIGKILL)
        if here:
            flag("has it")
        return any(v["stop"] for v in value)

    if again:
        assert trigram.elastic_all_gather(rank) == [rank], "a rank that joins asks nobody"
    for step in itertools.count(trigram.stats(net)["steps"]):
        if not again or answers:
            ask(step, "before")
        loss = loss_of(net, step, rank)
        if algorithm in WEIGHTS:
            says(raises(trigram.MisuseError, trigram.elastic_all_gather, rank), "before the forward pass")
        else:
            ask(step, "inside")
        opt.zero_grad()
        loss.backward()
        opt.step()
        ask(step, "after")
        if step % 10 == 0 or again:
            say(step)
        stop = ask(step, "after again")
        if stop if steps is None else step + 1 == steps:
            break
    trigram.shutdown()
    # Between two averaging steps each rank has weights of its own.
    return answers, torch.zeros(1) if algorithm in WEIGHTS else weights(net)


def _compare(results: list[Any], whole: int) -> dict[tuple[int, str], list[int]]:
    """All have had the same answers while they took part, and have the same weights; returns the answers."""
    first = {(step, where): who for step, where, who in results[whole][0]}
    for answers, final in (r for r in results if not isinstance(r, Died)):
        for step, where, who in answers:
            assert who == first[step, where], (step, where, who, first[step, where])
        torch.testing.assert_close(final, results[whole][1], rtol=0, atol=0)
    return first


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", long("sharded"), long("bytegrad")])
@pytest.mark.parametrize("where", ["before", "inside", long("after"), "after again"])
@pytest.mark.parametrize("late", [0, long(1)])
def test_who_missed_the_answer_gets_that_of_the_others(algorithm: str, where: str, late: int) -> None:
    """The others are in the next call, or in the next step, or in the middle of this one."""
    if (algorithm, where) == ("local_sgd", "inside"):
        pytest.skip("refused")
    miss = {"at": (5, where), "dies": 2, "late": late}
    with Ranks(3, _gathers, 12, algorithm, miss, transport="tcp") as ranks:
        results = ranks.results(90, dies=[2])
    answers = _compare(results, 0)
    assert len(answers) == 12 * (3 if algorithm in WEIGHTS else 4)
    assert answers[5, where] == [0, 1, 2], "its value was in the answer that others had"
    assert answers[11, "after"] == [0, 1]


@pytest.mark.parametrize("where", ["before", "after again"])
@pytest.mark.parametrize("late", [0, 1])
def test_what_ranks_do_together_before_a_pass_is_made_again(where: str, late: int) -> None:
    """The rank that has missed an answer comes to it later than the one that was in it."""
    miss = {"at": (5, where), "dies": 2, "late": late, "buffers": True}
    with Ranks(3, _gathers, 12, "gradient_allreduce", miss, transport="tcp") as ranks:
        answers = _compare(ranks.results(60, dies=[2]), 0)
    assert answers[11, "after"] == [0, 1]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", *map(long, [*WEIGHTS, "sharded"])])
@pytest.mark.parametrize("seed", [0, *map(long, range(1, 6))])
def test_ranks_are_killed_at_any_time_and_come_back(algorithm: str, seed: int) -> None:
    """Four times, one of four ranks; the calls of those that remain, and of those that join, agree."""
    chance = random.Random(seed)
    with Ranks(4, _gathers, None, algorithm, transport="tcp") as ranks:
        for _ in range(4):
            victim = chance.randrange(1, 4)
            said = len(ranks.ranks[0].said)
            until(lambda said=said: ranks.hear(0.05) and len(ranks.ranks[0].said) > said + 2, 60)
            time.sleep(chance.random() / 5)
            ranks.signal(victim, signal.SIGKILL)
            ranks.restart(victim, _gathers, None, algorithm, None, True)
            until(lambda v=victim: ranks.hear(0.05) and ranks.ranks[v].said, 60, "it has joined")
        (ranks.dir / "flag-stop").touch()
        answers = _compare(ranks.results(60), 0)
    assert answers[0, "before"] == [*answers.values()][-1] == [0, 1, 2, 3]
    assert any(len(who) == 3 for who in answers.values())


def _plain(rank: int, world: int) -> list[Any]:
    trigram.init()
    error = raises(trigram.UnsupportedError, trigram.elastic_all_gather, {"x": object()})
    says(error, "elastic_all_gather", "object")
    return trigram.elastic_all_gather([None, rank, "ä" * rank])


def test_a_job_of_fixed_ranks() -> None:
    assert run(3, _plain) == [[[None, 0, ""], [None, 1, "ä"], [None, 2, "ää"]]] * 3


def _without_a_model(rank: int, world: int) -> list[Any]:
    trigram.init(elastic=True)
    before = trigram.elastic_all_gather(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [before, trigram.elastic_all_gather(rank), trigram.elastic_all_gather(rank)]


def test_without_a_model() -> None:
    with Ranks(3, _without_a_model, transport="tcp") as ranks:
        results = ranks.results(60, dies=[1])
    assert results[0] == results[2] == [[0, 1, 2], [0, 2], [0, 2]]


def _spare(rank: int, world: int) -> list[Any]:
    trigram.init(elastic=True, spare=rank == 2)
    return trigram.elastic_all_gather(rank)


def test_what_a_spare_has_does_not_count() -> None:
    assert run(3, _spare) == [[0, 1]] * 3


def _at_different_calls(rank: int, world: int, loses: bool) -> str:
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = torch.nn.Linear(6, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trigram.with_bagua(net, optimizer=optimizer, elastic=True)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        if loses and rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        return raises(trigram.MismatchError, trigram.elastic_all_gather, 1)
    return raises(trigram.MismatchError, net(torch.ones(3, 6)).sum().backward)


@pytest.mark.parametrize("loses", [False, True])
def test_ranks_at_different_calls_are_told(loses: bool) -> None:
    """Before their deadline, also after a rank was lost: one gathers, the others average."""
    with Ranks(3, _at_different_calls, loses) as ranks:
        said, *others = ranks.results(60, dies=[2] if loses else [])
    says(said, "rank 0 called all_gather", "did not, but called all_reduce")
    says(others[0], "average different gradients")
