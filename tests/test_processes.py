"""A process and its signals, forks, threads and end: waits answer Ctrl-C, forks hold nothing, ends never hang."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trigram
from torch.utils.data import DataLoader, Dataset

from tests.checks import close, equal, raises
from tests.harness import await_flag, flag, free_port, run, scratch, until

WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: trigram.all_reduce(torch.ones(10)),
    "large all_reduce": lambda: trigram.all_reduce(torch.ones(1_000_003)),
    "barrier": lambda: trigram.barrier(),
    "recv": lambda: trigram.recv(torch.ones(10), 0),
    "Work.wait": lambda: trigram.all_reduce(torch.ones(10), async_op=True).wait(),
    "init": lambda: trigram.init(),
    "rank 0 in init": lambda: trigram.init(),
}


def _interrupt_when_waiting() -> list[float]:
    """Send this process SIGINT once its main thread has been in a wait for 0.3 s on end.

    That this thread runs meanwhile shows that the wait does not hold the interpreter.
    """
    sent: list[float] = []
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        since = time.monotonic()
        while time.monotonic() - since < 0.3:
            if not any("WAITS" in (f.line or "") for f in traceback.extract_stack(sys._current_frames()[main])):
                since = time.monotonic()
            time.sleep(0.01)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    return sent


def _ctrl_c(rank: int, world: int, what: str) -> float:
    """Rank 1 waits for rank 0, which never comes; "rank 0 in init": the other way round."""
    if not what.endswith("init"):
        trigram.init()
        trigram.barrier()
    if rank == (1 if what == "rank 0 in init" else 0):
        await_flag("interrupted")
        return 0.0
    sent = _interrupt_when_waiting()
    try:
        WAITS[what]()
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0]
        flag("interrupted")
        return took
    raise AssertionError("no KeyboardInterrupt")


@pytest.mark.parametrize("what", list(WAITS))
def test_ctrl_c_ends_a_wait(what: str, transport: str) -> None:
    """PY-3. The bound is no performance: a wait that notices signals only at its end fails."""
    assert max(run(2, _ctrl_c, what, transport=transport, timeout=30)) < 2.0


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def _in_a_fork(fn: Callable[[], object]) -> str:
    """What `fn` returns or raises in a forked child, as text."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"returned {fn()}"
        except BaseException as e:
            text = f"{'TrigramError' if isinstance(e, trigram.TrigramError) else 'other'}: {type(e).__name__}: {e}"
        os.write(w, text.encode()[:4000])
        os._exit(0)
    os.close(w)
    with open(r, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def _forked(rank: int, world: int, store: bool) -> tuple[dict[str, str], str]:
    before = _sockets()
    if store:
        trigram.init(torch.distributed.FileStore(str(scratch() / "store"), world), rank, world)
    t = trigram.empty(1003, dtype=torch.float32)
    t.fill_(1.0)
    trigram.all_reduce(t)
    work = trigram.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    model = trigram.with_bagua(torch.nn.Linear(3, 1))
    group = trigram.new_group([0, 1])
    ours = _sockets() - before
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: trigram.all_reduce(torch.ones(10)),
        "registered": lambda: trigram.all_reduce(t),
        "barrier": lambda: trigram.barrier(),
        "new_group": lambda: trigram.new_group([0, 1]),
        "a group": lambda: trigram.all_reduce(torch.ones(10), group=group),
        "async": lambda: trigram.all_reduce(torch.ones(10), async_op=True).wait(),
        "training": lambda: model(torch.ones(2, 3)).sum().backward(),
    }
    seen = {name: _in_a_fork(fn) for name, fn in uses.items()}
    held = _in_a_fork(lambda: len(_sockets() & ours))
    assert _in_a_fork(lambda: 7) == "returned 7"  # a fork that leaves trigram alone ends well
    trigram.all_reduce(t)  # and the parent is as it was
    equal(t, torch.full((1003,), float(world * world)), "after the forks")
    model(torch.ones(2, 3)).sum().backward()
    return seen, f"{len(ours)} sockets, in the child: {held}"


@pytest.mark.parametrize("store", [True, False], ids=["FileStore", "env"])
def test_forked_child(store: bool, transport: str) -> None:
    """PY-4. A clear error instead of two processes on one connection; and no socket outlives its owner in a child."""
    for seen, held in run(2, _forked, store, transport=transport, timeout=60):
        for use, outcome in seen.items():
            assert outcome.startswith("TrigramError: ") and "fork" in outcome, f"{use}: {outcome}"
        assert held.endswith("in the child: returned 0"), held


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((6,), float(i % 7 + self.rank)) / 10


def _with_workers(rank: int, world: int) -> None:
    """Two epochs with forked workers give the weights that one process gets on the whole batch."""
    torch.manual_seed(1)
    model, alone = torch.nn.Linear(6, 2), torch.nn.Linear(6, 2)
    torch.manual_seed(5)
    for p in [*model.parameters(), *alone.parameters()]:
        p.data.fill_(0.3)
    model = trigram.with_bagua(model)
    loaders = [
        DataLoader(Numbers(r), batch_size=4, num_workers=2 * (r == rank), multiprocessing_context="fork" if r == rank else None)
        for r in range(world)
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batches[rank]).square().mean().backward()
            sum(alone(b).square().mean() / world for b in batches).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
    for a, e in zip(model.parameters(), alone.parameters(), strict=True):
        close(a, e, 1e-5, "with loader workers")


def test_loader_workers(transport: str) -> None:
    run(2, _with_workers, transport=transport, timeout=60)


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
        fds.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    until(lambda: len(os.listdir("/proc/self/task")) <= threads[2], 5, f"threads to end: {threads}")
    return fds, threads


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


def _torch_lends_its_store(rank: int, world: int) -> None:
    """No RANK in the environment, but a default process group."""
    from tests.reference import gloo

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
import os, sys, torch, trigram
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
    threading.Thread(target=lambda: trigram.recv(torch.ones(3), 1), daemon=True).start()
print("at the end", flush=True)
"""


@pytest.mark.parametrize("how", ["raise", "thread"])
def test_interpreter_exit_with_work_in_flight(how: str, transport: str, tmp_path: Path) -> None:
    """PY-4. A real interpreter's real end (ranks of the harness end by os._exit): no hang, no crash, its own exit code."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"TRIGRAM_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    outputs = [(tmp_path / f"out{r}").open("w+") for r in range(2)]
    ranks: list[subprocess.Popen[Any]] = [
        subprocess.Popen([sys.executable, str(script), how], env=env | {"RANK": str(r)}, stdout=outputs[r], stderr=outputs[r])
        for r in range(2)
    ]
    try:
        codes = [p.wait(60) for p in ranks]
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
