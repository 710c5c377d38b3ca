"""Tensors of several kinds: in the memory format that a rank has, without memory of their own, and small
integers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.marks import long

CASES = Cases()


def values(rank: int) -> torch.Tensor:
    return torch.arange(24.0).view(2, 3, 2, 2) + 100 * rank


def held(t: torch.Tensor, other_format: bool) -> torch.Tensor:
    return t.to(memory_format=torch.channels_last) if other_format else t


@CASES
def memory_formats_that_differ_between_ranks(rank: int, world: int) -> None:
    """A value arrives at its index, whatever the strides are on the ranks."""
    world_group()
    everything = torch.stack([values(r) for r in range(world)])
    for odd_one in range(2):
        here = rank == odd_one
        for background in (False, True):
            t = held(values(rank), here)
            work = dist.all_reduce(t, async_op=background)
            if work is not None:
                work.wait()
            equal(t, everything.sum(0), "all_reduce")
        t = held(values(rank), here)
        dist.broadcast(t, 0)
        equal(t, values(0), "broadcast")
        t = held(values(rank), here)
        dist.reduce(t, 1)
        if rank == 1:
            equal(t, everything.sum(0), "reduce")
        got = held(torch.zeros(2, 3, 2, 2), not here)
        swap = [
            dist.P2POp(dist.isend, held(values(rank), here), (rank + 1) % world),
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        equal(got, values((rank - 1) % world), "a message")


@CASES
def results_of_functional_collectives(rank: int, world: int) -> None:
    """They are wrappers of a tensor that may still be on its way; calls take them as torch's backends do."""
    group = world_group()
    total = world * (world + 1) // 2

    def arriving() -> torch.Tensor:
        made = functional.all_reduce(torch.full((world,), rank + 1.0), "sum", group)
        assert isinstance(made, functional.AsyncCollectiveTensor)
        return made

    def plain(t: torch.Tensor) -> torch.Tensor:
        return t + 0

    want = torch.full((world,), float(total))
    t = arriving()
    dist.all_reduce(t)
    equal(plain(t), want * world)
    t = arriving()
    dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait()
    equal(plain(t), want)
    dist.broadcast(arriving(), 0)
    dist.reduce(arriving(), 0)
    outs = [torch.zeros(world) for _ in range(world)]
    dist.all_gather(outs, arriving())
    equal(outs[-1], want)
    into = torch.zeros(world * world)
    dist.all_gather_into_tensor(into, arriving())
    equal(into, want.repeat(world))
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, arriving())
    equal(part, want[:1] * world)
    dist.all_to_all_single(into[:world], arriving())
    equal(into[:world], want)
    dist.gather(arriving(), outs if rank == 0 else None, 0)
    parts = [arriving() for _ in range(world)]
    dist.scatter(outs[0], parts if rank == 0 else None, 0)
    equal(outs[0], want)
    with dist._coalescing_manager():
        for _ in range(2):
            dist.all_gather_into_tensor(into, arriving())
    work = dist.isend(arriving(), (rank + 1) % world)
    dist.recv(outs[1], (rank - 1) % world)
    equal(outs[1], want)
    assert work is not None and work.wait()


@CASES
def wrappers_without_memory(rank: int, world: int) -> None:
    """An error, where torch would read address 0; and the group can be used afterwards."""
    world_group()
    sharded = distribute_tensor(torch.arange(4.0 * world), init_device_mesh("cpu", (world,)), [Shard(0)])
    fake = FakeTensorMode().from_tensor(torch.ones(4))
    for t in (sharded, fake):
        outs = [torch.zeros(4) for _ in range(world)]
        with warnings.catch_warnings(action="ignore"):  # torch's, of the address of a FakeTensor
            for call in (
                lambda t=t: dist.all_reduce(t),
                lambda t=t: dist.all_reduce(t, async_op=True),
                lambda t=t: dist.broadcast(t, 0),
                lambda t=t, outs=outs: dist.all_gather(outs, t.view(-1)[:4]),
                lambda t=t: dist.isend(t, (rank + 1) % world),
                lambda t=t: trigram.all_reduce(t),
                lambda t=t: trigram.send(t, (rank + 1) % world),
            ):
                says(raises(trigram.MisuseError, call), "no memory", "DTensor", "to_local()")
    t = sharded.to_local()
    dist.all_reduce(t)
    equal(t, torch.arange(4.0 * world).view(world, 4).sum(0))


@CASES.over(torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int64)
def averages_of_integers(rank: int, world: int, dtype: torch.dtype) -> None:
    """Rounded towards 0; unsigned ones of 16 and 32 bits do not overflow on the way."""
    world_group()
    large = {torch.uint16: 60_000, torch.uint32: 4_000_000_000}.get(dtype, 7)
    mine = torch.tensor([large, rank]).to(dtype)
    want = torch.tensor([large, sum(range(world)) // world]).to(dtype)
    t = mine.clone()
    dist.all_reduce(t, dist.ReduceOp.AVG)
    assert torch.equal(t, want), t
    t = torch.zeros(2, dtype=dtype)
    dist.reduce_scatter_tensor(t, torch.cat([mine] * world), dist.ReduceOp.AVG)
    assert torch.equal(t, want), t
    t = mine.clone()
    dist.reduce(t, 0, dist.ReduceOp.AVG)
    assert torch.equal(t, want if rank == 0 else mine), t


@CASES
def errors_of_communication_hooks(rank: int, world: int) -> None:
    """DDP quotes the future's value where it has failed; the quotation is the error."""
    world_group()
    model = DistributedDataParallel(torch.nn.Linear(2, 2))

    def fail(_: object) -> torch.Tensor:
        raise KeyError("no such row")

    model.register_comm_hook(
        None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)
    )
    says(raises(RuntimeError, lambda: model(torch.ones(1, 2)).sum().backward()), "KeyError", "no such row")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, long(3)])
def test_tensors(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)
