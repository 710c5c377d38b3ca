"""Two parts of an elastic job never both go on."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import netns, patience
from tests.support.checks import says
from tests.support.elastic_run import await_step, the_same, train
from tests.support.harness import Ranks, run
from tests.support.marks import long
from trigram.elastic import knowledge
from trigram.elastic.knowledge import Knowledge, quorum
from trigram.elastic.replicas import Replicas

pytestmark = pytest.mark.waits


def damaged(rank: int, world: int, words: str, steps: int) -> dict[str, Any] | str:
    """A training whose connections the test can damage; the weights, or why this rank stops."""
    os.environ["TRIGRAM_CHAOS"] = f"{words}/{rank}"
    try:
        return train(rank, world, steps, "gradient_allreduce", None, 0.005)
    except trigram.PeerLostError as e:
        return str(e)


@pytest.mark.parametrize(
    "fault", [pytest.param(1, id="flip"), long(1, id="flip-2"), pytest.param(2, id="cut")]
)
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

    def goes_on(here: list[int], fresh: set[int]) -> bool:
        silent = {r: "silent" for r in range(5) if r not in here}
        table = [knowledge.row(r in fresh, 0, [False] * 4, silent, fresh, 5) for r in here]
        known = Knowledge(torch.stack(table), range(5), here, Replicas())
        return known.outvote(known.alive())

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


@pytest.mark.parametrize("one, other", [([0, 1], [2, 3]), long([0], [1]), long([0], [1, 2])])
def test_of_two_halves_one_goes_on(several_hosts: None, one: list[int], other: list[int]) -> None:
    world, steps = len(one) + len(other), 500
    switch = netns._switch()

    def ip(*words: str) -> None:
        subprocess.run(["ip", "-n", switch, *words], check=True)

    env = {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(world, in_parts, steps, transport="auto", hosts=list(range(world)), env=env) as ranks:
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


def _weighs_less_later(rank: int, world: int, options: dict[str, Any]) -> list[tuple[float, int, int]]:
    """A weight after each step, of how many members, and how often it was weighed since they are two; rank 0
    weighs much until rank 2 dies."""
    trigram.init(elastic=True)
    net = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATES[rank])
    found: list[tuple[float, int, int]] = []
    weighed = 0

    def weight() -> float:
        nonlocal weighed
        weighed += trigram.world_size() == 2
        return 8.0 if rank == 0 and trigram.world_size() == 3 else 1.0

    trigram.with_bagua(
        net, "local_sgd", optimizer=optimizer, elastic=True, every=4, sample_weight=weight, **options
    )
    while sum(members < 3 for _, members, _ in found) < 8:
        if len(found) == 5 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        net(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        found.append((net.weight.item(), trigram.world_size(), weighed))
        time.sleep(0.02)
    return found


_RATES = [0.1237, 0.2911, 0.4003]
"""Learning rates of :func:`_weighs_less_later`: their sums are not alike by chance."""


@pytest.mark.parametrize("options", [{}, {"quorum": 2}], ids=["all", "quorum"])
def test_what_was_weighed_before_a_change_counts_no_more(options: dict[str, Any]) -> None:
    """It is in the mean that all have taken."""
    results = run(3, _weighs_less_later, options, dies=[2])
    # The ranks need not be in the same training step when they hear of it, nor when they average.
    values = [[value for value, _, _ in found] for found in results[:2]]
    heard = [next(at for at, (_, members, _) in enumerate(found) if members == 2) for found in results[:2]]
    taken = sum(values[rank][at - 1] for rank, at in enumerate(heard)) / 2
    for rank, at in enumerate(heard):
        if results[rank][at][2] == 0:  # it heard of it after the optimizer's step
            taken = values[rank][at]
    averaged = next(
        (i, j)
        for i in range(heard[0], len(values[0]))
        for j in range(heard[1], len(values[1]))
        if results[0][i][2] and results[1][j][2] and abs(values[0][i] - values[1][j]) < 1e-6
    )
    total = mean = 0.0
    for rank, at in enumerate(averaged):
        weighed = results[rank][at][2]
        before = values[rank][at - 1] if at > heard[rank] else taken
        mean += weighed * (before - _RATES[rank])
        total += weighed
    assert abs(values[0][averaged[0]] - mean / total) < 1e-6, (results, averaged)
