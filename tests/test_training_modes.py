"""Ways of training that torch offers, each against DistributedDataParallel on gloo or one process on the whole batch."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import trigram
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.cases import Cases
from tests.checks import close, fingerprint, raises, same_on_all_ranks
from tests.pairs import Pair, sgd, x
from tests.reference import gloo
from tests.test_training_extras import mlp, square

CASES = Cases()
Train = Callable[[Callable[[nn.Module], Any]], list[Tensor]]


def like_ddp(rank: int, world: int, train: Train, name: str, everywhere: bool = True) -> None:
    """`train(wrap)` gives the same tensors under trigram as under DDP: with 2 ranks bit for bit, with more closely."""
    with gloo(rank, world):
        expected = train(DistributedDataParallel)
    actual = train(lambda module: trigram.with_bagua(module, "gradient_allreduce"))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        size = float(e.double().abs().max()) if e.numel() else 0.0
        tolerance = 0.0 if world == 2 else size * (0.05 if e.dtype == torch.bfloat16 else 1e-4)
        close(a, e, tolerance, f"{name}: tensor {i}")
    if everywhere:
        same_on_all_ranks(rank, world, name, actual)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@CASES.over("uneven", "none at all")
def join(rank: int, world: int, kind: str) -> None:
    """Ranks run out of inputs at different times; whoever is done shadows the others, and ends with their weights."""
    batches = 2 + 2 * rank if kind == "uneven" else 3 * min(rank, 1)

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        joined: AbstractContextManager[None] = (
            model.join() if isinstance(model, DistributedDataParallel) else trigram.join(model)
        )
        with joined:
            for step in range(batches):
                optimizer.zero_grad()
                square(model, rank, step).backward()
                optimizer.step()
        after = weights(model)
        if not isinstance(model, DistributedDataParallel):  # and the model is as useful as before
            optimizer.zero_grad()
            square(model, rank, 50).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            same_on_all_ranks(rank, world, f"after-join-{kind}", gradients)
        return after

    like_ddp(rank, world, train, f"join-{kind}")


@CASES
def scaler(rank: int, world: int) -> None:
    """autocast and GradScaler: an infinity on one rank makes all ranks skip that step and halve the scale."""
    skipped: list[int] = []

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(mlp())
        optimizer, seen = sgd(model), []
        scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        skipped.clear()
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = square(model, rank, step).float()
            if step == 2 and rank == world - 1:
                loss = loss * float("inf")
            scale.scale(loss).backward()
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = fingerprint(model.parameters())
            scale.step(optimizer)
            scale.update()
            if fingerprint(model.parameters()) == before:
                skipped.append(step)
            seen += [torch.tensor(scale.get_scale()), *weights(model)]
        return seen

    like_ddp(rank, world, train, "scaler")
    assert skipped == [2], skipped


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 8)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 2, dtype=torch.float64)
        self.again = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        h = torch.tanh(self.brain(self.single(inputs).bfloat16()))
        return self.again(self.wide(h.double()).float())


@CASES
def mixed_types(rank: int, world: int) -> None:
    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(Mixed())
        optimizer, seen = sgd(model), []
        for step in range(3):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return seen

    like_ddp(rank, world, train, "mixed")


@CASES
def batch_norm(rank: int, world: int) -> None:
    """Buffers as DDP keeps them: rank 0's at the start of a forward, each rank's own after it; whole numbers too."""

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3 + rank)  # the buffers differ before anything is wrapped
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        module[1].running_mean.normal_()  # type: ignore[union-attr]
        model = wrap(module)
        optimizer, seen = sgd(model), []
        for step in range(4):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
            seen += [b.clone() for b in module.buffers()] + weights(model)
        return seen

    like_ddp(rank, world, train, "batch_norm", everywhere=False)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, twice: bool) -> None:
        super().__init__()
        self.reentrant, self.twice = reentrant, twice
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.first(inputs)
        for _ in range(2 if self.twice else 1):
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.last(h)


@CASES.over("reentrant", "not reentrant", "not reentrant, block used twice")
def checkpointing(rank: int, world: int, kind: str) -> None:
    """Reentrant: a backward inside the backward, whose end is not the step's end."""
    pair = Pair(rank, world, lambda: Checkpointed(kind == "reentrant", "twice" in kind), bucket_mb=0.0001)
    pair.train(square, 4)


@CASES
def checkpointing_twice_reentrant(rank: int, world: int) -> None:
    """A parameter that two inner backwards touch: handled, or refused in words; never a wrong gradient."""
    pair = Pair(rank, world, lambda: Checkpointed(True, True))
    try:
        pair.train(square, 3)
    except trigram.TrigramError as e:
        assert "checkpoint" in str(e), e


def inductor() -> list[str]:
    compiler = os.environ.get("CXX", "g++")
    return ["inductor"] if shutil.which(compiler) else []


@CASES.over("eager", *inductor())
def compiled(rank: int, world: int, backend: str) -> None:
    torch._dynamo.reset()
    if backend == "inductor":
        from torch._inductor import config

        config.compile_threads = 1
    pair = Pair(rank, world, mlp)
    fast = torch.compile(pair.ours, backend=backend)
    for step in range(3):
        pair.zero()
        square(fast, rank, step).backward()
        pair.backward_alone(square, step)
        pair.check_gradients(f"compiled with {backend}, step {step}")
        pair.update()
    pair.check_weights(f"compiled with {backend}")


@CASES
def compiled_first(rank: int, world: int) -> None:
    """A model that was compiled before it came to us."""
    torch._dynamo.reset()
    Pair(rank, world, lambda: torch.compile(mlp(), backend="eager")).train(square, 3)  # type: ignore[arg-type,return-value]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("a fault in backward")


class Faulty(nn.Module):
    """With `fail`, half of the layers have their gradients when backward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, inputs: Tensor, fail: bool = False) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.third(Fails.apply(h) if fail else h)


def fail(model: nn.Module, rank: int) -> None:
    assert "a fault" in raises(RuntimeError, lambda: model(x(rank, 0), True).square().mean().backward())


@CASES.over(25, 0.0001)
def fault_everywhere(rank: int, world: int, bucket_mb: float) -> None:
    """An exception in backward on all ranks; the next step is clean, whichever way gradients are zeroed."""
    pair = Pair(rank, world, Faulty, bucket_mb=bucket_mb)
    for round, set_to_none in enumerate((True, False)):
        pair.train(square, 2, first=10 * round)
        fail(pair.ours, rank)
        pair.train(square, 2, first=10 * round + 5, set_to_none=set_to_none)


@CASES.over(25, 0.0001)
def fault_on_one_rank(rank: int, world: int, bucket_mb: float) -> None:
    """It goes on to the next step; the others, who wait for its gradients, are told, and go on too."""
    pair = Pair(rank, world, Faulty, bucket_mb=bucket_mb)
    for round in range(2):
        pair.train(square, 2, first=10 * round)
        if rank == world - 1:
            fail(pair.ours, rank)
        else:
            raises(trigram.TrigramError, lambda: square(pair.ours, rank, 0).backward())
        pair.train(square, 2, first=10 * round + 5)


def trains_alone(model: nn.Module, keys: Iterable[str]) -> None:
    """As a bare module does: called on one rank only, so anything sent would have no partner."""
    assert list(model.state_dict()) == list(keys)
    torch.manual_seed(3)
    bare = mlp()
    bare.load_state_dict(model.state_dict())
    for m in (model, bare):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            square(m, 0, step).backward()
            optimizer.step()
    for a, e in zip(model.parameters(), bare.parameters(), strict=True):
        close(a, e, 0.0, "a copy on its own")


@CASES.over("deepcopy", "pickle")
def copies(rank: int, world: int, how: str) -> None:
    """Hooks stay behind: the copy is a bare module, and the original trains on as before."""
    pair = Pair(rank, world, mlp)
    pair.train(square, 2)
    other = copy.deepcopy(pair.ours) if how == "deepcopy" else pickle.loads(pickle.dumps(pair.ours))
    kept = fingerprint(pair.ours.parameters())
    if rank == 0:
        trains_alone(other, pair.alone.state_dict())
    assert fingerprint(pair.ours.parameters()) == kept, "the copy's training moved the original"
    pair.train(square, 2, first=2)
    if rank != 0:
        other = mlp()
    again = trigram.with_bagua(other)  # a copy may be wrapped like any module
    same_on_all_ranks(rank, world, f"wrapped-{how}", again.parameters())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_mode(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport, patience=60)
