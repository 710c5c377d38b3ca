"""Lists of tensors in calls of c10d: the engine takes them where they are, whatever the other ranks pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.backend.ranks import world_group
from tests.support.cases import Cases
from tests.support.checks import equal
from tests.support.marks import long
from trigram.backend.calls import tensors

CASES = Cases()

Made = list[torch.Tensor]


def apart(lengths: list[int], dtype: torch.dtype) -> Made:
    return [torch.full((n,), -1.0).to(dtype) for n in lengths]


def chunks(lengths: list[int], dtype: torch.dtype) -> Made:
    return list(torch.full((sum(lengths),), -1.0).to(dtype).split(lengths))


def registered(lengths: list[int], dtype: torch.dtype) -> Made:
    return [trigram.empty(n, dtype=dtype).fill_(-1) for n in lengths]


def with_gaps(lengths: list[int], dtype: torch.dtype) -> Made:
    return [torch.full((n, 2), -1.0).to(dtype)[:, 0] for n in lengths]


KINDS: list[Callable[[list[int], torch.dtype], Made]] = [apart, chunks, registered, with_gaps]
SIZES = [3, 5000, 300_000]
"""A payload in the op slot, one in a bounce buffer, one in several."""


def filled(made: Made, values: list[float]) -> Made:
    for t, value in zip(made, values, strict=True):
        t.fill_(value)
    return made


@CASES.over(torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e5m2)
def lists_of_any_kind(rank: int, world: int, dtype: torch.dtype) -> None:
    """All ranks the same kind of list, then each another."""
    world_group()
    everyone = world * (world + 1) // 2
    for size in SIZES:
        for shift in range(2 * len(KINDS)):
            kind = KINDS[(shift + (rank if shift >= len(KINDS) else 0)) % len(KINDS)]
            what = f"{kind.__name__} {dtype} {size}"
            for lengths in ([size] * world, [size * (r % 2) + r for r in range(world)]):
                outs = kind(lengths, dtype)
                dist.all_gather(outs, torch.full((lengths[rank],), float(rank)).to(dtype))
                for r, out in enumerate(outs):
                    equal(
                        out.to(torch.complex64), torch.full((lengths[r],), float(r)).to(torch.complex64), what
                    )
                part = torch.empty(lengths[rank]).to(dtype)
                dist.reduce_scatter(part, filled(kind(lengths, dtype), [rank + 1.0] * world))
                equal(part.to(torch.complex64), torch.full((lengths[rank],), everyone + 0j), what)
            outs = kind([size + r for r in range(world)], dtype)
            given = filled(kind([size + rank] * world, dtype), [float(r) for r in range(world)])
            dist.all_to_all(outs, given)
            for r, out in enumerate(outs):
                equal(out.to(torch.complex64), torch.full((size + r,), float(rank)).to(torch.complex64), what)


@CASES
def from_and_to_one_rank(rank: int, world: int) -> None:
    world_group()
    for size in SIZES:
        for kind in KINDS:
            outs = kind([size] * world, torch.float32)
            dist.gather(torch.full((size,), float(rank)), outs if rank == 1 else None, 1)
            for r, out in enumerate(outs):
                equal(out.contiguous(), torch.full((size,), float(r) if rank == 1 else -1.0), kind.__name__)
            got = torch.empty(size)
            given = filled(outs, [r + 0.5 for r in range(world)])
            dist.scatter(got, given if rank == 0 else None, 0)
            equal(got, torch.full((size,), rank + 0.5), kind.__name__)


@CASES
def coalesced_calls(rank: int, world: int) -> None:
    """Several calls that torch makes one of; the ranks' tensors lie differently."""
    group = world_group()
    total = world * (world + 1) / 2
    for size in SIZES:
        lengths = [size, 1, size // 2, 7]
        for shift in range(len(KINDS)):
            kind = KINDS[(shift + rank) % len(KINDS)]
            for dtype in (torch.float32, torch.float16):
                given = filled(kind(lengths, dtype), [rank + 1.0] * 4)
                with dist._coalescing_manager(group):
                    for t in given:
                        dist.all_reduce(t)
                for t in given:
                    equal(t.float().contiguous(), torch.full(t.shape, total), kind.__name__)
            parts = kind(lengths, torch.float32)
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for part in parts:
                    places = torch.arange(float(world)).repeat_interleave(len(part))
                    dist.reduce_scatter_tensor(part, places + rank)
            manager.wait()
            for part in parts:
                equal(part.contiguous(), torch.full(part.shape, rank * world + total - world), kind.__name__)
            outs = [torch.empty(world * n, dtype=d) for n, d in zip(lengths, MIXED, strict=True)]
            with dist._coalescing_manager(group):
                for out, n in zip(outs, lengths, strict=True):
                    dist.all_gather_into_tensor(out, torch.full((n,), rank + 1).to(out.dtype))
            for out, n in zip(outs, lengths, strict=True):
                equal(out.float(), torch.arange(1.0, world + 1).repeat_interleave(n), f"{out.dtype}")


MIXED = [torch.float32, torch.uint8, torch.bfloat16, torch.int64]


@CASES
def other_operators_on_lists(rank: int, world: int) -> None:
    """Those that need a copy, and those that do not, in one list each."""
    group = world_group()
    for op, want in [
        (dist.ReduceOp.MAX, float(world)),
        (dist.ReduceOp.AVG, (world + 1) / 2),
        (torch._C._distributed_c10d._make_nccl_premul_sum(2.0), world * (world + 1.0)),
    ]:
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = op
        given = filled(apart([3, 4], torch.float32), [rank + 1.0] * 2)
        group.allreduce_coalesced(given, opts).wait()
        assert all(t.unique().tolist() == [want] for t in given), (given, want)
        part = torch.empty(3)
        dist.reduce_scatter(part, filled(apart([3] * world, torch.float32), [rank + 1.0] * world), op)
        assert part.unique().tolist() == [want]
    whole = filled(apart([3, 4], torch.int32), [rank + 1.0] * 2)
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp = dist.ReduceOp.AVG
    group.allreduce_coalesced(whole, opts).wait()
    assert all(t.unique().tolist() == [(world * (world + 1) // 2) // world] for t in whole)


@CASES
def inputs_among_the_outputs(rank: int, world: int) -> None:
    """A tensor that a call reads and writes, at this rank's place in a list and at others."""
    world_group()
    everyone = float(sum(range(world)))
    for size in SIZES:
        for at in (rank, (rank + 1) % world):
            outs = apart([size] * world, torch.float32)
            dist.all_gather(outs, outs[at].fill_(rank))
            for r, out in enumerate(outs):
                equal(out, torch.full((size,), float(r)), "all_gather")
            whole = torch.full((world, size), -1.0)
            dist.all_gather_into_tensor(whole, whole[at].fill_(rank))
            equal(whole[:, -1].clone(), torch.arange(float(world)), "all_gather_into_tensor")
            given = filled(apart([size] * world, torch.float32), [float(rank + r) for r in range(world)])
            dist.reduce_scatter(given[at], given)
            equal(given[at], torch.full((size,), everyone + world * rank), "reduce_scatter")
            whole = (torch.arange(float(world)) + rank).repeat_interleave(size).view(world, size)
            dist.reduce_scatter_tensor(whole[at], whole)
            equal(whole[at], torch.full((size,), everyone + world * rank), "reduce_scatter_tensor")
            outs = apart([size] * world, torch.float32)
            dist.gather(outs[at].fill_(rank), outs if rank == 1 else None, 1)
            if rank == 1:
                equal(torch.stack(outs)[:, -1].clone(), torch.arange(float(world)), "gather")
            given = filled(apart([size] * world, torch.float32), [float(r) for r in range(world)])
            dist.scatter(given[at], given if rank == 1 else None, 1)
            equal(given[at], torch.full((size,), float(rank)), "scatter")
        for reverse in (False, True):
            given = filled(apart([size] * world, torch.float32), [10.0 * rank + r for r in range(world)])
            outs = given[::-1] if reverse else given
            dist.all_to_all(outs, given)
            for r, out in enumerate(outs):
                equal(out, torch.full((size,), 10.0 * r + rank), "all_to_all")
        whole = (torch.arange(float(world)) + 10 * rank).repeat_interleave(size)
        dist.all_to_all_single(whole, whole)
        equal(whole, (torch.arange(float(world)) * 10 + rank).repeat_interleave(size), "all_to_all_single")


@CASES
def they_are_not_copied(rank: int, world: int) -> None:
    """What goes to the engine are the tensors of the list."""
    del rank, world
    for kind in (apart, registered):
        made = kind([3, 0, 2000], torch.float32)
        memory = tensors.together(made, True)
        assert isinstance(memory, list) and [id(t) for t in memory] == [id(t) for t in made]
    whole = chunks([3, 0, 2000], torch.float32)
    memory = tensors.together(whole)
    assert isinstance(memory, torch.Tensor) and memory.data_ptr() == whole[0].data_ptr()
    assert tensors.together(with_gaps([3, 4], torch.float32)) is None
    assert tensors.together(apart([3, 4], torch.float8_e5m2), True) is None


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_lists(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)


@pytest.mark.parametrize("case", ["inputs_among_the_outputs", "coalesced_calls"])
def test_lists_over_tcp(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 3, env={"TRIGRAM_TRANSPORT": "tcp"})
