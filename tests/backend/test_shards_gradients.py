"""FSDP2 in the rows of a mesh, and the mean of gradients across rows: `with_bagua(local_shards(model), ...)`.

The reference is one process with the whole model and all batches; it clips gradients too, so averages must
be there when backward returns.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says

CASES = Cases()
ROWS = 2


class Net(nn.Module):
    """One layer for all, and heads of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.b, self.c, self.d = (
            nn.Linear(6, 7),
            nn.Linear(7, 3),
            nn.Linear(7, 3),
            nn.Linear(7, 3),
        )

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        out: torch.Tensor = getattr(self, head)(self.first(x).tanh())
        return out


def _mesh(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    world_group()
    return init_device_mesh("cpu", (ROWS, world // ROWS), mesh_dim_names=("replicate", "shard"))


def _sharded(mesh: Any) -> nn.Module:
    net = Net()
    _shard(net, mesh)
    return net


def _shard(net: Net, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in (net.first, net.b, net.c, net.d):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])


def _batch(number: int, row: int, column: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + 10 * row + column))


def _loss(net: nn.Module, number: int, row: int, column: int, head: str) -> torch.Tensor:
    loss: torch.Tensor = net(_batch(number, row, column), head).square().mean()
    return loss


def _same(net: Any, whole: nn.Module, tolerance: float, what: str) -> None:
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        close(p.full_tensor().detach(), q.detach(), tolerance, what)


# Of each pass of a step: whether it averages, the number of its batch, and the head that a row uses.
PASSES: dict[str, Callable[[int, int], list[tuple[bool, int, str]]]] = {
    "one": lambda step, row: [(True, step, "b")],
    "accumulated": lambda step, row: [(False, step, "b"), (True, 50 + step, "b")],
    "only in no_sync": lambda step, row: [(False, step, "b")],
    "other heads": lambda step, row: [(True, step, "bc"[row])],
    "twice": lambda step, row: [(True, step, "b"), (True, 9 + step, "c")],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "weighted": {"sample_weight": True, "check_finite": True},
    "a warm-up, then weights": {"algorithm": "local_sgd", "every": 1, "warmup_steps": 3},
    "frozen in turn": {},
    "evaluated between": {},
    "switched": {},
}


@CASES.over(*PASSES, *(what for what in OPTIONS if what not in PASSES))
def steps(rank: int, world: int, what: str) -> None:
    mesh = _mesh(world)
    row, column = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    net, whole, passes = _sharded(mesh), Net(), PASSES.get(what, PASSES["one"])
    options = {"algorithm": "gradient_allreduce", **OPTIONS.get(what, {})}
    weights = [1.0, 3.0] if options.get("sample_weight") else [1.0, 1.0]
    if "sample_weight" in options:
        options["sample_weight"] = weights[row]
    shards = trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"], **options)
    of_weights = "every" in options
    kind: Any = torch.optim.SGD if of_weights or what == "switched" else torch.optim.AdamW
    mine, other = kind(net.parameters(), 0.05), kind(whole.parameters(), 0.05)
    for step in range(6):
        if what == "frozen in turn":
            for each in (net, whole):
                each.b.weight.requires_grad_(not 2 <= step < 4)
        if what == "evaluated between":
            net.eval()
            with torch.no_grad():
                _loss(net, step, row, column, "c")
            net.train(step != 1)
        if what == "switched" and step == 2:
            trigram.switch(shards, "local_sgd", every=1)
        if what == "switched" and step == 4:
            trigram.switch(shards, "gradient_allreduce")
        mine.zero_grad()
        other.zero_grad()
        for averages, number, head in passes(step, row):
            with contextlib.nullcontext() if averages else trigram.no_sync(shards):
                _loss(net, number, row, column, head).backward()
        for r in range(ROWS):
            for _, number, head in passes(step, r):
                for c in range(world // ROWS):
                    part = weights[r] / sum(weights) / (world // ROWS)
                    (part * _loss(whole, number, r, c, head)).backward()
        if not of_weights and what not in ("only in no_sync", "switched"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        mine.step()
        other.step()
        if of_weights or what == "switched":
            trigram.step(shards)
    _same(net, whole, 1e-5, what)
    assert trigram.stats(shards)["steps"] == (12 if what == "twice" else 6)
    if of_weights:
        assert trigram.stats(shards)["rounds"] == 3
    trigram.unwrap(shards)


class Told:
    """What a forward pass returns, which tells torch nothing of its tensors."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Teller(Net):
    """Returns its loss in an object; its first layer has a use of its own."""

    def forward(self, x: torch.Tensor, head: str) -> Any:
        return Told(super().forward(x, head).square().mean())

    def aside(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.b(self.first(x)).abs().mean()
        return loss


def _told(net: Any, what: str, x: torch.Tensor) -> None:
    """Backward passes that do not begin at what the model returns, or not only."""
    if what in ("an object", "both"):
        net(x, "b").loss.backward()
    if what in ("submodules", "both"):
        net.aside(x).backward()


@CASES.over("an object", "submodules", "both", "assigned")
def passes_of_other_kinds(rank: int, world: int, what: str) -> None:
    """Whatever has written gradients, they are averaged before the update."""
    mesh = _mesh(world)
    row, column = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    net, whole = Teller(), Teller()
    _shard(net, mesh)
    trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
    mine, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, whole))
    for step in range(3):
        mine.zero_grad()
        other.zero_grad()
        if what == "assigned":
            for p, q in zip(net.parameters(), whole.parameters(), strict=True):
                p.grad, q.grad = torch.full_like(p, float(row)), torch.full_like(q, (ROWS - 1) / 2)
        else:
            _told(net, what, _batch(step, row, column))
            for r in range(ROWS):
                for c in range(world // ROWS):
                    _told(whole, what, _batch(step, r, c))
            for q in whole.parameters():
                if q.grad is not None:
                    q.grad /= world
        mine.step()
        other.step()
    _same(net, whole, 1e-5, what)


@CASES
def hooks_of_the_script_stay(rank: int, world: int) -> None:
    """FSDP has one hook for all-reduces; it is called once, also after the shards were wrapped again."""
    mesh, heard = _mesh(world), []
    net: Any = _sharded(mesh)
    net.first.set_all_reduce_hook(lambda gradients: heard.append(gradients.numel()))
    for _ in range(2):
        shards = trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
        net(torch.full((4, 6), float(rank)), "b").sum().backward()
        trigram.unwrap(shards)
    assert len(heard) == 2
    same_on_all_ranks(rank, world, "heard", [p.grad.full_tensor() for p in net.first.parameters()])


@CASES
def parameters_that_were_replaced(rank: int, world: int) -> None:
    mesh = _mesh(world)
    net = _sharded(mesh)
    trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)
    says(raises(trigram.MisuseError, net, torch.ones(4, 6), "b"), "was replaced", "assign=True")


@CASES
def torch_autograd_grad_makes_no_pass(rank: int, world: int) -> None:
    mesh = _mesh(world)
    net = _sharded(mesh)
    shards = trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
    if mesh["replicate"].get_local_rank() == 0:  # of this row only
        x = torch.ones(4, 6, requires_grad=True)
        torch.autograd.grad(net(x, "b").sum(), x)
    net(torch.ones(4, 6), "b").sum().backward()
    assert trigram.stats(shards)["steps"] == 1
    raises(
        trigram.MisuseError, lambda: trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
    )
    trigram.unwrap(shards)


@CASES.over("bytegrad", "powersgd", "topk", "lossless")
def codecs(rank: int, world: int, algorithm: str) -> None:
    """All rows get the same; a state goes on as if nothing had been."""
    mesh = _mesh(world)
    row, column = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    net = _sharded(mesh)
    shards = trigram.with_bagua(trigram.local_shards(net), algorithm, group=mesh["replicate"], warmup_steps=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(first: int) -> list[torch.Tensor]:
        for step in range(first, first + 3):
            optimizer.zero_grad()
            _loss(net, step, row, column, "b").backward()
            optimizer.step()
        return [p.full_tensor().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]

    train(0)
    state, kept = trigram.algorithm_state(shards), [p.detach().clone() for p in net.parameters()]
    went_on = train(3)
    same_on_all_ranks(rank, world, algorithm, went_on)
    with torch.no_grad():
        for p, value in zip(net.parameters(), kept, strict=True):
            p.copy_(value)
    trigram.load_algorithm_state(shards, state)
    for a, b in zip(train(3), went_on, strict=True):
        equal(a, b)
    trigram.unwrap(shards)


@CASES
def shards_that_nobody_keeps(rank: int, world: int) -> None:
    mesh = _mesh(world)
    row, column = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    net = _sharded(mesh)
    trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])
    gc.collect()
    _loss(net, 0, row, column, "b").backward()
    gradients = [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]  # type: ignore[union-attr]
    assert gradients
    same_on_all_ranks(rank, world, "kept", gradients)


@CASES
def a_row_fails(rank: int, world: int) -> None:
    """In a backward pass of one row: the others are told, and nobody waits."""
    mesh = _mesh(world)
    row = mesh["replicate"].get_local_rank()
    net = _sharded(mesh)
    shards = trigram.with_bagua(trigram.local_shards(net), group=mesh["replicate"])

    def fails(_gradient: torch.Tensor) -> None:
        raise ValueError("mine")

    out = net(torch.ones(4, 6), "b")
    loss = out.square().mean()
    if row == 1:
        out.register_hook(fails)
        raises(ValueError, loss.backward)
        trigram.unwrap(shards)
    else:
        says(raises(trigram.AbortedError, loss.backward), "aborted its backward pass", "raised an exception")
        trigram.unwrap(shards)


@CASES.over("state", "fused", "sharded inside")
def refused(rank: int, world: int, what: str) -> None:
    mesh = _mesh(world)
    if what == "sharded inside":
        net = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        trigram.with_bagua(net, "sharded", optimizer=optimizer, group=mesh["shard"])
        shards, words, options = trigram.local_shards(net), "averages weights", {}
    else:
        net = _sharded(mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        shards, words = trigram.local_shards(net), "local_shards"
        options = {"state": "sharded"} if what == "state" else {"fused": True}
    more: dict[str, Any] = {**options, "optimizer": optimizer} if options else {}
    refusal = raises(
        trigram.UnsupportedError,
        lambda: trigram.with_bagua(shards, "gradient_allreduce", group=mesh["replicate"], **more),
    )
    says(refusal, words)


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_of_shards(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 4, patience=60.0)
