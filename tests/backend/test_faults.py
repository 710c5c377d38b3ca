"""Deaths, calls that differ, timeouts, aborts and strangers through c10d: the error names the rank,
no rank hangs, and the process can begin again."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.ranks import world_group
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import await_flag, flag, free_port, run, scratch

pytestmark = pytest.mark.waits


def _again(rank: int, world: int, name: str) -> None:
    """Destroys the process group, and begins again with the ranks that are left."""
    dist.destroy_process_group()
    store = dist.FileStore(str(scratch() / name), world)
    dist.init_process_group("trigram", store=store, rank=rank, world_size=world)
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t.tolist() == [world, world]
    dist.destroy_process_group()


def _death(rank: int, world: int, how: str) -> None:
    world_group()
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    t = torch.ones(4)
    calls: dict[str, Any] = {
        "sync": lambda: [dist.all_reduce(t) for _ in range(1000)],
        "async": lambda: [dist.all_reduce(t, async_op=True).wait() for _ in range(1000)],
        "future": lambda: [dist.all_reduce(t, async_op=True).get_future().wait() for _ in range(1000)],
        "recv": lambda: dist.recv(t, world - 1),
        "backward": lambda: _train(t),
    }
    text = raises(RuntimeError, calls[how])
    says(text, f"rank {world - 1}")
    _again(rank, world - 1, "after-death")


def _train(x: torch.Tensor) -> None:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(1000):
        net(x).sum().backward()


@pytest.mark.parametrize("how", ["sync", "async", "future", "recv", "backward"])
def test_death(how: str) -> None:
    run(3, _death, how, dies=[2], timeout=60)


def _mismatch(rank: int, world: int) -> None:
    group = world_group()
    text = raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3 + rank)))
    says(text, "rank 0", "rank 1", "3 elements", "4 elements")
    text = raises(
        dist.DistBackendError,
        lambda: dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(3), 0),
    )
    says(text, "all_reduce", "broadcast")
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    says(raises(RuntimeError, work.wait), "rank 0", "rank 1")
    assert isinstance(work.exception(), RuntimeError) and not work.is_success() and work.is_completed()
    dist.barrier()  # the group goes on
    dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    raises(RuntimeError, dist.barrier)  # where nobody waits for it
    dist.barrier()
    says(raises(RuntimeError, lambda: group.allreduce([torch.ones(3 + rank)]).wait()), "rank 1")


def test_mismatch() -> None:
    run(2, _mismatch, timeout=60)


def _timeouts(rank: int, world: int) -> None:
    group: Any = world_group()
    short = dist.new_group(timeout=timedelta(seconds=1))
    began = time.monotonic()
    if rank == 0:
        says(raises(RuntimeError, lambda: dist.barrier(group=short)), "rank 1", "1 s")
        assert time.monotonic() - began < patience.seconds(10)
        flag("over")
    await_flag("over")
    if rank == 0:  # one call only
        began = time.monotonic()
        call = lambda: dist.barrier(timeout=timedelta(seconds=1))  # noqa: E731
        says(raises(RuntimeError, call), "rank 1")
        assert time.monotonic() - began < patience.seconds(10)
        t = torch.ones(1)
        work = group.recv([t], 1, 3)
        text = raises(RuntimeError, lambda: work.wait(timedelta(seconds=0.5)))
        says(text, "still running")
        flag("send")
        work.wait()
        assert t.item() == 7
    else:
        await_flag("send")
        dist.send(torch.tensor([7.0]), 0, tag=3)


def test_timeouts() -> None:
    run(2, _timeouts, timeout=60)


def _abort(rank: int, world: int) -> None:
    world_group()
    other = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=other, async_op=True)
        time.sleep(0.2)
        other.abort()
        flag("aborted")
        says(raises(RuntimeError, work.wait), "abort")
    else:
        await_flag("aborted")
        says(raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1), group=other)), "abort")
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1), group=other))
    t = torch.ones(1)
    dist.all_reduce(t)  # other groups go on
    assert t.item() == world
    _again(rank, world, "after-abort")


def test_abort() -> None:
    run(2, _abort, timeout=60)


def _begin_again(rank: int, world: int) -> None:
    import trigram

    for k in range(8):
        store = dist.FileStore(str(scratch() / f"store-{k}"), world)
        dist.init_process_group("trigram", store=store, rank=rank, world_size=world)
        group = dist.new_group([0, 1])
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        assert t.item() == 2
        dist.destroy_process_group()
        assert not trigram.is_initialized()


def test_begin_again() -> None:
    run(2, _begin_again, timeout=60)


def _stranger(rank: int, world: int) -> str:
    import trigram

    os.environ["TRIGRAM_SECRET"] = "right" if rank == 0 else "wrong"
    text = raises(trigram.TrigramError, lambda: dist.init_process_group("trigram"))
    assert not dist.is_initialized()
    os.environ["TRIGRAM_SECRET"] = "right"
    store = dist.FileStore(str(scratch() / "after"), world)
    dist.init_process_group("trigram", store=store, rank=rank, world_size=world)
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_stranger() -> None:
    texts = run(2, _stranger, timeout=60)
    says(" ".join(texts), "TRIGRAM_SECRET")


def _groups_of_other_backends(rank: int, world: int) -> None:
    import trigram

    dist.init_process_group("gloo")
    if rank < 2:
        text = raises(trigram.UnsupportedError, lambda: dist.new_group([0, 1], backend="trigram"))
        says(text, "default process group")
    else:
        dist.new_group([0, 1], backend="trigram")  # torch counts groups on all ranks
    whole = dist.new_group(backend="trigram")
    t = torch.ones(1)
    dist.all_reduce(t, group=whole)
    assert t.item() == world
    part = dist.new_group([0, 2], backend="trigram")
    if rank != 1:
        dist.all_reduce(t, group=part)
        assert t.item() == 2 * world
    dist.destroy_process_group()


def test_beside_gloo() -> None:
    run(3, _groups_of_other_backends, timeout=60)


def _many_groups(rank: int, world: int) -> None:
    world_group()
    groups = [dist.new_group() for _ in range(200)]
    for k, group in enumerate(groups):
        t = torch.full((1,), float(k))
        dist.all_reduce(t, group=group)
        assert t.item() == k * world


def test_many_groups() -> None:
    run(2, _many_groups, timeout=90)


def _wrong_port(rank: int, world: int) -> None:
    import trigram

    os.environ["MASTER_PORT"] = str(free_port())
    began = time.monotonic()
    store = dist.FileStore(str(scratch() / "lonely"), world)
    says(
        raises(
            trigram.TimeoutError,
            lambda: dist.init_process_group(
                "trigram", store=store, rank=0, world_size=2, timeout=timedelta(seconds=2)
            ),
        ),
        "rank(s) 1",
    )
    assert time.monotonic() - began < patience.seconds(20)


def test_a_rank_that_never_comes() -> None:
    run(1, _wrong_port, timeout=60)
