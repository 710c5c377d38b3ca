"""Parts of different lengths, lists of tensors, and every dtype, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.collectives.test_calls import registered, right_sum
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.data import numbers
from tests.support.marks import long, long_unless

CASES = Cases()
SCALES = (1, 1000, 200_000)
"""Rows: through the inline buffer, the bounce buffers in one chunk, and in several."""


def _patterns(world: int, scale: int) -> list[list[int]]:
    """Lengths by rank: all differ, one rank has all, none has any, only the last has none."""
    return [
        [(3 * r + 1) % 4 * scale for r in range(world)],
        [7 * scale if r == world - 1 else 0 for r in range(world)],
        [0] * world,
        [scale if r < world - 1 else 0 for r in range(world)],
        [2 * scale] * world,
    ]


@CASES.over(*SCALES)
def all_gather(rank: int, world: int, scale: int) -> None:
    for splits in _patterns(world, scale):
        whole = torch.cat([numbers(r, 3 * n).view(n, 3) for r, n in enumerate(splits)])
        for make in (torch.empty, trigram.empty):
            t = make(splits[rank], 3)
            t.copy_(numbers(rank, 3 * splits[rank]).view(-1, 3))
            out = make(sum(splits), 3)
            trigram.all_gather(out, t, splits=splits)
            equal(out, whole, f"{splits}")
            out = make(sum(splits), 3)  # in place: this rank's part lies in it
            start = sum(splits[:rank])
            out[start : start + splits[rank]] = t
            trigram.all_gather(out, out[start : start + splits[rank]], splits=splits)
            equal(out, whole, f"{splits} in place")


@CASES.over(*SCALES)
def reduce_scatter(rank: int, world: int, scale: int) -> None:
    for splits in _patterns(world, scale):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            inputs = [numbers(r, sum(splits), dtype) for r in range(world)]
            start = sum(splits[:rank])
            mine = slice(start, start + splits[rank])
            for make in (torch.Tensor.clone, registered):
                t = make(inputs[rank])
                out = torch.empty(splits[rank], dtype=dtype)
                trigram.reduce_scatter(out, t, splits=splits)
                equal(t, inputs[rank], "the input")
                right_sum(out, "sum", [p[mine] for p in inputs], f"{splits} {dtype}")
                trigram.reduce_scatter(t[mine], t, splits=splits)
                right_sum(t[mine], "sum", [p[mine] for p in inputs], f"{splits} {dtype} in place")


@CASES
def equal_splits_are_none(rank: int, world: int) -> None:
    """Some ranks say that the parts are equal, others leave the lengths out."""
    for n in (0, 3, 3000, 300_000):
        some = [n] * world if rank % 2 else None
        out = torch.empty(world * n)
        trigram.all_gather(out, numbers(rank, n), splits=some)
        equal(out, torch.cat([numbers(r, n) for r in range(world)]))
        out = torch.empty(n)
        trigram.reduce_scatter(out, torch.ones(world * n), splits=some)
        equal(out, torch.full((n,), float(world)))
        out = torch.empty(world * n)
        trigram.all_to_all(out, numbers(rank, world * n), some, some)
        parts = [numbers(r, world * n)[rank * n : (rank + 1) * n] for r in range(world)]
        equal(out, torch.cat(parts))


@CASES
def all_to_all_of_both_kinds(rank: int, world: int) -> None:
    """Rank 0 and its peers exchange parts of one length, so rank 0 gives no lengths; others differ."""
    for n in (0, 2, 500, 100_000):

        def rows(i: int, j: int, n: int = n) -> int:
            return n if 0 in (i, j) else (i + 2 * j) % 3 * (n or 5)

        sent = [[rows(i, j) for j in range(world)] for i in range(world)]
        received = [rows(i, rank) for i in range(world)]
        t = numbers(rank, sum(sent[rank]))
        for make in (torch.Tensor.clone, registered):
            out = torch.empty(sum(received))
            lengths = (None, None) if rank == 0 else (received, sent[rank])
            trigram.all_to_all(out, make(t), *lengths)
            expected = [numbers(i, sum(sent[i])).split(sent[i])[rank] for i in range(world)]
            equal(out, torch.cat(expected), f"{n}")


@CASES
def lengths_that_differ_by_rank(rank: int, world: int) -> None:
    """Ranks that do not agree on the lengths, though on their sum: all are told."""
    if world < 2:
        return
    splits = [2] + [1] * (world - 1) if rank else [1] * (world - 1) + [2]
    t, whole = torch.ones(splits[rank]), torch.ones(world + 1)
    says(raises(trigram.MismatchError, trigram.all_gather, whole, t, splits=splits), "lengths", "rank 0")
    says(raises(trigram.MismatchError, trigram.reduce_scatter, t, whole, splits=splits), "lengths", "rank 0")
    says(raises(trigram.MisuseError, trigram.all_gather, whole, t, splits=[world + 1]), "splits")
    trigram.barrier()


@CASES.over(1, 300, 100_000)
def lists(rank: int, world: int, n: int) -> None:
    """Several tensors in one call, each where it is; borders fall anywhere."""
    sizes = [n, 0, 3 * n + 1, 1, 7 * n]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        inputs = [[numbers(r, s, dtype, salt=k) for k, s in enumerate(sizes)] for r in range(world)]
        ts = [registered(t) if k % 2 else t.clone() for k, t in enumerate(inputs[rank])]
        trigram.all_reduce(ts)
        for k, t in enumerate(ts):
            right_sum(t, "sum", [p[k] for p in inputs], f"all_reduce of a list, {dtype} {k}", hops=True)
    lengths = [(r + 1) % 3 * n for r in range(world)]
    outs = [torch.empty(m) for m in lengths]
    work = trigram.all_gather(outs, numbers(rank, lengths[rank]), async_op=True)
    assert work is not None
    work.wait()
    assert all(torch.equal(o, numbers(r, lengths[r])) for r, o in enumerate(outs))
    assert [o.data_ptr() for o in work.get_future().wait()] == [o.data_ptr() for o in outs]
    whole = [[numbers(r, m, salt=9 + k) for k, m in enumerate(lengths)] for r in range(world)]
    out = torch.empty(lengths[rank])
    trigram.reduce_scatter(out, [t.clone() for t in whole[rank]])
    right_sum(out, "sum", [w[rank] for w in whole], "reduce_scatter of a list")
    outs = [torch.empty((rank + r) % 3 * n) for r in range(world)]
    trigram.all_to_all(outs, [numbers(rank, (rank + r) % 3 * n, salt=r) for r in range(world)])
    for r, o in enumerate(outs):
        equal(o, numbers(r, (rank + r) % 3 * n, salt=rank), "all_to_all of lists")
    gathered = [torch.empty(n) for _ in range(world)] if rank == world - 1 else None
    trigram.gather(gathered, numbers(rank, n), world - 1)
    for r, o in enumerate(gathered or ()):
        equal(o, numbers(r, n), "gather into a list")
    t = torch.empty(n)
    trigram.scatter(t, [numbers(50 + r, n) for r in range(world)] if rank == 0 else None, 0)
    equal(t, numbers(50 + rank, n), "scatter of a list")


@CASES.over(2, 90_000)
def coalesced(rank: int, world: int, n: int) -> None:
    """Several gathers or scatters in one call: one output as a tensor, one as a list."""
    first, second = torch.empty(world * n), [torch.empty(5) for _ in range(world)]
    trigram.all_gather([first, second], [numbers(rank, n), numbers(rank, 5, salt=1)])
    equal(first, torch.cat([numbers(r, n) for r in range(world)]))
    equal(torch.cat(second), torch.cat([numbers(r, 5, salt=1) for r in range(world)]))
    inputs = [(numbers(r, world * n), numbers(r, world * 5, salt=1)) for r in range(world)]
    outs = [torch.empty(n), torch.empty(5)]
    trigram.reduce_scatter(outs, [inputs[rank][0].clone(), list(inputs[rank][1].clone().split(5))], "max")
    for out, k, m in ((outs[0], 0, n), (outs[1], 1, 5)):
        right_sum(out, "max", [p[k][rank * m : (rank + 1) * m] for p in inputs], "coalesced")


@CASES
def lists_that_do_not_do(rank: int, world: int) -> None:
    one = torch.ones(3)
    says(raises(trigram.MisuseError, trigram.all_reduce, []), "empty")
    says(raises(trigram.MisuseError, trigram.all_reduce, [one, one.double()]), "float64")
    says(raises(trigram.MisuseError, trigram.all_gather, [one] * (world + 1), one), str(world + 1))
    says(raises(trigram.MisuseError, trigram.all_to_all, [one] * world, one), "list")
    wrong = [one] * world
    wrong[rank] = torch.ones(4)
    says(raises(trigram.MisuseError, trigram.all_gather, wrong, one), "4", "3")


FP8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@CASES.over(5, 70_000)
def every_dtype_moves(rank: int, world: int, n: int) -> None:
    for dtype in [torch.int16, torch.complex64, torch.complex128, *FP8]:

        def of(r: int, count: int = n, dtype: torch.dtype = dtype) -> torch.Tensor:
            return numbers(r, count * dtype.itemsize, torch.int8).view(dtype)

        def same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
            equal(a.view(torch.uint8), b.view(torch.uint8), what)

        t = of(rank)
        trigram.broadcast(t, world - 1)
        same(t, of(world - 1), f"broadcast {dtype}")
        out = torch.empty(world * n, dtype=dtype)
        trigram.all_gather(out, of(rank))
        same(out, torch.cat([of(r) for r in range(world)]), f"all_gather {dtype}")
        trigram.all_to_all(out, of(rank, world * n))
        parts = [of(r, world * n)[rank * n : (rank + 1) * n] for r in range(world)]
        same(out, torch.cat(parts), f"all_to_all {dtype}")
        if world > 1:
            work = trigram.send(of(rank), (rank + 1) % world, async_op=True)
            trigram.recv(t, (rank - 1) % world)
            work.wait()
            same(t, of((rank - 1) % world), f"send {dtype}")


@CASES.over(5, 70_000)
def new_dtypes_are_reduced(rank: int, world: int, n: int) -> None:
    for op in ("sum", "min", "max", "prod", "band", "bor", "bxor"):
        parts = [numbers(r, n, torch.int16, op=op) for r in range(world)]
        for t in (parts[rank].clone(), registered(parts[rank])):
            trigram.all_reduce(t, op)
            right_sum(t, op, parts, f"int16 {op}")
    for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        for op in ("sum", "avg"):
            parts = [numbers(r, 2 * n, real) for r in range(world)]
            t = parts[rank].clone().view(dtype)
            trigram.all_reduce(t, op)
            right_sum(t.view(real), op, parts, f"{dtype} {op}")
            out = torch.empty(n, dtype=dtype)
            whole = [numbers(r, 2 * n * world, real) for r in range(world)]
            trigram.reduce_scatter(out, whole[rank].view(dtype), op)
            mine = slice(2 * n * rank, 2 * n * (rank + 1))
            right_sum(out.view(real), op, [w[mine] for w in whole], f"reduce_scatter {dtype} {op}")
    bools = torch.stack([numbers(r, n, torch.bool) for r in range(world)])
    for op, expected in (
        ("sum", bools.any(0)),
        ("prod", bools.all(0)),
        (dist.ReduceOp.MAX, bools.any(0)),
        (dist.ReduceOp.BAND, bools.all(0)),
    ):
        t = bools[rank].clone()
        trigram.all_reduce(t, op)
        equal(t, expected, f"bool {op}")


@CASES
def reductions_that_make_no_sense(rank: int, world: int) -> None:
    for dtype in FP8:
        t = torch.zeros(8).to(dtype)
        name = str(dtype).removeprefix("torch.")
        says(raises(trigram.UnsupportedError, trigram.all_reduce, t), name, "cast")
    z = torch.zeros(8, dtype=torch.complex64)
    for op in ("max", "prod", "bor"):
        says(raises(trigram.UnsupportedError, trigram.all_reduce, z, op), "complex64", op)


@CASES
def premultiplied_sums(rank: int, world: int) -> None:
    """Each rank's own factor, as a number or a tensor; inputs that are not outputs stay as they are."""
    factors = [0.5 + r for r in range(world)]
    parts = [numbers(r, 1000) for r in range(world)]
    scaled = [f * p for f, p in zip(factors, parts, strict=True)]
    for factor in (factors[rank], torch.tensor([factors[rank]])):
        for op in (("premul_sum", factor), dist._make_nccl_premul_sum(factor)):
            t = parts[rank].clone()
            trigram.all_reduce(t, op)
            right_sum(t, "sum", scaled, "premul all_reduce")
            t = parts[rank].clone()
            trigram.reduce(t, 0, op)
            if rank == 0:
                right_sum(t, "sum", scaled, "premul reduce")
            else:
                equal(t, parts[rank])
            whole = torch.cat([parts[rank]] * world)
            out = torch.empty(1000)
            trigram.reduce_scatter(out, whole, op)
            right_sum(out, "sum", scaled, "premul reduce_scatter")
            equal(whole, torch.cat([parts[rank]] * world))


WORLDS = [(by, n) for by in ("shm", "tcp") for n in (1, 2, 3, 4, 5)]
SOME = [("shm", 1), ("shm", 2), ("shm", 5), ("tcp", 3)]
LAYOUTS = {"1+3": [0, 1, 1, 1], "mixed": [0, 1, 0, 1, 0]}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", long_unless(SOME, WORLDS))
def test_uneven(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


@pytest.mark.parametrize("case", long_unless(list(CASES)[::2], list(CASES)))
@pytest.mark.parametrize("layout", [long("1+3"), "mixed"])
def test_uneven_across_hosts(
    in_launch: Callable[..., None], several_hosts: None, layout: str, case: str
) -> None:
    hosts = LAYOUTS[layout]
    in_launch("CASES", case, len(hosts), transport="auto", hosts=hosts)
