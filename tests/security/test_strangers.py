"""Strangers on the network, in the store and on the host: the job comes up and goes on without them."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.support import strangers
from tests.support.checks import equal, raises, says
from tests.support.harness import Ranks, await_flag, flag, run, say
from tests.support.strangers import SECRET, Detoured, Forwarder, address, card, client, ended, exactly
from trigram.cli import doctor

pytestmark = pytest.mark.waits

HELLO, NONCE, PROOF = 64, 32, 32
REFUSED = b"\x02" + bytes(PROOF)
INIT_TIMEOUT = 60.0
# How a TLS session begins: a record of 512 bytes, in it a ClientHello of 508.
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)


def _env(**more: str) -> dict[str, str]:
    return {"TRIGRAM_SECRET": SECRET, "TRIGRAM_IFACE": "lo", **more}


def _store(rank: int) -> Any:
    """The store of this launch, which rank 0 offers."""
    port = int(os.environ["MASTER_PORT"])
    if rank:
        client(port)  # waits for rank 0
    return dist.TCPStore(
        "127.0.0.1", port, None, rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False
    )


def _right(rank: int, world: int) -> None:
    for n in (1, 5000, 300_001):
        t = torch.arange(n, dtype=torch.float32) % 13 + rank
        trigram.all_reduce(t)
        equal(t, (torch.arange(n, dtype=torch.float32) % 13) * world + world * (world - 1) / 2, str(n))


def _join(rank: int, world: int, port: int | None = None, files: int = 0) -> bool:
    """Joins and works until told to stop; the last rank waits for "go", and finds rank 0 at `port`."""
    store = _store(rank)
    last = rank == world - 1
    if last:
        store = Detoured(store, 0, port, SECRET, lambda: await_flag("go"))
    if files and rank == 0:
        have = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (have + files, have + files))
    group = trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT)
    say("up")
    rounds = 0
    while True:
        _right(rank, world)
        rounds += 1
        over = torch.tensor([float(rank == 0 and rounds > 3 and (_flagged("stop")))])
        trigram.all_reduce(over)
        if over.item():
            # Whether memory is shared.
            return len(group.hosts()) < world


def _flagged(name: str) -> bool:
    with suppress(TimeoutError):
        await_flag(name, 0)
        return True
    return False


def _raise(ranks: Ranks, name: str) -> None:
    (ranks.dir / f"flag-{name}").touch()


def _port(ranks: Ranks) -> int:
    return int(ranks.env["MASTER_PORT"])


Target = tuple[str, int]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for a thousand sockets in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def garbage(rank0: Target, stack: ExitStack, tls: bool) -> None:
    """Bytes that mean nothing are answered with nothing."""
    for size in (1, HELLO, 100_000):
        s = stack.enter_context(socket.create_connection(rank0))
        with suppress(OSError):
            s.sendall(os.urandom(size))
            s.shutdown(socket.SHUT_WR)
        assert exactly(s, 1) == b""


def half_open(rank0: Target, stack: ExitStack, tls: bool) -> None:
    """Connections that say nothing, or half of something, and stay."""
    for said in (b"", b"TRIGRAM\x02", bytes(HELLO - 1)) * 10:
        s = stack.enter_context(socket.create_connection(rank0))
        s.sendall(said)


def byte_a_second(rank0: Target, stack: ExitStack, tls: bool) -> None:
    """Who speaks slowly is heard for a while, not for ever."""
    s = stack.enter_context(socket.create_connection(rank0))
    heard = 0
    for byte in CLIENT_HELLO if tls else b"TRIGRAM\x02" + bytes(HELLO - 8):
        try:
            s.send(bytes([byte]))
        except ConnectionError:
            break
        heard += 1
        if ended(s, 1.0):
            break
    assert 2 < heard < 30, f"heard for {heard} s"


def thousand(rank0: Target, stack: ExitStack, tls: bool) -> None:
    """A thousand connections at once, which stay."""
    for _ in range(1000):
        s = stack.enter_context(socket.socket())
        s.setblocking(False)
        with suppress(BlockingIOError):
            s.connect(rank0)
    time.sleep(0.2)


@pytest.mark.parametrize("tls", ["0", "1"])
@pytest.mark.parametrize("attack", [garbage, half_open, byte_a_second, thousand])
def test_the_job_comes_up(
    attack: Callable[[Target, ExitStack, bool], None], tls: str, many_files: None
) -> None:
    """During init, and again while the job runs, where nobody listens any more."""
    between = Forwarder()
    with (
        ExitStack() as stack,
        Ranks(3, _join, between.port, transport="tcp", env=_env(TRIGRAM_TLS=tls)) as ranks,
    ):
        store = client(_port(ranks))
        between.target = rank0 = address(card(store, 0, 3))
        _raise(ranks, "go")
        attack(rank0, stack, tls == "1")
        assert not ranks.ranks[0].said  # rank 2 is still kept out: rank 0 was listening all the while
        between.open.set()
        ranks.await_said(0, "up")
        for _ in range(1000 if attack is thousand else 10):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(rank0, timeout=5).close()
        _raise(ranks, "stop")
        ranks.results(60)
    between.close()


def test_an_attempt_that_is_given_up_does_not_count() -> None:
    """Rank 2 has proved itself, and hears no answer: it gives up and comes again. Rank 0 had let it in."""
    between = Forwarder()
    answered = threading.Event()

    def swallow(near: socket.socket) -> None:
        with socket.create_connection(rank0) as far:
            far.sendall(exactly(near, HELLO))
            near.sendall(exactly(far, NONCE))
            far.sendall(exactly(near, PROOF))
            assert exactly(far, 1) == b"\x01"  # rank 0 lets it in
            answered.set()
            assert ended(near, 20)

    with Ranks(3, _join, between.port, transport="tcp", env=_env(TRIGRAM_TLS="0")) as ranks:
        store = client(_port(ranks))
        between.target = rank0 = address(card(store, 0, 3))
        between.first = swallow
        between.open.set()
        _raise(ranks, "go")
        assert answered.wait(30)
        ranks.await_said(0, "up")
        _raise(ranks, "stop")
        ranks.results(60)
    between.close()


def test_out_of_descriptors(many_files: None) -> None:
    """A rank whose strangers have taken all its descriptors is free again when they have had their time."""
    between = Forwarder()
    with (
        ExitStack() as stack,
        Ranks(3, _join, between.port, 24, transport="tcp", env=_env()) as ranks,
    ):
        store = client(_port(ranks))
        between.target = rank0 = address(card(store, 0, 3))
        _raise(ranks, "go")
        for _ in range(60):
            stack.enter_context(socket.create_connection(rank0))
        between.open.set()
        ranks.await_said(0, "up")
        _raise(ranks, "stop")
        ranks.results(60)
    between.close()


def test_what_was_recorded_or_reflected_proves_nothing() -> None:
    """A genuine greeting played again; a rank's own question and its own proof given back to it."""
    between = Forwarder()
    reflected: list[bool] = []

    def reflect(near: socket.socket) -> None:
        hello = exactly(near, HELLO)
        near.sendall(hello[-NONCE:])  # the rank's own question
        proof = exactly(near, PROOF)
        near.sendall(b"\x01" + proof)  # and its own proof
        reflected.append(len(proof) == PROOF and ended(near, 10))

    between.first = reflect
    between.open.set()
    with Ranks(3, _join, between.port, transport="tcp", env=_env()) as ranks:
        store = client(_port(ranks))
        # Rank 2 listens to nobody: rank 0 waits for a rank 2 that is kept from it after its proof.
        rank0 = address(card(store, 0, 3))
        _raise(ranks, "go")
        deadline = time.monotonic() + 30
        while not reflected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reflected == [True]
        # Its next greeting is recorded, but does not arrive.
        recorded = bytearray()
        taken = threading.Event()

        def record(near: socket.socket) -> None:
            hello = exactly(near, HELLO)
            with socket.create_connection(rank0) as far:
                far.sendall(hello)
                nonce = exactly(far, NONCE)
                near.sendall(nonce)
                recorded.extend(hello + exactly(near, PROOF))
            taken.set()

        between.first = record
        assert taken.wait(30)
        assert len(recorded) == HELLO + PROOF
        hello, proof = bytes(recorded[:HELLO]), bytes(recorded[HELLO:])
        tries = {
            "replayed": lambda nonce: proof,
            "its own nonce": lambda nonce: nonce,
            "zeros": lambda nonce: bytes(PROOF),
        }
        for what, prove in tries.items():
            with socket.create_connection(rank0) as s:
                s.sendall(hello)
                nonce = exactly(s, NONCE)
                assert len(nonce) == NONCE and nonce != hello[-NONCE:], what
                s.sendall(prove(nonce))
                assert exactly(s, 1 + PROOF) == REFUSED, what
                assert ended(s, 10), what
        assert not ranks.ranks[0].said
        between.target = rank0
        ranks.await_said(0, "up")
        _raise(ranks, "stop")
        ranks.results(60)
    between.close()


def test_a_rank_is_let_in_through_a_forwarder() -> None:
    """What the tests above rest on: the same detour without an attack, and what was said on it."""
    between = Forwarder()
    between.open.set()
    with Ranks(2, _join, between.port, transport="tcp", env=_env()) as ranks:
        between.target = address(card(client(_port(ranks)), 0, 2))
        _raise(ranks, "go")
        ranks.await_said(0, "up")
        _raise(ranks, "stop")
        ranks.results(60)
    assert any(said.startswith(b"TRIGRAM\x02") for said in between.sent)
    assert not any(SECRET.encode() in said for said in between.sent)
    between.close()


def test_strangers_on_the_host() -> None:
    """Garbage and silence on the unix socket do not keep ranks of a host from sharing memory."""
    with ExitStack() as stack, Ranks(2, _join, transport="shm", env=_env()) as ranks:
        name = strangers.name(card(client(_port(ranks)), 0, 2))
        sent = 0
        for said in [os.urandom(HELLO), b"x", b""] * 60 + [os.urandom(HELLO)] * 150:
            s = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            s.settimeout(0.2)
            try:
                s.connect(f"\0{name}")
                if said:
                    s.send(said)
                sent += 1
            except (OSError, TimeoutError):  # its queue is full
                break
        assert sent > 100 and not ranks.ranks[0].said
        _raise(ranks, "go")
        ranks.await_said(0, "up")
        _raise(ranks, "stop")
        assert ranks.results(60) == [True, True]


def _refused(rank: int, world: int, secrets: list[str | None], error: str, *words: str) -> float:
    """This rank's init raises; how long that took."""
    os.environ.pop("TRIGRAM_SECRET", None)
    if (mine := secrets[rank]) is not None:
        os.environ["TRIGRAM_SECRET"] = mine
    began = time.monotonic()
    raised = raises(getattr(trigram, error), lambda: trigram.init(init_timeout=INIT_TIMEOUT))
    says(raised, *words)
    assert mine is None or len(mine) < 5 or mine not in str(raised)
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    "secrets", [["first secret", "first secret", "other secret"], ["first secret", "first secret", None]]
)
def test_ranks_with_different_secrets(secrets: list[str | None], transport: str) -> None:
    """Each rank is told whose differs, long before the time is over."""
    took = run(3, _refused, secrets, "AuthError", "rank 2", "TRIGRAM_SECRET", transport=transport, timeout=40)
    assert max(took) < INIT_TIMEOUT / 2


def test_an_empty_secret() -> None:
    """It is no secret, and not the same as none."""
    run(1, _refused, [""], "ConfigError", "TRIGRAM_SECRET", "empty")


def test_doctor_keeps_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that there is one, and whether it is a poor one, and not which."""
    for secret, status in (("", "fail"), ("tiny-secret", "warn"), ("a secret of good length", "ok")):
        monkeypatch.setenv("TRIGRAM_SECRET", secret)
        for tls, found in (("1", "on"), ("0", "off")):
            monkeypatch.setenv("TRIGRAM_TLS", tls)
            checks = {check.name: check for check in doctor.environment()}
            assert checks["job secret"].status == status
            assert checks["TLS between hosts"].found == found
            assert "TRIGRAM_TLS" in checks["TRIGRAM_*"].found
            assert not secret or not any(secret in text for check in checks.values() for text in check)
    monkeypatch.delenv("TRIGRAM_SECRET")
    assert {check.name: check for check in doctor.environment()}["job secret"].found.startswith("none")


def _mixed_tls(rank: int, world: int) -> None:
    os.environ["TRIGRAM_TLS"] = str(int(rank == 1))
    error = raises(trigram.ConfigError, lambda: trigram.init(init_timeout=INIT_TIMEOUT))
    says(error, "TRIGRAM_TLS", "rank 1")


def test_ranks_that_differ_in_tls() -> None:
    """Named on every rank."""
    run(3, _mixed_tls, transport="tcp", timeout=40)


def _forged(rank: int, world: int) -> str:
    store = _store(rank)
    if rank == 0:
        flag("store")
        await_flag("forged")
    error = raises(trigram.AuthError, lambda: trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT))
    return str(error)


def test_a_forged_card() -> None:
    """Somebody with the store but without the secret sends rank 0 to an address of his own."""
    with Ranks(3, _forged, transport="tcp", env=_env()) as ranks:
        store = client(_port(ranks))
        genuine = card(store, 1, 3)
        name = store.get(strangers.key(1, 3))[: strangers.NAME]
        store.set(strangers.key(1, 3), name + strangers.readdressed(genuine, 4444, "a guess"))
        _raise(ranks, "forged")
        said = ranks.results(40)
    for text in said:
        assert "rank 1" in text and "forged" in text, text


def _mark(rank: int, world: int, port: int, marker: bytes) -> None:
    store = _store(rank)
    if rank == 1:
        store = Detoured(store, 0, port, SECRET, lambda: await_flag("go"))
    trigram.init(store, rank, world, init_timeout=INIT_TIMEOUT)
    sent = torch.frombuffer(bytearray(marker * 20_000), dtype=torch.uint8)
    got = sent.clone() if rank == 1 else torch.zeros_like(sent)
    trigram.broadcast(got, 1)
    equal(got, sent, "what was broadcast")


@pytest.mark.parametrize("tls", ["0", "1"])
def test_what_is_on_the_wire(tls: str) -> None:
    """Between hosts the payload can be read without TLS, and not with it."""
    marker = b"weights worth a million"
    between = Forwarder()
    between.open.set()
    with Ranks(2, _mark, between.port, marker, transport="tcp", env=_env(TRIGRAM_TLS=tls)) as ranks:
        between.target = address(card(client(_port(ranks)), 0, 2))
        _raise(ranks, "go")
        ranks.results(60)
    said = b"".join(between.sent)
    assert len(said) > len(marker) * 20_000
    assert (marker in said) == (tls == "0")
    between.close()


def _collectives(rank: int, world: int) -> None:
    trigram.init()
    for n in (0, 1, 1000, 6_000_000):
        t = torch.arange(n, dtype=torch.float32) % 13 + rank
        trigram.all_reduce(t)
        equal(t, (torch.arange(n, dtype=torch.float32) % 13) * world + world * (world - 1) / 2, f"sum {n}")
        t = torch.full((n,), float(rank))
        trigram.broadcast(t, world - 1)
        equal(t, torch.full((n,), world - 1.0), f"broadcast {n}")
    works = []
    for i in range(40):
        t = torch.full((50_000,), float(rank + i))
        works.append((i, t, trigram.all_reduce(t, async_op=True)))
    for i, t, work in works:
        work.wait()
        equal(t, torch.full((50_000,), world * i + world * (world - 1) / 2), f"asynchronous {i}")
    trigram.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_over_tls(world: int) -> None:
    """As over plain connections; without a secret too."""
    run(world, _collectives, transport="tcp", env={"TRIGRAM_TLS": "1"})
