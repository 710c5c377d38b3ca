"""Signals and forks: every wait answers Ctrl-C, a forked child gets a clear error and holds nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import trigram
from tests.support import patience
from tests.support.checks import close, equal
from tests.support.harness import await_flag, flag, free_port, run, scratch
from tests.support.marks import long


def _mute_store() -> None:
    """Something listens where the store should be, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        os.environ["MASTER_PORT"] = str(mute.getsockname()[1])
        trigram.init()


WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: trigram.all_reduce(torch.ones(10)),
    "large all_reduce": lambda: trigram.all_reduce(torch.ones(1_000_003)),
    "barrier": trigram.barrier,
    "recv": lambda: trigram.recv(torch.ones(10), 0),
    "Work.wait": lambda: trigram.all_reduce(torch.ones(10), async_op=True).wait(),
    "init": trigram.init,
    "rank 0 in init": trigram.init,
    "a mute store in init": _mute_store,
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
            if not any(
                "WAITS" in (f.line or "") for f in traceback.extract_stack(sys._current_frames()[main])
            ):
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
    assert max(run(2, _ctrl_c, what, transport=transport, timeout=30)) < patience.seconds(2)


def _sockets() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(fd.readlink())
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
            kind = "TrigramError" if isinstance(e, trigram.TrigramError) else "other"
            text = f"{kind}: {type(e).__name__}: {e}"
        os.write(w, text.encode()[:4000])
        os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as pipe:
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
    pending = trigram.recv(torch.zeros(3), 1 - rank, async_op=True)
    ours = _sockets() - before
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: trigram.all_reduce(torch.ones(10)),
        "registered": lambda: trigram.all_reduce(t),
        "empty": lambda: trigram.empty(10),  # it would be memory of the parent
        "wait": pending.wait,
        "barrier": trigram.barrier,
        "another init": lambda: (trigram.shutdown(), trigram.init()),
        "new_group": lambda: trigram.new_group([0, 1]),
        "a group": lambda: trigram.all_reduce(torch.ones(10), group=group),
        "async": lambda: trigram.all_reduce(torch.ones(10), async_op=True).wait(),
        "training": lambda: model(torch.ones(2, 3)).sum().backward(),
    }
    seen = {name: _in_a_fork(fn) for name, fn in uses.items()}
    held = _in_a_fork(lambda: len(_sockets() & ours))
    assert _in_a_fork(lambda: 7) == "returned 7"  # a fork that leaves trigram alone ends well
    trigram.send(torch.ones(3), 1 - rank)  # and the parent is as it was
    pending.wait()
    trigram.all_reduce(t)
    equal(t, torch.full((1003,), float(world * world)), "after the forks")
    model(torch.ones(2, 3)).sum().backward()
    return seen, f"{len(ours)} sockets, in the child: {held}"


@pytest.mark.parametrize("store", [True, False], ids=["FileStore", "env"])
def test_forked_child(store: bool, transport: str) -> None:
    """PY-4. A clear error instead of two processes on one connection; no socket lives on in a child."""
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
        DataLoader(
            Numbers(r),
            batch_size=4,
            num_workers=2 * (r == rank),
            multiprocessing_context="fork" if r == rank else None,
        )
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


_FORKS = """
import os, sys, time
import trigram, torch
kept = []
for _ in range(int(sys.argv[2])):  # as in a notebook: tried out alone, and then on ranks
    kept += [trigram.init(), trigram.with_bagua(torch.nn.Linear(3, 1)), trigram.empty(10)]
    kept[1](torch.ones(2, 3)).sum().backward()
    trigram.all_reduce(torch.ones(3))
    trigram.shutdown()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], WORLD_SIZE="2")
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = str(rank)
        x = torch.ones(3)
        trigram.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.3, "a thread spins"
        trigram.barrier()
        sys.exit(0)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
sys.exit(max(codes))
"""


@pytest.mark.parametrize("jobs", [0, 2])
def test_ranks_forked_by_who_has_no_job(jobs: int) -> None:
    """Nothing of the parent is in their way: it had no engine, or has shut down those that it had."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(free_port()), str(jobs)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr


_CHILDREN = """
import os, sys, time
import torch, torch.multiprocessing as mp
import trigram

def train(rank, port, algorithm, fails):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="3", RANK=str(rank))
    torch.set_num_threads(1)
    model = trigram.with_bagua(torch.nn.Linear(4, 1), algorithm)
    for step in range(20):
        model(torch.ones(2, 4)).sum().backward()
    if fails and rank == 0:
        sys.exit(3)  # does not wait for those that train on
    if algorithm != "gradient_allreduce":
        end = time.monotonic() + (60 if fails else rank)
        while time.monotonic() < end:  # the first to end waits for the others, who need its messages
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.01)

if __name__ == "__main__":
    how, port, algorithm, fails = sys.argv[1:]
    mp.start_processes(train, (port, algorithm, fails == "True"), nprocs=3, start_method=how)
"""


def _children(tmp_path: Path, how: str, algorithm: str, fails: bool) -> tuple[int, str]:
    """The exit code and stderr of a script whose ranks are children of torch.multiprocessing."""
    script = tmp_path / "script.py"
    script.write_text(_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(script), how, str(free_port()), algorithm, str(fails)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "how, algorithm",
    [
        ("fork", "async_decentralized"),
        long("fork", "gradient_allreduce"),
        long("spawn", "async_decentralized"),
        long("forkserver", "async_decentralized"),
    ],
)
def test_the_first_child_to_end_ends_no_other(how: str, algorithm: str, tmp_path: Path) -> None:
    """Children of multiprocessing end by os._exit: they leave the job before, as any script does."""
    code, errors = _children(tmp_path, how, algorithm, False)
    assert code == 0 and "Error" not in errors, errors


def test_a_child_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """Its status ends the job at once; the others would train for a minute."""
    code, errors = _children(tmp_path, "fork", "async_decentralized", True)
    # torch names the first that it sees: the child, or one of its peers, which miss it at once.
    first = ("ProcessExitedException", "exit code 3"), ("PeerLostError", "is gone")
    assert code != 0 and any(all(word in errors for word in words) for words in first), errors
