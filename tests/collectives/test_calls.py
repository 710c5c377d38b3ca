"""Every collective against plain torch, on 1 to 5 ranks, over shared memory and TCP."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import trigram
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.data import DTYPES, HALVES, each_hop_rounds, numbers, ops, reduced
from tests.support.marks import long_unless

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


def parts_of(
    world: int, n: int, dtype: torch.dtype = torch.float32, salt: int = 0, op: str = "sum"
) -> list[torch.Tensor]:
    return [numbers(r, n, dtype, salt, op) for r in range(world)]


def right_sum(
    actual: torch.Tensor, op: str, parts: list[torch.Tensor], what: str, hops: bool = False
) -> None:
    """`hops`: half types may be rounded on the way (a topology taken by name, or several hosts)."""
    expected, tolerance = reduced(op, parts)
    if parts[0].dtype in HALVES and op in ("sum", "avg", "prod") and (hops or across_hosts()):
        tolerance = each_hop_rounds(op, parts)
    close(actual, expected, tolerance, what)


@CASES.over(*(str(d).removeprefix("torch.") for d in DTYPES))
def all_reduce(rank: int, world: int, name: str) -> None:
    """Every op that makes sense, in both kinds of memory. Halves: fails if sums are not kept in float32."""
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
        mixed = registered(parts[rank]) if rank == 0 else parts[rank].clone()
        for t in (parts[rank].clone(), registered(parts[rank]), mixed):
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
    results = []
    for n in (0, 1, 2, 5, 1003, 65_537, MIB3):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            parts = parts_of(world, n, dtype, salt=3)
            first, second = parts[rank].clone(), registered(parts[rank])
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
            tolerance = (
                each_hop_rounds("prod" if op == "prod" else "sum", parts) if dtype in HALVES else tolerance
            )
            tolerance = tolerance[finite] if isinstance(tolerance, torch.Tensor) else tolerance
            close(t[finite], expected[finite], tolerance, f"{op} via {via}")


@CASES.over(0, 1, 3, 1003, BIG)
def reduce(rank: int, world: int, n: int) -> None:
    for dst in range(world) if n < BIG else [world - 1]:
        for op, dtype in (
            ("sum", torch.float32),
            ("max", torch.int32),
            ("avg", torch.bfloat16),
            ("bor", torch.bool),
        ):
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
    """Rank i sends (i + 2j) % 4 rows to rank j, some none. Rows of three: splits count rows, as in torch."""

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
    from tests.support.harness import flag, scratch

    for round in range(5):
        flag(f"barrier-{round}-{rank}")
        trigram.barrier()
        late = [r for r in range(world) if not (scratch() / f"flag-barrier-{round}-{r}").exists()]
        assert not late, f"round {round}: left the barrier before {late} came"


WORLDS = [(by, n) for by in ("shm", "tcp") for n in (1, 2, 3, 4, 5)]
SOME = [("shm", 1), ("shm", 3), ("shm", 4), ("tcp", 2), ("tcp", 3)]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", long_unless(SOME, WORLDS))
def test_collective(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
