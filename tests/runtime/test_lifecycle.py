"""init, shutdown and exit: again and again, twice, with work in flight; nothing leaks or hangs."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.reference.torch_gloo import gloo
from tests.support import patience
from tests.support.checks import equal, raises
from tests.support.harness import Ranks, await_flag, flag, free_port, run, until
from tests.support.marks import long
from trigram.runtime import job
from trigram.runtime.rendezvous import find_store

pytestmark = pytest.mark.waits


def test_the_host_of_a_store_is_found_behind_prefixes() -> None:
    store: dist.Store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for prefix in ("one", "two"):
        store = dist.PrefixStore(prefix, store)
    found = find_store(store, 0, 2, time.monotonic() + 10)
    assert found[1:] == (0, 2, "127.0.0.1")
    assert find_store(dist.PrefixStore("one", dist.HashStore()), 1, 2, time.monotonic() + 10)[3] is None


def _ends_badly(rank: int, world: int) -> bool:
    called: list[int] = []

    @job.told_first
    class _Fails(job.Part):
        def finish(self) -> None:
            raise OSError("planned, of the test")

    @job.told
    class _Called(job.Part):
        def finish(self) -> None:
            called.append(1)

    trigram.init()
    trigram.shutdown()
    return bool(called) and not trigram.is_initialized()


class _Noting:
    """An engine that notes its end."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.ended = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def shutdown(self, exiting: bool, patient: bool = True) -> None:
        self.ended = True
        self.engine.shutdown(exiting, patient)


def _changes_at_the_end(rank: int, world: int) -> tuple[bool, bool]:
    """As an elastic job whose members change while its last averages are made."""
    trigram.init()
    mine = job.here()
    assert mine.world is not None
    before = _Noting(mine.world.engine)
    after = _Noting(mine.world.engine)
    mine.world.engine = before  # type: ignore[assignment]

    @job.told
    class _Changes(job.Part):
        def finish(self) -> None:
            assert mine.world is not None
            mine.world = dataclasses.replace(mine.world, engine=after)

    trigram.shutdown()
    return before.ended, after.ended


def test_the_engine_that_is_left_at_the_end_is_shut_down() -> None:
    assert run(2, _changes_at_the_end) == [(False, True)] * 2


INTERRUPTED = """
import torch, trigram
from trigram.runtime import job

@job.told
class Interrupted(job.Part):
    def finish(self):
        raise KeyboardInterrupt

trigram.init()
trigram.barrier()
if trigram.rank():
    try:
        trigram.all_reduce(torch.ones(1))
    except trigram.PeerLostError as e:
        print("MISSED", e, flush=True)
"""


def test_ctrl_c_at_the_end_leaves_the_job_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-m", "trigram", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(100),
        check=False,
    )
    assert "MISSED" in done.stdout and "it has left the job" in done.stdout, done.stdout + done.stderr


def test_a_finisher_that_raises_stops_nothing() -> None:
    with Ranks(2, _ends_badly) as ranks:
        assert ranks.results(30) == [True, True]
        assert "planned, of the test" in ranks.log(0)


def _entries(what: str) -> int:
    """How many file descriptors ("fd") or threads ("task") this process has."""
    return len(list(Path(f"/proc/self/{what}").iterdir()))


def _again_and_again(rank: int, world: int) -> tuple[list[int], list[int]]:
    """File descriptors and threads after each of 20 lives."""
    fds, threads = [], []
    for life in range(20):
        trigram.init()
        assert trigram.is_initialized() and trigram.rank() == rank and trigram.world_size() == world
        t = torch.full((1003,), float(rank))
        trigram.all_reduce(t, "max")
        equal(t, torch.full((1003,), world - 1.0), f"life {life}")
        trigram.new_group([0, 1])
        trigram.shutdown()
        assert not trigram.is_initialized()
        trigram.shutdown()
        gc.collect()
        fds.append(_entries("fd"))
        threads.append(_entries("task"))
    until(lambda: _entries("task") <= threads[2], 5, f"threads to end: {threads}")
    return fds, threads


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_twenty_lives(transport: str) -> None:
    for fds, threads in run(2, _again_and_again, transport=transport, timeout=90):
        assert fds[-1] <= fds[2], f"file descriptors: {fds}"
        assert threads[-1] <= threads[2], f"threads: {threads}"


def _init_twice(rank: int, world: int) -> None:
    """The second init is the first's group, or is refused in words; either way the first goes on."""
    group = trigram.init()
    try:
        assert trigram.init() is not None
    except trigram.TrigramError as e:
        assert "init" in str(e)
    for g in (group, None):
        t = torch.ones(3)
        trigram.all_reduce(t, group=g)
        equal(t, torch.full((3,), float(world)), "after a second init")


def test_init_twice(transport: str) -> None:
    run(2, _init_twice, transport=transport)


def _memory_outlives_the_world(rank: int, world: int) -> None:
    """Registered memory is its tensor's until that is gone, whatever becomes of the world it was made in."""
    t = trigram.empty(100_003, dtype=torch.float32)
    t.fill_(rank + 1.0)
    for _ in range(2):
        trigram.shutdown()
        assert bool((t == rank + 1.0).all())
        trigram.init()
        s = t.clone()
        trigram.all_reduce(s)
        equal(s, torch.full_like(s, world * (world + 1) / 2), "in the next world")
    trigram.all_reduce(t)
    equal(t, s, "memory of an earlier world")
    del t


def test_memory_outlives_the_world(transport: str) -> None:
    run(2, _memory_outlives_the_world, transport=transport)


def _torch_lends_its_store(rank: int, world: int) -> None:
    """No RANK in the environment, but a default process group."""
    with gloo(rank, world):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            del os.environ[name]
        trigram.init()
        assert (trigram.rank(), trigram.world_size()) == (rank, world)
        t = torch.ones(5)
        trigram.all_reduce(t)
        equal(t, torch.full((5,), float(world)), "on a lent store")
        trigram.shutdown()


def test_a_default_group_lends_its_store(transport: str) -> None:
    run(2, _torch_lends_its_store, transport=transport)


def _alone(rank: int, world: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(name, None)
    t = torch.ones(3)
    trigram.all_reduce(t)
    assert (trigram.rank(), trigram.world_size()) == (0, 1)
    equal(t, torch.ones(3), "alone")


def test_nothing_given_is_a_world_of_one() -> None:
    run(1, _alone)


def _shutdown_with_work(rank: int, world: int) -> None:
    """Rank 0's jobs have no partner. Their waits end in an error, and shutdown ends."""
    trigram.init()
    trigram.barrier()
    if rank == 0:
        works = [trigram.all_reduce(torch.ones(n), async_op=True) for n in (1, 1_000_003)]
        works.append(trigram.recv(torch.ones(3), 1, async_op=True))
        trigram.shutdown()
        for work in works:
            raises(trigram.TrigramError, work.wait)
        flag("shut down")
    else:
        await_flag("shut down")
        trigram.shutdown()


def test_shutdown_with_work_in_flight(transport: str) -> None:
    run(2, _shutdown_with_work, transport=transport, timeout=30)


SCRIPT = """
import os, sys, time, torch, trigram
rank, how = int(os.environ["RANK"]), sys.argv[1]
trigram.init()
model = trigram.with_bagua(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
trigram.barrier()
if rank == 0:
    works = [trigram.all_reduce(torch.ones(n), async_op=True) for n in (1, 1_000_003)]
if how == "raise":
    raise SystemExit(7)
if how == "thread" and rank == 0:
    import threading
    t = torch.ones(3)  # made here: a thread that exit finds inside of torch aborts in torch
    thread = threading.Thread(target=lambda: trigram.recv(t, 1), daemon=True)
    thread.start()
    for _ in range(1000):  # until it is inside of trigram
        frame = sys._current_frames().get(thread.ident)
        if frame is not None and frame.f_globals["__name__"].startswith("trigram"):
            break
        time.sleep(0.01)
print("at the end", flush=True)
"""


@pytest.mark.parametrize(
    "transport, how",
    [("shm", "thread"), ("tcp", "raise"), long("shm", "raise"), long("tcp", "thread")],
)
def test_interpreter_exit_with_work_in_flight(how: str, transport: str, tmp_path: Path) -> None:
    """PY-4. A real interpreter's end (the harness's ranks end by os._exit): no hang, its own exit code."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"TRIGRAM_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    outputs = [(tmp_path / f"out{r}").open("w+") for r in range(2)]
    ranks: list[subprocess.Popen[Any]] = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env=env | {"RANK": str(r)},
            stdout=outputs[r],
            stderr=outputs[r],
        )
        for r in range(2)
    ]
    try:
        codes = [p.wait(patience.seconds(60)) for p in ranks]
    except subprocess.TimeoutExpired:
        texts = [(tmp_path / f"out{r}").read_text() for r in range(2)]
        pytest.fail(f"a rank had not ended after 60 s; ended: {[p.poll() for p in ranks]}; {texts}")
    finally:
        for p in ranks:
            p.kill()
            p.wait()
        for o in outputs:
            o.close()
    texts = [(tmp_path / f"out{r}").read_text() for r in range(2)]
    assert codes == [7 if how == "raise" else 0] * 2, f"exit codes {codes}; {texts}"
