"""Every collective against plain torch: 1 to 5 ranks, shared memory and TCP, and hosts as network namespaces."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import trigram

from tests.cases import Cases
from tests.checks import close, equal, raises, same_on_all_ranks, says
from tests.data import DTYPES, HALVES, each_hop_rounds, numbers, ops, reduced

CASES = Cases()
BIG = 1_000_003
MIB3 = 3 * 2**20 // 4
VIAS = ["ring", "tree", "recursive_doubling", "scatter_gather", "shared"]


def across_hosts() -> bool:
    return os.environ["TRIGRAM_TRANSPORT"] == "auto"


def registered(t: torch.Tensor) -> torch.Tensor:
    """The same numbers in registered memory."""
    r = trigram.empty(*t.shape, dtype=t.dtype)
    r.copy_(t)
    return r


def parts_of(world: int, n: int, dtype: torch.dtype = torch.float32, salt: int = 0, op: str = "sum") -> list[torch.Tensor]:
    return [numbers(r, n, dtype, salt, op) for r in range(world)]


def right_sum(actual: torch.Tensor, op: str, parts: list[torch.Tensor], what: str, hops: bool = False) -> None:
    """`hops`: half types may be rounded on the way (a topology taken by name, or several hosts)."""
    expected, tolerance = reduced(op, parts)
    if parts[0].dtype in HALVES and op in ("sum", "avg", "prod") and (hops or across_hosts()):
        tolerance = each_hop_rounds(op, parts)
    close(actual, expected, tolerance, what)


@CASES.over(*(str(d).removeprefix("torch.") for d in DTYPES))
def all_reduce(rank: int, world: int, name: str) -> None:
    """Every op that makes sense, ordinary and registered memory; for halves this fails if sums are not kept in float32."""
    dtype, results = getattr(torch, name), []
    for op in ops(dtype):
        for n in (1, 257, 5003):
            parts = parts_of(world, n, dtype, op=op)
            for t in (parts[rank].clone(), registered(parts[rank])):
                assert trigram.all_reduce(t, op) is None
                right_sum(t, op, parts, f"{name} {op} {n}")
                results.append(t)
    same_on_all_ranks(rank, world, f"all_reduce-{name}", results)


@CASES.over(0, 1, 2, 3, 4, 7, 4097, BIG, MIB3)
def all_reduce_length(rank: int, world: int, n: int) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        parts = parts_of(world, n, dtype)
        for t in (parts[rank].clone(), registered(parts[rank])):
            trigram.all_reduce(t)
            right_sum(t, "sum", parts, f"{dtype} {n}")
            results.append(t)
    same_on_all_ranks(rank, world, f"length-{n}", results)


@CASES.over(*VIAS)
def all_reduce_via(rank: int, world: int, via: str) -> None:
    """By name: right, the same bits on all ranks, and the same again."""
    if via == "shared" and os.environ["TRIGRAM_TRANSPORT"] != "shm" and world > 1:
        t = torch.ones(3)  # no memory is shared: refused, not something else done instead
        says(raises(trigram.UnsupportedError, trigram.all_reduce, t, via=via), "shared")
        return
    if via == "shared" and world > 1:
        says(raises(trigram.UnsupportedError, trigram.all_reduce, torch.ones(BIG), via=via), "registered", "trigram.empty")
    results = []
    for n in (0, 1, 2, 5, 1003, 65_537, MIB3):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            parts = parts_of(world, n, dtype, salt=3)
            ordinary = via != "shared" or n < 2000  # above, "shared" works in place, on memory that peers can reach
            first, second = (parts[rank].clone() if ordinary else registered(parts[rank])), registered(parts[rank])
            for t in (first, second):
                trigram.all_reduce(t, via=via)
                right_sum(t, "sum", parts, f"{via} {dtype} {n}", hops=True)
            equal(second, first, f"{via} {dtype} {n} again")
            results.append(first)
    same_on_all_ranks(rank, world, f"via-{via}", results)


@CASES
def unknown_via_and_op(rank: int, world: int) -> None:
    t = torch.ones(4)
    says(raises(trigram.TrigramError, trigram.all_reduce, t, via="carrier_pigeon"), "carrier_pigeon", *VIAS)
    says(raises(trigram.TrigramError, trigram.all_reduce, t, "median"), "median", "sum", "avg", "bxor")
    says(raises(trigram.TrigramError, trigram.all_reduce, t, "bxor"), "bxor", "float32")
    trigram.all_reduce(t)
    equal(t, torch.full((4,), float(world)))


@CASES.over("float32", "bfloat16", "int64")
def nan_and_infinity(rank: int, world: int, name: str) -> None:
    """What is not a number stays so on every rank; the rest is right."""
    dtype = getattr(torch, name)
    if not dtype.is_floating_point:
        return
    for op in ("sum", "avg", "max", "min", "prod"):
        for via in (None, "ring", "tree", "recursive_doubling", "scatter_gather"):
            parts = parts_of(world, 301, dtype, op="prod")
            parts[world - 1][100] = float("nan")
            parts[0][200] = float("inf")
            t = parts[rank].clone()
            trigram.all_reduce(t, op, via=via)
            assert t[100].isnan(), f"{op} via {via}: NaN became {t[100].item()}"
            expected, tolerance = reduced(op, parts)
            finite = expected.isfinite()
            assert t[200].item() == expected[200].item(), f"{op} via {via}: {t[200].item()}"
            tolerance = each_hop_rounds("prod" if op == "prod" else "sum", parts) if dtype in HALVES else tolerance
            tolerance = tolerance[finite] if isinstance(tolerance, torch.Tensor) else tolerance
            close(t[finite], expected[finite], tolerance, f"{op} via {via}")


@CASES.over(0, 1, 3, 1003, BIG)
def reduce(rank: int, world: int, n: int) -> None:
    for dst in range(world) if n < BIG else [world - 1]:
        for op, dtype in (("sum", torch.float32), ("max", torch.int32), ("avg", torch.bfloat16), ("bor", torch.bool)):
            parts = parts_of(world, n, dtype, salt=dst)
            t = parts[rank].clone()
            trigram.reduce(t, dst, op)
            if rank == dst:
                right_sum(t, op, parts, f"reduce {op} {n} to {dst}")


@CASES.over(0, 1, 3, 1003, BIG)
def broadcast(rank: int, world: int, n: int) -> None:
    for src in range(world) if n < BIG else [world - 1]:
        for dtype in DTYPES if n < BIG else [torch.float32]:
            expected = numbers(src, n, dtype)
            for t in (numbers(rank, n, dtype), registered(numbers(rank, n, dtype))):
                trigram.broadcast(t, src)
                equal(t, expected, f"broadcast {dtype} {n} from {src}")


@CASES.over(0, 1, 3, 1003, BIG)
def all_gather(rank: int, world: int, n: int) -> None:
    for dtype in DTYPES if n < BIG else [torch.float32]:
        expected = torch.cat(parts_of(world, n, dtype))
        for make in (torch.empty, trigram.empty):
            out = make(world * n, dtype=dtype)
            trigram.all_gather(out, numbers(rank, n, dtype))
            equal(out, expected, f"all_gather {dtype} {n}")


@CASES.over(0, 1, 3, 1003, MIB3)
def reduce_scatter(rank: int, world: int, n: int) -> None:
    for dtype in DTYPES if n < MIB3 else [torch.float32, torch.float16]:
        for op in ops(dtype) if n < MIB3 else ["sum"]:
            parts = parts_of(world, world * n, dtype, op=op)
            mine = [p[rank * n : (rank + 1) * n] for p in parts]
            inputs = parts[rank].clone()
            out = torch.empty(n, dtype=dtype)
            trigram.reduce_scatter(out, inputs, op)
            right_sum(out, op, mine, f"reduce_scatter {dtype} {op} {n}")
            equal(inputs, parts[rank], "the input of reduce_scatter")


@CASES.over(0, 1, 1003, BIG)
def gather(rank: int, world: int, n: int) -> None:
    for dst in range(world) if n < BIG else [0]:
        out = torch.empty(world * n) if rank == dst else None
        trigram.gather(out, numbers(rank, n), dst)
        if out is not None:
            equal(out, torch.cat(parts_of(world, n)), f"gather {n} to {dst}")


@CASES.over(0, 1, 1003, BIG)
def scatter(rank: int, world: int, n: int) -> None:
    for src in range(world) if n < BIG else [world - 1]:
        whole = numbers(99 + src, world * n)
        t = torch.empty(n)
        trigram.scatter(t, whole if rank == src else None, src)
        equal(t, whole[rank * n : (rank + 1) * n], f"scatter {n} from {src}")


@CASES.over(0, 1, 1003, MIB3)
def all_to_all(rank: int, world: int, n: int) -> None:
    for dtype in DTYPES if n < MIB3 else [torch.float32]:
        parts = parts_of(world, world * n, dtype)
        out = torch.empty(world * n, dtype=dtype)
        trigram.all_to_all(out, parts[rank].clone())
        equal(out, torch.cat([p[rank * n : (rank + 1) * n] for p in parts]), f"all_to_all {dtype} {n}")


@CASES.over(1, 1000)
def all_to_all_uneven(rank: int, world: int, scale: int) -> None:
    """Rank i sends (i + 2j) % 4 rows to rank j: some none at all. Rows of three: splits count rows, as torch's do."""

    def rows(i: int, j: int) -> int:
        return (i + 2 * j) % 4 * scale

    in_splits, out_splits = [rows(rank, j) for j in range(world)], [rows(i, rank) for i in range(world)]

    def sent(i: int) -> torch.Tensor:
        return numbers(i, 3 * sum(rows(i, j) for j in range(world))).view(-1, 3)

    out = torch.empty(sum(out_splits), 3)
    trigram.all_to_all(out, sent(rank), out_splits, in_splits)
    expected = [sent(i).split([rows(i, j) for j in range(world)])[rank] for i in range(world)]
    equal(out, torch.cat(expected), "all_to_all with splits")


@CASES
def shapes(rank: int, world: int) -> None:
    """Tensors of several dimensions, and scalars."""
    t = numbers(rank, 60).view(3, 4, 5)
    trigram.all_reduce(t)
    close(t, reduced("sum", parts_of(world, 60))[0].view(3, 4, 5), 1e-5, "three dimensions")
    scalar = torch.tensor(float(rank + 1))
    trigram.all_reduce(scalar, "max")
    assert scalar.shape == () and scalar.item() == world
    out = torch.empty(world, 6, 10)
    trigram.all_gather(out, numbers(rank, 60).view(6, 10))
    equal(out, torch.stack(parts_of(world, 60)).view(world, 6, 10), "stacked")


@CASES
def barrier(rank: int, world: int) -> None:
    """Nobody leaves before the last has come: seen through files."""
    from tests.harness import flag, scratch

    for round in range(5):
        flag(f"barrier-{round}-{rank}")
        trigram.barrier()
        late = [r for r in range(world) if not (scratch() / f"flag-barrier-{round}-{r}").exists()]
        assert not late, f"round {round}: left the barrier before {late} came"


def ring_send_recv(rank: int, world: int, n: int, dtype: torch.dtype = torch.float32) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    work = trigram.send(numbers(rank, n, dtype), after, async_op=True)
    t = torch.zeros(n, dtype=dtype)
    trigram.recv(t, before)
    work.wait()
    equal(t, numbers(before, n, dtype), f"send_recv {n} {dtype}")


@CASES.over(0, 1, 1003, BIG)
def send_recv(rank: int, world: int, n: int) -> None:
    if world > 1:
        for dtype in DTYPES if n < BIG else [torch.float32]:
            ring_send_recv(rank, world, n, dtype)


@CASES
def send_recv_tags(rank: int, world: int) -> None:
    """Tags are told apart, whatever the order of the receives; messages of one tag keep their order."""
    if world == 1:
        return
    lengths = {7: 5, 3: MIB3, 11: 0, 5: 1003}
    if rank == 0:
        works = [trigram.send(numbers(tag, n), 1, tag=tag, async_op=True) for tag, n in lengths.items()]
        works += [trigram.send(torch.full((4,), float(i)), 1, tag=9, async_op=True) for i in range(8)]
        for work in works:
            work.wait()
    elif rank == 1:
        got = {tag: torch.zeros(lengths[tag]) for tag in (5, 11, 3, 7)}
        for tag, t in got.items():
            trigram.recv(t, 0, tag=tag)
        for tag, t in got.items():
            equal(t, numbers(tag, lengths[tag]), f"tag {tag}")
        for i in range(8):
            t = torch.zeros(4)
            trigram.recv(t, 0, tag=9)
            equal(t, torch.full((4,), float(i)), "the order within a tag")


@CASES
def several_in_flight(rank: int, world: int) -> None:
    """Twenty jobs of many kinds at once, waited for in reverse."""
    jobs: list[tuple[object, torch.Tensor, torch.Tensor]] = []
    for i in range(20):
        n = (1, 1003, 200_001)[i % 3]
        parts = parts_of(world, n, torch.int32, salt=i)
        if i % 4 < 2:
            t = parts[rank].clone() if i % 2 else registered(parts[rank])
            jobs.append((trigram.all_reduce(t, async_op=True), t, reduced("sum", parts)[0]))
        elif i % 4 == 2:
            t = parts[rank].clone()
            jobs.append((trigram.broadcast(t, i % world, async_op=True), t, parts[i % world]))
        else:
            t = torch.empty(world * n, dtype=torch.int32)
            jobs.append((trigram.all_gather(t, parts[rank], async_op=True), t, torch.cat(parts)))
    for work, t, expected in reversed(jobs):
        work.wait()  # type: ignore[attr-defined]
        assert work.is_completed()  # type: ignore[attr-defined]
        equal(t, expected, "in flight")


@CASES
def work_and_future(rank: int, world: int) -> None:
    """A Work completes without being waited for, and its future runs callbacks."""
    from tests.harness import until

    t = torch.full((1003,), rank + 1.0)
    work = trigram.all_reduce(t, async_op=True)
    until(work.is_completed, 20.0, "a job that nobody waits for")
    work.wait(timeout=1.0)
    seen: list[bool] = []
    t2 = torch.full((MIB3,), rank + 1.0)
    future = trigram.all_reduce(t2, async_op=True).get_future()
    future.then(lambda f: seen.append(True)).wait()
    assert seen == [True]
    for x in (t, t2):
        equal(x, torch.full_like(x, world * (world + 1) / 2), "after the future")


@CASES
def groups(rank: int, world: int) -> None:
    """Subsets at work at once, beside the world, each with its own numbers. Ranks are the world's, as in torch."""
    subsets = [list(range(0, world, 2)), list(range(1, world, 2)) or [0], list(reversed(range(world))), [world - 1]]
    made = [trigram.new_group(ranks) for ranks in subsets]
    jobs = []
    for i in range(3):
        for k, (ranks, group) in enumerate(zip(subsets, made)):
            if rank in ranks:
                parts = {r: numbers(r, 1003, torch.int64, salt=10 * i + k) for r in ranks}
                t = parts[rank].clone()
                work = trigram.all_reduce(t, group=group, async_op=True)
                jobs.append((work, t, reduced("sum", list(parts.values()))[0]))
        parts = {r: numbers(r, 77, torch.int64, salt=i) for r in range(world)}
        t = parts[rank].clone()
        jobs.append((trigram.all_reduce(t, async_op=True), t, reduced("sum", list(parts.values()))[0]))
    for work, t, expected in jobs:
        work.wait()
        equal(t, expected, "groups at once")
    if rank in subsets[1]:
        src = subsets[1][-1]
        t = torch.full((5,), float(rank))
        trigram.broadcast(t, src, group=made[1])
        equal(t, torch.full((5,), float(src)), "the source is a rank of the world")


@CASES
def torch_group_and_op(rank: int, world: int) -> None:
    """torch's ProcessGroup as `group`, torch's ReduceOp as `op`."""
    import torch.distributed as dist

    from tests.reference import gloo

    with gloo(rank, world):
        half = dist.new_group(list(range((world + 1) // 2)))
        t = torch.full((10,), rank + 1.0)
        trigram.all_reduce(t, dist.ReduceOp.MAX)
        equal(t, torch.full((10,), float(world)), "ReduceOp.MAX")
        t = torch.full((10,), rank + 1.0)
        trigram.all_reduce(t, dist.ReduceOp.AVG, group=dist.group.WORLD)
        equal(t, torch.full((10,), (world + 1) / 2), "ReduceOp.AVG on torch's world")
        if rank < (world + 1) // 2:
            t = torch.full((10,), rank + 1, dtype=torch.int32)
            trigram.all_reduce(t, dist.ReduceOp.SUM, group=half)
            members = (world + 1) // 2
            equal(t, torch.full((10,), members * (members + 1) // 2, dtype=torch.int32), "torch's subgroup")


@CASES
def tensors_that_do_not_do(rank: int, world: int) -> None:
    """Refused before anything is sent, with the reason; the group is as good as before."""
    square = torch.arange(12.0).view(3, 4)
    kept = square.clone()
    refused: list[tuple[Callable[..., object], tuple[object, ...], tuple[str, ...]]] = [
        (trigram.all_reduce, (square.t(),), ("contiguous",)),
        (trigram.broadcast, (torch.zeros(10)[::2], 0), ("contiguous",)),
        (trigram.all_gather, (torch.zeros(8 * world)[::2], torch.zeros(4)), ("contiguous",)),
        (trigram.all_reduce, (torch.zeros(4, device="meta"),), ("meta",)),
        (trigram.all_reduce, (torch.zeros(4, dtype=torch.complex64),), ("complex64",)),
        (trigram.all_reduce, (torch.zeros(4).to_sparse(),), ("sparse",)),
        (trigram.all_gather, (torch.zeros(4 * world + 1), torch.zeros(4)), (str(4 * world + 1), str(4 * world))),
        (trigram.all_gather, (torch.zeros(4 * world, dtype=torch.float64), torch.zeros(4)), ("float64", "float32")),
        (trigram.reduce_scatter, (torch.zeros(4), torch.zeros(4 * world + 1)), (str(4 * world + 1),)),
        (trigram.all_to_all, (torch.zeros(4 * world), torch.zeros(4 * world), [1], [1]), ("split",)),
        (trigram.broadcast, (torch.zeros(4), world), (str(world),)),
        (trigram.all_reduce, ([1.0, 2.0],), ("list",)),
    ]
    for fn, args, words in refused:
        says(raises((trigram.TrigramError, TypeError), fn, *args), *words)
    equal(square, kept, "a refused tensor")
    t = torch.ones(5)
    trigram.all_reduce(t)
    equal(t, torch.full((5,), float(world)), "after the refusals")


@CASES
def views_keep_their_neighbours(rank: int, world: int) -> None:
    """A contiguous slice of a larger tensor: nothing around it changes."""
    for make in (torch.empty, trigram.empty):
        whole = make(3000, dtype=torch.float32)
        whole.fill_(7.0)
        whole[1001:2004] = numbers(rank, 1003)
        trigram.all_reduce(whole[1001:2004])
        right_sum(whole[1001:2004], "sum", parts_of(world, 1003), "a slice")
        assert bool((whole[:1001] == 7).all()) and bool((whole[2004:] == 7).all())


@CASES
def registered_memory(rank: int, world: int) -> None:
    """trigram.empty: any shape and type, alive as long as its tensor or a view of it is, and reused afterwards."""
    for shape, dtype in (((0,), torch.float32), ((3, 5, 7), torch.int64), ((MIB3,), torch.bfloat16)):
        t = trigram.empty(*shape, dtype=dtype)
        assert t.shape == shape and t.dtype == dtype and t.is_contiguous()
    for i in range(30):  # more than could be kept at once, if none were given back
        t = trigram.empty(1_000_000, dtype=torch.float64)
        t.fill_(float(rank + i))
        view = t[500_000:500_010]
        del t
        trigram.all_reduce(view)
        equal(view, torch.full_like(view, sum(r + i for r in range(world))), "a view that outlives its tensor")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_collective(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
