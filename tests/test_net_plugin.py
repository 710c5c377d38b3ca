"""NCCL's network plugin, driven as NCCL drives it: data, limits, deaths, strangers, hosts."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import netns
from tests.net_driver import (
    Buffer,
    Net,
    NetError,
    Receiver,
    Request,
    Sender,
    _receive,
    _send,
    library,
    pattern,
    until,
)

VERSIONS = [7, 8, 11]
KIB, MIB = 2**10, 2**20
SIZES = [0, 1, 17, 64 * KIB - 1, 4 * MIB + 3, 64 * MIB]
MIXED = [0, 1, 64 * KIB - 1, 17, MIB, 0, 4 * MIB + 3, 31, 32, 33, 4096, 4097, 300_000] * 3
USAGE, REMOTE = 5, 6
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces are looked for once in a process; the rest is read at every init."""
    monkeypatch.setenv("TRIGRAM_IFACE", "lo")
    for name in ("STREAMS", "CHUNK", "TIMEOUT"):
        monkeypatch.delenv(f"TRIGRAM_NET_{name}", raising=False)


@contextmanager
def pair(sending: Net | None = None, receiving: Net | None = None) -> Iterator[tuple[Sender, Receiver]]:
    """Both ends of a connection, in this process."""
    sending = sending or Net(8).init()
    receiving = receiving or sending
    handle, listener = receiving.listen()
    sender = sending.connect(handle)
    receiver = receiving.accept(listener)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()
        receiving.call("closeListen", listener)


def send(comm: Sender, contents: bytes) -> Request:
    request = _send(comm, contents)
    assert request is not None
    return request


def receive(comm: Receiver, size: int) -> Request:
    request = _receive(comm, size)
    assert request is not None
    return request


def advance(requests: list[Request]) -> bool:
    """Tests them all: whether all are done."""
    return False not in [request.test() for request in requests]


def finish(requests: list[Request], seconds: float = 20.0) -> None:
    until(lambda: advance(requests), "requests", seconds)


def transfer(sender: Sender, receiver: Receiver, sizes: list[int], first: int = 0) -> None:
    """All at once, and checked."""
    into = [receive(receiver, size) for size in sizes]
    out = [send(sender, pattern(first + i, size)) for i, size in enumerate(sizes)]
    finish(into + out)
    for i, (request, size) in enumerate(zip(into, sizes, strict=True)):
        assert request.size == size
        assert request.keep.data() == pattern(first + i, size), f"message {i} of {size}"


def fails(step: Callable[[], object], code: int, within: float) -> NetError:
    """`step`, called again and again, raises that code within so many seconds."""
    end = time.monotonic() + within
    while True:
        try:
            step()
        except NetError as e:
            assert e.code == code, e
            return e
        assert time.monotonic() < end, f"no error within {within} s"
        time.sleep(0.001)


# The tables


@pytest.mark.parametrize("version", VERSIONS)
def test_table(version: int) -> None:
    net = Net(version)
    assert net.name == "Trigram"
    optional = {"regMrDmaBuf", "getDeviceMr", "irecvConsumed", "makeVDevice", "setNetAttr"}
    assert not any(net.has(name) for name in optional)
    required = "init devices getProperties listen connect accept regMr deregMr isend irecv iflush test "
    required += "closeSend closeRecv closeListen"
    assert all(net.has(name) for name in required.split())
    assert net.has("finalize") == (version == 11)


@pytest.mark.parametrize("version", VERSIONS)
def test_properties(version: int) -> None:
    net = Net(version).init()
    assert net.devices() == 1
    props = net.properties(0)
    assert props.name == b"lo" and props.pci_path is None
    assert props.ptr_support == 1 and props.speed > 0 and props.port == 0 and props.latency == 0.0
    assert props.max_comms >= 1024 and props.max_recvs == 1
    assert props.device_type == 0 and props.device_version == 0
    if version >= 8:
        assert props.reg_is_global == 0
    if version == 11:
        assert props.force_flush == 0
        assert props.vprops.ndevs == 1 and props.vprops.devs[0] == 0
        assert 0 < props.max_p2p_bytes <= 2**40 and 0 < props.max_coll_bytes <= 2**40
        assert props.max_multi_request_size == 1
    with pytest.raises(NetError):
        net.properties(1)
    net.finalize()


@pytest.mark.parametrize(
    ("name", "value"), [("STREAMS", "17"), ("STREAMS", "x"), ("CHUNK", "12parsecs"), ("TIMEOUT", "0")]
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TRIGRAM_NET_{name}", value)
    net = Net(8)
    with pytest.raises(NetError) as failure:
        net.init()
    assert failure.value.code == USAGE
    assert any(line.startswith("WARN") and f"TRIGRAM_NET_{name}={value}" in line for line in net.log)


def test_no_interface_is_an_error() -> None:
    script = "from tests.net_driver import Net; n = Net(8)\ntry: n.init()\nfinally: print(n.log)"
    env = {**os.environ, "TRIGRAM_IFACE": "", "NCCL_SOCKET_IFNAME": "nosuch"}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, env=env, capture_output=True, timeout=20
    )
    assert done.returncode and b"NCCL_SOCKET_IFNAME=nosuch" in done.stdout


# Data


@pytest.mark.parametrize("version", VERSIONS)
def test_sizes(version: int) -> None:
    with pair(Net(version).init()) as (sender, receiver):
        for i, size in enumerate(SIZES):
            transfer(sender, receiver, [size], i)


@pytest.mark.parametrize("sending", VERSIONS)
@pytest.mark.parametrize("receiving", VERSIONS)
def test_versions_understand_each_other(sending: int, receiving: int) -> None:
    with pair(Net(sending).init(), Net(receiving).init()) as (sender, receiver):
        transfer(sender, receiver, [17, 0, MIB + 1])


@pytest.mark.parametrize("streams", ["1", "4", "8", "16"])
@pytest.mark.parametrize("chunk", ["1", "64K", "1M"])
def test_streams_and_chunks(monkeypatch: pytest.MonkeyPatch, streams: str, chunk: str) -> None:
    """Small chunks over many streams arrive in any order."""
    monkeypatch.setenv("TRIGRAM_NET_STREAMS", streams)
    monkeypatch.setenv("TRIGRAM_NET_CHUNK", chunk)
    with pair() as (sender, receiver):
        transfer(sender, receiver, MIXED[:32])


def test_both_directions_at_once() -> None:
    with pair() as (a, b), pair() as (c, d):
        sizes = MIXED[:32]
        into = [receive(comm, size) for size in sizes for comm in (b, d)]
        out = [send(comm, pattern(i, size)) for i, size in enumerate(sizes) for comm in (a, c)]
        finish(into + out)
        for i, request in enumerate(into):
            assert request.keep.data() == pattern(i // 2, sizes[i // 2])


def test_messages_sent_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for the buffer of what they carry; buffers are given one by one, in order."""
    monkeypatch.setenv("TRIGRAM_NET_STREAMS", "4")
    monkeypatch.setenv("TRIGRAM_NET_CHUNK", "4K")
    with pair() as (sender, receiver):
        out = [send(sender, pattern(i, size)) for i, size in enumerate(MIXED)]
        for i, size in enumerate(MIXED):
            request = receive(receiver, size)
            until(lambda request=request: [r.test() for r in out] and request.test(), "a late buffer")  # type: ignore[misc]
            assert request.keep.data() == pattern(i, size)
        finish(out)


def test_too_many_requests_are_put_off() -> None:
    with pair() as (sender, receiver):
        into = []
        while (request := _receive(receiver, 8)) is not None:
            into.append(request)
            assert len(into) <= 1024
        assert len(into) >= 32
        out: list[Request] = []
        for i in range(len(into)):
            out.append(send(sender, pattern(i, 8)))
        finish(into + out)
        assert [request.keep.data() for request in into] == [pattern(i, 8) for i in range(len(into))]
        transfer(sender, receiver, [5])


def test_sizes_may_be_null() -> None:
    with pair() as (sender, receiver):
        into, out = receiver.irecv(None, 0), sender.isend(None, 0)
        assert into and out
        until(lambda: out.test(want_size=False) and into.test(want_size=False), "a message without bytes")


def test_actual_size_is_reported() -> None:
    with pair() as (sender, receiver):
        into, out = receive(receiver, 2 * MIB), send(sender, pattern(0, MIB + 5))
        finish([into, out])
        assert into.size == MIB + 5
        assert into.keep.data() == pattern(0, MIB + 5) + bytes(MIB - 5)


@pytest.mark.parametrize(("size", "room"), [(18, 17), (1, 0), (4 * MIB, 4 * MIB - 1)])
def test_message_larger_than_its_buffer(size: int, room: int) -> None:
    with pair() as (sender, receiver):
        into, out = receive(receiver, room), send(sender, b"\xff" * size)
        until(out.test, "sending") if size < MIB else out.test()
        error = fails(into.test, USAGE, 10)
        assert f"{size} bytes" in str(error) and "127.0.0.1" in str(error)
        assert into.keep.data() == bytes(room)
        with pytest.raises(NetError):
            receive(receiver, size)


def test_memory_of_a_gpu_is_refused() -> None:
    with pair() as (sender, receiver):
        buffer = Buffer(8)
        for comm in (sender, receiver):
            assert comm.register(buffer.address, 8) == 0
            assert comm.register(buffer.address, 8, kind=2) != 0


def test_several_connections_to_one_listener() -> None:
    net = Net(11).init()
    handle, listener = net.listen()
    attempts = [net.connecting(handle) for _ in range(5)]
    until(lambda: None not in [attempt.step() for attempt in attempts], "connecting")
    senders = [attempt.done for attempt in attempts if attempt.done]
    receivers = [net.accept(listener) for _ in attempts]
    out = [send(comm, bytes([i]) * MIB) for i, comm in enumerate(senders)]
    into = [receive(comm, MIB) for comm in receivers]
    finish(out + into)
    # Whose connection is whose is not said; each message is of one sender.
    assert {request.keep.data() for request in into} == {bytes([i]) * MIB for i in range(5)}
    for comm in [*senders, *receivers]:
        comm.close()
    net.call("closeListen", listener)


# Ends


def test_descriptors_come_back() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    net = Net(8).init()
    before = count()
    for _ in range(3):
        with pair(net) as (sender, receiver):
            transfer(sender, receiver, [MIB])
            assert count() > before
            # Closing with requests under way.
            receive(receiver, MIB)
            send(sender, bytes(16 * MIB))
    assert count() == before
    # Attempts and listeners that nobody goes on with.
    handle, listener = net.listen()
    sender = net.connect(handle)
    net.call("closeListen", listener)
    sender.close()
    assert count() == before


@pytest.mark.parametrize("code", [4, 5])
def test_wrong_handles(code: int) -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    wrong = b"x" * 128 if code == 4 else handle[:8] + b"\x63\0" + handle[10:]
    with pytest.raises(NetError) as failure:
        net.connect(wrong)
    assert failure.value.code == code
    with pytest.raises(NetError):
        net.connect(handle[:64] + b"\1" * 8 + handle[72:])  # names an attempt that is not under way
    net.call("closeListen", listener)


def test_nobody_listens() -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    net.call("closeListen", listener)
    attempt = net.connecting(handle)
    fails(attempt.step, REMOTE, 10)


def test_peer_closes() -> None:
    with pair() as (sender, receiver):
        finished = send(sender, pattern(0, 100))
        finish([finished])
        sender.close()
        into = receive(receiver, 100)
        finish([into])
        assert into.keep.data() == pattern(0, 100), "what was sent before the end arrives"
        lost = receive(receiver, 100)
        assert "127.0.0.1" in str(fails(lost.test, REMOTE, 10))
        with pytest.raises(NetError):
            lost.test()


# Other processes


class Peer:
    """A process with the other end."""

    def __init__(self, role: str, version: int, sizes: list[int], host: int | None = None) -> None:
        words = [sys.executable, "-m", "tests.net_driver", role, str(version), *map(str, sizes)]
        env = {**os.environ}
        if host is not None:
            words = ["ip", "netns", "exec", netns.name(host), *words]
            env["TRIGRAM_IFACE"] = "eth0"
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)

    def done(self, seconds: float = 40.0) -> None:
        assert self.process.wait(seconds) == 0


@pytest.mark.parametrize("versions", [(7, 11), (11, 8)])
def test_between_processes(versions: tuple[int, int]) -> None:
    sizes = [*MIXED, *SIZES]
    with Peer("receive", versions[0], sizes) as receiver, Peer("send", versions[1], sizes) as sender:
        sender.tell(receiver.hear())
        sender.done()
        receiver.done()


def test_between_hosts(several_hosts: None) -> None:
    sizes = MIXED
    with ExitStack() as stack:
        peers = []
        for here, there in ((0, 1), (1, 0)):
            receiver = stack.enter_context(Peer("receive", 8, sizes, there))
            sender = stack.enter_context(Peer("send", 11, sizes, here))
            sender.tell(receiver.hear())
            peers += [sender, receiver]
        for peer in peers:
            peer.done()


def test_sender_is_killed() -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    with Peer("send", 8, [-1]) as peer:
        peer.tell(handle.hex())
        receiver = net.accept(listener)
        for _ in range(3):
            finish([receive(receiver, 4 * MIB)])
        peer.process.send_signal(signal.SIGKILL)
        peer.process.wait(10)

        def more() -> None:
            until(receive(receiver, 4 * MIB).test, "a message", 10)

        fails(more, REMOTE, 10)
    assert any("WARN" in line and "127.0.0.1" in line for line in net.log)
    receiver.close()
    net.call("closeListen", listener)


def test_receiver_is_killed() -> None:
    net = Net(8).init()
    with Peer("receive", 8, [-1]) as peer:
        sender = net.connect(bytes.fromhex(peer.hear()))
        for _ in range(3):
            finish([send(sender, bytes(4 * MIB))])
        peer.process.send_signal(signal.SIGKILL)
        peer.process.wait(10)

        def more() -> None:
            until(send(sender, bytes(4 * MIB)).test, "a message", 10)

        fails(more, REMOTE, 10)
    sender.close()


def test_slow_receiver_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may leave data unread for longer than the timeout, with its window closed."""
    monkeypatch.setenv("TRIGRAM_NET_TIMEOUT", "1")
    with pair() as (sender, receiver):
        out = [send(sender, pattern(i, 8 * MIB)) for i in range(4)]
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert not advance(out)
            time.sleep(0.01)
        into = [receive(receiver, 8 * MIB) for _ in out]
        finish(into + out)
        assert into[3].keep.data() == pattern(3, 8 * MIB)


@pytest.mark.parametrize("role", ["receive", "send"])
def test_silent_cable(several_hosts: None, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """The switch drops everything from one moment on: both sides fail within some timeouts."""
    monkeypatch.setenv("TRIGRAM_NET_TIMEOUT", "2")
    with Peer("receive", 8, [-1], 2) as receiver, Peer("send", 8, [-1], 3) as sender:
        sender.tell(receiver.hear())
        assert (receiver.hear(), sender.hear()) == ("ready", "ready")
        time.sleep(0.3)
        port = ["ip", "-n", f"tg{os.getpid()}sw", "link", "set", "dev", "port3"]
        subprocess.run([*port, "nomaster"], check=True)
        try:
            peer = receiver if role == "receive" else sender
            assert peer.process.wait(15) != 0
        finally:
            subprocess.run([*port, "master", "br0"], check=True)


# Strangers


def address(handle: bytes) -> tuple[str, int]:
    assert handle[10] == 4
    return socket.inet_ntoa(handle[16:20]), struct.unpack_from("<H", handle, 12)[0]


def hello(
    handle: bytes, token: bytes | None = None, streams: int = 1, connection: bytes = b"c" * 16
) -> bytes:
    head = b"TrigramS" + handle[8:10] + bytes([0, streams]) + bytes(4)
    return head + connection + (handle[32:64] if token is None else token)


def test_strangers_do_not_disturb() -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    where = address(handle)
    with ExitStack() as stack:

        def stranger(words: bytes) -> socket.socket:
            other = stack.enter_context(socket.create_connection(where, timeout=10))
            other.sendall(words)
            return other

        silent = [stranger(b"") for _ in range(200)]
        for _ in range(5):
            assert net.try_accept(listener) is None
        refused = [stranger(random.randbytes(100)) for _ in range(20)]
        refused += [stranger(hello(handle, bytes(32))), stranger(hello(handle, streams=17))]
        slow = stranger(hello(handle)[:40])
        attempt = net.connecting(handle)
        receivers: list[Receiver] = []

        def step() -> bool:
            accepted = net.try_accept(listener)
            receivers.extend([accepted] if accepted else [])
            return attempt.step() is not None and bool(receivers)

        until(step, "the real peer")
        assert attempt.done
        transfer(attempt.done, receivers[0], [17, MIB])
        for other in refused:
            until(lambda other=other: not net.try_accept(listener) and _closed(other), "a refusal")  # type: ignore[misc]
        attempt.done.close()
        receivers[0].close()
        del silent, slow
    net.call("closeListen", listener)


def test_strangers_have_little_time() -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    with socket.create_connection(address(handle), timeout=20) as other:
        began = time.monotonic()
        until(lambda: net.try_accept(listener) is None and _closed(other), "the stranger's end", 20)
        assert 5 < time.monotonic() - began < 15
    net.call("closeListen", listener)


def _closed(other: socket.socket) -> bool:
    other.setblocking(False)
    try:
        return other.recv(1) == b""
    except ConnectionError:
        return True
    except BlockingIOError:
        time.sleep(0.01)
        return False


MAGIC = 0x5472_4743
GOOD = (MAGIC, 8, 0, 0, 16)


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([(0, 8, 0, 0, 16)], REMOTE),  # no magic
        ([(MAGIC, 8, 0, 9, 16)], REMOTE),  # past the message
        ([(MAGIC, 8, 0, 2**64 - 4, 16)], REMOTE),  # wraps around
        ([(MAGIC, 0, 0, 0, 16)], REMOTE),  # brings nothing
        ([(MAGIC, 8, 0, 0, 2**40)], USAGE),  # longer than the buffer
        ([GOOD, GOOD, GOOD], REMOTE),  # more than the message
        ([GOOD, (MAGIC, 8, 0, 8, 20)], REMOTE),  # another length
        ([(MAGIC, 8, 2**63, 0, 16)], REMOTE),  # a message that nobody could have sent yet
    ],
)
def test_corrupt_headers(chunks: list[tuple[int, ...]], code: int) -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    with socket.create_connection(address(handle), timeout=10) as other:
        other.sendall(hello(handle))
        receiver = net.accept(listener)
        into = receive(receiver, 20)
        for words in chunks:
            other.sendall(struct.pack("<IIQQQ", *words) + b"\xff" * 8)
        error = fails(into.test, code, 10)
        assert "127.0.0.1" in str(error)
        # At most what the sound headers before it allowed.
        assert into.keep.data()[16:] == bytes(4)
        receiver.close()
    net.call("closeListen", listener)


def test_library_is_found() -> None:
    assert library().suffix == ".so"
