"""Samples of other hosts: who owns one, and how its record comes here.

Each host owns a part of the samples, by rendezvous hashing. The first rank of a host serves: its processes,
also DataLoader workers, which have no connections of the job, send requests to its local socket, and it sends
them on to the first rank of the host that owns the sample. Every wait has a deadline. Whatever fails, the
answer is "none", and the sample is loaded from the data set.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trigram.collectives import recv, send
from trigram.data.store import Store
from trigram.errors import MismatchError, TrigramError
from trigram.runtime import job, logs, world
from trigram.runtime.group import Group
from trigram.runtime.job import Part
from trigram.runtime.records import all_gather_bytes

_ASK, _ANSWER, _GIVE = 0, 1, 2
_HEADER = struct.Struct("<BxxxIQQ")
"""Kind, host, number of the request, length of the body."""
_LENGTH = struct.Struct("<q")
_KEY = 24
_MOST = 1 << 30
"""Bytes of a body that is accepted."""
_HEADERS, _BODIES = 0, 1
"""Tags of the messages between hosts."""
_ANSWER_SECONDS = 5.0
"""How long the serving rank waits for another host's answer; a process waits for its own a little longer."""
_PAUSE_SECONDS = 60.0
"""How long nothing is asked after a failure."""
_WAITING = 64
"""Packets that may wait for a host; further ones are dropped."""


def owner(key: bytes, hosts: int) -> int:
    """The host that owns a record: that with the largest hash, so that few move if hosts do."""
    return max(
        range(hosts), key=lambda h: hashlib.blake2b(key + h.to_bytes(4, "big"), digest_size=8).digest()
    )


class Client:
    """How a process reaches the records of other hosts; workers receive a copy.

    Args:
        address: The socket of this host's serving rank.
        hosts: The number of hosts.
        host: This one's number.
    """

    def __init__(self, address: str, hosts: int, host: int, server: Server | None) -> None:
        self._address, self._hosts, self._host = address, hosts, host
        self._server = server  # lives as long as the data set of its process
        self._here: _Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {**self.__dict__, "_server": None, "_here": None}

    def ask(self, keys: Sequence[bytes]) -> list[bytearray | None]:
        """The records of keys that other hosts own; None: this host owns it, or it is not to be had."""
        by_host: dict[int, list[int]] = {}
        for n, key in enumerate(keys):
            by_host.setdefault(owner(key, self._hosts), []).append(n)
        by_host.pop(self._host, None)
        records: list[bytearray | None] = [None] * len(keys)
        for host, places in by_host.items():
            body = b"".join(keys[n] for n in places)
            answer = self._request(_ASK, host, body)
            for n, record in zip(places, _unpacked(answer, len(places)), strict=True):
                records[n] = record
        return records

    def give(self, records: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Gives records to the hosts that own them; returns those that this host owns."""
        mine: dict[bytes, bytes] = {}
        others: dict[int, list[bytes]] = {}
        for key, record in records.items():
            host = owner(key, self._hosts)
            if host == self._host:
                mine[key] = record
            else:
                others.setdefault(host, []).append(key + _LENGTH.pack(len(record)) + record)
        for host, parts in others.items():
            if (body := b"".join(parts)) and len(body) <= _MOST:
                self._request(_GIVE, host, body)
        return mine

    def _request(self, kind: int, host: int, body: bytes) -> bytearray:
        """Sends a request to the serving rank and returns its answer; an empty one: there is none."""
        if self._here is None or self._here.pid != os.getpid():  # that of before a fork is the parent's
            self._here = _Connection(self._address)
        return self._here.request(kind, host, body)


class _Connection:
    """A process's connection to the serving rank; its threads take turns."""

    def __init__(self, address: str) -> None:
        self.pid = os.getpid()
        self._address = address
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._warned = False

    def request(self, kind: int, host: int, body: bytes) -> bytearray:
        """As :meth:`Client._request`."""
        if not self._lock.acquire(timeout=_ANSWER_SECONDS):
            return bytearray()
        try:
            if time.monotonic() < self._not_before:
                return bytearray()
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_ANSWER_SECONDS + 1)
                self._socket.connect(self._address)
            _send_packet(self._socket, kind, host, 0, body)
            return _receive_packet(self._socket)[3] if kind == _ASK else bytearray()
        except OSError as e:
            self._socket, self._not_before = None, time.monotonic() + _PAUSE_SECONDS
            if not self._warned:
                self._warned = True
                logs.logger.warning(
                    "CachedDataset: the rank of this host that asks other hosts for samples does not answer "
                    "(%s); they are loaded from the data set",
                    e,
                )
            return bytearray()
        finally:
            self._lock.release()


@job.told
class _Servers(Part):
    """The servers of this rank that still exist."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Server] = weakref.WeakSet()

    def finish(self) -> None:
        """Closes them."""
        for server in list(self.open):
            server.close()


class Server:
    """The serving rank of a host: passes requests on, and answers those of other hosts.

    Args:
        group: The serving ranks, in the order of hosts.
        opened: Returns this process's store.
        identity: What all keys begin with.
    """

    def __init__(self, group: Group, opened: Callable[[], Store], identity: bytes) -> None:
        self._group, self._opened, self._identity = group, opened, identity
        self._folder = tempfile.mkdtemp(prefix="trigram-")
        self.address = str(Path(self._folder) / "samples")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._queues = [queue.Queue[tuple[int, int, bytes | bytearray]](_WAITING) for _ in group.ranks]
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[bytearray]] = {}
        self._not_before = [0.0] * group.size
        self._pid, self._closed = os.getpid(), False
        self._job, self._stay = job.here(), job.here().stay
        os.register_at_fork(after_in_child=self._listener.close)
        self._job.part(_Servers).open.add(self)
        for host in range(group.size):
            if host != group.rank:
                self._thread(self._send, host)
        self._thread(self._accept)
        self._thread(self._receive)

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        self._job.thread("trigram-samples", target, *args)

    def close(self) -> None:
        """Stops serving; a request that is under way is answered with nothing."""
        if self._pid == os.getpid():  # again too: the thread that was first may end with the process
            self._closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._thread(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """The requests of one process of this host."""
        with connection, contextlib.suppress(OSError):
            while True:
                kind, host, _, body = _receive_packet(connection)
                if kind == _GIVE:
                    self._put(host, _GIVE, 0, body)
                    continue
                _send_packet(connection, _ANSWER, host, 0, self._ask(host, body))

    def _ask(self, host: int, body: bytearray) -> bytearray:
        """Another host's answer; an empty one: it has not come in time, or the last has not."""
        if self._closed or time.monotonic() < self._not_before[host]:
            return bytearray()
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue[bytearray]()
        self._put(host, _ASK, number, body)
        try:
            return answer.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            self._not_before[host] = time.monotonic() + _PAUSE_SECONDS
            return bytearray()
        finally:
            self._answers.pop(number, None)

    def _put(self, host: int, kind: int, number: int, body: bytes | bytearray) -> None:
        """Queues a packet for a host; one that has no room is dropped, and is a timeout or not kept."""
        with contextlib.suppress(queue.Full):
            self._queues[host].put_nowait((kind, number, body))

    def _send(self, host: int) -> None:
        """Sends the packets for one host."""
        rank = self._group.ranks[host]
        try:
            while True:
                kind, number, body = self._queues[host].get()
                header = bytearray(_HEADER.pack(kind, self._group.rank, number, len(body)))
                for tag, data in ((_HEADERS, header), (_BODIES, bytearray(body))):
                    if data:
                        send(torch.frombuffer(data, dtype=torch.uint8), rank, tag, self._group)
        except TrigramError as e:
            self._end(e)

    def _receive(self) -> None:
        """Receives the packets of all hosts."""
        header = torch.zeros(_HEADER.size, dtype=torch.uint8, device="cpu")
        try:
            while True:
                sender = self._await(header, None, _HEADERS)
                kind, host, number, length = _HEADER.unpack(header.numpy().tobytes())
                if length > _MOST or self._group.ranks[host] != sender:
                    raise TrigramError(f"rank {sender} has sent an invalid request for samples")
                body = bytearray(length)
                if length:
                    self._await(torch.frombuffer(body, dtype=torch.uint8), sender, _BODIES)
                self._take(kind, host, number, body)
        except TrigramError as e:
            self._end(e)

    def _await(self, t: torch.Tensor, source: int | None, tag: int) -> int:
        """Receives a message. The engine's threads drive the call, for this one may wait for hours."""
        work = recv(t, source, tag, self._group, async_op=True, timeout=math.inf)
        ended = threading.Event()
        work.get_future().add_done_callback(lambda _: ended.set())
        ended.wait()
        work.wait()
        return work.source_rank()

    def _take(self, kind: int, host: int, number: int, body: bytearray) -> None:
        if kind == _ANSWER:
            if (answer := self._answers.get(number)) is not None:
                answer.put(body)
        elif kind == _ASK:
            keys = [bytes(body[at : at + _KEY]) for at in range(0, len(body), _KEY)]
            self._put(host, _ANSWER, number, _packed(self._opened().get(keys)))
        else:
            at, records, whole = 0, {}, memoryview(body)
            while at + _KEY + _LENGTH.size <= len(body):
                key = bytes(whole[at : at + _KEY])
                (length,) = _LENGTH.unpack_from(body, at + _KEY)
                at += _KEY + _LENGTH.size + max(length, 0)
                if key.startswith(self._identity) and length > 0 and at <= len(body):
                    records[key] = bytes(whole[at - length : at])
            self._opened().put(records)

    def _end(self, error: TrigramError) -> None:
        """Stops, because a host is lost or the job ends."""
        if not self._closed and not self._stay.over:
            logs.info(f"CachedDataset: samples are not asked of other hosts any more: {error}")
        self.close()


def start(opened: Callable[[], Store], identity: bytes, group: world.AnyGroup) -> Client | None:
    """Connects the hosts of a group. All ranks call it.

    Returns:
        How this process reaches the records of other hosts; None: there is one host.

    Raises:
        MismatchError: Ranks have other data.
    """
    ranks = world.resolve(group)
    hosts = ranks.hosts()
    host = next(h for h, members in enumerate(hosts) if ranks.rank in members)
    serving = [ranks.ranks[members[0]] for members in hosts]
    between = world.current().derive(ranks, "samples of other hosts", serving)
    server = None
    if len(hosts) > 1 and ranks.rank == hosts[host][0]:
        server = Server(between, opened, identity)
    mine = identity + (server.address.encode() if server is not None else b"")
    everyone = all_gather_bytes(ranks, mine)
    others = [r for r, theirs in zip(ranks.ranks, everyone, strict=True) if theirs[:16] != everyone[0][:16]]
    if others:
        if server is not None:
            server.close()
        raise MismatchError(
            f"CachedDataset: ranks {others} have other data than rank {ranks.ranks[0]}, or its samples "
            "differ each time; pass the same data set on all ranks, or key="
        )
    if len(hosts) == 1:
        return None
    return Client(everyone[hosts[host][0]][16:].decode(), len(hosts), host, server)


def _send_packet(to: socket.socket, kind: int, host: int, number: int, body: bytes | bytearray) -> None:
    to.sendall(_HEADER.pack(kind, host, number, len(body)))
    to.sendall(body)


def _receive_packet(source: socket.socket) -> tuple[int, int, int, bytearray]:
    kind, host, number, length = _HEADER.unpack(_receive_exactly(source, _HEADER.size))
    return kind, host, number, _receive_exactly(source, length)


def _receive_exactly(source: socket.socket, length: int) -> bytearray:
    if length > _MOST:
        raise OSError(f"a packet of {length} bytes is too large")
    whole = bytearray(length)
    at = memoryview(whole)
    while at:
        count = source.recv_into(at)
        if not count:
            raise ConnectionError("the serving rank has closed the connection")
        at = at[count:]
    return whole


def _packed(records: Sequence[bytearray | None]) -> bytearray:
    body = bytearray()
    for record in records:
        if record is None or len(body) + len(record) > _MOST // 2:
            body += _LENGTH.pack(-1)
        else:
            body += _LENGTH.pack(len(record)) + record
    return body


def _unpacked(body: bytearray, count: int) -> list[bytearray | None]:
    """The records of an answer; one without a body, or a short one, has none."""
    records: list[bytearray | None] = []
    at = 0
    while len(records) < count and at + _LENGTH.size <= len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + max(length, 0)
        records.append(body[at - length : at] if length >= 0 and at <= len(body) else None)
    return records + [None] * (count - len(records))
