"""What one host finds out about the way to another: which addresses answer, round trip, rate, loss, clock.

A host listens on a port; another connects, and both say a word of this check, so that an address that leads
to another machine is noticed: every host may have the same 172.17.0.1 of its containers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import statistics
import struct
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

CONNECT_SECONDS = 3.0
"""After which a connection that nobody refuses counts as dropped on the way."""
_PINGS = 20
_CHUNK = bytes(1 << 18)
_LONGEST = 4096
_PORTS = "TRIGRAM_PORT"


@dataclass(frozen=True)
class Attempt:
    """One address of another host.

    Attributes:
        address: Where it was tried.
        result: ``ok``, ``refused``, ``dropped`` (no answer), ``unreachable`` (no way there), ``other``
            (another machine answers) or ``error``.
        detail: What the system says.
        seen: The address from which this host comes, as the other sees it; empty if it was not reached.
    """

    address: str
    result: str
    detail: str = ""
    seen: str = ""


@dataclass(frozen=True)
class Way:
    """What the way to another host carries, over the first address that answers.

    Attributes:
        address: That address.
        trip: Seconds of a round trip, the median.
        longest_trip: The longest of some.
        rate: Bytes per second, by one connection.
        lost: The part of the packets that were sent again.
        packet: Bytes of the largest packet of the path, as the system knows it.
        clock: Seconds by which the other's clock is ahead.
        control: The congestion control.
        stalled: Large messages did not arrive, although small ones do.
    """

    address: str
    trip: float = math.nan
    longest_trip: float = math.nan
    rate: float = 0.0
    lost: float = 0.0
    packet: int = 0
    clock: float = 0.0
    control: str = ""
    stalled: bool = False


class Listener:
    """Answers the other hosts until it is closed.

    Args:
        word: The word of this check, and this host's number: ``WORD:NUMBER``.
    """

    def __init__(self, word: str) -> None:
        self.word = word
        family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
        try:
            self._socket = _listen(family)
        except OSError:  # IPv6 is switched off
            self._socket = _listen(socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._serve, name="trigram-doctor", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                peer, address = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer, address[0]), daemon=True).start()

    def _answer(self, peer: socket.socket, address: str) -> None:
        with peer, contextlib.suppress(OSError, ValueError):
            peer.settimeout(30)
            stream = peer.makefile("rwb", buffering=0)
            if _read(stream).get("word") != self.word.partition(":")[0]:
                return
            _write(stream, {"word": self.word, "seen": address.removeprefix("::ffff:")})
            for _ in range(_PINGS):
                _read(stream)
                _write(stream, {"clock": time.time()})
            received, began = 0, 0.0
            while more := peer.recv(len(_CHUNK)):
                began = began or time.monotonic()
                received += len(more)
            _write(stream, {"bytes": received, "seconds": time.monotonic() - (began or time.monotonic())})


def _listen(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    wanted = os.environ.get(_PORTS, "0")
    try:
        made.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", int(wanted) if wanted.isdigit() else 0))
        made.listen(64)
    except OSError:
        made.close()
        raise
    return made


def attempt(address: str, port: int, word: str) -> Attempt:
    """Tries one address of the host that has ``word``."""
    try:
        with _connected(address, port) as connection:
            answer = _greeted(connection, word)
    except TimeoutError:
        return Attempt(address, "dropped", f"no answer in {CONNECT_SECONDS:.0f} s")
    except ConnectionRefusedError as error:
        return Attempt(address, "refused", str(error))
    except OSError as error:
        away = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        return Attempt(address, "unreachable" if error.errno in away else "error", str(error))
    except ValueError:
        return Attempt(address, "other", "who answers there does not take part")
    if answer.get("word") != word:
        return Attempt(address, "other", "another of these hosts answers there, or this one")
    seen = answer.get("seen")
    return Attempt(address, "ok", seen=seen if isinstance(seen, str) else "")


def measure(address: str, port: int, word: str, seconds: float) -> Way:
    """Measures the way to the host that has ``word``, over an address that answers.

    Args:
        address: The address.
        port: Where it listens.
        word: Its word.
        seconds: How long to send.
    """
    with _connected(address, port) as connection:
        connection.settimeout(10)
        _greeted(connection, word)
        stream = connection.makefile("rwb", buffering=0)
        trips, clocks = [], []
        for _ in range(_PINGS):
            began, at = time.perf_counter(), time.time()
            _write(stream, {})
            other = float(_read(stream)["clock"])
            trips.append(time.perf_counter() - began)
            clocks.append(other - at - trips[-1] / 2)
        trip, clock = statistics.median(trips), clocks[trips.index(min(trips))]
        way = Way(address, trip, max(trips), clock=clock, control=_control(connection))
        end = time.monotonic() + seconds
        try:
            connection.settimeout(5)
            while time.monotonic() < end:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(30)
            got = _read(stream)
            rate = float(got["bytes"]) / max(float(got["seconds"]), 1e-6)
        except (OSError, ValueError, KeyError):
            return replace(way, packet=_info(connection)[1], stalled=True)
        lost, packet = _info(connection)
        return replace(way, rate=rate, lost=lost, packet=packet)


def as_dict(of: Attempt | Way) -> dict[str, Any]:
    """For JSON."""
    return asdict(of)


def _connected(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), CONNECT_SECONDS)


def _greeted(connection: socket.socket, word: str) -> dict[str, Any]:
    stream = connection.makefile("rwb", buffering=0)
    _write(stream, {"word": word.partition(":")[0]})
    return _read(stream)


def _write(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value).encode() + b"\n")


def _read(stream: Any) -> dict[str, Any]:
    line = stream.readline(_LONGEST)
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(line)
    return value


def _control(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode(errors="replace")


def _info(connection: socket.socket) -> tuple[float, int]:
    """The part of the packets that were sent again, and the largest packet of the path (``tcp_info``)."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144).ljust(144, b"\0")
    packet, again, sent = (struct.unpack_from("I", raw, at)[0] for at in (60, 100, 136))
    return again / sent if sent else 0.0, packet
