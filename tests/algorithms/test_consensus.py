"""`consensus` and `consensus_state_dict`: the average of replicas that differ, for a while or for good."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.simulation import flatten
from tests.support import patience
from tests.support.algorithm_rows import ROWS
from tests.support.algorithm_run import Run, Yardstick, go, loss, net, start
from tests.support.cases import Cases
from tests.support.checks import close, equal, fingerprint, raises, same_on_all_ranks, says
from tests.support.harness import await_flag, flag
from tests.support.marks import long, long_unless
from tests.support.twin_training import x

CASES = Cases()


def part(module: nn.Module, rank: int) -> None:
    """Replicas go apart."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.add_(x(rank, k, *p.shape, salt=6), alpha=0.1)
        for k, b in enumerate(module.buffers()):
            if b.is_floating_point():
                b.add_(x(rank, k, *b.shape, salt=7).abs())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def average(t: Tensor, world: int) -> Tensor:
    t = t.detach().clone()
    trigram.all_reduce(t)
    return t / world


WEIGHTS = [
    "decentralized",
    "low_precision_decentralized",
    "async third",
    "local_sgd",
    "noloco",
    "sparseloco",
    "push_sum",
]


@CASES.over(*WEIGHTS, "async_decentralized third")
def consensus(rank: int, world: int, label: str) -> None:
    """All ranks get the average, weights and buffers; inside of `with` only for a while."""
    model, optimizer = start(rank, label, normed)
    go(model, optimizer, rank, 0, 1)
    trigram.algorithm_state(model)  # what is in flight lands
    part(model, rank)
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    expected = [average(t, world) for t in floats]
    before = [t.detach().clone() for t in floats]
    model.eval()
    with trigram.consensus(model):
        for t, e in zip(floats, expected, strict=True):
            close(t.detach(), e, 1e-6, "inside")
        same_on_all_ranks(rank, world, f"inside-{label}", floats)
        if rank == 0:  # an evaluation; nobody else need take part
            with torch.no_grad():
                model(x(0, 5))
    model.train()
    for t, e in zip(floats, before, strict=True):
        equal(t.detach(), e, "replicas come back")
    trigram.consensus(model)
    for t, e in zip(floats, expected, strict=True):
        close(t.detach(), e, 1e-6, "a plain call")
    same_on_all_ranks(rank, world, f"plain-{label}", floats)
    go(model, optimizer, rank, 2, 3)


@CASES.over("decentralized", "push_sum", "local_sgd")
def consensus_stays(rank: int, world: int, label: str) -> None:
    """At a learning rate of 0 the averages stay what they are, through a checkpoint too; what is seen in
    a `with` block before changes nothing."""
    model, optimizer = start(rank, label, net)
    go(model, optimizer, rank, 0, 6)
    part(model, rank)
    trigram.consensus(model)
    with trigram.consensus(model):
        pass
    was = flatten(list(model.parameters()))
    state, weights = trigram.algorithm_state(model), copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        go(model, optimizer, rank, 6, 5)
        close(flatten(list(model.parameters())), was, 1e-6, "the averages")
        model.load_state_dict(weights)
        trigram.load_algorithm_state(model, state)


@CASES.over("decentralized", "push_sum", "local_sgd")
def consensus_after_a_skipped_update(rank: int, world: int, label: str) -> None:
    """One rank skips its update, all evaluate, and then gradients are reset: the step counts everywhere."""
    model, optimizer = start(rank, label, net)
    for step in range(9):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        if (rank, step % 3) != (world - 1, 1):
            optimizer.step()
        if step % 3 == 1:
            with trigram.consensus(model):
                pass
    assert trigram.stats(model)["steps"] == 9
    trigram.unwrap(model)


@CASES
def consensus_of_buffers(rank: int, world: int) -> None:
    """Where weights are the same anyway, buffers are what differs."""
    model, optimizer = start(rank, "bytegrad sgd", normed)
    go(model, optimizer, rank, 0, 3)
    weights, mean = fingerprint(model.parameters()), average(model[1].running_mean, world)
    own = model[1].running_mean.clone()
    with trigram.consensus(model):
        close(model[1].running_mean, mean, 1e-6, "inside")
    equal(model[1].running_mean, own, "it comes back")
    trigram.consensus(model)
    close(model[1].running_mean, mean, 1e-6, "a plain call")
    assert fingerprint(model.parameters()) == weights


@CASES.over(*WEIGHTS)
def consensus_within_a_training(rank: int, world: int, label: str) -> None:
    """With `with`, training goes on as if nothing had been asked."""
    if label == "async third":
        return  # what is in flight may land first
    run = Run(rank, world, ROWS[label])
    for _ in range(2):
        run.train(3)
        mean = flatten(run.sim.consensus())
        with trigram.consensus(run.model):
            Yardstick(True).check(run.weights(), mean, "inside")
    run.train(2)


@CASES
def consensus_and_an_error(rank: int, world: int) -> None:
    """Replicas come back when the block raises."""
    model, _ = start(rank, "decentralized", net)
    part(model, rank)
    before = fingerprint(model.parameters())

    def block() -> None:
        with trigram.consensus(model):
            raise ZeroDivisionError

    raises(ZeroDivisionError, block)
    assert fingerprint(model.parameters()) == before


class Mixed(nn.Module):
    """Tied weights, a buffer of integers, one that is not saved, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = normed()
        self.tied = nn.Linear(6, 9)
        self.tied.weight = self.body[0].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.body(inputs) + self.tied(inputs)[:, :3]

    def get_extra_state(self) -> Any:
        return {"version": [3]}

    def set_extra_state(self, state: Any) -> None:
        pass


@CASES.over(*WEIGHTS, "gradient_allreduce sgd", "async_decentralized third")
def consensus_state_dict(rank: int, world: int, label: str) -> None:
    """The averaged state on every rank; the model keeps its weights, and trains on."""
    model, optimizer = start(rank, label, Mixed)
    go(model, optimizer, rank, 0, 1)
    trigram.algorithm_state(model)  # what is in flight lands
    if not label.startswith("gradient"):
        part(model, rank)
    else:
        model.body[1].running_mean.add_(rank)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    expected = {k: average(v, world) for k, v in before.items() if v.is_floating_point()}
    state = trigram.consensus_state_dict(model)
    assert list(state) == list(model.state_dict()) and "scratch" not in state
    assert state["_extra_state"] == {"version": [3]} and state._metadata == model.state_dict()._metadata
    for name, e in expected.items():
        close(state[name], e, 1e-6, name)
        equal(model.state_dict()[name], before[name], f"the model's {name}")
        assert state[name].data_ptr() != model.state_dict()[name].data_ptr()
    tied = state["body.0.weight"], state["tied.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    same_on_all_ranks(
        rank, world, f"state-dict-{label}", [v for v in state.values() if isinstance(v, Tensor)]
    )
    fresh = Mixed()
    fresh.load_state_dict(state)
    if rank == 0:  # an evaluation; nobody else need take part
        fresh.eval()(x(0, 5))
    go(model, optimizer, rank, 1, 3)
    assert trigram.stats(model)["steps"] == 4


@CASES
def consensus_of_ignored(rank: int, world: int) -> None:
    """What `ignore` names is left alone, by every name that it has."""
    torch.manual_seed(8)
    module = Mixed()
    names = ["tied.weight", "body.1.running_var", "body.3.bias"]
    model = trigram.with_bagua(module, "local_sgd", ignore=names)
    part(model, rank)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    left = {*names, "body.0.weight"}
    for state in (trigram.consensus_state_dict(model), trigram.consensus(model) and model.state_dict()):
        for name, was in before.items():
            if was.is_floating_point():
                assert torch.equal(state[name], was) == (name in left), name


@CASES.over("gradient_allreduce", "local_sgd", "central:median/full/every:2")
def consensus_in_chunks(rank: int, world: int, algorithm: str) -> None:
    """The tensors that an average needs do not grow with the model, apart from the copy that is kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from trigram.averaging import mean
    from trigram.collectives import coalesced

    model = nn.Module()
    for k, shape in enumerate([(3 * mean.CHUNK,), (1024, mean.CHUNK // 1024), (5, 7)]):
        model.register_parameter(f"p{k}", nn.Parameter(torch.ones(shape) * (rank + 1)))
    model.register_buffer("turned", torch.ones(2048, mean.CHUNK // 2048 + 1).t())
    trigram.with_bagua(model, algorithm)
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(rank)
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    largest = max(t.nbytes for t in model.parameters())
    known, sizes = set(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                    sizes.append((t.untyped_storage().nbytes(), str(func)))
            return out

    known |= {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    made, registered = coalesced.empty, []
    coalesced.empty = lambda *a, **k: registered.append(made(*a, **k)) or registered[-1]
    try:
        with Watch():
            trigram.consensus(model)
    finally:
        coalesced.empty = made
    assert registered and max(t.nbytes for t in registered) <= 1.5 * mean.CHUNK
    copies = [n for n, func in sizes if "clone" in func]
    assert sum(copies) <= whole + 8 * mean.CHUNK
    others = [n for n in sizes if "clone" not in n[1]]
    assert max(n for n, _ in others) <= 2 * world * mean.CHUNK < largest * 2, others
    middle = (world - 1) / 2
    for t in (*model.parameters(), *model.buffers()):
        assert bool((t == middle).all())


@CASES
def consensus_without_one(rank: int, world: int) -> None:
    """Asked for on all ranks but the last: it is named, and nobody hangs."""
    model, _ = start(rank, "decentralized", net)
    trigram.barrier()
    if rank < world - 1:
        text = raises(
            (trigram.TimeoutError, trigram.MismatchError), lambda: trigram.consensus(model, timeout=2)
        )
        says(text, f"rank {world - 1}" if world == 2 else "rank")
        flag(f"consensus-{rank}")
    else:
        for r in range(world - 1):
            await_flag(f"consensus-{r}", 20)


@CASES
def consensus_without_one_after_a_skipped_update(rank: int, world: int) -> None:
    """The averaging step that a skipped update has left is bounded by the timeout, too."""
    model = trigram.with_bagua(net(), "central/full/every:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, rank, 0).backward()
    trigram.barrier()
    if rank < world - 1:
        began = time.monotonic()
        text = raises(
            (trigram.TimeoutError, trigram.MismatchError), lambda: trigram.consensus(model, timeout=2)
        )
        says(text, f"rank {world - 1}" if world == 2 else "rank")
        assert time.monotonic() - began < patience.seconds(20)
        flag(f"skipped-{rank}")
    else:
        for r in range(world - 1):
            await_flag(f"skipped-{r}", 20)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_consensus(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


@pytest.mark.parametrize("case", long_unless(list(CASES)[::3], list(CASES)))
@pytest.mark.parametrize("world", [4])
def test_consensus_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
