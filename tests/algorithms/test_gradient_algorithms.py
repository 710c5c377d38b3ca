"""Algorithms on gradients that a script registers: `register(..., average=)`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, says
from tests.support.ternary import Ternary, register, rounded
from trigram.averaging import GradientAverage

CASES = Cases()
THRESHOLD, RATE = 0.4, 0.05
DEFAULT = trigram.Trigram()


class Net(nn.Module):
    """Three layers, of which the middle one rests in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, inputs: torch.Tensor, rests: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.one(inputs))
        out: torch.Tensor = self.three(hidden if rests else torch.tanh(self.two(hidden)))
        return out


def loss(model: nn.Module, rank: int, step: int, rests: bool = False) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    out: torch.Tensor = (model(inputs, rests) - inputs[:, :2].sin()).square().mean()
    return out


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, rests: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step, rests and step % 3 == 1).backward()
        optimizer.step()


def wrapped(optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    register()
    torch.manual_seed(1)
    module = Net()
    made = optimizer(module.parameters(), lr=RATE)
    given = {"optimizer": made} if "state" in options else {}
    return trigram.with_bagua(module, "ternary", threshold=THRESHOLD, **given, **options), made


@CASES
def by_hand(rank: int, world: int) -> None:
    """Step by step against all ranks in one process, with a layer that no rank uses in some steps."""
    model, optimizer = wrapped()
    alone = copy.deepcopy(model.state_dict())
    replica = Net()
    replica.load_state_dict(alone)
    params = list(replica.parameters())
    errors = [[torch.zeros_like(p) for p in params] for _ in range(world)]
    for step in range(9):
        rests = step % 3 == 1
        sums = [torch.zeros_like(p) for p in params]
        for r in range(world):
            grads = torch.autograd.grad(loss(replica, r, step, rests), params, allow_unused=True)
            used = [g is not None for g in grads]
            # What nobody has used takes part as what is kept of it, and comes out as it was.
            values = [e + (0 if g is None else g) for e, g in zip(errors[r], grads, strict=True)]
            flat = rounded(torch.cat([v.flatten() for v in values]), THRESHOLD)
            for k, sent in enumerate(flat.split([p.numel() for p in params])):
                if used[k]:
                    sums[k] += sent.view_as(params[k])
                    errors[r][k] = values[k] - sent.view_as(params[k])
        with torch.no_grad():
            for k, p in enumerate(params):
                p.sub_(sums[k] / world, alpha=RATE if used[k] else 0.0)
        train(model, optimizer, rank, range(step, step + 1), rests=True)
        for mine, theirs in zip(model.parameters(), params, strict=True):
            close(mine.detach(), theirs.detach(), 1e-5, f"step {step}")


@CASES
def in_checkpoints(rank: int, world: int) -> None:
    """A training that goes on from a checkpoint has the bits of one that was not interrupted."""
    model, optimizer = wrapped()
    train(model, optimizer, rank, range(4))
    weights, state = copy.deepcopy(model.state_dict()), trigram.algorithm_state(model)
    assert "error" in str(state)
    train(model, optimizer, rank, range(4, 8))
    again, other = wrapped()
    again.load_state_dict(weights)
    trigram.load_algorithm_state(again, state)
    train(again, other, rank, range(4, 8))
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        equal(a.detach(), b.detach(), "after the checkpoint")


@CASES
def sharded(rank: int, world: int) -> None:
    """With a sharded optimizer, and after a warm-up."""
    for options in ({}, {"warmup_steps": 3}):
        models = []
        for more in ({}, {"state": "sharded"}):
            model, optimizer = wrapped(torch.optim.Adam, **options, **more)
            train(model, optimizer, rank, range(8))
            trigram.consensus(model)
            models.append(model)
        for a, b in zip(*(m.parameters() for m in models), strict=True):
            close(a.detach(), b.detach(), 1e-6, f"sharded, {options}")


@CASES
def under_ddp(rank: int, world: int) -> None:
    """As a communication hook it trains as `with_bagua` does."""
    model, optimizer = wrapped()
    train(model, optimizer, rank, range(5))
    dist.init_process_group("trigram")
    try:
        torch.manual_seed(1)
        ddp = nn.parallel.DistributedDataParallel(Net())
        ddp.register_comm_hook(*trigram.ddp_hook("ternary", threshold=THRESHOLD))
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=RATE), rank, range(5))
    finally:
        dist.destroy_process_group()
    for a, b in zip(model.parameters(), ddp.module.parameters(), strict=True):
        close(b.detach(), a.detach(), 1e-5, "DDP")


@CASES
def fails_on_one(rank: int, world: int) -> None:
    """What the class raises on one rank ends the pass on all, and training goes on after it."""

    class Fails(Ternary):
        def phases(self, step: int) -> Any:
            if step == 2 and rank == 1 and not hasattr(Fails, "done"):
                Fails.done = True  # type: ignore[attr-defined]
                raise ValueError("a value of the script's")
            yield from super().phases(step)

    trigram.register(f"fails {world}", trigram.Trigram(), average=Fails, threshold=THRESHOLD)
    torch.manual_seed(1)
    model = trigram.with_bagua(Net(), f"fails {world}")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    train(model, optimizer, rank, range(2))
    error = raises((ValueError, trigram.TrigramError), train, model, optimizer, rank, range(2, 3))
    says(error, "a value of the script's" if rank == 1 else "rank 1")
    optimizer.zero_grad()
    train(model, optimizer, rank, range(3, 5))
    everybody = torch.empty(world, 18)
    trigram.all_gather(everybody, model.three.weight.detach().reshape(-1))
    assert torch.equal(everybody, everybody[:1].expand(world, -1))


@CASES
def refused(rank: int, world: int) -> None:
    """What cannot be is named."""
    register()

    def of(error: type[Exception], make: Any, value: trigram.Trigram = DEFAULT, **options: Any) -> str:
        name = f"refused {len(trigram.algorithms())}"
        trigram.register(name, value, average=make, **options)
        return raises(error, trigram.with_bagua, Net(), name)

    unsupported = trigram.UnsupportedError
    for value in (
        trigram.Trigram("gossip:ring"),
        trigram.Trigram("central", "int8"),
        trigram.Trigram("central:median"),
        trigram.Trigram("central", "full", "every:2"),
        trigram.Trigram(carry="weights"),
    ):
        says(of(unsupported, Ternary, value, threshold=0.5), "average=", "averages gradients")
    both = raises(
        trigram.MisuseError,
        lambda: trigram.register("both", trigram.Trigram(), step=trigram.mixing.Mean, average=Ternary),
    )
    says(both, "step=", "average=")
    says(of(trigram.MisuseError, lambda memory, views, groups: 3), "int", "GradientAverage")
    says(raises(unsupported, trigram.with_bagua, Net(), "ternary", theshold=1), "theshold", "threshold")
    says(
        raises(unsupported, trigram.with_bagua, Net(), "ternary", sample_weight=1.0),
        "sample_weight",
        "linear",
    )

    module = Net()
    optimizer = torch.optim.Adam(module.parameters())
    for options in ({"state": "sharded", "gradients": "shards"}, {"fused": True}):
        text = raises(
            unsupported, lambda o=options: trigram.with_bagua(module, "ternary", optimizer=optimizer, **o)
        )
        says(text, "registered averages" if "gradients" in options else "trigram.register")
    trigram.register(
        "often", trigram.Trigram("central", "full", "every:4", "weights"), step=trigram.mixing.Mean, every=2
    )
    trigram.unwrap(trigram.with_bagua(Net(), "often"))

    class Late(GradientAverage):
        def phases(self, step: int) -> Any:
            self.keep("late")
            yield None

    trigram.register("late", trigram.Trigram(), average=Late)
    model = trigram.with_bagua(Net(), "late")
    says(raises(trigram.MisuseError, lambda: loss(model, rank, 0).backward()), "late", "__init__")


class NoCall(GradientAverage):
    """Trains every rank on its own gradients."""

    def phases(self, step: int) -> Any:
        if step < 0:
            yield None


class NoProgram(GradientAverage):
    """Does not say what it sends."""


class NoNumber(GradientAverage):
    """Its program does not take the number of the step."""

    def phases(self) -> Any:  # type: ignore[override]
        yield None


class NoOption(GradientAverage):
    """Does not take the option that it is registered with."""


def with_more(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives an argument of its own."""

    @functools.wraps(method)
    def given(self: Any, step: int) -> Any:
        return method(self, step, 2)

    return given


class Rarely(GradientAverage):
    """Averages in every second step what has come since, and leaves zeros in the others."""

    def __init__(self, memory: Any, views: Any, groups: Any, function: Callable[[int], bool]) -> None:
        super().__init__(memory, views, groups)
        self.function, self.gathered = function, self.keep("gathered")

    @with_more
    def phases(self, step: int, every: int) -> Any:
        self.gathered += self.memory
        self.memory.zero_()
        if step % every and self.function(step):
            self.memory.copy_(self.gathered)
            self.gathered.zero_()
            yield trigram.all_reduce(self.memory, "avg", group=self.groups.main, async_op=True)


@CASES
def silent_in_some_steps(rank: int, world: int) -> None:
    """An average that makes no call in a step, and leaves nothing of this rank's own, is no mistake."""
    trigram.register("rarely", trigram.Trigram(), average=Rarely, function=bool)
    torch.manual_seed(1)
    model = trigram.with_bagua(Net(), "rarely")
    train(model, torch.optim.SGD(model.parameters(), lr=RATE), rank, range(4))
    everybody = torch.empty(world, 18)
    trigram.all_gather(everybody, model.three.weight.detach().reshape(-1))
    assert torch.equal(everybody, everybody[:1].expand(world, -1))


@CASES
def not_written_as_called(rank: int, world: int) -> None:
    """A class that averages nothing, or that takes other arguments, is an error that says so."""
    trigram.register("no call", trigram.Trigram(), average=NoCall)
    trigram.register("no program", trigram.Trigram(), average=NoProgram)
    trigram.register("no number", trigram.Trigram(), average=NoNumber)
    trigram.register("no option", trigram.Trigram(), average=NoOption, rate=1)
    for name, words in (
        ("no call", ("NoCall", "no call")),
        ("no program", ("NoProgram", "phases(self, number)")),
    ):
        model = trigram.with_bagua(Net(), name)
        says(raises(trigram.MisuseError, lambda m=model: loss(m, rank, 0).backward()), *words)
    unsupported = trigram.UnsupportedError
    says(
        raises(unsupported, trigram.with_bagua, Net(), "no number"),
        "NoNumber",
        "phases(number)",
        "phases(self)",
    )
    says(raises(unsupported, trigram.with_bagua, Net(), "no option"), "NoOption", "rate=")
    says(raises(trigram.MisuseError, trigram.Trigram, when=lambda step: True), "when=", "every=")


@CASES.over("memory", "views", "view")
def what_would_not_be_averaged(rank: int, world: int, what: str) -> None:
    """Another tensor in the place of the gradients is an error, not training without averages."""

    class Replaces(GradientAverage):
        def phases(self, step: int) -> Any:
            self.memory *= 2  # in place: the same tensor
            self.views[0] *= 1
            if what == "memory":
                self.memory = self.memory.bfloat16().float()
            elif what == "views":
                self.views = [v.clone() for v in self.views]
            else:
                self.views[0] = self.views[0].clone()
            yield trigram.all_reduce(self.memory, "avg", group=self.groups.main, async_op=True)

    trigram.register(f"replaces {what}", trigram.Trigram(), average=Replaces)
    model = trigram.with_bagua(Net(), f"replaces {what}")
    says(raises(trigram.MisuseError, lambda: loss(model, rank, 0).backward()), "in place", what)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_gradient_algorithm(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
