"""Every row of docs/troubleshooting.md happens as it says."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import trigram
from tests.support import patience
from tests.support.harness import ROOT, Ranks, await_flag, flag, say, scratch, until

pytestmark = pytest.mark.waits

WORLD = 3
Case = Callable[[int], object]


def rows() -> list[tuple[str, str]]:
    """The errors and what they say, as the page has them."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = text.split("## Lines")[0].splitlines()
    found = [re.match(r"\| (\w+Error) \| `([^`]+)` \|", line) for line in table]
    return [(m[1], m[2]) for m in found if m]


def _loop(rank: int) -> object:
    t = torch.ones(100_000)
    trigram.all_reduce(t, "max")  # the first call begins the job: who is stopped in that is awaited for long
    say("in the loop")
    while True:
        trigram.all_reduce(t, "max")


def leaves(rank: int) -> object:
    """Rank 2 has left."""
    trigram.init()
    if rank == 2:
        trigram.shutdown()
        return None
    trigram.barrier()
    return None


def slow(rank: int) -> object:
    """Rank 2 is late."""
    if rank < 2:
        trigram.init(op_timeout=0.3)
    else:
        trigram.init()
        await_flag("noticed")
    try:
        trigram.all_reduce(torch.ones(10))
    finally:
        flag("noticed")
    return None


def waits(rank: int) -> object:
    """A wait that is too short."""
    trigram.init()
    if rank == 2:
        await_flag("waited0", 60)
        await_flag("waited1", 60)
    work = trigram.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    try:
        work.wait(0.2 if rank < 2 else None)
    finally:
        flag(f"waited{rank}")
        await_flag(f"waited{1 - rank % 2}", 60)  # who ends first would end the other's call
    return None


def differs(rank: int) -> object:
    """Rank 2 calls something else."""
    return trigram.all_reduce(torch.ones(10 + rank // 2))


def crossed(rank: int) -> object:
    """Rank 2 has left its loop one step early and asks for the consensus."""
    model = trigram.with_bagua(torch.nn.Linear(2, 2))
    for _ in range(3 if rank < 2 else 2):
        model(torch.ones(1, 2)).sum().backward()
    return trigram.consensus(model)


def algorithms_differ(rank: int) -> object:
    """Rank 2 asks for another algorithm."""
    return trigram.with_bagua(torch.nn.Linear(2, 2), "bytegrad" if rank == 2 else "gradient_allreduce")


def models_differ(rank: int) -> object:
    """Rank 2 has another model."""
    return trigram.with_bagua(torch.nn.Linear(2, 2 + rank // 2))


def not_finite(rank: int) -> object:
    """Rank 2 has NaN."""
    model = trigram.with_bagua(torch.nn.Linear(4, 1), check_finite=True)
    return model(torch.full((2, 4), float("nan") if rank == 2 else 1.0)).sum().backward()


def drifted(rank: int) -> object:
    """Rank 2 changes its weights."""
    model = trigram.with_bagua(torch.nn.Linear(4, 1), check_replicas=1)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 2:
        model.bias.data += 1
    return model(torch.ones(2, 4))


def dtype(rank: int) -> object:
    """Complex numbers of half floats."""
    return trigram.all_reduce(torch.ones(2, dtype=torch.complex32))


def without_memory(rank: int) -> object:
    """A wrapper of a tensor, which functional collectives, DTensor and FakeTensor are."""
    return trigram.all_reduce(AsyncCollectiveTensor(torch.ones(2)))


def lazy(rank: int) -> object:
    """A model whose shapes depend on its first inputs."""
    return trigram.with_bagua(torch.nn.LazyLinear(2))


def twice(rank: int) -> object:
    """A model hooked twice."""
    return trigram.with_bagua(trigram.with_bagua(torch.nn.Linear(2, 2)))


def forked(rank: int) -> object:
    """A collective in a forked child."""
    trigram.init()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            trigram.barrier()
        except trigram.MisuseError as e:
            os.write(write, str(e).encode())
        os._exit(0)
    os.waitpid(child, 0)
    raise trigram.MisuseError(os.read(read, 4096).decode())


def after_shutdown(rank: int) -> object:
    """A group that outlives its world."""
    group = trigram.init()
    trigram.shutdown()
    return trigram.barrier(group)


class Raises(torch.autograd.Function):
    """Backward fails."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def backward_fails(rank: int) -> object:
    """Rank 2 raises in its backward pass, catches that, and goes on."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model = trigram.with_bagua(net)
    y = net[1](Raises.apply(net[0](torch.ones(2, 4)))) if rank == 2 else None
    if y is None:
        model(torch.ones(2, 4)).sum().backward()
        return None
    hooked = model(torch.ones(2, 4))
    with suppress(ZeroDivisionError):
        (hooked + y).sum().backward()
    model(torch.ones(2, 4))  # the next forward pass gives the failed one up
    return None


def too_much(rank: int) -> object:
    """More memory than there is."""
    return trigram.empty(1 << 62, dtype=torch.uint8)


def no_secret(rank: int) -> object:
    """Rank 2 has another secret."""
    os.environ["TRIGRAM_SECRET"] = "two" * 10 if rank == 2 else "one" * 10
    return trigram.init(init_timeout=20)


def wrong_transport(rank: int) -> object:
    """A transport that there is not."""
    os.environ["TRIGRAM_TRANSPORT"] = "pigeons"
    return trigram.init()


def half_an_environment(rank: int) -> object:
    """A rank and no world."""
    del os.environ["WORLD_SIZE"]
    return trigram.init()


def other_launcher(rank: int) -> object:
    """Started by an Indexed Job."""
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    os.environ |= {"JOB_COMPLETION_INDEX": str(rank)}
    return trigram.init()


def port_taken(rank: int) -> object:
    """Another process has the port of rank 0's store."""
    if rank == 0:
        with socket.socket() as other:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            other.listen()
            return trigram.init()
    return None


def no_process_group(rank: int) -> object:
    """SyncBatchNorm without torch's process group."""
    return trigram.with_bagua(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))


def missing(rank: int) -> object:
    """Rank 2 does not come."""
    if rank == 2:
        await_flag("noticed")
        return None
    try:
        trigram.init(init_timeout=1.5)
    finally:
        if rank == 0:
            flag("noticed")
    return None


CASES: dict[tuple[str, str], Case] = {
    ("PeerLostError", "it has left the job"): leaves,
    ("TimeoutError", "init: rank 0 waited"): missing,
    ("TimeoutError", "timed out after"): slow,
    ("TimeoutError", "it is still running, call wait() again"): waits,
    ("MismatchError", "ranks disagree on call"): differs,
    ("MismatchError", "each waits for the other"): crossed,
    ("MismatchError", "use a different algorithm"): algorithms_differ,
    ("MismatchError", "differs from that of rank 0"): models_differ,
    ("CorruptError", "contain NaN or infinity"): not_finite,
    ("CorruptError", "check_replicas"): drifted,
    ("AuthError", "TRIGRAM_SECRET"): no_secret,
    ("ConfigError", "TRIGRAM_TRANSPORT"): wrong_transport,
    ("ConfigError", "not set; start the ranks with torchrun"): half_an_environment,
    ("ConfigError", "so it would train alone"): other_launcher,
    ("ConfigError", "cannot serve the store at"): port_taken,
    ("UnsupportedError", "is a SyncBatchNorm"): no_process_group,
    ("UnsupportedError", "is not supported; cast the tensor"): dtype,
    ("MisuseError", "hooked already"): twice,
    ("MisuseError", "is not initialized"): lazy,
    ("MisuseError", "has no memory of its own"): without_memory,
    ("MisuseError", "cannot be used in a forked child"): forked,
    ("MisuseError", "has been shut down"): after_shutdown,
    ("AbortedError", "aborted its backward pass"): backward_fails,
    ("IoError", "shared memory"): too_much,
}


def outcome(rank: int, world: int, key: tuple[str, str]) -> tuple[str, str, int | None]:
    """The error that a case ends in, on this rank: its name, what it says, and whom it is about."""
    case = CASES.get(key, _loop)
    os.environ["TRIGRAM_CHAOS"] = str(scratch() / f"word{rank}")
    (scratch() / f"word{rank}").write_bytes(bytes(4))
    try:
        case(rank)
    except trigram.TrigramError as e:
        return type(e).__name__, str(e), getattr(e, "rank", None)
    return "", "", None


@pytest.mark.parametrize("key", list(CASES), ids=lambda key: key[1].replace(" ", "-"))
def test_what_ranks_do(key: tuple[str, str]) -> None:
    with Ranks(WORLD, outcome, key) as ranks:
        results = ranks.results(60)
    name, text, _ = results[0]
    assert name == key[0] and key[1] in text, results
    assert name not in ("MismatchError", "CorruptError", "AuthError") or {r[0] for r in results} == {name}


DONE_TO = {
    ("PeerLostError", "is gone (its process has ended)"): ("shm", signal.SIGKILL),
    ("PeerLostError", "is gone (its connection has closed)"): ("tcp", signal.SIGKILL),
    ("PeerLostError", "no heartbeat from it for"): ("tcp", signal.SIGSTOP),
    ("PeerLostError", "it evicted this rank"): ("tcp", signal.SIGSTOP),
    ("CorruptError", "wrong checksum of"): ("tcp", None),
}


@pytest.mark.parametrize("key", list(DONE_TO), ids=lambda key: key[1].replace(" ", "-"))
def test_what_is_done_to_ranks(key: tuple[str, str]) -> None:
    transport, number = DONE_TO[key]
    env = {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(WORLD, outcome, key, transport=transport, env=env) as ranks:
        for r in range(WORLD):
            ranks.await_said(r, "in the loop")
        time.sleep(0.3)
        if number is None:
            with (ranks.dir / "word2").open("r+b") as f:
                f.write(b"\1")
        else:
            ranks.signal(2, number)
        if number == signal.SIGSTOP:
            # Not after a fixed time: on a busy machine the others wait for longer before they evict it.
            until(lambda: any("evicted rank 2" in ranks.log(r) for r in (0, 1)), 40, "the eviction")
            time.sleep(0.5)
            ranks.signal(2, signal.SIGCONT)
        results = ranks.results(60, dies=[2] if number == signal.SIGKILL else [])
    itself = key[1] == "it evicted this rank"
    for name, text, about in results[2:] if itself else results[:2]:
        assert name == key[0] and key[1] in text, results
        assert about in (0, 1) if itself else about == 2, results


def test_every_row_is_made_to_happen() -> None:
    listed = rows()
    assert len(listed) > 20
    elastic = {  # tests/elastic
        ("PeerLostError", "cannot reach ranks"),
        ("PeerLostError", "have lost their connections with"),
        ("PeerLostError", "have lost each other, and others hear both"),
        ("DrainError", "were asked to leave it"),
    }
    made = {*CASES, *DONE_TO, *elastic}
    assert set(listed) == made
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "troubleshooting.md").read_text())
    for file, function in named:
        assert f"def {function}(" in (ROOT / file).read_text()
