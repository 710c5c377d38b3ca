"""torch's own ways to train in parallel, over our backend: each trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import close, equal
from tests.support.harness import scratch
from tests.support.marks import long

CASES = Cases()
STEPS, SIZE = 4, 12


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(step))


def alone() -> list[torch.Tensor]:
    """The parameters after training in one process, on the whole batches."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step).chunk(world)[rank]).square().mean().backward()
        optimizer.step()


def agree(params: Any, name: str = "") -> None:
    for got, want in zip(params, alone(), strict=True):
        whole = got.full_tensor() if hasattr(got, "full_tensor") else got
        close(whole.detach(), want, 2e-5, name)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@CASES.over(False, True)
def ddp(rank: int, world: int, view: bool) -> None:
    world_group()
    net = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
    train(net, adam(net.parameters()), rank, world)
    agree(net.parameters())


@CASES.over("powersgd", "fp16", "post local sgd", "python")
def ddp_with_hook(rank: int, world: int, which: str) -> None:
    """torch's communication hooks, whose callbacks communicate, with several buckets in flight."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    world_group()
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    if which == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif which == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif which == "post local sgd":
        subgroup, _ = dist.new_subgroups(world)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, 100)
        net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    else:

        def mean(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda f: f.value()[0].div_(world))

        net.register_comm_hook(None, mean)
    train(net, adam(net.parameters()), rank, world)
    for p in net.parameters():
        copies = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(copies, p.detach())
        assert all(torch.equal(copies[0], other) for other in copies)
    if which in ("post local sgd", "python"):
        agree(net.parameters())


@CASES.over("bytegrad", "gradient_allreduce")
def ddp_with_our_hook(rank: int, world: int, which: str) -> None:
    import trigram

    group = world_group()
    net = nn.parallel.DistributedDataParallel(model())
    net.register_comm_hook(*trigram.ddp_hook(which, group=group))
    train(net, adam(net.parameters()), rank, world)
    if which == "gradient_allreduce":
        agree(net.parameters())


@CASES.over(True, False)
def fsdp2(rank: int, world: int, registered: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    world_group()
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    if registered and hasattr(net, "set_allocate_memory_from_process_group_for_comm"):
        net.set_allocate_memory_from_process_group_for_comm(True)
    train(net, adam(net.parameters()), rank, world)
    agree(net.parameters())


@CASES
def fsdp1(rank: int, world: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    world_group()
    net = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    train(net, adam(net.parameters()), rank, world)
    with FullyShardedDataParallel.summon_full_params(net):
        agree([p.clone() for p in net.parameters()])


@CASES
def hybrid_sharding(rank: int, world: int) -> None:
    """HSDP: sharded in rows of a mesh, replicated across rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_group()
    shards = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh)
    train(net, adam(net.parameters()), rank, world)
    agree(net.parameters())


@CASES
def zero(rank: int, world: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    world_group()
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    train(net, optimizer, rank, world)
    agree(net.parameters())
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6


@CASES
def tensor_parallel(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world_group()
    mesh = init_device_mesh("cpu", (world,))
    net = model()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, adam(net.parameters()), 0, 1)
    agree(net.parameters())


@CASES
def dtensor_redistribution(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    world_group()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(5 * 7.0).view(5, 7)  # of uneven shards
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    equal((rows @ rows.t()).full_tensor(), whole @ whole.t())
    part = rows.sum(0)
    assert part.placements == (Partial(),) or part.placements[0].is_partial()
    equal(part.full_tensor(), whole.sum(0))
    equal(rows.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).full_tensor(), whole)


@CASES.over("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
def pipeline(rank: int, world: int, which: str) -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    world_group()
    looped = which in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
    stages = 2 * world if looped else world
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)]
    x, target = torch.randn(12, 8), torch.randn(12, 8)
    whole = nn.Sequential(*layers)
    nn.functional.mse_loss(whole(x), target).backward()
    want = [p.grad.clone() for p in whole.parameters()]  # type: ignore[union-attr]
    whole.zero_grad()
    mine = range(rank, stages, world)
    made = [PipelineStage(layers[k], k, stages, torch.device("cpu")) for k in mine]
    kind = get_schedule_class(which)
    schedule: Any = kind(
        made if looped else made[0],
        4 if world % 2 == 0 or not looped else 2 * world,
        loss_fn=nn.functional.mse_loss,
    )
    last = stages - 1 in mine
    schedule.step(*([x] if rank == 0 else []), **({"target": target} if last else {}))
    per = len(want) // stages
    for k in mine:
        for p, w in zip(layers[k].parameters(), want[k * per : (k + 1) * per], strict=True):
            assert p.grad is not None
            close(p.grad, w, 1e-6, f"stage {k}")


@CASES.over(False, True)
def checkpoints(rank: int, world: int, background: bool) -> None:
    """DCP saves shards of FSDP2 and loads them, also asynchronously."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    world_group()
    net = model()
    fully_shard(net)
    train(net, adam(net.parameters()), rank, world)
    where = str(scratch() / f"checkpoint-{background}")
    state = {"model": net.state_dict()}
    if background:
        # The background thread of async_save makes calls beside those of training: in a group of its own.
        dcp.async_save(state, checkpoint_id=where, process_group=dist.new_group()).result()
    else:
        dcp.save(state, checkpoint_id=where)
    assert Path(where, ".metadata").exists()
    other = model()
    fully_shard(other)
    loaded = {"model": other.state_dict()}
    dcp.load(loaded, checkpoint_id=where)
    other.load_state_dict(loaded["model"])
    agree(other.parameters())


def _functional(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    summed = funcol.all_reduce(x * 2, "sum", group)
    gathered = funcol.all_gather_tensor(summed, 0, group)
    return (
        summed,
        gathered,
        funcol.reduce_scatter_tensor(gathered, "sum", 0, group),
        funcol.all_to_all_single(gathered, None, None, group),
        funcol.broadcast(x, 0, group),
        *funcol.all_gather_into_tensor_coalesced([x, x + 1], group),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
    )


@CASES.over("eager", "compiled", "autograd")
def functional(rank: int, world: int, how: str) -> None:
    group = world_group()
    x = torch.arange(3.0) + rank
    if how == "autograd":
        leaf = x.clone().requires_grad_()
        out = funcol.all_gather_tensor_autograd(leaf, 0, group)
        (out * torch.arange(out.numel())).sum().backward()
        assert leaf.grad is not None
        equal(leaf.grad, world * (torch.arange(3.0) + 3 * rank))
        return
    run = _functional if how == "eager" else torch.compile(_functional)
    summed, gathered, scattered, turned, first, *coalesced = run(x, group)
    values = [torch.arange(3.0) + r for r in range(world)]
    total = 2 * torch.stack(values).sum(0)
    equal(summed + 0, total)
    equal(gathered + 0, total.repeat(world))
    equal(scattered + 0, world * total)
    equal(turned + 0, total.repeat(world))
    equal(first + 0, values[0])
    equal(coalesced[0] + 0, torch.cat(values))
    equal(coalesced[1] + 0, torch.cat(values) + 1)
    equal(coalesced[2] + 0, total / 2)
    equal(coalesced[3] + 0, total / 2 + world)


@CASES
def compiled_ddp(rank: int, world: int) -> None:
    world_group()
    net = nn.parallel.DistributedDataParallel(model())
    train(torch.compile(net), adam(net.parameters()), rank, world)  # type: ignore[arg-type]
    agree(net.parameters())


@CASES
def operators_with_out(rank: int, world: int) -> None:
    group = world_group()
    out = torch.empty(2 * world)
    operators = torch.ops._c10d_functional
    operators.wait_tensor(
        operators.all_gather_into_tensor_out(torch.full((2,), float(rank)), world, group.group_name, out=out)
    )
    equal(out, torch.arange(world).repeat_interleave(2).float())


@CASES
def meshes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    world_group()
    if world % 2:
        return
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    t = torch.ones(1)
    dist.all_reduce(t, group=mesh["a"].get_group())
    assert t.item() == 2
    both = mesh["a", "b"]._flatten("both")
    dist.all_reduce(t, group=both.get_group())
    assert t.item() == 2 * world


SLOW = ("compiled", "InterleavedZeroBubble", "LoopedBFS")


@pytest.mark.parametrize("case", [long(c) if any(s in c for s in SLOW) else c for c in CASES])
@pytest.mark.parametrize("world", [2, long(3), 4])
def test_parallelism(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, patience=150.0)
