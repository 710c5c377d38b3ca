"""Inside a host, fused updates take one pass: where it is taken, and that its bits are torch's."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.sharded.twins import Twins, same_state
from tests.support.cases import Cases
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.harness import Died, Ranks, await_flag, flag, say
from tests.support.twin_training import mlp, square
from trigram.sharded import rules

CASES = Cases()
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.05}),
    "sgd, decay": (SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "sgd, momentum": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "sgd, dampening": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd, nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd, maximize": (SGD, {"lr": 0.001, "momentum": 0.5, "maximize": True}),
    "sgd, foreach": (SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True, "weight_decay": 0.1}),
    "sgd, fused": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    "adam": (ADAM, {"lr": 0.02, "fused": True}),
    "adam, decay": (ADAM, {"lr": 0.02, "weight_decay": 0.1, "fused": True}),
    "adamw": (ADAMW, {"lr": 0.02, "weight_decay": 0.1, "fused": True}),
    "adamw, betas": (ADAMW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "maximize": True, "fused": True}),
}


def making(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Two groups with different learning rates."""
    kind, options = KINDS[name]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": others, "lr": options["lr"] / 2}]
        return kind(groups, **options)

    return make


def hooks_of(model: nn.Module) -> Any:
    """What ``with_bagua`` has installed."""
    return trigram.model.wrapped.wrapped_models[model].hooks


def taken(twins: Twins) -> int:
    """How many buckets the model has updated at once."""
    count: int = trigram.stats(twins.models[1])["one_pass_updates"]
    return count


def trained(rank: int, world: int, name: str, steps: int = 5, **options: Any) -> Twins:
    """Twins with some steps behind them: the first is an ordinary one."""
    twins = Twins(rank, world, optimizer=making(name), fused=True, **options)
    twins.train(steps=steps)
    return twins


@CASES.over(*KINDS)
def each_kind(rank: int, world: int, name: str) -> None:
    """Weights and state have torch's bits, and each bucket is updated at once after the first step. The model
    has parameters that some ranks use, or none, and slices of odd lengths."""
    twins = trained(rank, world, name, 7)
    stats = trigram.stats(twins.models[1])
    assert stats["one_pass_updates"] >= 6 * (len(stats["buckets"]) - 1) > 0, stats
    twins.check_state(name)
    twins.check_ranks()


@CASES
def large_buckets(rank: int, world: int) -> None:
    """Parts of several turns of the engine, and of many tiles."""
    pairs = []
    for algorithm in ("gradient_allreduce", "sharded"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(301, 1203), nn.Tanh(), nn.Linear(1203, 701))
        optimizer = ADAMW(model.parameters(), lr=0.01, fused=True)
        more = {"fused": True} if algorithm == "sharded" else {}
        trigram.with_bagua(model, algorithm, optimizer=optimizer if more else None, **more)
        pairs.append((model, optimizer))
    for step in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(3, 301)).square().mean().backward()
            optimizer.step()
        for a, b in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            equal(b, a, f"step {step}")
    same_state(pairs[1][1].state_dict(), pairs[0][1].state_dict(), "large")
    assert trigram.stats(pairs[1][0])["one_pass_updates"] > 0


@CASES
def states_interchange(rank: int, world: int) -> None:
    """A state of one pass goes on in a plain optimizer, and the other way round."""
    first = trained(rank, world, "adamw", 3)
    for source in (0, 1):
        model, optimizer = first.pairs[source]
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        second = trained(rank, world, "adamw", 2)
        for model, optimizer in second.pairs:
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
        before = taken(second)
        second.train(3, 3)
        second.check_state("resumed")
        assert taken(second) > before


@CASES
def schedulers(rank: int, world: int) -> None:
    """Learning rates, and other options, that change after each step."""
    twins = trained(rank, world, "adamw", 2)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in twins.optimizers]
    for step in range(2, 6):
        twins.step(step)
        twins.check(f"after step {step}")
        for schedule, optimizer in zip(schedules, twins.optimizers, strict=True):
            schedule.step()
            optimizer.param_groups[1]["weight_decay"] = 0.02 * step
    twins.check_state("scheduled")
    assert taken(twins) > 0


@CASES
def options_that_it_does_not_have(rank: int, world: int) -> None:
    """An option that comes later ends it, without another result."""
    twins = trained(rank, world, "sgd, momentum", 3)
    before = taken(twins)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    twins.train(3, 2)
    assert taken(twins) == before > 0
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = 0.04
    twins.train(5, 2)
    assert taken(twins) > before
    twins.check_state("options")


@CASES
def a_layer_that_thaws(rank: int, world: int) -> None:
    """The buckets of gradients are others then; while they match no weights, buckets are averaged as ever."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    twins = Twins(rank, world, make, making("sgd, momentum"), fused=True)
    twins.train(steps=3)
    assert taken(twins) > 0
    for model in twins.models:
        model[0].requires_grad_(True)
    twins.train(3, 3)
    for model in twins.models:
        model[2].requires_grad_(False)
    twins.train(6, 2)
    twins.check_state("thawed")


@CASES
def accumulated(rank: int, world: int) -> None:
    """Passes under no_sync before the one that updates."""
    twins = trained(rank, world, "adamw", 2)
    before = taken(twins)
    for model, optimizer in twins.pairs:
        optimizer.zero_grad()
        with trigram.no_sync(model):
            twins.loss(model, 2).backward()
        twins.loss(model, 3).backward()
        optimizer.step()
    twins.check("accumulated")
    assert taken(twins) > before


@CASES
def another_default_dtype(rank: int, world: int) -> None:
    """What is computed to compare with torch has the dtype that the engine computes in."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        rules._tried.clear()
        model = mlp().float()
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        trigram.with_bagua(model, "sharded", optimizer=optimizer, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6, dtype=torch.float32) * step).square().mean().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert trigram.stats(model)["one_pass_updates"] > 0
    same_on_all_ranks(rank, world, "default dtype", model.parameters())


@CASES
def parameters_that_leave_the_optimizer(rank: int, world: int) -> None:
    """Their buckets are updated as ever."""
    twins = trained(rank, world, "sgd, momentum", 3)
    before = taken(twins)
    for model, optimizer in twins.pairs:
        optimizer.param_groups.pop()
        model.zero_grad()
    twins.train(3, 3)
    assert taken(twins) == before > 0


@CASES
def overlapped(rank: int, world: int) -> None:
    twins = trained(rank, world, "adamw", overlap=True)
    assert taken(twins) > 0
    twins.check_state("overlap")


@CASES
def a_wait_with_a_limit(rank: int, world: int) -> None:
    """Updates that have not ended when a wait is over have not failed: they stay under way."""
    twins = trained(rank, world, "adamw", overlap=True)
    model, hooks = twins.models[1], hooks_of(twins.models[1])
    updates = hooks.updates
    one_pass, gathers = updates.values.one_pass, updates.state.weights.gathers
    begin, before = one_pass.start, taken(twins)

    def held_up(*given: Any) -> Any:
        await_flag("a wait with a limit is over")
        return begin(*given)

    for m, optimizer in twins.pairs:
        optimizer.zero_grad()
        if m is model and rank == world - 1:
            one_pass.start = held_up
        twins.loss(m, 5).backward()
        if m is model and rank == 0:
            under_way = len(gathers.under_way)
            raises(trigram.TimeoutError, hooks.drain, 0.05)
            assert len(gathers.under_way) == under_way > 0
            assert not updates.fused_updates.stepper.broken
            flag("a wait with a limit is over")
        optimizer.step()
    one_pass.start = begin
    twins.check("after the wait")
    twins.train(6, 3)
    twins.check_state("after the wait")
    assert taken(twins) > before


class Own(ADAMW):
    """An optimizer of the script, which may have any step."""


@CASES.over("RMSprop", "amsgrad", "a class of its own", "float64", "not fused", "small beta1", "shards")
def others(rank: int, world: int, what: str) -> None:
    """Optimizers and tensors that are updated as ever."""
    makes: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
        "amsgrad": lambda m: ADAM(m.parameters(), lr=0.01, amsgrad=True),
        "a class of its own": lambda m: Own(m.parameters(), lr=0.01),
        "small beta1": lambda m: ADAM(m.parameters(), lr=0.01, betas=(0.3, 0.9)),
    }
    make = makes.get(what, making("sgd, momentum"))
    model = mlp().double() if what == "float64" else mlp()
    optimizer = make(model)
    gradients = "shards" if what == "shards" else "full"
    trigram.with_bagua(model, "sharded", optimizer=optimizer, fused=what != "not fused", gradients=gradients)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=model[0].weight.dtype) * step).square().mean().backward()
        optimizer.step()
    assert trigram.stats(model)["one_pass_updates"] == 0
    same_on_all_ranks(rank, world, f"others-{what}", model.parameters())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_one_pass(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


MESSAGES = Cases()


@MESSAGES
def without_shared_memory(rank: int, world: int) -> None:
    """Ranks that share no memory average and gather as ever."""
    twins = trained(rank, world, "sgd, momentum")
    assert taken(twins) == 0


@pytest.mark.parametrize("case", list(MESSAGES))
def test_messages(in_launch: Callable[..., None], case: str) -> None:
    in_launch("MESSAGES", case, 2, transport="tcp")


@pytest.mark.parametrize("name", list(KINDS))
def test_bits_of_torch(name: str) -> None:
    """The engine's arithmetic is compared with torch's, and a rounding that torch has not is found."""
    optimizer = making(name)(mlp())
    group = optimizer.param_groups[0]
    found = rules.rounding(optimizer, group)
    assert found is not None
    assert not rules._same_bits(optimizer, group, rules.Rounding(not found.fused, 1))


def _stopped(rank: int, world: int) -> tuple[int, str, str] | None:
    """A rank dies between the parts of others in an update."""
    model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 1))
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    trigram.with_bagua(model, "sharded", optimizer=optimizer, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        square(model, rank, step).backward()
        optimizer.step()
    assert trigram.stats(model)["one_pass_updates"] > 0
    say("updates at once")
    optimizer.zero_grad()
    if rank == world - 1:
        hooks_of(model).updates.values.one_pass.start = lambda *_: signal.pause()
    try:
        square(model, rank, 3).backward()
    except trigram.PeerLostError as e:
        optimizer.zero_grad()
        again = raises(trigram.TrigramError, lambda: square(model, rank, 4).backward())
        return e.rank, str(e), str(again)
    return None


@pytest.mark.waits
def test_a_rank_that_dies() -> None:
    """The others get PeerLostError, and no pass goes on with weights that are updated in part."""
    world = 3
    with Ranks(world, _stopped) as ranks:
        for r in range(world):
            ranks.await_said(r, "updates at once")
        ranks.signal(world - 1, signal.SIGKILL)
        results = ranks.results(30, dies=[world - 1])
    assert results[-1] == Died(-signal.SIGKILL)
    for lost, text, again in results[:-1]:
        assert lost == world - 1
        says(text, f"rank {world - 1}")
        says(again, "checkpoint")
