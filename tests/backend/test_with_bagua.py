"""`with_bagua` and the backend together: process groups and dimensions of meshes as its group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import close, raises, same_on_all_ranks, says

CASES = Cases()


def _steps(net: nn.Module, rank: int, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@CASES.over("gradient_allreduce", "bytegrad", "decentralized", "local_sgd")
def in_a_process_group(rank: int, world: int, algorithm: str) -> None:
    import trigram

    group = world_group()
    net = trigram.with_bagua(_model(), algorithm, group=group)
    _steps(net, rank)
    with trigram.consensus(net):
        same_on_all_ranks(rank, world, f"in-{algorithm}", net.parameters())
    trigram.unwrap(net)
    t = torch.ones(1)
    trigram.all_reduce(t, group=group)
    assert t.item() == world


@CASES
def in_a_dimension_of_a_mesh(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import trigram

    world_group()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    says(raises(trigram.MisuseError, lambda: trigram.with_bagua(_model(), group=mesh)), "rows")
    net = trigram.with_bagua(_model(), group=mesh["columns"])
    _steps(net, rank)
    p = next(net.parameters()).detach().flatten()
    everyone = [torch.empty_like(p) for _ in range(world)]
    dist.all_gather(everyone, p)
    row = rank // (world // 2)
    for other in range(world):
        same = torch.equal(everyone[other], p)
        assert same == (other // (world // 2) == row), (rank, other)
    trigram.unwrap(net)


@CASES
def in_a_group_that_was_destroyed(rank: int, world: int) -> None:
    import trigram

    world_group()
    group = dist.new_group(list(range(world)))
    dist.destroy_process_group(group)
    says(raises(trigram.MisuseError, lambda: trigram.with_bagua(_model(), group=group)), "destroyed")


@CASES.over("local_sgd", "diloco", "decentralized")
def between_replicas_of_shards(rank: int, world: int, algorithm: str) -> None:
    """FSDP2 in the rows of a mesh, an algorithm that averages weights across rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import trigram

    world_group()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    replica, shard = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    options = {"every": 2} if algorithm != "decentralized" else {}

    def losses(x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        return net(x).square().mean()

    def batch(step: int, replica: int) -> torch.Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + replica))

    net = _model()
    fully_shard(net, mesh=mesh["shard"])
    shards = trigram.with_bagua(trigram.local_shards(net), algorithm, group=mesh["replicate"], **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        losses(batch(step, replica).chunk(world // 2)[shard], net).backward()
        optimizer.step()
        trigram.step(shards)
    with trigram.consensus(shards):
        got = [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]
    same_on_all_ranks(rank, world, f"replicas-{algorithm}", got)
    trigram.unwrap(shards)
    if algorithm == "decentralized":
        return  # a gossip step of shards begins after the update, of a model with its forward pass

    # The same without shards: one rank of each row trains its replica on the row's whole batches.
    across = dist.new_group([0, world // 2])
    if shard != 0:
        return
    plain = trigram.with_bagua(_model(), algorithm, group=across, **options)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        losses(batch(step, replica), plain).backward()
        optimizer.step()
        trigram.step(plain)
    with trigram.consensus(plain):
        for a, b in zip(got, plain.parameters(), strict=True):
            close(a, b.detach(), 1e-5, algorithm)
    trigram.unwrap(plain)


@pytest.mark.parametrize("case", list(CASES))
def test_together(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 4, patience=60.0)
