"""Where every algorithm runs: on a group of the ranks, on one rank alone, across hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import trigram
from tests.reference.simulation import Simulation, flatten
from tests.support.algorithm_rows import NAMES_ONCE, ROWS
from tests.support.algorithm_run import OPTIMIZERS, Run, Yardstick, loss, net, start
from tests.support.cases import Cases

GROUPS, ALONE, HOSTS = Cases(), Cases(), Cases()


@GROUPS.over(*NAMES_ONCE)
def on_a_group(rank: int, world: int, label: str) -> None:
    """Rank 0 trains alone, the others together."""
    groups = [trigram.new_group([0]), trigram.new_group(list(range(1, world)))]
    row = ROWS[label]
    torch.manual_seed(8 + min(rank, 1))
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, group=groups[min(rank, 1)], **given, **row.options)
    torch.manual_seed(9)
    sim = Simulation(row.reference(world - 1), world - 1, net, Run.optimizer_for(row, world - 1), row.warmup)
    yardstick = Yardstick(row.coded)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        if rank > 0 and world > 2:
            sim.step(lambda m, r, step=step: [loss(m, r + 1, step)])
            weights = flatten(list(model.parameters()))
            yardstick.check(weights, sim.weights(rank - 1), f"after step {step}")


@ALONE.over(*ROWS)
def alone(rank: int, world: int, label: str) -> None:
    """A world of one: it trains, and without a codec as the reference does; there is no outer step."""
    row = ROWS[label]
    if label.startswith(("diloco", "noloco", "gossip outer")):
        model, optimizer = start(rank, label, net)
        torch.manual_seed(8)
        plain = net()
        local = OPTIMIZERS[row.optimizer](plain)
        for step in range(row.steps):
            for m, o in ((model, optimizer), (plain, local)):
                o.zero_grad()
                loss(m, rank, step).backward()
                o.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        return
    if row.coded or label.startswith("powersgd"):
        model, optimizer = start(rank, label, net)
        losses = []
        for _ in range(row.steps + 10):
            optimizer.zero_grad()
            value = loss(model, rank, 0)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        assert losses[-1] < losses[0], losses
    else:
        run = Run(rank, world, row)
        run.train(row.steps)


@HOSTS.over(
    *NAMES_ONCE,
    "powersgd rank",
    "gossip random sign",
    "low_precision_decentralized exponential",
    "central int8 every",
    "push_sum exponential",
)
def across(rank: int, world: int, label: str) -> None:
    row = ROWS[label]
    run = Run(rank, world, row, once=True)
    run.train(row.steps)
    run.end(world, f"across-{label}")


@pytest.mark.parametrize("case", list(GROUPS))
@pytest.mark.parametrize("world", [2, 3])
def test_on_a_group(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("GROUPS", case, world, transport="shm" if world == 3 else "tcp")


@pytest.mark.parametrize("case", list(ALONE))
def test_world_of_one(in_launch: Callable[..., None], case: str) -> None:
    in_launch("ALONE", case, 1)


@pytest.mark.parametrize("case", list(HOSTS))
def test_across_hosts(in_launch: Callable[..., None], several_hosts: None, case: str) -> None:
    in_launch("HOSTS", case, 4, transport="auto", hosts=[0, 0, 1, 1])
