"""A sharded training in an elastic job, beside a plain optimizer with the same gradients on each rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

import trigram
from tests.support import elastic_run
from tests.support.checks import close
from tests.support.elastic_run import awaited, loss_of, model, weights
from tests.support.harness import flag, say, until
from trigram.elastic import membership
from trigram.sharded.elastic import copied_parts
from trigram.sharded.elastic.copied_parts import CopiedParts
from trigram.sharded.weights.divided_weights import DividedWeights
from trigram.sharded.weights.optimizer import ShardedOptimizer
from trigram.steps.elastic_model import ElasticModel

Moments = dict[int, tuple[int, str]]
"""By rank, the step and the moment in it at which it ends itself."""

BEFORE = ["forward", "backward"]
"""Moments at which the step does not count for who dies."""
DURING = ["commit", "after", "update", "updated", "gathering", "gathered", "stepped"]
"""Moments at which it does."""
LATER = ["state", "has state", "told", "moved"]
"""Moments in a call of ``state_dict`` after the step, and when its parts have moved."""


def optimizer(net: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """With slices, or with whole parameters."""
    if kind == "whole":
        matrices = [p for p in net.parameters() if p.dim() == 2]
        return torch.optim.Muon(matrices, lr=0.01)
    params = list(net.parameters())
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def reference(history: list[tuple[int, ...]], kind: str = "adamw") -> tuple[torch.Tensor, dict[str, Any]]:
    """The weights and the optimizer's state after steps of these ranks, made in one process."""
    net = model()
    opt = optimizer(net, kind)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 7, 0.9)
    for step, ranks in enumerate(history):
        opt.zero_grad()
        torch.stack([loss_of(net, step, r) for r in ranks]).mean().backward()
        opt.step()
        schedule.step()
    return weights(net), opt.state_dict()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From now on a method makes another call first."""
    method = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call(*args)
        return method(*args, **kwargs)

    setattr(owner, name, wrapper)


def after(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From now on a method makes another call at its end."""
    method = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        call(*args)
        return found

    setattr(owner, name, wrapper)


def _prepare_death(net: Any, opt: Any, where: str, world: int) -> None:
    if where == "forward":
        net.register_forward_hook(die)
    elif where == "backward":
        next(net.parameters()).register_hook(die)
    elif where == "commit":
        elastic_run._meet_at_commit(world, True)
    elif where == "update":
        opt.register_step_pre_hook(die)
    elif where == "updated":
        before(CopiedParts, "gather", die)
    elif where == "gathering":
        after(DividedWeights, "gather_bucket", lambda self, k, group: die() if k == 1 else None)
    elif where == "gathered":
        before(CopiedParts, "_await_ranks_without_part", die)
    elif where == "state":
        before(ShardedOptimizer, "gathered", die)
    elif where == "has state":
        after(ShardedOptimizer, "gathered", die)
    elif where == "told":
        after(copied_parts.collectives, "barrier", die)
    elif where == "moved":
        after(CopiedParts, "_use_next", die)
    else:
        assert where in ("after", "stepped"), where


def _see_loss_in(what: str) -> None:
    """Once, a call that has ended on the other ranks is seen to fail on this one, by the loss of a rank."""
    seen: list[int] = []

    def fail(*_: Any) -> None:
        if not seen:
            seen.append(1)
            say("saw a loss")
            until(membership.has_lost, 20)
            raise trigram.PeerLostError("seen here only", 0)

    if what == "commit":
        after(ElasticModel, "_commit", fail)
    elif what == "gather":
        after(CopiedParts, "_await_ranks_without_part", fail)
    elif what == "move":
        before(CopiedParts, "_use_next", fail)
    else:
        assert what == "state"
        after(copied_parts.collectives, "barrier", fail)


class Shadow:
    """A plain optimizer, stepped with the same gradients."""

    def __init__(self, kind: str) -> None:
        self.net = model()
        self.opt = optimizer(self.net, kind)

    def step(self, net: torch.nn.Module) -> None:
        for mine, p in zip(self.net.parameters(), net.parameters(), strict=True):
            mine.grad = None if p.grad is None else p.grad.clone()
        self.opt.step()

    def take(self, net: torch.nn.Module, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, p in zip(self.net.parameters(), net.parameters(), strict=True):
                mine.copy_(p)
        self.opt.load_state_dict(state)

    def check(self, net: torch.nn.Module, what: str) -> None:
        assert torch.equal(weights(net), weights(self.net)), f"{what}: the weights differ"

    def check_state(self, state: dict[str, Any], what: str) -> None:
        same_state(state, self.opt.state_dict(), what)


def same_state(ours: dict[str, Any], plain: dict[str, Any], what: str, tolerance: float = 0.0) -> None:
    """Two states of optimizers are the same."""
    assert ours["param_groups"] == plain["param_groups"], what
    assert ours["state"].keys() == plain["state"].keys(), what
    for k, state in plain["state"].items():
        assert ours["state"][k].keys() == state.keys(), f"{what}: {k}"
        for name, value in state.items():
            close(ours["state"][k][name], value, tolerance, f"{what}: {name} of {k}")


def train(
    rank: int,
    world: int,
    steps: int,
    moments: Moments | None = None,
    pause: float | tuple[float, ...] = 0.0,
    again: bool = False,
    kind: str = "adamw",
    sees_loss: tuple[int, int, str] = (-1, -1, ""),
    every: int = 10,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A rank of the job.

    ``sees_loss``: a rank, and a call in a step that fails there when it has ended on the other ranks.
    ``every``: steps between two calls of ``state_dict``.
    """
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = model()
    if again:
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(float("nan"))  # nothing of a newcomer's own weights may matter
    net.register_buffer("count", torch.full((3,), float("nan") if again else 0.0))
    opt = optimizer(net, kind)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 7, 0.9)
    shadow: Shadow | None = None if again else Shadow(kind)
    slower = None if shadow is None else torch.optim.lr_scheduler.StepLR(shadow.opt, 7, 0.9)
    more = {"algorithm": "sharded", "elastic": [schedule], "bucket_mb": 0.0005, **(options or {})}
    net = trigram.with_bagua(net, optimizer=opt, **more)
    first = trigram.stats(net)["steps"]
    say(("begins", first))
    flag(f"entered-{rank}")
    history, states = [], 0
    fate = (moments or {}).get(rank, (-1, "")) if not again else (-1, "")
    for step in range(first, steps):
        dies = fate[1] if fate[0] == step else ""
        if any(at == step and where == "commit" for at, where in (moments or {}).values()) and not dies:
            elastic_run._meet_at_commit(world, False)
        if dies:
            _prepare_death(net, opt, dies, world)
        if sees_loss[:2] == (rank, step):
            _see_loss_in(sees_loss[2])
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        history.append(tuple(trigram.stats(net)["ranks"]))
        if dies == "after":
            die()
        if shadow is not None:
            shadow.step(net)
        opt.step()
        if dies == "stepped":
            die()
        schedule.step()
        if slower is not None:
            slower.step()
        net.count += 1
        if step % every == every - 1:
            state = opt.state_dict()
            states += 1
            if shadow is None:
                shadow = Shadow(kind)
                shadow.take(net, state)
                slower = torch.optim.lr_scheduler.StepLR(shadow.opt, 7, 0.9)
                slower.load_state_dict(schedule.state_dict())
                shadow.opt.load_state_dict(state)
            shadow.check_state(state, f"rank {rank}, step {step}")
        if shadow is not None:
            shadow.check(net, f"rank {rank}, step {step}")
        say(("did", step))
        mine = pause if isinstance(pause, float) else pause[rank]
        time.sleep(0.5 if steps - step <= 50 and awaited() else mine)
    stats = trigram.stats(net)
    return {
        "first": first,
        "weights": weights(net),
        "history": history,
        "state": opt.state_dict(),
        "states": states,
        "count": net.count.clone(),
        "steps": stats["steps"],
        "own": stats.get("sharded_values"),
        "copied": stats.get("copied_values"),
    }
