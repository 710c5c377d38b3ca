"""Warm-ups in elastic jobs: where they end, and what a rank that joins knows of them (ADR 65)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support.checks import equal
from tests.support.elastic_run import await_step, awaited, come, loss_of, model, optimizer, weights
from tests.support.harness import Ranks, flag, run, say

pytestmark = pytest.mark.waits

WARMUP, STEPS = 3, 8


def _trains(rank: int, world: int, loop: str) -> tuple[bool, int, torch.Tensor]:
    """Whether the warm-up goes on after all steps, how many those were, and the weights."""
    trigram.init(elastic=True, op_timeout=20)
    net = model()
    parts = list(net.parameters())
    optimizers = [optimizer(net)] if loop != "two optimizers" else []
    for some in (parts[:2], parts[2:]) if not optimizers else ():
        optimizers.append(torch.optim.Adam(some, lr=0.01))
    warmup = 1 if loop == "evaluates after the first" else WARMUP
    net = trigram.with_bagua(net, "bytegrad", optimizer=optimizers[0], elastic=True, warmup_steps=warmup)
    if loop == "in evaluation mode":
        net.eval()
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            for each in optimizers:
                each.zero_grad()
            called = torch.nn.Sequential(*net) if loop == "submodules" else net
            loss = loss_of(called, step, rank)
            loss.backward()
            return float(loss)

        if loop == "closure":
            optimizers[0].step(closure)
        else:
            closure()
            for each in optimizers:
                each.step()
        if loop.startswith("evaluates"):  # on one rank, and all make a call of their own then
            if rank == 0:
                net.eval()
                loss_of(net, step, rank)
                net.train()
            trigram.all_reduce(torch.ones(1))
    state = trigram.algorithm_state(net)
    return state["warming"], trigram.stats(net)["steps"], weights(net)


LOOPS = ["closure", "submodules", "evaluates", "evaluates after the first", "in evaluation mode"]


@pytest.mark.parametrize("loop", [*LOOPS, "two optimizers"])
def test_where_it_ends(loop: str) -> None:
    """Also where no call of the module follows the last step, or one that other ranks do not make."""
    found = run(2, _trains, loop, timeout=60)
    for warming, steps, values in found:
        assert (warming, steps) == (False, STEPS)
        equal(values, found[0][2])


def _before(rank: int, world: int, folder: str) -> None:
    """Saves a state of after the warm-up."""
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, "bytegrad", optimizer=opt, elastic=True, warmup_steps=WARMUP)
    for step in range(2 * WARMUP):
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
    torch.save(trigram.algorithm_state(net), Path(folder) / f"state{rank}")


def _goes_on(rank: int, world: int, how: str, folder: str, steps: int, again: bool) -> dict[str, Any]:
    """Trains until the model has made so many steps; a rank that joins begins with the last algorithm."""
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    options: dict[str, Any] = {"warmup_steps": WARMUP} if how == "loads" else {}
    name = "bytegrad" if how == "loads" else "local_sgd" if again else "gradient_allreduce"
    if name == "local_sgd":
        options = {"every": 2}
    net = trigram.with_bagua(net, name, optimizer=opt, elastic=True, **options)
    if how == "loads" and not again:
        trigram.load_algorithm_state(net, torch.load(Path(folder) / f"state{rank}", weights_only=False))
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    for step in range(first, steps):
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        say(("did", step))
        if how == "switches" and not again and step == WARMUP:
            trigram.switch(net, "local_sgd", every=2, optimizer=opt)
        time.sleep(0.2 if steps - step <= 60 and awaited() else 0.01)
    trigram.consensus(net, timeout=60)
    return {"first": first, "steps": trigram.stats(net)["steps"], "weights": weights(net)}


@pytest.mark.parametrize("how", ["switches", "loads"])
def test_who_joins_counts_the_steps_of_before(how: str, tmp_path: Path) -> None:
    """Those of an algorithm before a switch, or of a warm-up in a job before."""
    if how == "loads":
        run(2, _before, str(tmp_path), timeout=60)
    steps = 120
    with Ranks(2, _goes_on, how, str(tmp_path), steps, False) as ranks:
        await_step(ranks, 0, 12)
        ranks.env["WORLD_SIZE"] = "3"
        come(ranks, 2, how, str(tmp_path), steps, True, run=_goes_on)
        results = ranks.results(60)
    assert 12 < results[2]["first"] < steps
    for found in results:
        assert found["steps"] == steps
        equal(found["weights"], results[0]["weights"])
