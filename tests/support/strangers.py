"""What a stranger needs: the ranks' addresses from the store, a place in between, and patience."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.harness import until

SECRET = "the secret of the tests"


def client(port: int) -> Any:
    """The store of a launch, as anybody on the network can open it."""
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))


NAME = 16
"""Bytes of the name of an ``init``, before the endpoint record."""


KIND = 5
"""Bytes that say what the rank is, before its record proper."""


def key(rank: int, world: int) -> str:
    """Where a rank's endpoint record lies in a store that was handed to ``init``."""
    return f"trigram/of{world}/endpoint/{rank}"


def card(store: Any, rank: int, world: int) -> bytes:
    """A rank's endpoint record, as soon as it is there."""
    until(lambda: store.check([key(rank, world)]), 30, f"the endpoint record of rank {rank}")
    return bytes(store.get(key(rank, world)))[NAME:]


def _port(card: bytes) -> tuple[int, int]:
    """Where a card's port lies: after what the rank is, a version, the release (its length and its text), a
    rank, the kind of address, and 4 numbers."""
    begin = end = KIND + 8 + card[KIND + 1]
    while card[end] & 0x80:
        end += 1
    return begin, end + 1


def address(card: bytes) -> tuple[str, int]:
    """Where the rank of this card listens."""
    begin, end = _port(card)
    port = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(card[begin:end]))
    return ".".join(map(str, card[begin - 4 : begin])), port


def name(card: bytes) -> str:
    """The name of its unix socket."""
    begin = card.index(b"trigram-")
    return card[begin : begin + len("trigram-") + 32].decode()


def readdressed(card: bytes, port: int, secret: str | None = SECRET) -> bytes:
    """The card of a rank that listens elsewhere: what somebody who knows the secret can make of it."""
    begin, end = _port(card)
    number = []
    while port >= 0x80:
        number.append(port & 0x7F | 0x80)
        port >>= 7
    body = card[KIND : begin - 4] + bytes([127, 0, 0, 1]) + bytes([*number, port]) + card[end:-32]
    seal = (
        hmac.new(secret.encode(), b"trigram record" + body, hashlib.sha256).digest() if secret else bytes(32)
    )
    return card[:KIND] + body + seal


class Detoured(dist.Store):
    """A store that gives one rank another's card with the port of a forwarder, when `ready` says so."""

    def __init__(
        self, store: Any, rank: int, port: int | None, secret: str | None, ready: Callable[[], object]
    ) -> None:
        super().__init__()
        self.store, self.rank, self.port, self.secret, self.ready = store, rank, port, secret, ready

    def get(self, wanted: str) -> bytes:
        """The value, altered if it is that card."""
        value = bytes(self.store.get(wanted))
        if not wanted.endswith(f"/endpoint/{self.rank}"):
            return value
        self.ready()
        if self.port is None:
            return value
        return value[:NAME] + readdressed(value[NAME:], self.port, self.secret)

    def set(self, wanted: str, value: bytes) -> None:
        """As the store does."""
        self.store.set(wanted, value)

    def check(self, wanted: list[str]) -> bool:
        """As the store does."""
        return bool(self.store.check(wanted))

    def add(self, wanted: str, value: int) -> int:
        """As the store does."""
        return int(self.store.add(wanted, value))


class Forwarder:
    """Stands between a rank that connects and the one that it connects to, and keeps what it sees."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.target: tuple[str, int] | None = None
        self.open = threading.Event()  # connections pass
        self.sent: list[bytearray] = []  # by connection: what the connecting side said
        self.first: Callable[[socket.socket], None] | None = None  # has its way with a connection instead
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        if self.first is not None:
            first, self.first = self.first, None
            with near:
                return first(near)
        if not self.open.wait(30) or self.target is None:
            return near.close()
        try:
            far = socket.create_connection(self.target)
        except OSError:
            return near.close()
        said = bytearray()
        self.sent.append(said)
        back = threading.Thread(target=_pass, args=(far, near, None), daemon=True)
        back.start()
        _pass(near, far, said)
        return None

    def close(self) -> None:
        """Lets nobody in any more."""
        self.listener.close()


def _pass(a: socket.socket, b: socket.socket, keep: bytearray | None) -> None:
    try:
        while got := a.recv(1 << 16):
            if keep is not None:
                keep += got
            b.sendall(got)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        a.close()


def exactly(s: socket.socket, n: int) -> bytes:
    """So many bytes, or fewer if the peer ends the connection."""
    got = b""
    s.settimeout(20)
    try:
        while len(got) < n and (more := s.recv(n - len(got))):
            got += more
    except ConnectionResetError:
        pass
    return got


def ended(s: socket.socket, within: float) -> bool:
    """Whether the other side ends the connection in so many seconds."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        s.settimeout(max(end - time.monotonic(), 0.01))
        try:
            if not s.recv(4096):
                return True
        except ConnectionError:
            return True
        except TimeoutError:
            return False
    return False
