"""What cannot be sharded is refused on all ranks, with words that say what to do; and ranks that die."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import trigram
from tests.sharded.twins import Net, Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.harness import run
from tests.support.twin_training import mlp, square

CASES = Cases()


def refused(
    kind: type[BaseException], *words: str, make: Callable[[], nn.Module] = mlp, **options: Any
) -> None:
    model = make()
    given = options.pop("optimizer", adamw)
    says(
        raises(
            kind,
            trigram.with_bagua,
            model,
            options.pop("algorithm", "sharded"),
            optimizer=given(model),
            **options,
        ),
        *words,
    )
    assert not trigram.is_wrapped(model)


@CASES
def optimizers(rank: int, world: int) -> None:
    refused(trigram.MisuseError, "optimizer=", optimizer=lambda m: None)
    refused(trigram.MisuseError, "none of the parameters", optimizer=lambda m: adamw(mlp()))
    refused(
        trigram.UnsupportedError,
        "LBFGS",
        "at once",
        optimizer=lambda m: torch.optim.LBFGS(m.parameters()),
        elementwise=False,
    )
    refused(
        trigram.UnsupportedError,
        "differentiable",
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True),
    )


@CASES
def combinations(rank: int, world: int) -> None:
    refused(trigram.UnsupportedError, "elastic", "shards", elastic=True, gradients="shards")
    refused(trigram.MisuseError, "copies=2", "elastic=True", copies=2)
    refused(trigram.UnsupportedError, "weights", algorithm="local_sgd", state="sharded")
    refused(trigram.UnsupportedError, "decentralized", algorithm="decentralized", state="sharded")
    refused(trigram.UnsupportedError, "shards", algorithm="bytegrad", state="sharded", gradients="shards")
    refused(trigram.UnsupportedError, "state=", state="split")
    says(raises(trigram.UnsupportedError, trigram.register, "sharded", trigram.Trigram()), "taken")


@CASES
def complex_parameters(rank: int, world: int) -> None:
    """They train in pairs under other algorithms; slices of them, and robust aggregations, take real ones."""

    def turned() -> nn.Module:
        model = mlp()
        model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        return model

    refused(trigram.UnsupportedError, "turn", "complex64", "sharded", make=turned)
    refused(
        trigram.UnsupportedError, "turn", "fused", make=turned, algorithm="gradient_allreduce", fused=True
    )
    median = "central:median/full/sync"
    text = raises(trigram.UnsupportedError, trigram.with_bagua, turned(), median)
    says(text, "turn", "robust", "view_as_real")


@CASES
def shared_memory(rank: int, world: int) -> None:
    """Two parameters that overlap, and a buffer that is a view of a parameter."""

    def overlapping() -> nn.Module:
        model = mlp()
        model[2].bias = nn.Parameter(model[0].weight.data[3])
        return model

    def with_view() -> nn.Module:
        model = mlp()
        model.register_buffer("view", model[0].weight.data[0])
        return model

    for make in (overlapping, with_view):
        refused(trigram.UnsupportedError, "share memory", make=make)
    model = overlapping()
    optimizer = adamw(model)
    refused(trigram.UnsupportedError, "share memory", make=lambda: model, optimizer=lambda _: optimizer)
    model[2].bias.data = model[2].bias.data.clone()
    trigram.with_bagua(nn.Sequential(model), "sharded", optimizer=optimizer)  # no other model has claimed it


@CASES
def joins(rank: int, world: int) -> None:
    model = mlp()
    trigram.with_bagua(model, "sharded", optimizer=adamw(model))
    says(raises(trigram.UnsupportedError, trigram.join, model), "sharded", "batches")


@CASES
def another_optimizer(rank: int, world: int) -> None:
    """Another optimizer of the same parameters, alone or around the sharded one."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    twins.loss(model, 0).backward()
    says(raises(trigram.MisuseError, second.step), "SGD", "AdamW", "0.weight")

    class Around(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(optimizer.param_groups, {})

        def step(self, closure: Any = None) -> None:
            optimizer.step()

    says(raises(trigram.MisuseError, Around().step), "Around", "AdamW")
    for _, each in twins.pairs:
        each.zero_grad()
    twins.train(2, 2)


@CASES
def one_optimizer_of_two_models(rank: int, world: int) -> None:
    models = [mlp(), mlp()]
    optimizer = adamw(nn.ModuleList(models))
    trigram.with_bagua(models[0], "sharded", optimizer=optimizer)
    refused(trigram.MisuseError, "another model", make=lambda: models[1], optimizer=lambda m: optimizer)
    trigram.unwrap(models[0])
    trigram.with_bagua(nn.ModuleList(models), "sharded", optimizer=optimizer)


@CASES
def a_closure_that_is_ignored(rank: int, world: int) -> None:
    class Ignores(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    model = mlp()
    optimizer = Ignores(model.parameters(), lr=0.1)
    trigram.with_bagua(model, "sharded", optimizer=optimizer, elementwise=True)
    square(model, rank, 0).backward()
    says(raises(trigram.MisuseError, optimizer.step, lambda: None), "closure", "slices")


@CASES
def another_dtype(rank: int, world: int) -> None:
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    model.double()
    optimizer.zero_grad()
    model(torch.ones(2, 6).double()).sum().backward()
    says(raises(trigram.UnsupportedError, optimizer.step), "float32", "float64", "unwrap")


@CASES
def a_step_of_one_rank(rank: int, world: int) -> None:
    """One rank steps and the others go on: an error on all."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    if rank == 0:
        says(raises(trigram.MismatchError, optimizer.step), "all ranks")
    else:
        optimizer.zero_grad()
        raises(trigram.MismatchError, lambda: twins.loss(model, 3).backward())


@CASES.over("step", "state_dict")
def a_call_of_one_rank_with_buffers(rank: int, world: int, call: str) -> None:
    """The others go on to a forward pass, which begins with the buffers: nobody waits."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = adamw(model)
    trigram.with_bagua(model, "sharded", optimizer=optimizer)

    def train() -> None:
        for step in range(5):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            if call == "state_dict" or step < 3 or rank == 0:
                optimizer.step()
            if call == "state_dict" and step == 3 and rank == 0:
                optimizer.state_dict()

    says(raises(trigram.MismatchError, train), call if rank == 0 else "every rank")


@CASES
def only_accumulated_on_one_rank(rank: int, world: int) -> None:
    """Before the first update, one rank has made a pass and the others have only accumulated."""
    model = mlp()
    optimizer = adamw(model)
    trigram.with_bagua(model, "sharded", optimizer=optimizer)
    if rank == 0:
        square(model, rank, 0).backward()
    else:
        with model.no_sync():  # type: ignore[operator]
            square(model, rank, 0).backward()
    optimizer.step()


@CASES
def a_step_that_raises(rank: int, world: int) -> None:
    """A hook of the script raises in the step, on all ranks: the groups hold the parameters again."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    twins.loss(model, 7).backward()

    def fails(*_: Any) -> None:
        raise ValueError("no")

    handle = optimizer.register_step_pre_hook(fails)
    raises(ValueError, optimizer.step)
    handle.remove()
    optimizer.zero_grad()
    model(torch.ones(2, 6))
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    twins.train(2, 2)


@CASES
def divided_gradients(rank: int, world: int) -> None:
    """What needs whole gradients raises on all ranks, and the next step is right."""
    given: dict[str, Any] = {"gradients": "shards"}
    twins = Twins(rank, world, mlp, **given)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    grad = model[0].weight.grad
    assert "on this rank" in repr(grad)
    for use in (
        lambda: grad.abs().max(),
        lambda: grad + 1,
        lambda: grad.mul_(torch.ones_like(model[0].weight)),
        lambda: torch.stack([p.grad for p in model.parameters()][:1]),
    ):
        says(raises(trigram.MisuseError, use), "gradients='full'")
    says(raises(trigram.MisuseError, lambda: twins.loss(model, 3).backward()), "no_sync", "gradients='full'")
    twins.train(2, 2)
    refused(
        trigram.MisuseError,
        "2.bias",
        "does not update it",
        optimizer=lambda m: torch.optim.SGD([p for n, p in m.named_parameters() if n != "2.bias"], lr=0.1),
        **given,
    )


@CASES.over("shards", "fused")
def gradients_without_memory(rank: int, world: int, what: str) -> None:
    """What takes a tensor's memory, and not torch's operations, would read a null pointer."""
    given: dict[str, Any] = {"fused": True} if what == "fused" else {"gradients": "shards"}
    twins = Twins(rank, world, mlp, **given)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    twins.loss(model, 2).backward()
    grad = model[0].weight.grad
    for take in (
        grad.numpy,
        grad.tolist,
        grad.data_ptr,
        grad.untyped_storage,
        grad.storage,
        grad.__dlpack__,
        lambda: numpy.asarray(grad),
        lambda: torch.from_dlpack(grad),
        lambda: copy.deepcopy(grad),
        lambda: pickle.dumps(grad),
        lambda: torch.save(grad, io.BytesIO()),
        lambda: ForkingPickler.dumps(grad),
        lambda: torch.Tensor(grad.untyped_storage()),
        lambda: trigram.all_reduce(grad),
    ):
        text = raises(trigram.MisuseError, take)
        assert "fused=False" in text or "gradients='full'" in text or "no memory" in text, text
    raises(RuntimeError, torch.utils.dlpack.to_dlpack, grad)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.Tensor(grad.untyped_storage()).numel() == 0
    optimizer.step()


@CASES
def after_shutdown(rank: int, world: int) -> None:
    """The state's other parts are gone: no step and no state without a word. The last case: it ends the
    job."""
    twins = Twins(rank, world, Net)
    twins.train(steps=2)
    _, optimizer = twins.pairs[1]
    trigram.shutdown()
    for call in (optimizer.step, optimizer.state_dict):
        says(raises(trigram.MisuseError, call), "shutdown", "unwrap")
    fresh = mlp()
    fresh_optimizer = adamw(fresh)
    trigram.with_bagua(fresh, "sharded", optimizer=fresh_optimizer)
    square(fresh, rank, 0).backward()
    fresh_optimizer.step()


@CASES
def begun_again(rank: int, world: int) -> None:
    """An optimizer that has lost no state is a plain one after unwrap."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trigram.with_bagua(model, "sharded", optimizer=optimizer)
    square(model, rank, 0).backward()
    optimizer.step()
    trigram.shutdown()
    trigram.unwrap(model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_refused(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


def _dies(rank: int, world: int, where: str) -> str:
    trigram.init()
    model = mlp()
    optimizer = adamw(model)
    trigram.with_bagua(model, "sharded", optimizer=optimizer, fused=where == "in backward")
    for step in range(2):
        optimizer.zero_grad()
        square(model, rank, step).backward()
        optimizer.step()
    if rank == world - 1:
        optimizer.register_step_post_hook(lambda *_: os._exit(7))  # before it, the gather has begun
        if where == "in the step":
            optimizer.register_step_pre_hook(lambda *_: os._exit(7))
        if where == "in backward":
            model[2].weight.register_post_accumulate_grad_hook(lambda _: os._exit(7))

    def train() -> None:
        for step in range(100):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()

    return raises(trigram.PeerLostError, train)


@pytest.mark.waits
@pytest.mark.parametrize("where", ["in the step", "after the step", "in backward"])
def test_a_rank_that_dies(transport: str, where: str) -> None:
    for text in run(3, _dies, where, transport=transport, dies=[2])[:2]:
        says(text, "rank 2")
