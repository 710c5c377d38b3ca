"""What the machine does to a rank: a crash with a core dump, no memory, no disk, a frozen container, a clock
that jumps. Nobody who is healthy is lost, and no call returns a wrong number."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import trigram
from tests.faults.test_liveness import gave_up, paused
from tests.support import cgroups, patience
from tests.support.checks import raises, says
from tests.support.harness import ROOT, Died, Ranks, await_flag, flag, say, until
from tests.support.marks import long
from trigram.runtime.end_signals import EndSignals
from trigram.runtime.launch import end, job_environment, start_rank

pytestmark = pytest.mark.waits


def crashes(rank: int, world: int, victim: int, gib: float) -> tuple[int, str, float, bool] | None:
    """all_reduce on registered memory until a rank is lost; the victim crashes, and dumps its memory."""
    trigram.init()
    t = trigram.empty(1 << 20)
    fat = b""
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.chdir(os.environ["CORE_DIR"])
        fat = os.urandom(1 << 20) * int(gib * 1024)
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
        if rank == victim and step == 20:
            assert len(fat) >> 20 == int(gib * 1024)
            say(time.monotonic())
            os.kill(os.getpid(), signal.SIGABRT)
    assert not gave_up(text)
    ones = torch.ones(1000)
    living = trigram.new_group([r for r in range(world) if r != who])
    trigram.all_reduce(ones, group=living)
    return who, text, now, bool((ones == world - 1).all())


def _expected_bytes(core: Path) -> int:
    """The size that a core file must have by its own program headers."""
    with core.open("rb") as f:
        header = f.read(64)
        offset, size, count = (
            struct.unpack_from(form, header, at)[0] for form, at in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        f.seek(offset)
        rows = [struct.unpack_from("<IIQQQQQQ", f.read(size)) for _ in range(count)]
    return max(row[2] + row[5] for row in rows)


@pytest.mark.parametrize(
    ("transport", "gib", "kill"),
    [("shm", 1.25, "on"), long("shm", 1.25, "off"), long("tcp", 1.25, "off"), long("shm", 4.0, "on")],
)
def test_a_rank_that_writes_a_core_dump_is_named_and_may_finish_it(
    transport: str, gib: float, kill: str
) -> None:
    """It never runs again, so its host does not wait for the dump; nobody cuts it off, with TRIGRAM_KILL=on
    too. Other hosts hear of it from that host; alone there, it is lost when the dump ends."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or pattern.startswith("|"):
        pytest.skip(f"core dumps of this machine go to {pattern}")
    world, victim = 3, 1
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        env = {"CORE_DIR": folder, "TRIGRAM_KILL": kill}
        with Ranks(world, crashes, victim, gib, transport=transport, env=env) as ranks:
            ranks.await_said(victim, "in the loop")
            results = ranks.results(120, dies=[victim])
            (began,) = (said for said in ranks.ranks[victim].said if isinstance(said, float))
        (core,) = Path(folder).iterdir()
        # The last pages may be a hole, which counts in the size all the same.
        assert core.stat().st_size >= _expected_bytes(core) > gib * (1 << 30)
    assert results[victim] == Died(-signal.SIGABRT)
    for r in (r for r in range(world) if r != victim):
        who, text, when, right = results[r]
        assert who == victim and right
        if transport == "shm":
            says(text, f"rank {victim}", "has crashed and is writing a core dump")
            assert when - began < 10, text


FREEZERS = (
    ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
    ("/sys/fs/cgroup/unified", "cgroup.freeze", "1", "0"),
    ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"),
)


@pytest.mark.parametrize(("root", "file", "freeze", "thaw"), FREEZERS, ids=["v2", "v2-beside-v1", "v1"])
def test_who_is_frozen_with_its_container_is_waited_for(root: str, file: str, freeze: str, thaw: str) -> None:
    world, victim = 3, 1
    with cgroups.new(root, file) as folder, Ranks(world, paused, 7.0) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        (folder / "cgroup.procs").write_text(str(ranks.pid(victim)))
        (folder / file).write_text(freeze)
        try:
            time.sleep(3)
        finally:
            (folder / file).write_text(thaw)
        counts = ranks.results(90)
        logs = [ranks.log(r) for r in range(world)]
    assert len(set(counts)) == 1
    says(logs[0], f"no heartbeat from rank {victim}", "its container is frozen", "sends heartbeats again")


@contextmanager
def _little_memory(spare: int) -> Iterator[None]:
    """This process may take `spare` bytes more, and then no memory any more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def cannot_map(rank: int, world: int) -> str:
    """Rank 0 shares new memory for which rank 1 has no room."""
    trigram.init()
    size = 300 << 18  # elements: more than the memory that is shared already
    trigram.all_reduce(torch.ones(1))
    if rank == 1:
        t = trigram.empty(size)
        trigram.all_reduce(torch.ones(1))
        with _little_memory(64 << 20):
            flag("full")
            text = raises(trigram.IoError, trigram.all_reduce, t)
    else:
        trigram.all_reduce(torch.ones(1))
        await_flag("full", 60)
        t = trigram.empty(size)
        text = raises(trigram.IoError, trigram.all_reduce, t)
    return _goes_on(world, text)


def cannot_allocate(rank: int, world: int) -> str:
    """Rank 1 has no room for memory of its own: that call of its alone fails, and no collective was made."""
    trigram.init()
    trigram.all_reduce(torch.ones(1))
    text = ""
    if rank == 1:
        with _little_memory(64 << 20):
            text = raises(trigram.IoError, trigram.empty, 300 << 18)
    return _goes_on(world, text)


def cannot_buffer(rank: int, world: int) -> str:
    """Rank 1 has no room for buffers of the engine in its first large calls."""
    trigram.init()
    t, want = torch.full((12 << 20,), float(rank)), world * (world - 1) / 2
    with _little_memory(16 << 20) if rank == 1 else nullcontext():
        try:
            trigram.all_reduce(t)
            text = ""
        except trigram.IoError as e:
            text = str(e)
    assert text or t.min() == t.max() == want
    return _goes_on(world, text)


def cannot_make_a_file_so_large(rank: int, world: int) -> str:
    """`ulimit -f` on rank 1: shared memory counts as a file; who has nobody to share with needs none."""
    trigram.init()
    trigram.all_reduce(torch.ones(1))
    text = ""
    alone = os.environ["TRIGRAM_TRANSPORT"] == "tcp"
    if rank == 1:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        if alone:
            trigram.empty(300 << 18).fill_(1.0)
        else:
            text = raises(trigram.IoError, trigram.empty, 300 << 18)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return _goes_on(world, text)


def _goes_on(world: int, text: str) -> str:
    """Nobody is lost, and the next call is right."""
    ones = torch.ones(1000)
    trigram.all_reduce(ones)
    assert torch.equal(ones, torch.full_like(ones, world))
    return text


ADVICE = {
    cannot_map: ["mapping shared memory", "no memory left", "ulimit -v"],
    cannot_allocate: ["shared memory", "no memory left", "ulimit -v"],
    cannot_make_a_file_so_large: ["creating", "shared memory", "ulimit -f"],
    cannot_buffer: [],
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("lacks", list(ADVICE), ids=lambda lacks: lacks.__name__)
def test_who_lacks_memory_has_the_error_and_nobody_is_lost(lacks: object, transport: str) -> None:
    if lacks is cannot_map and transport == "tcp":
        pytest.skip("over TCP ranks share no memory")
    with Ranks(3, lacks, transport=transport) as ranks:  # type: ignore[arg-type]
        texts = ranks.results(90)
    if (lacks, transport) != (cannot_make_a_file_so_large, "tcp"):
        says(texts[1], *ADVICE[lacks])  # type: ignore[index]


def disk_is_full(rank: int, world: int, seconds: float) -> int:
    """As `paused`; on all ranks stderr and the checkpoint's folder have no room left."""
    trigram.init()
    stderr = os.dup(2)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    try:
        count = paused(rank, world, seconds)
        model = trigram.with_bagua(torch.nn.Linear(100, 100))
        model(torch.ones(2, 100)).sum().backward()
        if rank == 0:
            with pytest.raises((OSError, RuntimeError)) as caught, Path("/dev/full").open("wb") as full:
                torch.save(model.state_dict(), full)
                full.flush()
            assert os.strerror(errno.ENOSPC) in str(caught.value) or isinstance(caught.value, RuntimeError)
        trigram.barrier()
        return count
    finally:
        os.dup2(stderr, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_full_disk_ends_nothing(transport: str) -> None:
    """The engine writes nothing but its log; memory that ranks share needs neither a disk nor /dev/shm."""
    world, victim = 3, 1
    with Ranks(world, disk_is_full, 5.0, transport=transport) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        ranks.signal(victim, signal.SIGSTOP)
        time.sleep(2.5)  # long enough for a line in the log of the others
        ranks.signal(victim, signal.SIGCONT)
        assert len(set(ranks.results(90))) == 1


SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile int64_t *jump;
static int64_t ahead(void) {
    if (!jump) {
        int file = open(getenv("CLOCK_JUMP"), O_RDONLY);
        void *at = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (at == MAP_FAILED) abort();
        jump = at;
    }
    return *jump;
}
int clock_gettime(clockid_t clock, struct timespec *t) {
    long code = syscall(SYS_clock_gettime, clock, t);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
    if (!code && is_wall) t->tv_sec += ahead();
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return t ? *t = now.tv_sec : now.tv_sec;
}
"""

CLOCKED = """
import sys, time
import torch, trigram
trigram.init()
t, calls, seen = torch.empty(100_003), 0, set()
rank, world = trigram.rank(), trigram.world_size()
while True:
    t.fill_(float(rank))
    work = trigram.all_reduce(t, async_op=True)
    work.wait()
    assert torch.equal(t, torch.full_like(t, world * (world - 1) / 2))
    calls += 1
    if calls == 10:
        print("in the loop", flush=True)
    seen.add(round((time.time() - time.monotonic()) / 3600))
    over = torch.tensor([float(len(seen) >= 3)])
    trigram.all_reduce(over, "min")
    if over:
        break
for _ in range(100):
    trigram.barrier()
    time.sleep(0.02)
print("hours", len(seen), flush=True)
"""


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_a_clock_that_jumps_by_hours_decides_nothing(tmp_path: Path, transport: str) -> None:
    """All waits and limits are by the monotonic clock. The ranks' wall clocks jump while they run."""
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    script = tmp_path / "script.py"
    script.write_text(CLOCKED)
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    own = {"TRIGRAM_TRANSPORT": transport, "TRIGRAM_SILENCE": patience.silence(1.2)}
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT}/python"}
    env = (
        job_environment(3)
        | own
        | paths
        | {"LD_PRELOAD": str(shim), "CLOCK_JUMP": str(clock), "OMP_NUM_THREADS": "1"}
    )
    logs = [tmp_path / f"rank{r}" for r in range(3)]
    processes: list[subprocess.Popen[bytes]] = []
    with clock.open("r+b") as file, mmap.mmap(file.fileno(), 8) as jump:
        try:
            for r, log in enumerate(logs):
                with log.open("wb") as out:
                    command = [sys.executable, str(script)]
                    processes.append(start_rank(r, command, env, stdout=out, stderr=subprocess.STDOUT))
            until(lambda: all("in the loop" in log.read_text() for log in logs), 90)
            for hours in (7, -20, 3, 0, -1):
                jump[:] = struct.pack("<q", hours * 3600)
                time.sleep(0.5)
            until(lambda: all(p.poll() is not None for p in processes), 60)
        finally:
            end(processes, EndSignals(ExitStack()))
    texts = [log.read_text() for log in logs]
    assert [p.returncode for p in processes] == [0, 0, 0], "\n".join(texts)
    assert all("hours" in text and "heartbeat" not in text for text in texts), "\n".join(texts)
