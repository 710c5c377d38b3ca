"""Nothing is left behind: not by a process that goes on without Trigram, nor by one that was killed."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support.checks import equal
from tests.support.harness import Ranks, await_flag, flag, run, say, until
from tests.support.marks import long

pytestmark = pytest.mark.waits

CYCLES = 100
WARM = 20  # lives after which a process holds what it will hold: pools, caches, the allocator's own
M_ARENA_MAX = -8  # of malloc.h
TOLERANCE = 1 << 20  # bytes that memory may differ by between two looks that should be the same


def _links(of: str) -> list[str]:
    """What the file descriptors of a process lead to."""
    links = []
    for fd in Path(f"/proc/{of}/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:  # the one that lists them
            continue
    return sorted(links)


def _sockets(of: str) -> list[str]:
    """Abstract unix sockets that a process holds: their names."""
    mine = {link[8:-1] for link in _links(of) if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted(row[7] for row in rows if len(row) > 7 and row[6] in mine and row[7].startswith("@"))


def _mappings(of: str) -> list[str]:
    """Shared memory that a process has mapped: name and inode."""
    rows = [line.split() for line in Path(f"/proc/{of}/maps").read_text().splitlines()]
    return sorted(
        f"{row[5]} {row[4]}" for row in rows if len(row) > 5 and row[5].startswith(("/memfd:", "/dev/shm/"))
    )


def _memory() -> int:
    """Bytes in memory that are this process's, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _held() -> dict[str, Any]:
    """All that this process holds of the system."""
    gc.collect()
    return {
        "descriptors": len(_links("self")),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "shared memory": len(_mappings("self")),
        "abstract sockets": len(_sockets("self")),
    }


def _until_held(no_more_than: dict[str, Any]) -> None:
    """Wait until this process holds no more than that: threads that have been joined end a moment later."""

    def more() -> dict[str, Any]:
        return {k: v for k, v in _held().items() if v > no_more_than[k]}

    try:
        until(lambda: not more(), 5.0)
    except TimeoutError:
        raise AssertionError(f"holds {more()}, before {no_more_than}: {_links('self')}") from None


def _life(world: int, cycle: int) -> None:
    """From init to shutdown, with a call that waits, one in the background, and one on registered memory."""
    trigram.init()
    t = torch.full((5003,), float(cycle))
    trigram.all_reduce(t)
    equal(t, torch.full((5003,), float(cycle * world)), f"cycle {cycle}")
    trigram.all_reduce(t, async_op=True).wait()
    trigram.new_group(list(range(world)))
    registered = trigram.empty(1000, dtype=torch.float32)
    registered.fill_(1.0)
    trigram.all_reduce(registered)
    del registered
    if cycle % 2:
        trigram.all_reduce(t, async_op=True)  # not waited for: shutdown ends it
    else:
        trigram.barrier()
    trigram.shutdown()


def _lives(rank: int, world: int) -> None:
    # One heap for all threads: where glibc makes a new one for a new thread, the process grows by that.
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    warm: dict[str, Any] = {}
    memory = 0
    for cycle in range(CYCLES):
        _life(world, cycle)
        if cycle == WARM:
            warm, memory = _held(), _memory()
    _until_held(warm)
    assert warm["shared memory"] == warm["abstract sockets"] == 0
    grown = _memory() - memory
    assert grown < TOLERANCE, f"{grown} bytes more after {CYCLES - WARM} more lives"


@pytest.mark.parametrize(("world", "transport"), [(3, "shm"), long(2, "tcp")])
def test_lives_leave_nothing(world: int, transport: str) -> None:
    run(world, _lives, transport=transport, timeout=120)


def _survive(rank: int, world: int) -> None:
    """Rank 1 is killed in the middle of calls; the others hear of it, shut down, and go on with nothing."""
    _life(world, 0)
    before = _held()
    trigram.init()
    registered = trigram.empty(300_000, dtype=torch.float32)
    registered.fill_(0.0)
    trigram.all_reduce(registered)
    assert any(now > before[k] for k, now in _held().items()), "this test sees nothing"
    works = [trigram.all_reduce(torch.ones(70_000), async_op=True) for _ in range(3)]
    say("in calls")
    try:
        while True:
            trigram.all_reduce(registered)
    except trigram.TrigramError as e:
        assert "rank 1" in str(e), e
    for work in works:
        with suppress(trigram.TrigramError):  # those that were done when rank 1 was killed have ended well
            work.wait()
    del registered, works, work
    trigram.shutdown()
    _until_held(before)


def test_survivors_of_a_kill_hold_nothing(transport: str) -> None:
    with Ranks(3, _survive, transport=transport) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "in calls")
        ranks.signal(1, signal.SIGKILL)
        ranks.results(60, dies=[1])


def _until_killed(rank: int, world: int) -> None:
    trigram.init()
    registered = trigram.empty(300_000, dtype=torch.float32)
    registered.fill_(0.0)
    trigram.all_reduce(registered, async_op=True).wait()
    flag(f"{rank}")
    for other in range(world):
        await_flag(f"{other}")
    say({"sockets": _sockets("self"), "memory": _mappings("self")})
    while True:
        trigram.all_reduce(registered)


def _shared_memory_of_all() -> set[str]:
    """Of all processes that this one may look at, and the files that have none."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found |= set(_mappings(process.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_nothing_is_left_when_all_are_killed(transport: str) -> None:
    files = set(Path("/dev/shm").iterdir())
    with Ranks(3, _until_killed, transport=transport) as ranks:
        until(lambda: ranks.hear(0.1) and all(r.said for r in ranks.ranks.values()), 30, "ranks in calls")
        held = [r.said[0] for r in ranks.ranks.values()]
        names = {name for said in held for name in said["sockets"]}
        memory = {name for said in held for name in said["memory"]}
        assert names | memory <= names | _shared_memory_of_all() and memory, "this test sees nothing"
        pids = [ranks.pid(rank) for rank in range(3)]
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)
        for r in ranks.ranks.values():
            r.process.join(10)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not memory & _shared_memory_of_all()
        left = {
            line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines() if "@trigram" in line
        }
        assert not names & left
        assert not {path for path in set(Path("/dev/shm").iterdir()) - files if "trigram" in path.name}
