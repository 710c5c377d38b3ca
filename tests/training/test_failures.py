"""A backward that fails, on all ranks or on one; copies of a model, which train alone."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support import patience
from tests.support.cases import Cases
from tests.support.checks import close, fingerprint, raises, same_on_all_ranks, says
from tests.support.harness import run
from tests.support.twin_training import Pair, mlp, sgd, square, x
from trigram.model.wrapped import wrapped_models

pytestmark = pytest.mark.waits

GRADIENTS = ("gradient_allreduce", "bytegrad", "topk", "powersgd")

CASES = Cases()


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
def fault_and_zeroed_early(rank: int, world: int, bucket_mb: float) -> None:
    """Gradients set to zero while those of the failed pass still travel stay zero."""
    pair = Pair(rank, world, Faulty, bucket_mb=bucket_mb)
    for step in range(2):
        pair.train(square, 1, first=10 * step)
        if rank != 0:
            time.sleep(0.1)  # rank 0 has zeroed before the others' gradients come
        fail(pair.ours, rank)
        pair.zero(set_to_none=False)
        trigram.barrier()
        pair.backward(square, 10 * step + 1)
        pair.check_gradients(f"step {step}")
        pair.update()
        pair.check_weights(f"after step {step}")


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


@CASES
def fault_before_the_first_gradient(rank: int, world: int) -> None:
    """Where a pass is prepared, on one rank: it is aborted, and not the pass before it, so nobody waits."""
    model = trigram.with_bagua(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(x(rank, number)).square().mean().backward()
        optimizer.step()

    for number in range(2):
        step(number)
    hooks: Any = wrapped_models[model].hooks
    if rank == world - 1:
        hooks.parameters.train_otherwise = lambda: 1 / 0
        raises(ZeroDivisionError, step, 2)
        del hooks.parameters.train_otherwise
    else:
        began = time.monotonic()
        says(raises(trigram.AbortedError, step, 2), "raised an exception")
        assert time.monotonic() - began < patience.seconds(20)
    step(3)
    same_on_all_ranks(rank, world, "prepared", model.parameters())


@CASES.over(*GRADIENTS)
def fault_after_the_last_gradient(rank: int, world: int, algorithm: str) -> None:
    """One rank's pass fails when it has sent all gradients, and the others complete theirs: no later than in
    the next pass all have an error, and go on from a checkpoint."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"warmup_steps": 2} if algorithm == "powersgd" else {}
    model = trigram.with_bagua(mlp(), algorithm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = 0

    def step(number: int, late_fault: bool = False) -> None:
        inputs = x(rank, number).requires_grad_() * 1
        if late_fault:
            inputs.register_hook(lambda _: 1 / 0)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for number in range(4):
        step(number)
    kept = copy.deepcopy(model.state_dict())
    for fault in (rank == world - 1, False):
        try:
            step(4, fault)
        except (ZeroDivisionError, trigram.MismatchError, trigram.AbortedError) as e:
            errors += 1
            assert not isinstance(e, trigram.MismatchError) or "load a checkpoint" in str(e)
        time.sleep(0.1)  # the others complete their pass before that rank begins another one
    assert errors > 0
    optimizer.zero_grad()
    model.load_state_dict(kept)
    for number in range(5, 8):
        step(number)
    same_on_all_ranks(rank, world, f"late-{algorithm}", model.parameters())


@CASES.over(*GRADIENTS, "local_sgd", "decentralized")
def fault_before_another_model(rank: int, world: int, algorithm: str) -> None:
    """One rank's pass of a model fails, and it goes on with another model: the others do not wait for it."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"warmup_steps": 2} if algorithm == "powersgd" else {}
    models = [trigram.with_bagua(Faulty(), algorithm, **options) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(which: int, number: int, fault: bool = False) -> None:
        optimizers[which].zero_grad()
        models[which](x(rank, number), fault).square().mean().backward()
        optimizers[which].step()

    for number in range(3):
        step(0, number)
        step(1, number)
    began = time.monotonic()
    for number in range(3, 6):
        for which in (0, 1):
            try:
                step(which, number, fault=which == 0 and number == 3 and rank == world - 1)
            except (RuntimeError, trigram.TrigramError):
                optimizers[which].zero_grad()
    assert time.monotonic() - began < patience.seconds(20)


def told_apart(rank: int, world: int, algorithm: str, passes: list[int], updates: list[bool]) -> None:
    """Steps of so many passes, each with an update or not; the one that meets another raises on all ranks."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"warmup_steps": 2} if algorithm == "powersgd" else {}
    model = trigram.with_bagua(mlp(), algorithm, bucket_mb=0.0001, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step, (count, update) in enumerate(zip(passes, updates, strict=True)):
            optimizer.zero_grad()
            for i in range(count):
                square(model, rank, 10 * step + i).backward()
            if update:
                optimizer.step()

    said = raises(trigram.MismatchError, train)
    assert "backward pass" in said and "skipped an update" in said, said
    trigram.barrier()


@CASES.over(*GRADIENTS)
def one_pass_more(rank: int, world: int, algorithm: str) -> None:
    """One rank accumulates a micro-batch more than the others, which would meet their next step."""
    more = rank == world - 1
    told_apart(rank, world, algorithm, [2, 2, 2, 2, 3 if more else 2, 2], [True] * 6)


@CASES.over(*GRADIENTS)
def one_update_less(rank: int, world: int, algorithm: str) -> None:
    """One rank leaves out an update that the others make: its weights would differ from theirs ever after."""
    told_apart(rank, world, algorithm, [1] * 6, [True, True, True, rank != 0, True, True])


def found(train: Callable[[], None]) -> None:
    """Ranks that wait for each other in calls of two groups are told so, long before the calls time out."""
    began = time.monotonic()
    says(raises(trigram.MismatchError, train), "each waits for the other", "rank 1 ")
    assert time.monotonic() - began < patience.seconds(20)


@CASES.over("gradient_allreduce", "bytegrad", "local_sgd", "central/full/every:1")
def one_rank_stops_early(rank: int, world: int, algorithm: str) -> None:
    """One rank leaves its loop and asks for the consensus, while the others train on."""
    model = trigram.with_bagua(mlp(), algorithm)
    optimizer = sgd(model)

    def train() -> None:
        for step in range(3 if rank == 1 else 8):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
        trigram.consensus(model)

    found(train)


@CASES
def models_in_another_order(rank: int, world: int) -> None:
    """Each rank waits in the backward pass of a model that the other has not called yet."""
    models = [trigram.with_bagua(mlp()) for _ in range(2)]

    def train() -> None:
        for model in models if rank == 1 else reversed(models):
            square(model, rank, 0).backward()

    found(train)


@CASES
def steps_without_updates(rank: int, world: int) -> None:
    """All ranks leave out the same updates, or make them by hand: nothing is wrong."""
    model = trigram.with_bagua(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        square(model, rank, step).backward()
        if step in (2, 3, 6):
            continue
        if step == 4:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
        else:
            optimizer.step()
    same_on_all_ranks(rank, world, "skipped", model.parameters())


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
def test_fault_or_copy(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


def _stops_early(rank: int, world: int, algorithm: str) -> str:
    model = trigram.with_bagua(mlp(), algorithm)
    optimizer = sgd(model)
    began = time.monotonic()
    try:
        for step in range(3 if rank == 1 else 8):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
        trigram.consensus_state_dict(model)
    except (trigram.MismatchError, trigram.PeerLostError) as e:
        assert time.monotonic() - began < patience.seconds(20)
        return str(e)
    raise AssertionError("no error")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("algorithm", ["decentralized", "push_sum", "low_precision_decentralized"])
def test_one_rank_stops_early_in_gossip(world: int, algorithm: str) -> None:
    """It waits in a collective, and a neighbour for its message. Who waits for one of these hears of their
    error, or that they have ended."""
    said = run(world, _stops_early, algorithm, timeout=90)
    says(said[1], "each waits for the other", "rank 1 ")
    assert all("each waits for the other" in text or "is gone" in text for text in said), said
    assert world > 2 or said[0].count("each waits for the other") == 1
