"""`import trigram.compat.horovod as hvd`: Horovod's calls and its optimizer, against what they must give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
import trigram.compat.horovod as hvd
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.twin_training import mlp, x
from trigram.averaging import GradientBucket, GradientFilter

CASES = Cases()


def parts(world: int, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    """Each rank's tensor."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 4
    return [(numbers + r + 1).to(dtype) for r in range(world)]


@CASES.over(torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)
def reductions(rank: int, world: int, dtype: torch.dtype) -> None:
    """In place and not, grouped, asynchronous, scaled; averages of integers are rounded towards 0."""
    hvd.init()
    mine = parts(world, dtype, 4, 5)
    total = torch.stack([t.double() for t in mine]).sum(0)
    mean = total / world if dtype.is_floating_point else (total / world).trunc()
    want = {
        hvd.Average: mean,
        hvd.Sum: total,
        hvd.Min: torch.stack(mine).double().amin(0),
        hvd.Max: torch.stack(mine).double().amax(0),
        hvd.Product: torch.stack(mine).double().prod(0),
    }
    tolerance = 2e-3 * float(total.max()) if dtype == torch.float16 else 1e-5
    for op, expected in want.items():
        t = mine[rank].clone()
        close(hvd.allreduce(t, op=op).double(), expected, tolerance, f"op {op}")
        equal(t, mine[rank], "the argument")
        handle = hvd.allreduce_async_(t, op=op, name="in place")
        assert hvd.synchronize(handle) is t and hvd.poll(handle)
        close(t.double(), expected, tolerance, f"op {op} in place")
    several = [t[rank] for t in ([p.clone() for p in mine], [p[:2].clone() for p in mine])]
    for out, expected in zip(hvd.grouped_allreduce(several, op=hvd.Sum), (total, total[:2]), strict=True):
        close(out.double(), expected, tolerance, "grouped")
    twice = hvd.allreduce(mine[rank], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    close(twice.double(), total, tolerance, "scaled")


@CASES
def transfers(rank: int, world: int) -> None:
    """Ranks may have different numbers of rows; none at all, too."""
    hvd.init()
    rows = [torch.full((r, 3), float(r)) for r in range(world)]
    equal(hvd.allgather(rows[rank]), torch.cat(rows))
    equal(hvd.allgather(torch.tensor(rank)), torch.arange(world))
    for root in range(world):
        equal(hvd.broadcast(torch.full((2, 2), rank), root), torch.full((2, 2), root))
    t = torch.arange(6.0).view(2, 3).t() * (rank + 1)  # not contiguous
    assert hvd.broadcast_(t, world - 1) is t
    equal(t, torch.arange(6.0).view(2, 3).t() * world)
    sent = torch.cat([torch.full((r + 1, 2), 10 * rank + r) for r in range(world)])
    out, received = hvd.alltoall(sent, splits=[r + 1 for r in range(world)])
    assert received.tolist() == [rank + 1] * world
    equal(out, torch.cat([torch.full((rank + 1, 2), 10 * r + rank) for r in range(world)]))
    equal(hvd.alltoall(torch.arange(2 * world) + 100 * rank), torch.cat([
        torch.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(world)
    ]))  # fmt: skip
    whole = torch.arange(2.0 * world + 1).view(-1, 1)  # one row more than can be divided
    mine = hvd.reducescatter(whole, op=hvd.Sum)
    begin = 2 * rank + (rank > 0)
    equal(mine, whole[begin : begin + len(mine)] * world)
    assert len(mine) == (3 if rank == 0 else 2)
    assert hvd.broadcast_object({"a": rank}, world - 1) == {"a": world - 1}
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(world)]
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (world + 1,))
    total = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "s", hvd.Sum))
    equal(total.to_dense(), torch.tensor([float(world)] + [2.0] * world))
    hvd.barrier()


@CASES
def gradients_of_calls(rank: int, world: int) -> None:
    """As Horovod defines them."""
    hvd.init()
    t = torch.ones(2 * world, requires_grad=True)
    hvd.allreduce(t, op=hvd.Sum).backward(torch.full((2 * world,), rank + 1.0))
    close(t.grad, torch.full((2 * world,), world * (world + 1) / 2), 1e-6)
    t.grad = None
    hvd.allgather(t).backward(torch.arange(2.0 * world * world))
    close(t.grad, torch.arange(2.0 * world) + 2 * world * rank, 1e-6)
    t.grad = None
    hvd.broadcast(t, 0).backward(torch.ones(2 * world))
    close(t.grad, torch.full((2 * world,), float(rank == 0)), 1e-6)
    t.grad = None
    hvd.alltoall(t).backward(torch.full((2 * world,), float(rank)))
    close(t.grad, torch.arange(world).repeat_interleave(2).float(), 1e-6)
    t.grad = None
    hvd.reducescatter(t, op=hvd.Sum).backward(torch.full((2,), float(rank)))
    close(t.grad, world * torch.arange(world).repeat_interleave(2).float(), 1e-6)


@CASES
def sets(rank: int, world: int) -> None:
    """Of some of the ranks."""
    hvd.init(process_sets=[hvd.ProcessSet([0, world - 1])] if world > 2 else None)
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (rank, world, rank)
    first = hvd.add_process_set([world - 1])
    says(raises(ValueError, hvd.add_process_set, [world - 1]), "duplicate")
    if first.included():
        assert (first.size(), first.rank()) == (1, 0)
        equal(hvd.allreduce(torch.tensor([5.0]), process_set=first), torch.tensor([5.0]))
    assert hvd.remove_process_set(first) and not hvd.remove_process_set(hvd.global_process_set)
    says(raises(trigram.MisuseError, hvd.barrier, first), "not in the job")


@CASES
def what_is_wrong_is_said(rank: int, world: int) -> None:
    """On all ranks, and the next call is right."""
    hvd.init()
    for call in (
        lambda: hvd.allreduce(torch.ones(3 + rank)),
        lambda: hvd.allgather(torch.ones(2, 3 + rank)),
        lambda: hvd.broadcast(torch.ones(2), rank),
        lambda: hvd.allgather(torch.ones(2, dtype=torch.int32 if rank else torch.float32)),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
    ):
        assert raises(hvd.HorovodInternalError, call)
        equal(hvd.allreduce(torch.ones(2)), torch.ones(2))
    handle = hvd.allreduce_async(torch.ones(2), name="a")
    says(raises(ValueError, hvd.allreduce_async, torch.ones(2), name="a"), "Duplicate", "a")
    hvd.synchronize(handle)
    says(raises(ValueError, hvd.alltoall, torch.ones(world + 1)), "splits")
    says(raises(trigram.UnsupportedError, hvd.allreduce, torch.ones(2), op=hvd.Adasum), "Adasum")
    for name in ("join", "elastic", "SyncBatchNorm"):
        says(raises(trigram.UnsupportedError, getattr, hvd, name), name)


def train(rank: int, world: int, passes: int, op: int, **options: Any) -> tuple[Any, Any]:
    """A training as a script of Horovod's does it, beside one process with all batches."""
    hvd.init()
    torch.manual_seed(rank)
    net = mlp()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    alone = copy.deepcopy(net)
    make: Callable[[nn.Module], Any] = lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    optimizer, single = make(net), make(alone)
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), backward_passes_per_step=passes, op=op, **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(6):
        optimizer.zero_grad()
        single.zero_grad()
        for k in range(passes):
            net(x(rank, 10 * step + k)).square().mean().backward()
            for r in range(world):
                loss = alone(x(r, 10 * step + k)).square().mean()
                (loss / (world if op == hvd.Average else 1)).backward()
        if step % 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        single.step()
    return net, alone


@CASES.over((1, hvd.Average), (3, hvd.Average), (1, hvd.Sum), (2, hvd.Sum))
def optimizer(rank: int, world: int, how: tuple[int, int]) -> None:
    net, alone = train(rank, world, *how)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        close(p, q, 1e-5, f"{how}")
    same_on_all_ranks(rank, world, f"hvd-{how}", net.parameters())


@CASES
def fewer_passes_than_are_accumulated(rank: int, world: int) -> None:
    """A step averages what is there, as with Horovod; too many passes are an error."""
    hvd.init()
    torch.manual_seed(3)
    net = mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backward_passes_per_step=2
    )
    for step in range(3):
        optimizer.zero_grad()
        net(x(rank, step)).square().mean().backward()
        optimizer.step()
    same_on_all_ranks(rank, world, "fewer", net.parameters())
    for _ in range(2):
        net(x(rank, 7)).square().mean().backward()
    says(
        raises(AssertionError, lambda: net(x(rank, 8)).square().mean().backward()), "backward_passes_per_step"
    )


@CASES.over("decentralized", "bytegrad", "local_sgd")
def other_algorithms(rank: int, world: int, algorithm: str) -> None:
    """One word more than Horovod has."""
    net, _ = train(rank, world, 1, hvd.Average, algorithm=algorithm)
    assert all(bool(p.isfinite().all()) for p in net.parameters())


class Halves(GradientFilter):
    def before(self, bucket: GradientBucket) -> None:
        bucket.values.mul_(0.5)


@CASES
def filters_of_the_script(rank: int, world: int) -> None:
    """They are not lost where sums are made of averages; and no parameter is added unnoticed."""
    hvd.init()
    hvd.init()  # Horovod's may be called again
    torch.manual_seed(9)
    net = mlp()
    own = [Halves()]
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(made, op=hvd.Sum, filters=own)
    net(x(rank, 1)).square().mean().backward()
    want = copy.deepcopy(net)
    want.zero_grad()
    sum(0.5 * want(x(r, 1)).square().mean() for r in range(world)).backward()  # type: ignore[union-attr]
    for p, q in zip(net.parameters(), want.parameters(), strict=True):
        close(p.grad, q.grad, 1e-5)
    more = {"params": [nn.Parameter(torch.ones(2))]}
    says(raises(trigram.UnsupportedError, optimizer.add_param_group, more), "averaged")


@CASES.over((False, True), (True, True), (True, False))
def sparse_gradients(rank: int, world: int, how: tuple[bool, bool]) -> None:
    """Rows that some ranks have used, as one process with all batches."""
    hvd.init()
    torch.manual_seed(5)
    net = nn.Embedding(10, 3, sparse=True)
    alone = copy.deepcopy(net)
    as_dense, adam = how
    kind = torch.optim.SparseAdam if adam else torch.optim.SGD
    make: Callable[[nn.Module], Any] = lambda m: kind(list(m.parameters()), lr=0.1)  # noqa: E731
    single = make(alone)
    optimizer = hvd.DistributedOptimizer(make(net), sparse_as_dense=as_dense)
    rows = [torch.tensor([1, 4, 4, 2 + r]) for r in range(world)]
    for _ in range(3):
        for opt in (optimizer, single):
            opt.zero_grad()
        net(rows[rank]).square().sum().backward()
        sum(alone(r).square().sum() / world for r in rows).backward()  # type: ignore[union-attr]
        optimizer.step()
        single.step()
    close(net.weight, alone.weight, 1e-5, "the table")


@CASES
def compressed(rank: int, world: int) -> None:
    """In 16 bits."""
    net, alone = train(rank, world, 1, hvd.Average, compression=hvd.Compression.fp16)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        close(p, q, 5e-3, "fp16")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world, transport", [(2, "tcp"), (3, "shm")])
def test_horovod(in_launch: Callable[..., None], world: int, transport: str, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
