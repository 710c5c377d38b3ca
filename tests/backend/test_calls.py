"""Every call of c10d with our backend, against values that are computed here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.marks import long

CASES = Cases()
SUM = dist.ReduceOp.SUM
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
}


def mine(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) % 5 + rank).reshape(shape)).to(dtype)


def total(world: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return sum((mine(r, dtype).to(wide) for r in range(world)), torch.zeros(3, 4, dtype=wide)).to(dtype)


@CASES.over(*DTYPES)
def all_reduce(rank: int, world: int, dtype: torch.dtype) -> None:
    world_group()
    for name, layout in LAYOUTS.items():
        for background in (False, True):
            t = layout(mine(rank, dtype))
            work = dist.all_reduce(t, async_op=background)
            if background:
                assert work.wait() and work.is_completed() and work.is_success()
                assert work.exception() is None and work.result()[0].data_ptr() == t.data_ptr()
            got, want = t.contiguous(), total(world, dtype)
            if dtype.itemsize == 1 and dtype.is_floating_point:
                got, want = got.float(), want.float()
            equal(torch.view_as_real(got) if dtype.is_complex else got,
                  torch.view_as_real(want) if dtype.is_complex else want, f"{dtype} {name}")  # fmt: skip


@CASES.over(*DTYPES, torch.bool)
def moves(rank: int, world: int, dtype: torch.dtype) -> None:
    """Calls that compute nothing move any dtype and layout, bit for bit."""
    world_group()

    def same(a: torch.Tensor, b: torch.Tensor) -> None:
        a, b = a.contiguous(), b.contiguous()
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (a, b)

    for layout in LAYOUTS.values():
        values = [layout(mine(r, dtype)) for r in range(world)]
        t = layout(mine(rank, dtype)).clone(memory_format=torch.preserve_format)
        dist.broadcast(t, world - 1)
        same(t, values[-1])
        outs = [layout(torch.zeros(3, 4).to(dtype)) for _ in range(world)]
        dist.all_gather(outs, values[rank])
        for out, value in zip(outs, values, strict=True):
            same(out, value)
        into = torch.zeros(world * 3, 4).to(dtype)
        dist.all_gather_into_tensor(into, values[rank])
        same(into, torch.cat([v.contiguous() for v in values]))
        outs = [torch.zeros(3, 4).to(dtype) for _ in range(world)]
        dist.gather(values[rank], outs if rank == 0 else None, 0)
        if rank == 0:
            for out, value in zip(outs, values, strict=True):
                same(out, value)
        got = layout(torch.zeros(3, 4).to(dtype))
        dist.scatter(got, values if rank == 1 else None, 1)
        same(got, values[rank])
        outs = [torch.zeros(3, 4).to(dtype) for _ in range(world)]
        dist.all_to_all(outs, [values[(rank + r) % world] for r in range(world)])
        for r, out in enumerate(outs):
            same(out, values[(rank + r) % world])
        got = layout(torch.zeros(3, 4).to(dtype))
        works = [
            dist.isend(values[rank], (rank + 1) % world, tag=7),
            dist.irecv(got, (rank - 1) % world, tag=7),
        ]
        for work in works:
            work.wait()
        same(got, values[(rank - 1) % world])


@CASES
def reduce_ops(rank: int, world: int) -> None:
    world_group()
    values = torch.stack([torch.tensor([r + 1.0, 2.0, -r]) for r in range(world)])
    for op, want in [
        (dist.ReduceOp.AVG, values.mean(0)),
        (dist.ReduceOp.MIN, values.min(0).values),
        (dist.ReduceOp.MAX, values.max(0).values),
        (dist.ReduceOp.PRODUCT, values.prod(0)),
    ]:
        t = values[rank].clone()
        dist.all_reduce(t, op)
        equal(t, want, str(op))
    bits = torch.stack([torch.tensor([1 << r, 3]) for r in range(world)])
    for op, start, fold in [
        (dist.ReduceOp.BAND, -1, torch.bitwise_and),
        (dist.ReduceOp.BOR, 0, torch.bitwise_or),
        (dist.ReduceOp.BXOR, 0, torch.bitwise_xor),
    ]:
        t, want = bits[rank].clone(), torch.full((2,), start)
        for row in bits:
            want = fold(want, row)
        dist.all_reduce(t, op)
        equal(t, want, str(op))


@CASES
def premultiplied_sum(rank: int, world: int) -> None:
    world_group()
    for factor in (2.0, torch.tensor([0.5])):
        op = torch._C._distributed_c10d._make_nccl_premul_sum(factor)
        t = torch.full((5,), rank + 1.0)
        dist.all_reduce(t, op)
        equal(t, torch.full((5,), float(factor) * world * (world + 1) / 2))
        part = torch.empty(2)
        given = torch.full((2 * world,), rank + 1.0)
        dist.reduce_scatter_tensor(part, given, op)
        equal(part, torch.full((2,), float(factor) * world * (world + 1) / 2))
        equal(given, torch.full((2 * world,), rank + 1.0), "the input is left as it was")


@CASES
def reduce_to_one(rank: int, world: int) -> None:
    world_group()
    for root in range(world):
        for dtype in (torch.float32, torch.int16, torch.complex64):
            t = mine(rank, dtype)
            dist.reduce(t, root)
            want = total(world, dtype) if rank == root else mine(rank, dtype)
            assert torch.equal(t, want), (t, want)


@CASES
def uneven_and_empty(rank: int, world: int) -> None:
    world_group()
    for lengths in ([r + 1 for r in range(world)], [0, *range(3, 2 + world)], [5] + [0] * (world - 1)):
        outs = [torch.full((n, 2), -1.0) for n in lengths]
        dist.all_gather(outs, torch.full((lengths[rank], 2), float(rank)))
        for r, out in enumerate(outs):
            equal(out, torch.full((lengths[r], 2), float(r)))
        for dtype in (torch.float32, torch.complex64, torch.int16):
            part = torch.empty(lengths[rank], 2, dtype=dtype)
            dist.reduce_scatter(part, [torch.full((n, 2), rank + 1).to(dtype) for n in lengths])
            assert torch.equal(part, torch.full((lengths[rank], 2), world * (world + 1) // 2).to(dtype))
    # Rank r sends r + j rows to rank j.
    sends = [rank + j for j in range(world)]
    takes = [r + rank for r in range(world)]
    out = torch.empty(sum(takes), 3)
    dist.all_to_all_single(out, torch.full((sum(sends), 3), float(rank)), takes, sends)
    equal(out, torch.cat([torch.full((n, 3), float(r)) for r, n in enumerate(takes)]))
    empty = torch.empty(0)
    for call in (lambda: dist.all_reduce(empty), lambda: dist.broadcast(empty, 0)):
        call()
    dist.all_to_all_single(empty, empty, [0] * world, [0] * world)


@CASES
def equal_splits_on_some_ranks(rank: int, world: int) -> None:
    """A rank may leave equal splits out where another gives them."""
    world_group()
    out, given = torch.empty(world * 2), torch.arange(world * 2.0) + 100 * rank
    splits = [2] * world if rank % 2 else None
    dist.all_to_all_single(out, given, splits, splits)
    equal(out, torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(world)]))


@CASES
def coalesced(rank: int, world: int) -> None:
    group = world_group()
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 1000, 3)]
    with dist._coalescing_manager(group):
        for t in tensors:
            dist.all_reduce(t)
    for t in tensors:
        equal(t, torch.full_like(t, world * (world + 1) / 2))
    outs = [torch.empty(world * n) for n in (2, 5)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for out, n in zip(outs, (2, 5), strict=True):
            dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
    manager.wait()
    for out, n in zip(outs, (2, 5), strict=True):
        equal(out, torch.arange(world).repeat_interleave(n).float())
    parts = [torch.empty(n) for n in (2, 5)]
    with dist._coalescing_manager(group):
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.full((world * len(part),), rank + 1.0))
    for part in parts:
        equal(part, torch.full_like(part, world * (world + 1) / 2))
    lists = [[torch.empty(2), torch.empty(3, dtype=torch.int64)] for _ in range(world)]
    group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank)]).wait()
    for r, one in enumerate(lists):
        equal(one[0], torch.full((2,), float(r)))
        equal(one[1], torch.full((3,), r))


@CASES
def older_forms_of_calls(rank: int, world: int) -> None:
    """A tensor and a root in place of lists and options."""
    group: Any = world_group()
    t = torch.full((3,), float(rank))
    group.broadcast(t, 1).wait()
    equal(t, torch.full((3,), 1.0))
    group.allreduce(t, SUM).wait()
    group.allreduce([t], op=SUM, timeout=timedelta(seconds=5)).wait()
    equal(t, torch.full((3,), float(world * world)))
    group.reduce(t, 0, SUM).wait()
    outs = [torch.empty(3) for _ in range(world)]
    group.allgather(outs, torch.full((3,), float(rank))).wait()
    equal(outs[-1], torch.full((3,), world - 1.0))
    group.gather(outs if rank == 0 else [], torch.full((3,), float(rank)), 0).wait()
    group.scatter(t, outs if rank == 0 else [], 0).wait()
    equal(t, torch.full((3,), float(rank)))
    group.reduce_scatter(t, [torch.ones(3)] * world, SUM).wait()
    equal(t, torch.full((3,), float(world)))
    group.alltoall(outs, [torch.full((3,), float(rank))] * world).wait()
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=20)).wait()


@CASES
def objects(rank: int, world: int) -> None:
    world_group()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * rank * 100})
    assert [g["rank"] for g in gathered] == list(range(world))
    told: list[Any] = [rank, "a" * rank]
    dist.broadcast_object_list(told, 1)
    assert told == [1, "a"]
    dist.gather_object(rank, gathered if rank == 0 else None, 0)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world)] if rank == 0 else None, 0)
    assert got == [f"for {rank}"]


@CASES
def shorter_messages(rank: int, world: int) -> None:
    """As gloo: `recv` takes what is sent as the first part of its tensor, byte for byte."""
    world_group()
    after, before = (rank + 1) % world, (rank - 1) % world
    for length in (1, 3, 100_000):
        sent = torch.arange(length, dtype=torch.int32) + 1
        for source in (before, None):
            got = torch.full((2 * length + 1,), -1.0)
            work = dist.isend(sent, after, tag=3)
            assert dist.recv(got, source, tag=3) == before
            work.wait()
            equal(got[:length].view(torch.int32), sent, "the part that was sent")
            assert bool((got[length:] == -1).all())
        columns = torch.full((2, length + 2), -1).t()  # not contiguous
        work = dist.isend(sent.long(), after)
        dist.recv(columns, before)
        work.wait()
        equal(columns.flatten()[:length], sent.long(), "in the order of the shape")
        assert bool((columns.flatten()[length:] == -1).all())


@CASES
def tags_and_batches(rank: int, world: int) -> None:
    world_group()
    after, before = (rank + 1) % world, (rank - 1) % world
    a, b = torch.empty(2), torch.empty(3)
    works = [dist.isend(torch.full((2,), 1.0), after, tag=1), dist.isend(torch.full((3,), 2.0), after, tag=2)]
    dist.irecv(b, before, tag=2).wait()
    dist.irecv(a, before, tag=1).wait()
    for work in works:
        work.wait()
    assert a[0] == 1 and b[0] == 2
    big = torch.full((1 << 20,), float(rank))
    got = torch.empty_like(big)
    operations = [dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got[-1] == before


@CASES
def groups(rank: int, world: int) -> None:
    """Groups that overlap, in opposite orders on two ranks, made by their members alone, and many of them."""
    world_group()
    evens, first = dist.new_group(list(range(0, world, 2))), dist.new_group([0, 1])
    everyone = dist.new_group()
    t = torch.ones(1)
    if rank % 2 == 0:
        dist.all_reduce(t, group=evens)
        assert t.item() == (world + 1) // 2
    if rank < 2:
        u = torch.full((1,), float(rank))
        dist.broadcast(u, 1, group=first)
        assert u.item() == 1
    a, b = torch.ones(1), torch.ones(1)
    order = [(a, everyone), (b, dist.group.WORLD)]
    works = [dist.all_reduce(v, group=g, async_op=True) for v, g in (order if rank else order[::-1])]
    for work in works:
        work.wait()
    assert a.item() == b.item() == world
    for k in range(40):
        group = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
        if group is not None:
            v = torch.ones(1)
            dist.all_reduce(v, group=group)
            assert v.item() == 2, k
            dist.destroy_process_group(group)


@CASES
def split_groups(rank: int, world: int) -> None:
    """As torch makes them where the default group has a device: a rank that is in no part names the first."""
    group: Any = world_group()
    assert group.supports_splitting
    for k, parts in enumerate([[[0, 1], list(range(2, world))], [list(range(world))], [[1]]]):
        mine = next((part for part in parts if rank in part), parts[0])
        made = group.split_group(
            mine, timeout=timedelta(seconds=20), group_name=f"{k} {mine}", group_desc="part"
        )
        if rank not in mine:
            assert made is None
            continue
        assert (made.rank(), made.size(), made.group_name) == (mine.index(rank), len(mine), f"{k} {mine}")
        t = torch.full((3,), float(rank))
        made.allreduce([t]).wait()
        equal(t, torch.full((3,), float(sum(mine))))
        inner = made.split_group([len(mine) - 1], group_name=f"{k} {mine} last")
        assert (inner is not None) == (rank == mine[-1])
        made.shutdown()
        says(raises(RuntimeError, made.split_group, [0]), "destroyed")


@CASES
def threads(rank: int, world: int) -> None:
    world_group()
    made = [dist.new_group() for _ in range(3)]
    wrong: list[str] = []

    def work(k: int) -> None:
        for i in range(50):
            t = torch.full((10,), float(k + i))
            dist.all_reduce(t, group=made[k])
            if t[0].item() != world * (k + i):
                wrong.append(f"thread {k}, call {i}: {t[0]}")

    running = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong[:3]


@CASES
def callbacks_run_in_the_order_asked(rank: int, world: int) -> None:
    """Callbacks that communicate, added early on one rank and late on another."""
    import time

    world_group()
    done: list[int] = []

    def further(k: int) -> Callable[[Any], torch.Tensor]:
        def run(future: Any) -> torch.Tensor:
            done.append(k)
            t = future.value()[0].clone()
            return dist.all_reduce(t, async_op=True).get_future().wait()[0]

        return run

    futures = []
    for k in range(6):
        work = dist.all_reduce(torch.full((4,), float(k)), async_op=True)
        if rank == 0:
            time.sleep(0.01)
        futures.append(work.get_future().then(further(k)).then(lambda f: f.value() + 1))
        dist.all_reduce(torch.ones(1))  # of this thread, in between
    for k, future in enumerate(futures):
        equal(future.wait(), torch.full((4,), float(k * world * world + 1)))
    assert done == list(range(6))


@CASES
def futures_tell_errors(rank: int, world: int) -> None:
    world_group()
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def fails(_: Any) -> None:
        raise ValueError("on purpose")

    says(raises(ValueError, future.then(fails).wait), "on purpose")
    assert torch.futures.collect_all([future]).wait()[0] is future or future.done()


@CASES.over(False, True)
def a_barrier_comes_after_collectives(rank: int, world: int, is_async: bool) -> None:
    """Those started before it, whose handles nobody keeps; it awaits no message that may come later."""
    world_group()
    late = torch.zeros(3)
    coming = dist.irecv(late, (rank - 1) % world, tag=5)
    for _ in range(5):
        tensors = [torch.full((1000,), float(rank)) for _ in range(50)]
        gathered = torch.empty(world, 3).t()  # which is copied to when it has come
        parts = [gathered[:, k] for k in range(world)]
        for t in tensors:
            dist.all_reduce(t, async_op=True)
        dist.all_gather(parts, torch.full((3,), float(rank)), async_op=True)
        work = dist.barrier(async_op=is_async)
        if work is not None:
            work.wait()
        for t in tensors:
            equal(t, torch.full((1000,), world * (world - 1) / 2))
        equal(gathered[0], torch.arange(float(world)))
    dist.send(torch.ones(3), (rank + 1) % world, tag=5)
    assert coming is not None
    coming.wait()
    equal(late, torch.ones(3))


@CASES
def arguments_are_checked(rank: int, world: int) -> None:
    group: Any = world_group()
    for call in (
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(2)),
        lambda: dist.all_to_all_single(torch.empty(world + 1), torch.empty(world)),
        lambda: dist.all_to_all_single(torch.empty(world), torch.empty(world), [1] * (world + 1), None),
        lambda: group.send([torch.ones(1)], world + 1, 0),
        lambda: group.send([torch.ones(1)], 0, -1),
        lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
    ):
        raises(RuntimeError, call)
    dist.barrier()


@CASES
def sparse_sums(rank: int, world: int) -> None:
    world_group()
    t = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (world + 1,))
    dist.all_reduce(t)
    want = torch.ones(world + 1)
    want[0] += 2 * world
    want[world] = 0
    equal(t.to_dense(), want)


@CASES
def shapes_reach_the_profiler(rank: int, world: int) -> None:
    world_group()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0, async_op=True).wait()
    events = {e.name: e for e in profile.function_events if e.name.startswith("trigram:")}
    assert events["trigram:all_reduce"].input_shapes == [[2, 3]]
    assert events["trigram:broadcast"].input_shapes == [[4]] and events["trigram:broadcast"].is_async


@CASES
def registered_memory(rank: int, world: int) -> None:
    group: Any = world_group()
    assert group.supports_tensor_alloc(torch.device("cpu"))
    t = group.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    dist.all_reduce(t)
    assert t.shape == (1000,) and t[0] == world


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, long(3), 4])
def test_call(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)
