"""Ranks as real processes: start them in milliseconds, hear what they say, end them whatever happens."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import itertools
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import netns
from tests.support.patience import Limit

# A rank is forked from a server that has these already: importing torch takes seconds.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "sklearn.datasets",
    "pytest",
    "trigram",
    "tests.support.harness",
]
ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNET = 0x40000000

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
_pipe: Connection | None = None  # in a rank: the way to the test
launches: list[tuple[float, float, str]] = []
"""Of this process's tests, each launch of ranks: seconds, those that its ranks computed, its name."""


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung."""


@dataclass(frozen=True)
class Died:
    """What `run` returns for a rank that was meant to die."""

    exitcode: int | None


@dataclass
class _Rank:
    """The parent's view of one rank."""

    process: Any
    pipe: Connection
    said: list[Any] = field(default_factory=list)
    answer: tuple[str, Any] | None = None  # ("returned", value) | ("raised", traceback)
    computed: float = 0.0  # seconds of processor time, once it has answered
    ended: bool = False


def say(value: Any) -> None:
    """In a rank: tell the test something, at once."""
    assert _pipe is not None
    _pipe.send_bytes(pickle.dumps(("said", value)))


def until(condition: Callable[[], Any], timeout: float = 20.0, what: str = "") -> Any:
    """Poll until the condition is true; never longer than the timeout, see :mod:`patience`."""
    limit = Limit(timeout)
    while True:
        value = condition()
        if value:
            return value
        if limit.is_over():
            raise TimeoutError(f"waited {timeout} s for {what or condition}")
        time.sleep(0.01)


def scratch() -> Path:
    """In a rank: a directory that all ranks of this launch share."""
    return Path(os.environ["TRIGRAM_TEST_DIR"])


def flag(name: str) -> None:
    """In a rank: raise a flag that `await_flag` of any rank sees (no communication library is involved)."""
    (scratch() / f"flag-{name}").touch()


def await_flag(name: str, timeout: float = 30.0) -> None:
    """In a rank: wait until some rank has called `flag(name)`."""
    until((scratch() / f"flag-{name}").exists, timeout, f"the flag {name}")


_ports = itertools.cycle(range(10_000, 32_000))
next(itertools.islice(_ports, os.getpid() * 997 % 22_000, None))


def free_port() -> int:
    """A TCP port that is free now; not one that the kernel gives to others, who may ask before it is used."""
    for port in itertools.islice(_ports, 22_000):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free between 10000 and 32000")


def _enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(fd)


def _main(
    pipe: Connection, rank: int, call: bytes, env: dict[str, str], namespace: str | None, log: str
) -> None:
    """The life of a rank, in the rank's process."""
    global _pipe
    _pipe = pipe
    gc.freeze()  # the server's objects stay: each collection would look at, and so copy, all of them
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if namespace is not None:
            _enter(namespace)
        os.environ.update(env)
        import torch

        torch.set_num_threads(1)
        module, name, args = pickle.loads(call)
        if "TRIGRAM_TEST_STANDIN" in env:
            importlib.import_module("tests.support.gpu_standin").use()
        value = getattr(importlib.import_module(module), name)(rank, int(env["WORLD_SIZE"]), *args)
        if (
            "trigram" in sys.modules
        ):  # a rank's process ends by os._exit: what an interpreter does at exit is done here
            sys.modules["trigram"].shutdown()
        answer = pickle.dumps(("returned", value))
    except BaseException:
        answer = pickle.dumps(("raised", traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(("computed", time.process_time())))
    pipe.send_bytes(answer)
    pipe.close()


class Ranks:
    """The ranks of one launch. Use with `with`: at the end they are gone, however they fared."""

    def __init__(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        transport: str = "shm",
        hosts: Sequence[int] | None = None,
        env: dict[str, str] | None = None,
        only: Iterable[int] | None = None,
    ) -> None:
        self.name = f"{fn.__module__}.{fn.__name__} on {world} ranks ({transport})"
        self.began = time.monotonic()
        self.dir = Path(tempfile.mkdtemp(prefix="trigram-test-"))
        self.ranks: dict[int, _Rank] = {}
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(ROOT) not in path:  # read by the fork server, which imports tests.support.harness
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, str(ROOT)]))
        call = pickle.dumps((fn.__module__, fn.__name__, args))
        self.env = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1" if hosts is None else netns.address(hosts[0]),
            "MASTER_PORT": str(free_port()),
            "TRIGRAM_TRANSPORT": transport,
            "TRIGRAM_TEST_DIR": str(self.dir),
            "OMP_NUM_THREADS": "1",
        }
        self.hosts, self.extra = hosts, env or {}
        for rank in range(world) if only is None else only:
            self._start(rank, call)

    def _start(self, rank: int, call: bytes) -> None:
        hosts = self.hosts
        local = rank if hosts is None else sum(h == hosts[rank] for h in hosts[:rank])
        mine = self.env | {"RANK": str(rank), "LOCAL_RANK": str(local)} | self.extra
        namespace = None if hosts is None else netns.name(hosts[rank])
        ours, theirs = _context.Pipe(duplex=True)
        process = _context.Process(
            target=_main,
            args=(theirs, rank, call, mine, namespace, str(self._log(rank))),
            name=f"rank{rank}",
        )
        process.start()
        theirs.close()
        self.ranks[rank] = _Rank(process, ours)

    def restart(self, rank: int, fn: Callable[..., Any], *args: Any) -> None:
        """Starts a rank that has ended again, or one that was not there."""
        if rank in self.ranks:
            self.ranks[rank].process.join(10)
            self.ranks[rank].pipe.close()
        self._start(rank, pickle.dumps((fn.__module__, fn.__name__, args)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for r in self.ranks.values():
            if r.process.is_alive():
                r.process.kill()
            r.process.join()
            r.process.close()
            r.pipe.close()
        shutil.rmtree(self.dir, ignore_errors=True)
        computed = sum(r.computed for r in self.ranks.values())
        launches.append((time.monotonic() - self.began, computed, self.name))

    def _log(self, rank: int) -> Path:
        return self.dir / f"rank{rank}.log"

    def log(self, rank: int) -> str:
        """What the rank has written to stdout and stderr."""
        with suppress(FileNotFoundError):
            return self._log(rank).read_text(errors="replace")
        return ""

    def pid(self, rank: int) -> int:
        return int(self.ranks[rank].process.pid)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pid(rank), number)

    def hear(self, timeout: float) -> bool:
        """Take in what the ranks have sent, waiting at most `timeout` for it; False when all have ended."""
        talking = {r.pipe: r for r in self.ranks.values() if not r.ended}
        for pipe in wait(list(talking), timeout) if talking else []:
            r = talking[pipe]  # type: ignore[index]
            try:
                kind, value = pickle.loads(r.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                r.ended = True
                continue
            if kind == "said":
                r.said.append(value)
            elif kind == "computed":
                r.computed = value
            else:
                r.answer = (kind, value)
        return bool(talking)

    def await_said(self, rank: int, value: Any, timeout: float = 30.0) -> None:
        """Wait until the rank has said this."""
        limit = Limit(timeout)
        while value not in self.ranks[rank].said:
            if self.ranks[rank].ended or limit.is_over():
                raise RanksFailed(f"{self.name}: rank {rank} never said {value!r}\n{self.report()}")
            self.hear(0.1)

    def results(self, timeout: float, dies: Iterable[int] = (), renew: bool = False) -> list[Any]:
        """Every rank's result in rank order; RanksFailed if any raised, died unasked or outlived the timeout.

        `renew`: the time runs from the last word of any rank.
        """
        limit = Limit(timeout)
        failed, words = False, -1
        while not limit.is_over() and self.hear(0.2):
            heard = sum(len(r.said) for r in self.ranks.values())
            if not failed and any(r.ended and not self._well(k, dies) for k, r in self.ranks.items()):
                failed, limit = True, Limit(3.0)  # its peers may wait for it: hear them, but not for long
            elif renew and not failed and heard != words:
                words, limit = heard, Limit(timeout)
        hung = self.end_hung()
        if hung and not failed:
            raise RanksFailed(
                f"TIMEOUT: {self.name}: rank(s) {hung} still running after {timeout} s\n{self.report()}"
            )
        for r in self.ranks.values():
            r.process.join(5)
        wrong = [k for k in self.ranks if not self._well(k, dies)]
        if wrong:
            raise RanksFailed(f"{self.name}: rank(s) {wrong} failed\n{self.report()}")
        return [r.answer[1] if r.answer else Died(r.process.exitcode) for _, r in sorted(self.ranks.items())]

    def _well(self, rank: int, dies: Iterable[int]) -> bool:
        """The rank has returned, or died as it was to."""
        answer = self.ranks[rank].answer
        return rank in dies if answer is None else answer[0] == "returned" and rank not in dies

    def end_hung(self) -> list[int]:
        """Ask the ranks that still run for their stacks, then kill them; their numbers."""
        hung = [k for k, r in self.ranks.items() if not r.ended and r.process.is_alive()]
        for k in hung:
            self.signal(k, signal.SIGUSR1)
        for k in hung:
            with suppress(TimeoutError):
                until(lambda k=k: self._has_stacks(k), 2.0)
            self.ranks[k].process.kill()
            self.ranks[k].process.join()
            self.ranks[k].ended = True
        return hung

    def _has_stacks(self, rank: int) -> bool:
        """The rank has written the stack of its main thread, which comes last, to the end."""
        return self.log(rank).rpartition("Current thread")[2].rstrip().endswith("in <module>")

    def report(self) -> str:
        """How every rank fared: its traceback and the end of its log."""
        parts = []
        for k, r in sorted(self.ranks.items()):
            fate = (
                r.answer[1]
                if r.answer and r.answer[0] == "raised"
                else "returned"
                if r.answer
                else "no answer"
            )
            code = "" if r.process.exitcode in (0, None) else f" (exit code {r.process.exitcode})"
            log = self.log(k).strip()
            log = log if len(log) < 5000 else f"{log[:2500]}\n[...]\n{log[-2500:]}"
            parts.append(f"--- rank {k}{code}: {fate.strip()}" + (f"\n    its log:\n{log}" if log else ""))
        return "\n".join(parts)


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "shm",
    timeout: float = 60,
    hosts: Sequence[int] | None = None,
    env: dict[str, str] | None = None,
    only: Iterable[int] | None = None,
    dies: Iterable[int] = (),
) -> list[Any]:
    """Run `fn(rank, world, *args)` in `world` processes; their results, in rank order.

    `hosts[r]` is the host (a network namespace) of rank r, `only` the ranks that are started at all,
    `dies` the ranks that must end without an answer.
    """
    with Ranks(world, fn, *args, transport=transport, hosts=hosts, env=env, only=only) as ranks:
        return ranks.results(timeout, dies)
