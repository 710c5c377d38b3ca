"""What a model may be, under every algorithm: partly used, partly frozen, in half precision, with buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.simulation import Simulation, flatten
from tests.support.algorithm_rows import GRADIENTS, NAMES_ONCE, ROWS, Row
from tests.support.algorithm_run import Run, Yardstick, loss, net, start
from tests.support.cases import Cases
from tests.support.checks import close, equal, fingerprint, same_on_all_ranks
from tests.support.marks import long
from tests.support.twin_training import x

CASES = Cases()


class Heads(nn.Module):
    """A trunk, and heads of which a forward takes one; the last is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 9)
        self.heads = nn.ModuleList(nn.Linear(9, 3) for _ in range(4))

    def forward(self, inputs: Tensor, which: int = 0) -> Tensor:
        return self.heads[which](torch.tanh(self.trunk(inputs)))


@CASES.over(*NAMES_ONCE, "topk momentum")
def unused(rank: int, world: int, label: str) -> None:
    """Ranks use different heads; what nobody used keeps None. With weight decay, a zero would show."""

    def lossy(model: nn.Module, r: int, step: int) -> Tensor:
        return (model(x(r, step), (r + step) % 3 if step > 2 else 0) - r).square().mean()

    row = ROWS[label]
    chosen = row.optimizer if row.given else "momentum"
    run = Run(rank, world, Row(**{**vars(row), "optimizer": chosen}), Heads)
    last = fingerprint(run.model.heads[3].parameters())
    for step in range(7):
        run.optimizer.zero_grad()
        lossy(run.model, rank, step).backward()
        for k, head in enumerate(run.model.heads):
            mine = k == ((rank + step) % 3 if step > 2 else 0)
            anyone = k < 3 and any(k == ((r + step) % 3 if step > 2 else 0) for r in range(world))
            got = head.weight.grad is not None
            assert got == (anyone if row.same else mine), f"step {step}, head {k}"
        run.optimizer.step()
        if label != "qadam 8":
            run.sim.step(lambda m, r, step=step: [lossy(m, r, step)])
            run.yardstick.check(run.weights(), run.sim.weights(rank), f"after step {step}")
        if row.same:
            run.same.append(run.weights())
    run.end(world, f"unused-{label}")
    if row.same:
        assert fingerprint(run.model.heads[3].parameters()) == last, "a head that nobody used has moved"


@CASES.over(*NAMES_ONCE)
def bfloat16(rank: int, world: int, label: str) -> None:
    """A model in half precision learns, stays what it is, and is the same where it is to be."""
    model, optimizer = start(rank, label, lambda: net().bfloat16())
    losses, seen = [], []
    for _ in range(12):
        optimizer.zero_grad()
        inputs = x(0, 3)
        value = (model(inputs.bfloat16()).float() - inputs[:, :3].sin()).square().mean()
        value.backward()
        losses.append(float(value.detach()))
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    assert all(t.dtype == torch.bfloat16 and bool(t.isfinite().all()) for t in seen)
    # All ranks have the same data here, so nobody parts, whatever is exchanged.
    assert losses[-1] < losses[0], losses
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"bfloat16-{label}", [t.view(torch.int16) for t in seen])


@CASES.over(*NAMES_ONCE)
def another_default_dtype(rank: int, world: int, label: str) -> None:
    """`torch.set_default_dtype(torch.float64)` in a script changes nothing for a model in float32."""
    inputs, first, ends = [x(rank, step) for step in range(6)], net(), []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            model, optimizer = start(rank, label, lambda: copy.deepcopy(first))
            for mine in inputs:
                optimizer.zero_grad()
                (model(mine) - rank * mine[:, :3]).square().mean().backward()
                optimizer.step()
            trigram.algorithm_state(model)
            ends.append(flatten(list(model.parameters())))
        finally:
            torch.set_default_dtype(torch.float32)
    equal(ends[1], ends[0], "the weights")


@CASES.over(torch.bfloat16, torch.float16, torch.float32)
def outer_optimizer_in_16_bits(rank: int, world: int, dtype: torch.dtype) -> None:
    """After an outer step all ranks hold the same bits in every dtype that is rounded from float32."""
    torch.manual_seed(8)
    model = trigram.with_bagua(net().to(dtype), "diloco", every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        inputs = x(rank, step).to(dtype)
        (model(inputs) - rank * inputs[:, :3]).square().mean().backward()
        optimizer.step()
        if step % 2:
            same_on_all_ranks(rank, world, f"outer-{dtype}-{step}", model.parameters())


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(6, 9),
            nn.Linear(9, 9, dtype=torch.bfloat16),
            nn.Linear(9, 3),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.three(self.two(torch.tanh(self.one(inputs)).bfloat16()).float())


@CASES.over(*NAMES_ONCE)
def mixed_types(rank: int, world: int, label: str) -> None:
    model, optimizer = start(rank, label, Both)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        seen += [p.detach().float() for p in model.parameters()]
    assert [p.dtype for p in model.two.parameters()] == [torch.bfloat16] * 2
    assert all(bool(t.isfinite().all()) for t in seen)
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"types-{label}", seen)


@CASES.over(*NAMES_ONCE)
def frozen(rank: int, world: int, label: str) -> None:
    """What needs no gradient stays at home."""

    def make() -> nn.Module:
        module = net()
        module[2].requires_grad_(False)  # type: ignore[index]
        return module

    row = ROWS[label]
    torch.manual_seed(8)
    sim = Simulation(row.reference(world), world, make, Run.optimizer_for(row, world), row.warmup)
    model, optimizer = start(rank, label, make)
    yardstick = Yardstick(row.coded)
    before = fingerprint(model[2].parameters())
    for step in range(6):
        sim.step(lambda m, r, step=step: [loss(m, r, step)])
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        own = [p for p in model.parameters() if p.requires_grad]
        yardstick.check(flatten(own), sim.weights(rank), f"after step {step}")
    assert fingerprint(model[2].parameters()) == before


class Table(nn.Module):
    """Buffers that forward does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.table: Tensor
        self.count: Tensor
        self.register_buffer("table", torch.zeros(5))
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


@CASES.over(*NAMES_ONCE)
def buffers(rank: int, world: int, label: str) -> None:
    """They follow rank 0 where gradients are averaged, stay local elsewhere; consensus averages them."""
    model, optimizer = start(rank, label, Table)
    for step in range(4):
        model.table.fill_(rank + 1.0)
        model.count.fill_(rank + 1)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        if step == 0:
            continue
        expected = 1.0 if label in GRADIENTS else rank + 1.0
        equal(model.table, torch.full((5,), expected), f"step {step}")
        equal(model.count, torch.full((2,), int(expected)), f"step {step}, integers")
    model.table.fill_(rank + 1.0)
    with trigram.consensus(model):
        close(model.table, torch.full((5,), (world + 1) / 2), 1e-6, "inside")
    equal(model.table, torch.full((5,), rank + 1.0), "afterwards")
    trigram.consensus(model)
    close(model.table, torch.full((5,), (world + 1) / 2), 1e-6, "a plain call")


@CASES.over(*NAMES_ONCE)
def batch_norm(rank: int, world: int, label: str) -> None:
    """Trains; rank 0's statistics never meet the others' where they are to stay at home."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))

    model, optimizer = start(rank, label, make)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    assert int(model[1].num_batches_tracked) == 5
    assert all(bool(t.isfinite().all()) for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_model(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm" if world == 3 else "tcp")
