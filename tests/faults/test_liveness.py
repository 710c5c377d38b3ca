"""Death, silence and cut links are noticed on every rank, named alike; short pauses disturb nobody."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import netns, patience
from tests.support.checks import init_refuses, raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, run, say, scratch, until
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
        assert when - began < patience.seconds(5), text


def stopped(rank: int, world: int, victim: int) -> tuple[int, str, float, bool]:
    """As `loop` on registered memory, which is as this rank left it when the victim has woken up."""
    trigram.init()
    t = trigram.empty(SIZE)
    step = 0
    while True:
        t.fill_(float(rank + step))
        try:
            trigram.all_reduce(t)
        except trigram.PeerLostError as e:
            now, who, text = time.monotonic(), e.rank, str(e)
            break
        assert torch.equal(t, torch.full_like(t, world * (world - 1) / 2 + world * step))
        step = (step + 1) % 1000
        if step == 10:
            say("in the loop")
    t.fill_(-1.0)
    flag(f"noticed{rank}")
    await_flag("woken", 60)
    return who, text, now, bool((t == -1.0).all())


def _stopped(transport: str, victim: int, env: dict[str, str], dies: bool) -> list[Any]:
    """All ranks' results: one is stopped until the others have noticed, and goes on then."""
    world = 3
    others = [r for r in range(world) if r != victim]
    with Ranks(
        world, stopped, victim, transport=transport, env={"TRIGRAM_SILENCE": patience.silence(1.2), **env}
    ) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        began = time.monotonic()
        ranks.signal(victim, signal.SIGSTOP)
        until(lambda: all((ranks.dir / f"flag-noticed{r}").exists() for r in others), 60)
        if dies:
            process = ranks.ranks[victim].process
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
            until(lambda: any("ended the process of rank" in ranks.log(r) for r in others), 60)
        else:
            ranks.signal(victim, signal.SIGCONT)
            until((ranks.dir / f"flag-noticed{victim}").exists, 60)
        (ranks.dir / "flag-woken").touch()
        results = ranks.results(60, dies=[victim] if dies else [])
    for r in others:
        who, text, when, intact = results[r]
        assert who == victim and intact
        says(text, f"rank {victim}", "no heartbeat")
        assert when - began < patience.seconds(20)
        if transport == "shm":
            says(text, "stopped by a signal")
    return results


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_rank_is_named_by_all(transport: str) -> None:
    """Nobody ends it: it wakes up, learns that it was evicted, and has written into nobody's memory."""
    victim = 1
    results = _stopped(transport, victim, {}, dies=False)
    who, text, _, _ = results[victim]
    assert who != victim
    says(text, "evicted this rank")


def test_a_stopped_rank_is_ended_where_that_is_asked_for() -> None:
    assert _stopped("shm", 1, {"TRIGRAM_KILL": "on"}, dies=True)[1] == Died(-signal.SIGKILL)


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


def all_paused(rank: int, world: int, seconds: float) -> int:
    """All ranks are stopped together, as Ctrl-Z does, for longer than anyone may be silent."""
    return paused(rank, world, seconds)


def test_who_is_stopped_with_the_others_blames_nobody() -> None:
    world, silence = 3, patience.silence(1.2)
    stop = 2.5 * float(silence)
    with Ranks(world, all_paused, stop + 1, transport="tcp", env={"TRIGRAM_SILENCE": silence}) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        for r in range(world):
            ranks.signal(r, signal.SIGSTOP)
        time.sleep(stop)
        for r in range(world):
            ranks.signal(r, signal.SIGCONT)
        assert len(set(ranks.results(60))) == 1


def test_a_cut_link_is_named_by_all(several_hosts: None) -> None:
    world, victim = 3, 2
    cable = ["ip", "-n", netns._switch(), "link", "set", f"port{victim}"]
    env = {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(world, loop, transport="auto", hosts=[0, 1, 2], env=env) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        began = time.monotonic()
        subprocess.run([*cable, "down"], check=True)
        try:
            ranks.hear(0.1)
            limit = patience.Limit(20)
            while not limit.is_over() and any(ranks.ranks[r].answer is None for r in (0, 1)):
                ranks.hear(0.1)
            for r in (0, 1):
                answer = ranks.ranks[r].answer
                assert answer is not None and answer[0] == "returned", ranks.report()
                who, text, when, wrong = answer[1]
                assert who == victim and wrong == 0
                says(text, f"rank {victim}")
                assert when - began < patience.seconds(10)
        finally:
            subprocess.run([*cable, "up"], check=True)


def busy(rank: int, world: int, seconds: float) -> tuple[float, list[float], list[float]]:
    """One rank computes for long without a call: it is awaited, not given up. How long that took, for whom
    it waited how long, and when it came to its two calls."""
    trigram.init()
    came = [time.monotonic()]
    trigram.barrier()
    began = time.monotonic()
    if rank == 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(100_000))  # holds the interpreter lock
    t = torch.ones(1000)
    came.append(time.monotonic())
    trigram.all_reduce(t)
    assert torch.equal(t, torch.full_like(t, world))
    return time.monotonic() - began, trigram.stats()["waited_for"], came


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_busy_rank_is_awaited_and_counted(transport: str) -> None:
    silence = patience.silence(1.2)
    seconds = 2.5 * float(silence)
    with Ranks(3, busy, seconds, transport=transport, env={"TRIGRAM_SILENCE": silence}) as ranks:
        results = ranks.results(60)
    assert min(took for took, _, _ in results) > 0.8 * seconds
    _, waited, came = results[0]
    # A busy machine may have made rank 2 late too.
    late = sum(max(0.0, theirs - mine) for theirs, mine in zip(results[2][2], came, strict=True))
    assert waited[1] > 0.6 * seconds and waited[2] < 0.5 + late, (waited, late)


def one_core(rank: int, world: int, numel: int) -> None:
    """Who waits on the core of the rank that it waits for gives its time slices away, and hardly sleeps."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trigram.init()
    t, spent = torch.ones(numel), 0.0
    trigram.barrier()
    before = trigram.stats()["waited_for"][1]
    for _ in range(40):
        end = time.thread_time() + 0.01
        while rank == 1 and time.thread_time() < end:
            sum(range(10_000))
        began = time.monotonic()
        trigram.all_reduce(t, "avg")
        spent += time.monotonic() - began
    assert bool((t == 1).all())
    waited = trigram.stats()["waited_for"][1] - before
    assert rank == 1 or 0.5 * spent < waited < 1.1 * spent, (waited, spent)


@pytest.mark.parametrize("numel", [10, 20_000])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_wait_without_sleep_is_counted(transport: str, numel: int) -> None:
    run(2, one_core, numel, transport=transport)


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
        assert e.rank == world - 1 and time.monotonic() - began < patience.seconds(1)
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


def leaves(rank: int, world: int) -> int:
    """all_reduce until a peer is lost, and which it is; then the rank leaves the job."""
    trigram.init()
    for step in range(10**6):
        try:
            trigram.all_reduce(torch.ones(1000))
        except trigram.PeerLostError as e:
            say("leaves")
            return e.rank
        if step == 10:
            say("in the loop")
        time.sleep(0.001)
    raise AssertionError("nobody was lost")


def test_who_left_because_of_a_death_is_not_named_for_it(transport: str) -> None:
    """A rank that does not run meanwhile finds both gone, the one that left in good order too."""
    with Ranks(3, leaves, transport=transport) as ranks:
        for r in range(3):
            ranks.await_said(r, "in the loop")
        ranks.signal(1, signal.SIGSTOP)
        ranks.signal(2, signal.SIGKILL)
        ranks.await_said(0, "leaves")
        time.sleep(0.5)
        ranks.signal(1, signal.SIGCONT)
        assert ranks.results(30, dies=[2])[:2] == [2, 2]


def paused_by_agreement(rank: int, world: int) -> int:
    """As `paused`; only one rank asks for more than a second."""
    os.environ["TRIGRAM_SILENCE"] = "30" if rank == 2 else "1"
    return paused(rank, world, 5)


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_the_longest_silence_that_a_rank_asks_for_holds_for_all(transport: str) -> None:
    with Ranks(3, paused_by_agreement, transport=transport) as ranks:
        for r in range(3):
            ranks.await_said(r, "in the loop")
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(2.5)
        ranks.signal(1, signal.SIGCONT)
        assert len(set(ranks.results(60))) == 1


def watched(rank: int, world: int, seconds: float) -> tuple[int, float]:
    """As `paused`, and the longest silence that this rank has counted."""
    longest = 0.0
    over = threading.Event()

    def look() -> None:
        nonlocal longest
        while not over.wait(0.05):
            if trigram.is_initialized():
                longest = max(longest, *trigram.stats()["silent_for"])

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        return paused(rank, world, seconds), longest
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pause_of_five_seconds_costs_its_time_only(transport: str) -> None:
    """It is warned of, with its reason where the host knows it."""
    world, victim = 3, 1
    with Ranks(world, watched, 9.0, transport=transport) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        time.sleep(1)  # all have had a heartbeat of the victim: before the first one more time is given
        ranks.signal(victim, signal.SIGSTOP)
        time.sleep(5)
        ranks.signal(victim, signal.SIGCONT)
        results = ranks.results(90)
        logs = {r: ranks.log(r) for r in range(world)}
    assert len({calls for calls, _ in results}) == 1
    for r in range(world):
        if r != victim:
            assert results[r][1] > 2
            says(logs[r], f"no heartbeat from rank {victim}", f"rank {victim} sends heartbeats again")
            if transport == "shm":
                says(logs[r], "its process is stopped by a signal")
        assert "evicted" not in logs[r]


PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


def _debug(pid: int, seconds: float) -> None:
    """Stops all threads of a process for a while, as a debugger does."""
    libc = ctypes.CDLL(None, use_errno=True)
    ptrace = libc.ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    ptrace.restype = ctypes.c_long
    threads = [int(t.name) for t in Path(f"/proc/{pid}/task").iterdir()]
    if ptrace(PTRACE_SEIZE, pid, 0, 0) != 0:
        pytest.skip(f"this machine forbids to debug a process ({os.strerror(ctypes.get_errno())})")
    held = [pid, *(t for t in threads if t != pid and ptrace(PTRACE_SEIZE, t, 0, 0) == 0)]
    for thread in held:
        ptrace(PTRACE_INTERRUPT, thread, 0, 0)
    for thread in held:
        os.waitpid(thread, WALL)
    time.sleep(seconds)
    for thread in held:
        ptrace(PTRACE_DETACH, thread, 0, 0)


def test_who_is_looked_at_by_a_debugger_is_waited_for() -> None:
    world, victim = 3, 1
    with Ranks(world, paused, 6.0) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        _debug(ranks.pid(victim), 3)
        counts = ranks.results(90)
        logs = [ranks.log(r) for r in range(world)]
    assert len(set(counts)) == 1
    says(logs[0], f"no heartbeat from rank {victim}", "its process is stopped by a debugger")


@pytest.mark.parametrize("seconds", [0.5, long(2.0), 5.0])
def test_a_link_that_is_down_for_a_while_costs_its_time_only(several_hosts: None, seconds: float) -> None:
    world, victim = 3, 2
    cable = ["ip", "-n", netns._switch(), "link", "set", f"port{victim}"]
    with Ranks(world, paused, seconds + 3, transport="auto", hosts=[0, 1, 2]) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        subprocess.run([*cable, "down"], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run([*cable, "up"], check=True)
        assert len(set(ranks.results(120))) == 1


def test_many_ranks_on_few_cores_lose_nobody() -> None:
    """16 ranks, however many cores there are."""
    with Ranks(16, paused, 3.0, transport="shm") as ranks:
        assert len(set(ranks.results(180))) == 1


def cannot_write(rank: int, world: int, seconds: float) -> int:
    """As `paused`; where stderr goes, nobody reads, and there is no room left."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        return paused(rank, world, seconds)
    finally:
        os.dup2(stderr, 2)
        os.set_blocking(reader, False)
        while os.read(reader, 1 << 20):  # for the thread that waits there with a line
            if not select.select([reader], [], [], 1)[0]:
                break


def test_who_cannot_write_its_log_goes_on() -> None:
    world, victim = 3, 1
    with Ranks(world, cannot_write, 5.0) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        ranks.signal(victim, signal.SIGSTOP)
        time.sleep(3)  # long enough for a line on the other ranks
        ranks.signal(victim, signal.SIGCONT)
        assert len(set(ranks.results(90))) == 1


def without_descriptors(rank: int, world: int) -> str:
    """Rank 1 has as many files open as it may when rank 0 shares new memory."""
    trigram.init()
    size = 300 << 18  # elements: more than the memory that is shared already
    if rank == 1:
        t = trigram.empty(size)
        trigram.all_reduce(torch.ones(1))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1
        spare = []
        with suppress(OSError):  # no gap below the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
            while True:
                spare.append(os.dup(0))
        (scratch() / "flag-full").mkdir()  # a flag that needs no descriptor
    else:
        trigram.all_reduce(torch.ones(1))
        if rank == 0:
            await_flag("full", 60)
        t = trigram.empty(size)
    text = raises(trigram.IoError, trigram.all_reduce, t)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in spare:
            os.close(fd)
    ones = torch.ones(1000)
    trigram.all_reduce(ones)
    assert torch.equal(ones, torch.full_like(ones, world))
    return text


def test_who_lacks_descriptors_has_the_error_and_nobody_is_lost() -> None:
    with Ranks(3, without_descriptors) as ranks:
        for text in ranks.results(90):
            says(text, "open files", "ulimit -n")


def floods(rank: int, world: int) -> str:
    """Rank 0 sends more than 1 GiB that rank 1 does not receive."""
    trigram.init()
    if rank == 0:
        t = torch.ones(1 << 18)
        for _ in range(1030):
            trigram.send(t, 1)
    while True:  # rank 1 reads while it is in a call; its calls after the message that was too much fail
        try:
            trigram.all_reduce(torch.ones(10))
        except trigram.IoError as e:
            assert all(how == "left" for _, how in trigram.runtime.world.current().engine.losses())
            return str(e)


@pytest.mark.long
def test_who_has_no_room_for_messages_has_the_error_and_nobody_is_lost() -> None:
    with Ranks(3, floods) as ranks:
        for text in ranks.results(120):
            says(text, "receiving from rank 0", "more than 1 GiB")


def without_threads(rank: int, world: int) -> float:
    """On rank 0 there is no memory for the thread that a call in the background needs."""
    trigram.init()
    t = torch.ones(1000)
    trigram.all_reduce(t)
    if rank == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        lost = torch.full((1000,), 100.0)
        over = threading.Event()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
        try:
            with suppress(RuntimeError):  # none of the memory of earlier threads is left
                while True:
                    threading.Thread(target=over.wait).start()
            text = raises(trigram.IoError, trigram.all_reduce, lost, async_op=True)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
            over.set()
        says(text, "starting a thread")
        del lost
    t.fill_(1.0)
    work = trigram.all_reduce(t, async_op=True)  # the same call on all ranks: the failed one is not counted
    assert work is not None
    work.wait()
    return float(t.sum())


def test_a_call_that_finds_no_thread_leaves_nothing_behind() -> None:
    with Ranks(3, without_threads) as ranks:
        assert ranks.results(60) == [3000.0] * 3


def holding_the_interpreter(rank: int, world: int) -> bool:
    """Rank 1's main thread waits in a call; another keeps the interpreter for longer than a silence."""
    trigram.init()
    seconds = 2.5 * float(os.environ["TRIGRAM_SILENCE"])
    if rank == 1:
        # One call of C code that does not let go of the interpreter's lock.
        keep = threading.Timer(0.3, lambda: ctypes.PyDLL(None).usleep(int(seconds * 1_000_000)))
        keep.start()
    if rank == 0:
        time.sleep(seconds + 1)
    t = torch.ones(1000)
    trigram.all_reduce(t)
    return bool(torch.equal(t, torch.full_like(t, float(world))))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_waits_for_the_interpreter_is_alive(transport: str) -> None:
    env = {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(3, holding_the_interpreter, transport=transport, env=env) as ranks:
        assert ranks.results(60) == [True] * 3


def settings_are_checked(rank: int, world: int) -> None:
    init_refuses(
        ("TRIGRAM_SILENCE", "30s"),
        ("TRIGRAM_SILENCE", "0.1"),
        ("TRIGRAM_CHECKSUM", "no"),
        ("TRIGRAM_KILL", "yes"),
        ("TRIGRAM_LANES", "-1"),
        ("TRIGRAM_LANES", "65"),
        ("TRIGRAM_LANES", "two"),
        ("TRIGRAM_STREAMS", "0"),
        ("TRIGRAM_STREAMS", "many"),
        ("TRIGRAM_CONGESTION", "no control"),
        ("TRIGRAM_CONGESTION", "unknown"),
    )


def test_settings_that_cannot_be_are_refused() -> None:
    with Ranks(1, settings_are_checked) as ranks:
        ranks.results(60)
