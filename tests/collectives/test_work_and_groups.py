"""Messages, jobs in flight, groups, and tensors of all kinds: on 1 to 5 ranks, over shared memory and TCP."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.collectives.test_calls import BIG, MIB3, parts_of, registered, right_sum
from tests.reference.torch_gloo import gloo
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.data import DTYPES, numbers, reduced
from tests.support.harness import until
from tests.support.marks import long_unless
from trigram.collectives.work import _held
from trigram.runtime.callbacks import when_done

CASES = Cases()


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
def many_in_flight(rank: int, world: int) -> None:
    """More jobs at once than any ring of slots can hold; each rank waits in an order of its own."""
    jobs = []
    for i in range(300):
        n = (1, 70, 5000)[i % 3]
        t = torch.full((n,), rank + i, dtype=torch.int32)
        jobs.append((i, t, trigram.all_reduce(t, async_op=True)))
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(rank)).tolist()
    for i, t, work in [jobs[k] for k in order]:
        work.wait()
        equal(t, torch.full_like(t, sum(r + i for r in range(world))), f"job {i}")


@CASES
def jobs_that_nobody_keeps(rank: int, world: int) -> None:
    """The Work and its tensor are let go at once: the engine keeps the memory, and writes to no other."""
    bystanders = []
    for i in range(60):
        n = (3, 100_003)[i % 2]
        make = (torch.empty, trigram.empty)[i // 2 % 2]
        t = make(n, dtype=torch.float32)
        t.fill_(1.0)
        trigram.all_reduce(t, async_op=True)
        del t
        bystander = make(n, dtype=torch.float32)
        bystander.fill_(-1.0)
        bystanders.append(bystander)
    trigram.barrier()
    for b in bystanders:
        assert bool((b == -1.0).all()), "a job wrote into memory that was not its own"


@CASES
def threads(rank: int, world: int) -> None:
    """Two Python threads, each on a group of its own, and the main thread on the world."""
    made = [trigram.new_group(list(range(world))) for _ in range(2)]
    errors: list[BaseException] = []

    def loop(k: int) -> None:
        try:
            for i in range(50):
                t = torch.full((1 + 997 * (i % 3),), float(rank + k))
                trigram.all_reduce(t, group=made[k])
                equal(t, torch.full_like(t, sum(r + k for r in range(world))), f"thread {k}, round {i}")
        except BaseException as e:
            errors.append(e)

    started = [Thread(target=loop, args=(k,), daemon=True) for k in range(2)]
    for thread in started:
        thread.start()
    for _ in range(50):
        t = torch.ones(2000)
        trigram.all_reduce(t)
        equal(t, torch.full_like(t, float(world)), "the main thread")
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors, errors


@CASES
def many_threads_in_flight(rank: int, world: int) -> None:
    """Threads start messages that nobody waits for, far more than 64. Each start succeeds, and keeps its
    tensor until the message has arrived."""
    if world == 1:
        return
    after, before = (rank + 1) % world, (rank - 1) % world
    threads, each = 6, 100
    kept: list[weakref.ref[torch.Tensor]] = []
    errors: list[BaseException] = []
    mine = [trigram.new_group([rank]) for _ in range(threads)]

    def start(k: int) -> None:
        try:
            for tag in range(k * each, (k + 1) * each):
                t = torch.zeros(1, dtype=torch.int64)
                kept.append(weakref.ref(t))
                trigram.recv(t, before, tag=tag, async_op=True)
                done = trigram.all_reduce(torch.ones(1), group=mine[k], async_op=True)
                done.get_future().wait()
        except BaseException as e:
            errors.append(e)

    started = [Thread(target=start, args=(k,), daemon=True) for k in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in started) and not errors, errors
    assert all(t() is not None for t in kept), "a tensor was freed while the engine may write to it"
    trigram.barrier()
    for tag in range(threads * each):
        trigram.send(torch.tensor([tag]), after, tag=tag)
    until(lambda: _ended(kept), 60.0, "messages that have arrived to be freed")


class Unanswered:
    """A call on a device that answers no question, as a GPU after an error."""

    def is_completed(self) -> bool:
        raise RuntimeError("a device error")

    def wait(self, timeout: float | None = None) -> bool:
        raise RuntimeError("a device error")

    def order(self) -> None:
        pass


@CASES
def a_call_that_cannot_be_asked(rank: int, world: int) -> None:
    """The start of another call looks through those in flight. It succeeds, and its tensor is kept."""
    if world == 1:
        return
    after, before = (rank + 1) % world, (rank - 1) % world
    broken = trigram.Work(Unanswered(), (), "all_reduce")
    kept: list[weakref.ref[torch.Tensor]] = []
    try:
        for tag in range(70):
            t = torch.zeros(1, dtype=torch.int64)
            kept.append(weakref.ref(t))
            trigram.recv(t, before, tag=tag, async_op=True)
        del t
        assert all(t() is not None for t in kept)
    finally:
        _held.works.discard(broken)
    trigram.barrier()
    for tag in range(70):
        trigram.send(torch.tensor([tag]), after, tag=tag)
    until(lambda: _ended(kept), 60.0, "messages that have arrived to be freed")


@CASES
def result_that_nobody_awaits(rank: int, world: int) -> None:
    """It keeps its tensors until it has ended, and no longer than until others start."""
    if world == 1:
        return
    if rank == 0:
        t = trigram.empty(MIB3, dtype=torch.float32)
        kept = weakref.ref(t.fill_(1.0))
        trigram.all_reduce(t, async_op=True)
        del t
        gc.collect()
        for _ in range(200):
            trigram.send(torch.ones(1), 1, tag=77, async_op=True)
        assert kept() is not None, "freed while the other ranks have not made the call"
        trigram.barrier()
        until(lambda: _ended([kept]), 60.0, "a result that has ended to be freed")
    else:
        for _ in range(200 if rank == 1 else 0):
            trigram.recv(torch.zeros(1), 0, tag=77)
        trigram.all_reduce(torch.ones(MIB3))
        trigram.barrier()


def _ended(kept: list[weakref.ref[torch.Tensor]]) -> bool:
    """Whether the tensors are gone after more calls than are kept without a look at those that have ended."""
    mine = trigram.new_group([trigram.rank()])
    for _ in range(70):
        trigram.all_reduce(torch.ones(1), group=mine, async_op=True)
    return all(t() is None for t in kept)


@CASES
def work_and_future(rank: int, world: int) -> None:
    """A Work completes without being waited for, and its future runs callbacks."""
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
def callbacks_in_order(rank: int, world: int) -> None:
    """Callbacks run in one thread, for one group in the order asked; they may make calls, and may fail."""
    world_group, other = trigram.new_group(range(world)), trigram.new_group(range(world))
    seen: list[int] = []
    threads: set[int] = set()
    sums: list[torch.Tensor] = []
    works = []
    for i in range(12):
        t = torch.full(((1, 200_001, 1003)[i % 3],), float(rank + i))
        works.append(trigram.all_reduce(t, group=world_group, async_op=True))

    def callback(i: int) -> None:
        assert works[i].is_completed(), "called before its end"
        t = torch.full((1003,), float(rank + i))
        trigram.all_reduce(t, group=other)
        sums.append(t)
        seen.append(i)
        threads.add(get_ident())
        if i == 3:
            raise ValueError("of a callback")

    for i, work in enumerate(works):
        when_done(work._core, partial(callback, i))
    until(lambda: len(seen) == 12, 20.0, "the callbacks")
    assert seen == list(range(12))
    assert len(threads) == 1
    assert get_ident() not in threads
    for i, t in enumerate(sums):
        equal(t, torch.full_like(t, sum(r + i for r in range(world))), "a call of a callback")
    for work in works:
        work.wait()


@CASES
def a_callback_of_a_message_does_not_wait_for_others(rank: int, world: int) -> None:
    if world == 1:
        return
    if rank == 0:
        ended = Event()
        late, early = torch.zeros(3), torch.zeros(5)
        works = [trigram.recv(t, 1, tag=tag, async_op=True) for tag, t in ((8, late), (9, early))]
        when_done(works[0]._core, lambda: None)
        when_done(works[1]._core, ended.set)
        assert ended.wait(20.0), "the second message has come"
        assert not works[0].is_completed()
        trigram.send(torch.ones(1), 1)
        for work in works:
            work.wait()
    elif rank == 1:
        trigram.send(torch.ones(5), 0, tag=9)
        trigram.recv(torch.zeros(1), 0)
        trigram.send(torch.ones(3), 0, tag=8)


@CASES
def groups(rank: int, world: int) -> None:
    """Subsets at work at once, beside the world, each with its own numbers. Ranks are the world's."""
    subsets = [
        list(range(0, world, 2)),
        list(range(1, world, 2)) or [0],
        list(reversed(range(world))),
        [world - 1],
    ]
    made = [trigram.new_group(ranks) for ranks in subsets]
    jobs = []
    for i in range(3):
        for k, (ranks, group) in enumerate(zip(subsets, made, strict=True)):
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


def shared_memory() -> int:
    """Bytes of shared memory that this process has touched."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))


@CASES
def groups_come_and_go(rank: int, world: int) -> None:
    """Let go in the middle of a call or right after it: results are right, and memory comes back."""
    before = 0
    for step in range(60):
        group = trigram.new_group(list(range(world)))
        first = torch.full((MIB3 // 3,), float(rank))
        trigram.all_reduce(first, group=group)
        second = first.clone()
        work = trigram.all_reduce(second, group=group, async_op=True)
        del group
        work.wait()
        del work
        total = float(world * (world - 1) // 2)
        assert bool((first == total).all()) and bool((second == world * total).all()), step
        if step == 20:
            before = shared_memory()
    assert shared_memory() < before + (16 << 20), "stages of groups that are gone are not used again"


@CASES
def torch_group_and_op(rank: int, world: int) -> None:
    """torch's ProcessGroup as `group`, torch's ReduceOp as `op`."""
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
    imaginary = torch.tensor([1 + 2j, 3 + 4j])
    refused: list[tuple[Callable[..., object], tuple[object, ...], tuple[str, ...]]] = [
        (trigram.all_reduce, (square.t(),), ("contiguous",)),
        (trigram.broadcast, (torch.zeros(10)[::2], 0), ("contiguous",)),
        (trigram.all_gather, (torch.zeros(8 * world)[::2], torch.zeros(4)), ("contiguous",)),
        (trigram.all_reduce, (torch.zeros(4, device="meta"),), ("meta",)),
        (trigram.all_reduce, (torch.zeros(4, dtype=torch.complex32),), ("complex32",)),
        (trigram.all_reduce, (torch.zeros(4).to_sparse(),), ("sparse",)),
        (
            trigram.all_gather,
            (torch.zeros(4 * world + 1), torch.zeros(4)),
            (str(4 * world + 1), str(4 * world)),
        ),
        (
            trigram.all_gather,
            (torch.zeros(4 * world, dtype=torch.float64), torch.zeros(4)),
            ("float64", "float32"),
        ),
        (trigram.reduce_scatter, (torch.zeros(4), torch.zeros(4 * world + 1)), (str(4 * world + 1),)),
        (trigram.all_to_all, (torch.zeros(4 * world), torch.zeros(4 * world), [1], [1]), ("split",)),
        (trigram.broadcast, (torch.zeros(4), world), (str(world),)),
        (trigram.all_reduce, ([1.0, 2.0],), ("list",)),
        (trigram.broadcast, (imaginary.conj(), 0), ("conjugate",)),
        (trigram.all_reduce, (imaginary[:1].conj().imag,), ("negative",)),
        (trigram.all_reduce, (imaginary.conj().imag[0],), ("negative",)),
    ]
    for fn, args, words in refused:
        says(raises((trigram.TrigramError, TypeError), fn, *args), *words)
    equal(square, kept, "a refused tensor")
    t = torch.ones(5)
    trigram.all_reduce(t)
    equal(t, torch.full((5,), float(world)), "after the refusals")


@CASES
def overlapping_memory(rank: int, world: int) -> None:
    """A call works in its own place of the larger tensor, and any other overlap is refused."""
    for n in (1, 1000, 50_000):
        for new in (torch.empty, trigram.empty):
            given = [numbers(r, world * n) for r in range(world)]
            own = slice(rank * n, (rank + 1) * n)

            twice = new(2 * world * n)
            twice.zero_()
            x = twice[: world * n]
            x.copy_(given[rank])
            trigram.all_gather(x, x[own])
            equal(x, torch.cat([given[r][r * n : (r + 1) * n] for r in range(world)]), "all_gather")
            x.copy_(given[rank])
            trigram.reduce_scatter(x[own], x)
            right_sum(x[own], "sum", [g[own] for g in given], "reduce_scatter")
            x.copy_(given[rank])
            trigram.gather(x if rank == 0 else None, x[own], 0)
            if rank == 0:
                equal(x, torch.cat([given[r][r * n : (r + 1) * n] for r in range(world)]), "gather")
            x.copy_(given[rank])
            trigram.scatter(x[own], x if rank == 0 else None, 0)
            equal(x[own], given[0][own], "scatter")
            moved = twice[n : n + world * n]
            bad: list[tuple[Any, tuple[Any, ...]]] = [(trigram.all_to_all, (moved, moved))]
            if rank:
                bad += [
                    (trigram.all_to_all, (moved, x)),
                    (trigram.all_gather, (x, x[:n])),
                    (trigram.reduce_scatter, (x[:n], x)),
                ]
            for fn, args in bad:
                says(raises(trigram.MisuseError, fn, *args), "overlap", "clone()")
    trigram.barrier()


class _Named(torch.Tensor):
    """A subclass, which does nothing else than its base."""


@CASES
def kinds_of_small_tensors(rank: int, world: int) -> None:
    """Small tensors of all kinds, plain or not, are reduced where they are."""
    total = float(sum(range(1, world + 1)))
    base = torch.full((4, 4), rank + 1.0)
    parameter = torch.nn.Parameter(base[0].clone())
    weight = torch.ones(4, requires_grad=True)
    saved = base[1].clone()
    loss = (weight * saved).sum()
    kinds = {
        "a number": torch.tensor(rank + 1.0),
        "a row": base[2],
        "a column of one": base[3:, 2],
        "one of a step": base.t()[3, 1],
        "shape 1 x 3": torch.full((1, 3), rank + 1.0),
        "shape 3 x 1": torch.full((3, 1), rank + 1.0),
        "a subclass": torch.full((3,), rank + 1.0).as_subclass(_Named),
        "a parameter": parameter,
        "nothing": torch.zeros(0),
        "channels of one": torch.full((2, 1, 3, 1), rank + 1.0).contiguous(memory_format=torch.channels_last),
    }
    for name, t in kinds.items():
        trigram.all_reduce(t)
        equal(t.detach().as_subclass(torch.Tensor), torch.full(t.shape, total), name)
    equal(base[0], torch.full((4,), rank + 1.0), "a row beside the one reduced")
    # Torch is told that a parameter has changed.
    used = (parameter * weight).sum()
    trigram.all_reduce(parameter)
    says(raises(RuntimeError, used.backward), "modified by an inplace operation")
    loss.backward()


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
    """trigram.empty: any shape and type, alive as long as its tensor or a view of it is, then reused."""
    for shape, dtype in (((0,), torch.float32), ((3, 5, 7), torch.int64), ((MIB3,), torch.bfloat16)):
        t = trigram.empty(*shape, dtype=dtype)
        assert t.shape == shape and t.dtype == dtype and t.is_contiguous()
    for i in range(30):  # more than could be kept at once, if none were given back
        t = trigram.empty(1_000_000, dtype=torch.float64)
        t.fill_(float(rank + i))
        view = t[500_000:500_010]
        del t
        trigram.all_reduce(view)
        equal(
            view, torch.full_like(view, sum(r + i for r in range(world))), "a view that outlives its tensor"
        )


WORLDS = [(by, n) for by in ("shm", "tcp") for n in (1, 2, 3, 4, 5)]
SOME = [("shm", 1), ("shm", 2), ("shm", 5), ("tcp", 2), ("tcp", 3), ("tcp", 4)]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", long_unless(SOME, WORLDS))
def test_work_and_groups(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
