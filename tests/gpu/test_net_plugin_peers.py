"""The network plugin between processes and hosts: deaths, silence, strangers, corrupt headers."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from tests.support import netns, patience
from tests.support.net_driver import (
    Net,
    Receiver,
    library,
    pattern,
    until,
)
from tests.support.net_pair import (
    MIB,
    MIXED,
    REMOTE,
    ROOT,
    SIZES,
    USAGE,
    advance,
    fails,
    finish,
    on_loopback,
    pair,
    receive,
    send,
    transfer,
)

pytestmark = pytest.mark.waits

__all__ = ["on_loopback"]


class Peer:
    """A process with the other end."""

    def __init__(self, role: str, version: int, sizes: list[int], host: int | None = None) -> None:
        words = [sys.executable, "-m", "tests.support.net_driver", role, str(version), *map(str, sizes)]
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
        assert 5 < time.monotonic() - began < patience.seconds(15)
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
