"""Groups that are aborted, timeouts of one call and of one group, and many groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.marks import long_unless

CASES = Cases()


def _group(world: int) -> trigram.Group:
    return trigram.new_group(list(range(world)))


@CASES
def calls_under_way(rank: int, world: int) -> None:
    """Collectives and receives that wait for others end on all ranks, and the other group goes on."""
    if world < 2:
        return
    group = _group(world)
    t = torch.ones(300_000)
    if rank == 0:
        trigram.barrier()
        began = time.monotonic()
        group.abort("the user has had enough")
        error = raises(trigram.AbortedError, trigram.all_reduce, t, group=group)
        says(error, "rank 0", "had enough", "new group")
    else:
        works = [trigram.all_reduce(t, group=group, async_op=True)]
        works.append(trigram.recv(torch.ones(3), 0, group=group, async_op=True))
        works.append(trigram.recv(torch.ones(3), group=group, async_op=True))
        works.append(trigram.send(torch.ones(1_000_000), 0, group=group, async_op=True))
        trigram.barrier()
        began = time.monotonic()
        for work in works:
            says(raises(trigram.AbortedError, work.wait), "rank 0", "had enough")
    assert time.monotonic() - began < patience.seconds(10)
    says(raises(trigram.AbortedError, trigram.barrier, group), "rank 0")
    says(raises(trigram.AbortedError, trigram.recv, torch.ones(1), group=group), "rank 0")
    ones = torch.ones(5)
    trigram.all_reduce(ones)
    equal(ones, torch.full((5,), float(world)))
    trigram.all_reduce(ones, group=_group(world))
    trigram.barrier()


@CASES
def before_others_know_the_group(rank: int, world: int) -> None:
    """A rank aborts a group that others create later: their first call tells them."""
    if world < 2:
        return
    if rank == world - 1:
        _group(world).abort()
        trigram.barrier()
    else:
        trigram.barrier()
        error = raises(trigram.AbortedError, trigram.all_reduce, torch.ones(3), group=_group(world))
        says(error, f"rank {world - 1}")
    trigram.barrier()


@CASES
def while_a_thread_waits(rank: int, world: int) -> None:
    """One thread is in a call that nobody joins; another one of the same rank aborts the group."""
    import threading

    group = _group(world)
    if world < 2 or rank:
        return trigram.barrier()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            trigram.all_reduce(torch.ones(10), group=group)
        except trigram.AbortedError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    group.abort()
    thread.join(10)
    assert not thread.is_alive() and errors
    return trigram.barrier()


@CASES
def a_timeout_of_one_call(rank: int, world: int) -> None:
    """The call ends after its own timeout, on all ranks, and names the ranks that have not come."""
    if world < 2:
        return
    group = _group(world)
    last = world - 1
    began = time.monotonic()
    if rank != last:
        for call in (
            lambda: trigram.all_reduce(torch.ones(300_000), group=group, timeout=0.3),
            lambda: trigram.barrier(group, timeout=0.3),
            lambda: trigram.recv(torch.ones(3), last, group=group, timeout=0.3),
        ):
            says(raises(trigram.TimeoutError, call), f"rank {last}" if world == 2 else str(last))
        work = trigram.all_reduce(torch.ones(3), group=group, async_op=True, timeout=0.3)
        says(raises(trigram.TimeoutError, work.wait), str(last))
        assert time.monotonic() - began < patience.seconds(15)
    trigram.barrier()
    says(raises(trigram.MisuseError, trigram.barrier, timeout=-1.0), "timeout")


@CASES
def a_timeout_of_a_group(rank: int, world: int) -> None:
    if world < 2:
        return
    group = trigram.new_group(list(range(world)), timeout=0.3)
    assert group.timeout == 0.3
    assert trigram.new_group([0], timeout=math.inf).timeout is None
    if rank == 0:
        # The message has the time that has passed, which is more on a busy machine.
        says(raises(trigram.TimeoutError, trigram.barrier, group), "timed out after", "waiting for rank")
    trigram.barrier()


@CASES
def many_groups(rank: int, world: int) -> None:
    """Far more than 512 at once, each with calls of its own; then as many again in their place."""
    for _ in range(2):
        groups = [_group(world) for _ in range(1100)]
        for i in range(0, 1100, 50):
            t = torch.full((3,), float(i + rank))
            trigram.all_reduce(t, group=groups[i])
            equal(t, torch.full((3,), float(world * i + world * (world - 1) / 2)))
        del groups
    trigram.barrier()


@CASES
def deleted_one_after_another(rank: int, world: int) -> None:
    for i in range(1500):
        t = torch.tensor([float(i)])
        trigram.all_reduce(t, "max", group=_group(world))
        assert t.item() == i


WORLDS = [(by, n) for by in ("shm", "tcp") for n in (2, 3, 4, 5)]
SOME = [("shm", 2), ("shm", 3), ("tcp", 3)]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", long_unless(SOME, WORLDS))
def test_abort(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


@pytest.mark.parametrize("case", list(CASES))
def test_abort_across_hosts(in_launch: Callable[..., None], several_hosts: None, case: str) -> None:
    in_launch("CASES", case, 3, transport="auto", hosts=[0, 1, 1])
