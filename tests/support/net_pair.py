"""Two ends of a connection through the plugin, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.net_driver import (
    Net,
    NetError,
    Receiver,
    Request,
    Sender,
    _receive,
    _send,
    pattern,
    until,
)

VERSIONS = [7, 8, 11]
KIB, MIB = 2**10, 2**20
SIZES = [0, 1, 17, 64 * KIB - 1, 4 * MIB + 3, 64 * MIB]
MIXED = [0, 1, 64 * KIB - 1, 17, MIB, 0, 4 * MIB + 3, 31, 32, 33, 4096, 4097, 300_000] * 3
USAGE, REMOTE = 5, 6
ROOT = Path(__file__).resolve().parents[2]


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
