"""Death, silence and cut links are noticed on every rank, named alike; short pauses disturb nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import torch

import trigram
from tests.support import netns
from tests.support.checks import raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, say
from tests.support.marks import long

pytestmark = pytest.mark.waits

SIZE = 4 << 20  # elements: 16 MiB


def gave_up(text: str) -> bool:
    """Whether this rank is the one that was cut off."""
    return "evicted this rank" in text


def loop(rank: int, world: int) -> tuple[int, str, float, float]:
    """all_reduce until a peer is lost: who, the text, when; and the largest wrong number before."""
    trigram.init()
    t = torch.empty(SIZE)
    wrong, step = 0.0, 0
    while True:
        t.fill_(float(rank + step))
        try:
            trigram.all_reduce(t)
        except (trigram.PeerLostError, trigram.CorruptError) as e:
            now, who, text = time.monotonic(), e.rank, str(e)
            break
        wrong = max(wrong, float((t - (world * (world - 1) / 2 + world * step)).abs().max()))
        step = (step + 1) % 1000
        if step == 10:
            say("in the loop")
    # The living go on in a group of their own.
    ones = torch.ones(1000)
    if not gave_up(text):
        living = trigram.new_group([r for r in range(world) if r != who])
        trigram.all_reduce(ones, group=living)
        assert torch.equal(ones, torch.full((1000,), world - 1.0))
    return who, text, now, wrong


def _faulted(ranks: Ranks, world: int, victim: int, fault: Any, dies: bool) -> tuple[list[Any], float]:
    for r in range(world):
        ranks.await_said(r, "in the loop")
    began = time.monotonic()
    fault()
    return ranks.results(60, dies=[victim] if dies else []), began


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_by_all(transport: str, victim: int) -> None:
    world = 4
    with Ranks(world, loop, transport=transport) as ranks:
        results, began = _faulted(ranks, world, victim, lambda: ranks.signal(victim, signal.SIGKILL), True)
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
            continue
        who, text, when, wrong = result
        assert who == victim and wrong == 0
        says(text, f"rank {victim}", "all_reduce", "float32")
        assert when - began < 5, text


def stopped(rank: int, world: int, victim: int) -> tuple[int, str, float]:
    """As `loop`, and the victim is ended by whoever notices, or by the test."""
    who, text, when, wrong = loop(rank, world)
    assert wrong == 0
    flag(f"noticed{rank}")
    return who, text, when


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_rank_is_named_by_all(transport: str) -> None:
    world, victim = 3, 1
    with Ranks(world, stopped, victim, transport=transport) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        began = time.monotonic()
        ranks.signal(victim, signal.SIGSTOP)
        end = began + 20
        others = [r for r in range(world) if r != victim]
        while time.monotonic() < end and not all((ranks.dir / f"flag-noticed{r}").exists() for r in others):
            ranks.hear(0.05)
        if transport == "shm":  # who shares memory with it has ended it
            process = ranks.ranks[victim].process
            process.join(5)
            assert process.exitcode == -signal.SIGKILL
            assert any("ended the process of rank" in ranks.log(r) for r in others)
        else:
            ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(30, dies=[victim])
    for r in others:
        who, text, when = results[r]
        assert who == victim
        says(text, f"rank {victim}", "no heartbeat")
        assert when - began < 10


def paused(rank: int, world: int, seconds: float = 4) -> int:
    """Many calls, in which some rank is stopped for a while."""
    trigram.init()
    t = torch.empty(100_003)
    calls = 0
    end = time.monotonic() + seconds
    while True:
        t.fill_(float(rank))
        trigram.all_reduce(t)
        assert torch.equal(t, torch.full_like(t, world * (world - 1) / 2))
        calls += 1
        if calls == 10:
            say("in the loop")
        go_on = torch.tensor([float(time.monotonic() < end)])
        trigram.all_reduce(go_on, "min")
        if not go_on:
            return calls


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_short_pause_disturbs_nobody(transport: str) -> None:
    world = 3
    with Ranks(world, paused, transport=transport) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        for victim in range(world):
            ranks.signal(victim, signal.SIGSTOP)
            time.sleep(0.5)
            ranks.signal(victim, signal.SIGCONT)
            time.sleep(0.2)
        counts = ranks.results(60)
    assert len(set(counts)) == 1


def all_paused(rank: int, world: int) -> int:
    """All ranks are stopped together, as Ctrl-Z does, for longer than anyone may be silent."""
    return paused(rank, world)


def test_who_is_stopped_with_the_others_blames_nobody() -> None:
    world = 3
    with Ranks(world, all_paused, transport="tcp") as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        for r in range(world):
            ranks.signal(r, signal.SIGSTOP)
        time.sleep(3)
        for r in range(world):
            ranks.signal(r, signal.SIGCONT)
        assert len(set(ranks.results(60))) == 1


def test_a_cut_link_is_named_by_all(several_hosts: None) -> None:
    world, victim = 3, 2
    cable = ["ip", "-n", netns._switch(), "link", "set", f"port{victim}"]
    with Ranks(world, loop, transport="auto", hosts=[0, 1, 2]) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        began = time.monotonic()
        subprocess.run([*cable, "down"], check=True)
        try:
            ranks.hear(0.1)
            while time.monotonic() < began + 20 and any(ranks.ranks[r].answer is None for r in (0, 1)):
                ranks.hear(0.1)
            for r in (0, 1):
                answer = ranks.ranks[r].answer
                assert answer is not None and answer[0] == "returned", ranks.report()
                who, text, when, wrong = answer[1]
                assert who == victim and wrong == 0
                says(text, f"rank {victim}")
                assert when - began < 10
        finally:
            subprocess.run([*cable, "up"], check=True)


def busy(rank: int, world: int) -> float:
    """One rank computes for long without a call: it is awaited, not given up."""
    trigram.init()
    trigram.barrier()
    began = time.monotonic()
    if rank == 1:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            sum(range(100_000))  # holds the interpreter lock
    t = torch.ones(1000)
    trigram.all_reduce(t)
    assert torch.equal(t, torch.full_like(t, world))
    if rank == 0:
        waited = trigram.stats()["waited_for"]
        assert waited[1] > 2 and waited[2] < 0.5, waited
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_busy_rank_is_awaited_and_counted(transport: str) -> None:
    with Ranks(3, busy, transport=transport) as ranks:
        assert min(ranks.results(60)) > 2.5


def idle(rank: int, world: int) -> str:
    """A rank dies while nobody calls anything: the next call tells at once."""
    trigram.init()
    trigram.barrier()
    say("up")
    await_flag("dead")
    time.sleep(0.5)
    began = time.monotonic()
    try:
        trigram.barrier()
    except trigram.PeerLostError as e:
        assert e.rank == world - 1 and time.monotonic() - began < 1
        return str(e)
    raise AssertionError


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_death_between_calls(transport: str) -> None:
    world = 3
    with Ranks(world, idle, transport=transport) as ranks:
        for r in range(world):  # one leaves the barrier before another
            ranks.await_said(r, "up")
        ranks.signal(world - 1, signal.SIGKILL)
        (ranks.dir / "flag-dead").touch()
        assert ranks.results(30, dies=[world - 1])[-1] == Died(-signal.SIGKILL)


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_the_limit_follows_what_was_forgiven(transport: str) -> None:
    """The second pause is longer than the setting, and forgiven because of the first."""
    with Ranks(3, paused, 8.0, transport=transport, env={"TRIGRAM_SILENCE": "2"}) as ranks:
        for r in range(3):
            ranks.await_said(r, "in the loop")
        for seconds in (1.6, 2.5):
            ranks.signal(1, signal.SIGSTOP)
            time.sleep(seconds)
            ranks.signal(1, signal.SIGCONT)
            time.sleep(0.5)
        assert len(set(ranks.results(60))) == 1


def holding_the_interpreter(rank: int, world: int) -> bool:
    """Rank 1's main thread waits in a call; another keeps the interpreter for three seconds."""
    trigram.init()
    if rank == 1:
        # One call of C code that does not let go of the interpreter's lock.
        keep = threading.Timer(0.3, lambda: ctypes.PyDLL(None).usleep(3_000_000))
        keep.start()
    if rank == 0:
        time.sleep(4.0)
    t = torch.ones(1000)
    trigram.all_reduce(t)
    return bool(torch.equal(t, torch.full_like(t, float(world))))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_waits_for_the_interpreter_is_alive(transport: str) -> None:
    with Ranks(3, holding_the_interpreter, transport=transport) as ranks:
        assert ranks.results(60) == [True] * 3


def settings_are_checked(rank: int, world: int) -> None:
    for name, value in (("TRIGRAM_SILENCE", "30s"), ("TRIGRAM_SILENCE", "0.1"), ("TRIGRAM_CHECKSUM", "no")):
        os.environ[name] = value
        says(raises(trigram.ConfigError, trigram.init), name, value)
        del os.environ[name]


def test_settings_that_cannot_be_are_refused() -> None:
    with Ranks(1, settings_are_checked) as ranks:
        ranks.results(60)
