"""How ranks meet in a store in which others have been before, and what they learn of one that fails."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.support.checks import equal, raises, says
from tests.support.harness import await_flag, flag, free_port, run, scratch
from tests.support.marks import long
from trigram.runtime.rendezvous import AgainError, StoreGather

pytestmark = pytest.mark.waits

INIT_TIMEOUT = 60.0
STORES: dict[str, Callable[[Path], Any]] = {
    "hash": lambda _: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store")),
    "tcp": lambda _: dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False),
    "prefix": lambda _: dist.PrefixStore("a", dist.PrefixStore("job", dist.HashStore())),
}


def _begin(store: Any, rank: int, size: int, seconds: float = 30.0) -> StoreGather:
    return StoreGather(store, rank, size, time.monotonic() + seconds)


@pytest.mark.parametrize("kind", STORES)
def test_who_was_there_before_is_not_met(kind: str, tmp_path: Path) -> None:
    """Rank 0 has waited three times in vain, rank 1 once, rank 2 never; each knows its own past at most."""
    store = STORES[kind](tmp_path)
    for rank in (0, 1, 0, 0):
        with pytest.raises(trigram.TimeoutError, match=r"rank\(s\) .*2 of 3"):
            _begin(store, rank, 3, 0.1).all_gather(b"of the past")
    records = [b"first", b"second", b"third"]
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: _begin(store, rank, 3).all_gather(records[rank]), range(3)))
    assert met == [records] * 3


@pytest.mark.parametrize("kind", STORES)
def test_a_rank_that_begins_again_is_met_again(kind: str, tmp_path: Path) -> None:
    """Before the others have come, and after all have met: those who wait for it follow."""
    store = STORES[kind](tmp_path)
    have_met = threading.Barrier(3)  # who has not would meet the rank that begins again at once

    def wait(rank: int) -> list[bytes]:
        gather = _begin(store, rank, 3)
        gather.all_gather(b"in vain")
        have_met.wait(30)
        with pytest.raises(AgainError):
            gather("handshake", b"yes")
        gather.begin()
        gather.all_gather(b"%d" % rank)
        return gather("handshake", b"%d" % rank)

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(wait, rank) for rank in (0, 2)]
        with pytest.raises(trigram.TimeoutError):
            _begin(dist.PrefixStore("elsewhere", store), 1, 3, 0.1).all_gather(b"of another job")
        _begin(store, 1, 3).all_gather(b"dies here")
        have_met.wait(30)
        gather = _begin(store, 1, 3)
        gather.all_gather(b"1")
        assert gather("handshake", b"1") == [b"0", b"1", b"2"]
        assert [each.result() for each in others] == [[b"0", b"1", b"2"]] * 2


def test_two_processes_of_one_rank() -> None:
    """The first is told; the other takes its place."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lambda: _begin(store, 1, 2).all_gather(b"first"))
        time.sleep(0.3)
        second = pool.submit(lambda: _begin(store, 1, 2).all_gather(b"second"))
        time.sleep(0.3)
        assert pool.submit(lambda: _begin(store, 0, 2).all_gather(b"zero")).result() == [b"zero", b"second"]
        assert second.result() == [b"zero", b"second"]
        with pytest.raises(trigram.ConfigError, match="another process has registered as rank 1 of 2"):
            first.result()


def _sum(world: int) -> None:
    t = torch.ones(5)
    trigram.all_reduce(t)
    equal(t, torch.full((5,), float(world)), "after a second start")


def _restarted(rank: int, world: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    trigram.init(init_timeout=INIT_TIMEOUT)
    _sum(world)


def test_ranks_that_were_restarted_more_often_than_others() -> None:
    run(2, _restarted, timeout=40)


def _again(rank: int, world: int, in_file: bool) -> None:
    """Rank 0 gives up twice before the others come; then ranks 0 and 1 go on alone, and all again."""
    store = dist.FileStore(str(scratch() / "store"), world) if in_file else None
    given = (store, rank, world) if in_file else ()
    if rank == 0:
        for _ in range(2):
            says(raises(trigram.TimeoutError, lambda: trigram.init(*given, init_timeout=0.5)), "1, 2 of 3")
        flag("gave up")
    else:
        await_flag("gave up", 30.0)
    trigram.init(*given, init_timeout=INIT_TIMEOUT)
    _sum(3)
    trigram.shutdown()
    if in_file:
        if rank < 2:
            trigram.init(store, rank, 2, init_timeout=INIT_TIMEOUT)
            _sum(2)
            trigram.shutdown()
        trigram.init(store, rank, 3, init_timeout=INIT_TIMEOUT)
        _sum(3)


@pytest.mark.parametrize("in_file", [True, False], ids=["FileStore", "env"])
def test_init_is_called_again(in_file: bool) -> None:
    run(3, _again, in_file, timeout=50)


def _no_files() -> None:
    have = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (have + 1, have + 1))


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "secret": (lambda: os.environ.update(TRIGRAM_SECRET=""), "TRIGRAM_SECRET"),
    "transport": (lambda: os.environ.update(TRIGRAM_TRANSPORT="pigeons"), "TRIGRAM_TRANSPORT"),
    "interface": (lambda: os.environ.update(TRIGRAM_IFACE="nowhere7"), "nowhere7"),
    "files": (_no_files, "rank 1"),
    "no shared memory": (lambda: os.environ.update(TRIGRAM_TRANSPORT="shm"), "shares no memory"),
}


def _one_fails(rank: int, world: int, fault: str, late: float) -> None:
    """Rank 1 has a fault of its own: it raises that, and the others are told of it."""
    store = dist.FileStore(str(scratch() / "store"), world)
    break_it, word = FAULTS[fault]
    if rank == 1:
        break_it()
    else:
        os.environ["TRIGRAM_TRANSPORT"] = "tcp"
        time.sleep(late)
    kind = trigram.TrigramError if rank == 1 else trigram.AbortedError
    error = raises(kind, lambda: trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT))
    says(error, word, *(() if rank == 1 else ("init: aborted", "rank 1")))


@pytest.mark.parametrize(
    ("fault", "late"),
    [
        ("secret", 0.0),
        ("interface", 7.0),
        ("files", 0.0),
        ("no shared memory", 0.0),
        long("transport", 0.0),
        long("interface", 0.5),
    ],
)
def test_a_rank_that_fails_tells_the_others(fault: str, late: float) -> None:
    """Also those that come when it has gone."""
    run(3, _one_fails, fault, late, timeout=40)


def _told_and_again(rank: int, world: int) -> None:
    """A rank that was told may call init again at once: it is not told the same again."""
    store = dist.FileStore(str(scratch() / "store"), world)
    if rank == 1:
        os.environ["TRIGRAM_IFACE"] = "nowhere7"
        raises(trigram.ConfigError, lambda: trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT))
        del os.environ["TRIGRAM_IFACE"]
        await_flag("again", 30.0)
        time.sleep(1.0)
    else:
        raises(trigram.AbortedError, lambda: trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT))
        flag("again")
    trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT)
    _sum(world)


def test_init_is_called_again_after_a_failure() -> None:
    run(2, _told_and_again, timeout=40)


def _refused_and_again(rank: int, world: int) -> None:
    """The init of all ranks fails, and that of rank 0, which serves the store, is called again last."""
    text = "exclude each other"
    says(raises(trigram.UnsupportedError, lambda: trigram.init(elastic=True, helper=True)), text)
    if rank == 0:
        time.sleep(1.0)
    trigram.init(init_timeout=INIT_TIMEOUT)
    _sum(world)


def test_init_is_called_again_by_the_rank_that_serves_the_store() -> None:
    run(2, _refused_and_again, timeout=40)


def _refused_again_and_again(rank: int, world: int, everywhere: bool) -> None:
    """Rank 0, which serves the store, ends after its last failure, while rank 1 is late each time."""
    for _ in range(3):
        if rank == 1:
            time.sleep(1.0)
        wrong = -1.0 if everywhere or rank == 0 else None
        kind = trigram.AbortedError if wrong is None else trigram.ConfigError
        error = raises(kind, lambda w=wrong: trigram.init(init_timeout=INIT_TIMEOUT, op_timeout=w))
        says(error, "op_timeout")


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "rank 0"])
def test_a_rank_that_failed_before_is_told_of_each_failure(everywhere: bool) -> None:
    run(2, _refused_again_and_again, everywhere, timeout=40)


def test_a_wrong_argument_is_known_without_the_others() -> None:
    """Nobody serves the store."""
    run(2, _refused_alone, timeout=40)


def _refused_alone(rank: int, world: int) -> None:
    if rank == 1:
        error = raises(trigram.ConfigError, lambda: trigram.init(init_timeout=2.0, op_timeout=-1.0))
        says(error, "op_timeout")


def _bad_port(rank: int, world: int) -> None:
    os.environ["MASTER_PORT"] = "70000"
    says(raises(trigram.ConfigError, trigram.init), "MASTER_PORT=70000", "65535")


def test_a_port_that_is_none_is_named() -> None:
    run(2, _bad_port)


def _other_port(rank: int, world: int) -> None:
    """torchrun's agent serves the store, and the script has set another port."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(free_port()))
    error = raises(trigram.TimeoutError, lambda: trigram.init(init_timeout=1.0))
    says(error, f"rank {rank} ", "MASTER_PORT", "torchrun serves it")
    assert "rank 0 is running" not in error


def test_another_port_than_that_of_torchrun() -> None:
    run(2, _other_port)


def _mute_store(rank: int, world: int) -> str:
    """Something else listens where the store should be, or the process that serves it is stopped."""
    if rank == 0:
        return ""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        os.environ["MASTER_PORT"] = str(mute.getsockname()[1])
        return raises(trigram.TimeoutError, lambda: trigram.init(init_timeout=1.0))


def test_a_store_that_does_not_answer() -> None:
    """torch would wait for its greeting without end."""
    said = run(2, _mute_store, timeout=40)[1]
    says(
        said, "rank 1 waited", "MASTER_PORT", "accepts connections and has not answered", "rank 0 is running"
    )


def test_a_store_that_answers_no_more(tmp_path: Path) -> None:
    """Its process is stopped, or the network drops what is sent, while ranks meet."""
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    path = Path(tmp_path) / "holds"

    def pass_on(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if path.exists():
                    return  # and both stay open
                to.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def accept() -> None:
            with suppress(OSError):
                near = stack.enter_context(listener.accept()[0])
                far = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                threading.Thread(target=pass_on, args=(near, far), daemon=True).start()
                threading.Thread(target=pass_on, args=(far, near), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        port = listener.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        gather = _begin(store, 1, 2, 3.0)
        threading.Timer(0.5, path.touch).start()
        said = raises(trigram.TimeoutError, lambda: gather.all_gather(b"record"))
        says(said, "rank(s) 0 of 2", "accepts connections and has not answered")
