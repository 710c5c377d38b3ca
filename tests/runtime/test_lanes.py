"""Lanes, threads that move bytes: results are the same with them, and faults are named as without."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import trigram
from tests.runtime.test_far_ranks import _collectives
from tests.support import patience
from tests.support.harness import Ranks, run, say, until

MUCH = 3_000_017
"""Values, of which each message has 512 KiB, and a remainder."""
SECRET = {"TRIGRAM_SECRET": "a secret of some length"}


def _lanes() -> int:
    """How many lanes this process has."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:  # it has ended meanwhile
            continue
    return names.count("trigram-lane")


def _bits(rank: int, world: int) -> list[bytes]:
    """Sums of fractions, of which any other order of summing gives other bits."""
    trigram.init()
    before = _lanes()
    _collectives(world, MUCH)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        t = torch.randn(MUCH, generator=generator).to(dtype)
        part = torch.empty(MUCH // world, dtype=dtype)
        trigram.reduce_scatter(part, t[: MUCH // world * world].contiguous())
        lists = [t[:1_000_000].clone(), t[1_000_000:2_500_000].clone()]
        trigram.all_reduce(t)
        trigram.all_reduce(lists)
        digest = [t.view(torch.uint8), part.view(torch.uint8), *(each.view(torch.uint8) for each in lists)]
        found += [bytes(each.numpy()[::97]) for each in digest]
    mine = torch.full((world * 200_000,), float(rank))
    theirs = torch.empty_like(mine)
    trigram.all_to_all(theirs, mine)
    assert torch.equal(theirs, torch.arange(world, dtype=torch.float32).repeat_interleave(200_000))
    if rank == 0:
        trigram.send(torch.arange(MUCH), 1)
    elif rank == 1:
        t = torch.empty(MUCH, dtype=torch.int64)
        trigram.recv(t, 0)
        assert torch.equal(t, torch.arange(MUCH))
    asked = int(os.environ["TRIGRAM_LANES"])
    assert before == 0 and _lanes() == asked, (before, _lanes(), asked)
    trigram.shutdown()
    assert _lanes() == 0, "lanes end with the job"
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"TRIGRAM_TRANSPORT": "tcp"},
        {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_CHECKSUM": "on"},
        {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_TLS": "1", **SECRET},
        {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_STREAMS": "3", "TRIGRAM_TLS": "1", **SECRET},
        {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_STREAMS": "2"},
        {"TRIGRAM_TRANSPORT": "shm"},
    ],
    ids=["tcp", "checksums", "tls", "tls-streams", "streams", "shm"],
)
def test_lanes_change_no_bit(settings: dict[str, str]) -> None:
    transport = settings["TRIGRAM_TRANSPORT"]
    without, among = (
        run(3, _bits, transport=transport, env={**settings, "TRIGRAM_LANES": lanes}, timeout=120)
        for lanes in ("0", "3")
    )
    assert without == among


def _dies_while_they_work(rank: int, world: int) -> str:
    trigram.init()
    living = trigram.new_group([0, 2])
    t = torch.ones(20_000_000)
    trigram.all_reduce(t)
    say("all work")
    try:
        for _ in range(1000):
            t.fill_(1.0)
            trigram.all_reduce(t)
    except trigram.PeerLostError as e:
        said = str(e)
    # Nobody writes to it any more.
    t.fill_(7.0)
    other = torch.ones(20_000_000)
    trigram.all_reduce(other, group=living)
    assert bool((other == 2).all()) and bool((t == 7).all())
    return said


@pytest.mark.parametrize("settings", [{}, {"TRIGRAM_TLS": "1", **SECRET}], ids=["tcp", "tls"])
def test_a_rank_that_dies_while_lanes_work_is_named(settings: dict[str, str]) -> None:
    env = {"TRIGRAM_LANES": "2", **settings}
    with Ranks(3, _dies_while_they_work, transport="tcp", env=env) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "all work", 60)
        time.sleep(0.5)
        ranks.signal(1, signal.SIGKILL)
        results = ranks.results(60, dies=[1])
    assert all("rank 1 is gone" in results[rank] for rank in (0, 2)), results


def _gives_up(rank: int, world: int, how: str) -> str:
    """Rank 1 stops for a while; the others give up their call, use its memory, and go on when it is back."""
    trigram.init()
    limited = trigram.new_group(range(world), timeout=1.5 if how == "timeout" else 600)
    t = torch.ones(20_000_000)
    trigram.all_reduce(t, group=limited, timeout=600)
    trigram.barrier()
    say(os.getpid())
    said = ""
    if rank == 0 and how == "interrupt":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
    try:
        for _ in range(1000):
            t.fill_(1.0)
            trigram.all_reduce(t, group=limited)
    except (trigram.TrigramError, KeyboardInterrupt) as e:
        said = f"{type(e).__name__}: {e}"
    t.fill_(7.0)
    time.sleep(0.5)
    assert bool((t == 7).all())
    trigram.barrier()
    return said


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_memory_is_left_alone_after_a_call_is_given_up(how: str) -> None:
    with Ranks(3, _gives_up, how, transport="tcp", env={"TRIGRAM_LANES": "2"}) as ranks:
        for rank in range(3):
            ranks.await_said(rank, ranks.pid(rank), 60)
        time.sleep(0.3)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(3.0)
        ranks.signal(1, signal.SIGCONT)
        results = ranks.results(60)
    expected = {"timeout": "TimeoutError", "interrupt": "KeyboardInterrupt"}
    assert results[0].startswith(expected[how]), results
    assert all(results), results


def _forks(rank: int, world: int) -> int:
    trigram.init()
    t = torch.ones(20_000_000)
    trigram.all_reduce(t)
    assert _lanes() == 2
    codes = []
    for _ in range(5):
        work = trigram.all_reduce(t, async_op=True)
        child = os.fork()  # while lanes work
        if child == 0:
            del work, t  # which nobody in the child waits for
            try:
                trigram.all_reduce(torch.ones(1))
            except trigram.TrigramError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(status))
        work.wait()
    assert bool((t == float(world) ** 6).all())
    return sum(codes)


def test_a_process_forks_while_lanes_work() -> None:
    assert run(2, _forks, transport="tcp", env={"TRIGRAM_LANES": "2"}, timeout=60) == [0, 0]


def _auto(rank: int, world: int) -> int:
    """Ranks that share their cores."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    trigram.init()
    for _ in range(30):
        trigram.all_reduce(torch.ones(MUCH))
    return _lanes()


def test_ranks_without_a_core_to_spare_have_none() -> None:
    assert run(2, _auto, transport="tcp", timeout=60) == [0, 0]


def _stands_still(rank: int, world: int, how: str) -> tuple[str, float]:
    """Rank 1 stops while it receives; rank 0 gives up its call in time, and has not been busy meanwhile."""
    trigram.init()
    limited = trigram.new_group(range(world), timeout=1.5 if how == "timeout" else 600)
    t = torch.ones(64_000_000)  # which takes far longer than the peer runs
    said, spent = "", 0.0
    if rank == 1:
        trigram.recv(t, 0)
        t.zero_()
        work = trigram.recv(t, 0, group=limited, async_op=True)
        say("stops")
        until(lambda: t[0] == 1)  # the first of it has come
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(trigram.TrigramError):
            work.wait()
    else:
        trigram.send(t, 1)
        if how == "interrupt":
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 1.5)
        began, before = time.monotonic(), time.process_time()
        try:
            trigram.send(t, 1, group=limited)
        except (trigram.TimeoutError, KeyboardInterrupt) as e:
            said = f"{type(e).__name__}: {e}"
        spent = time.process_time() - before
        assert time.monotonic() - began < patience.seconds(2.5), "it was given up in time"
    trigram.barrier()
    return said, spent


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_who_waits_for_room_sleeps(how: str, transport: str) -> None:
    with Ranks(2, _stands_still, how, transport=transport, env={"TRIGRAM_LANES": "2"}) as ranks:
        ranks.await_said(1, "stops", 60)
        time.sleep(3.0)
        ranks.signal(1, signal.SIGCONT)
        said, spent = ranks.results(60)[0]
    expected = {"timeout": "TimeoutError: .*waiting for rank 1$", "interrupt": "KeyboardInterrupt"}
    assert re.match(expected[how], said), said
    assert spent < 0.5, "seconds of processor time in a call that waited for 1.5 s"
