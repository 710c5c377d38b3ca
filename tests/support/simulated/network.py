"""The engine and the store, simulated: calls of groups, what ranks learn of the end of others, and when."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.simulated.scheduler import Scheduler
from trigram.errors import AbortedError, MismatchError, PeerLostError, TimeoutError, TrigramError
from trigram.runtime import engine_codes, serving
from trigram.runtime.live_store import ReconnectingStore

_NAMES = {code: name for name, code in vars(engine_codes)["_COLLECTIVES"].items()}
_DTYPES = {code: dtype for dtype, code in engine_codes.DTYPES.items()}
_OPS = {engine_codes.OPS[name]: name for name in engine_codes.OP_NAMES}
_POLL = 0.01
"""Seconds between two looks of a rank that waits at what others wait for."""
_LATEST = (0.0, 0.0, 0.001, 0.05, 0.7)
"""Seconds until a rank learns of something; one is chosen."""


@dataclass(eq=False)
class Process:
    """A rank's process.

    Attributes:
        rank: Its rank.
        number: Of the processes of this rank.
        alive: It has not been killed.
        engines: Those that it has made.
    """

    rank: int
    number: int
    alive: bool = True
    engines: list[Engine] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.number})" if self.number else "")


@dataclass(eq=False)
class _Call:
    """A collective of a group.

    Attributes:
        asked: What the first rank has called, and by rank what each has.
        given: By rank the bytes that it has brought.
        ended: Ranks on which it has ended or failed.
        told: By rank the error that another has told it.
    """

    asked: dict[int, engine_codes.Asked] = field(default_factory=dict)
    given: dict[int, bytes] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    told: dict[int, TrigramError] = field(default_factory=dict)


class Network:
    """What all ranks share.

    Args:
        scheduler: The time, and the choices.

    Attributes:
        hosts: The host of each rank; other ranks are on that of rank 0.
        gentle: A rank that leaves spoils no call for which it has given its part. Otherwise it may.
        without_store: Ranks that do not reach the store.
        calls: By the connections and the group, its calls.
        messages: By these, sender, receiver and tag, when a message comes, and what it is.
        turns: By the same, the number of the last receive.
        values: What is in the store.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.hosts: dict[int, int] = {}
        self.gentle = False
        self.without_store: set[int] = set()
        self.calls: dict[Any, list[_Call]] = {}
        self.connecting: dict[tuple[bytes, ...], dict[int, Engine]] = {}
        self.endpoints: dict[bytes, Process] = {}
        self.values: dict[str, bytes] = {}
        self.messages: dict[Any, list[tuple[float, bytes]]] = {}
        self.turns: dict[Any, int] = {}
        self.numbers = itertools.count(1)

    def delay(self) -> float:
        """How long something takes to become known."""
        return self.scheduler.choices.choice(_LATEST)

    def kill(self, process: Process) -> None:
        """Ends a process; the others notice."""
        process.alive = False
        for engine in process.engines:
            engine.closes("dead")

    def part(self, here: list[Process], there: list[Process]) -> None:
        """Resets the connections between two parts, which take each other for dead."""
        for one in here:
            for other in there:
                for a, b in ((one, other), (other, one)):
                    for engine in a.engines:
                        if b.rank in engine.ranks and not engine.closed:
                            self.scheduler.at(self.delay(), lambda e=engine, r=b.rank: e.loses(r, "dead"))


class Engine:
    """``_core.Engine``.

    Args:
        network: The network.
        process: Whose it is.
        key: The same on all ranks that it connects.
        ranks: Those.
        peers: By rank the engines of them that exist; all of them share it.
    """

    def __init__(
        self, network: Network, process: Process, key: Any, ranks: list[int], peers: dict[int, Engine]
    ) -> None:
        self.network, self.process, self.key, self.ranks, self.peers = network, process, key, ranks, peers
        self.known: dict[int, str] = {}
        self.closed: str | None = None
        self.hosts = [network.hosts.get(r, 0) for r in range(max(ranks) + 1)]
        self.groups: dict[Any, Core] = {}
        process.engines.append(self)
        for rank, peer in peers.items():
            if peer.closed is not None:  # before this one was there to be told
                self._learns(rank, peer.closed)
        peers[process.rank] = self

    def group(self, name: str, ranks: list[int], ordinal: int, helpers: int) -> Core:
        """A group."""
        key = (self.key, tuple(ranks), ordinal)
        if key not in self.groups:
            self.groups[key] = Core(self, key, name, list(ranks))
        return self.groups[key]

    def losses(self) -> list[tuple[int, str]]:
        """Who is lost, as far as is known here."""
        return sorted(self.known.items(), key=lambda item: item[1] == "left")

    def loses(self, rank: int, kind: str) -> None:
        """It takes a rank for lost; who stays, told by nobody else, learns it as well."""
        if self.closed is None and rank not in self.known and rank != self.process.rank:
            self.known[rank] = kind

    def closes(self, kind: str) -> None:
        """The others lose it."""
        if self.closed is not None:
            return
        self.closed = kind
        for rank, peer in self.peers.items():
            if rank != self.process.rank:
                peer._learns(self.process.rank, kind)

    def _learns(self, rank: int, kind: str) -> None:
        """It will learn of a loss."""
        self.network.scheduler.at(self.network.delay(), lambda: self.loses(rank, kind))

    def shutdown(self, exiting: bool, patient: bool = True) -> None:
        """Closes the connections."""
        self.closes("left")

    def send_away(self, rank: int, why: str) -> None:
        """Takes a rank for lost."""
        self.loses(rank, "evicted")

    def am_sent_away(self) -> bool:
        """Whether it was."""
        return False

    def write_out_log(self) -> None:
        """There is none."""

    def allocate(self, nbytes: int) -> Memory:
        """Memory that others could reach."""
        return Memory(nbytes)

    def counters(self) -> dict[str, Any]:
        """None."""
        return {}


class Memory:
    """``_core.RegisteredMemory``."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(nbytes)
        self.nbytes, self.address = nbytes, ctypes.addressof(self._bytes)


class Rendezvous:
    """``_core.Rendezvous``."""

    def __init__(self, network: Network, rank: int, size: int, *_: object) -> None:
        self.network, self.rank = network, rank
        running = network.scheduler.running
        assert running is not None
        self.process: Process = running.process
        self.token = b"%d:%d" % (rank, next(network.numbers))
        network.endpoints[self.token] = self.process
        self.records: list[bytes] = []

    def endpoint_record(self) -> bytes:
        """Where others find it."""
        return self.token

    def handshake(self, records: list[bytes], timeout: float, look: object = None) -> bool:
        """Whether it shares memory with the ranks of its host."""
        self.records = list(records)
        assert records[self.rank] == self.token
        self.network.scheduler.pause("a handshake")
        there = [self.network.endpoints[record] for record in records if record]
        hosts = self.network.hosts
        same = [p for p in there if hosts.get(p.rank, 0) == hosts.get(self.rank, 0)]
        if not all(p.alive for p in same):
            self.network.scheduler.sleep(self.network.scheduler.choices.choice((0.01, timeout)))
        return all(p.alive for p in same)

    def connect(
        self, verdicts: list[bool], timeout: float, beside: Engine | None = None, look: object = None
    ) -> Engine:
        """The engine, when all have come."""
        key = tuple(self.records)
        ranks = [rank for rank, record in enumerate(self.records) if record]
        there = {rank: self.network.endpoints[self.records[rank]] for rank in ranks}
        peers = self.network.connecting.setdefault(key, {})
        engine = Engine(self.network, self.process, key, ranks, peers)
        before = len(beside.known) if beside is not None else 0

        def lost() -> bool:
            return beside is not None and len(beside.known) > before

        def failed() -> bool:
            return any(not process.alive or (r in peers and peers[r].closed) for r, process in there.items())

        def done() -> bool:
            return lost() or failed() or len(peers) == len(ranks)

        came = self.network.scheduler.wait(done, "the others to connect", timeout)
        if len(peers) == len(ranks) and (
            not (lost() or failed()) or self.network.scheduler.choices.random() < 0.5
        ):
            return engine
        engine.closes("dead")
        if lost():
            raise AbortedError("another rank was lost while the ranks connected")
        if not came:
            raise TimeoutError("not all ranks have connected")
        raise PeerLostError("a rank has ended while the ranks connected", ranks[0])


class Core:
    """``_core.Group``."""

    def __init__(self, engine: Engine, key: Any, name: str, ranks: list[int]) -> None:
        self.engine, self.key, self.name, self.ranks = engine, key, name, ranks
        self.rank = ranks.index(engine.process.rank)
        self.id = abs(hash(key))
        self.hosts = [list(range(len(ranks)))]
        self._next = 0
        self._aborted: tuple[int, str] | None = None

    def next(self) -> int:
        """The number of the next call."""
        return self._next

    def set_pass(self, number: int) -> None:
        """Of no effect here."""

    def rates(self) -> list[float]:
        """Not measured."""
        return []

    def all_reduce(self, t: object, op: int, timeout: float | None = None) -> bool:
        """The shortest way, which is not taken."""
        return False

    def run(
        self,
        asked: engine_codes.Asked,
        memory: tuple[int, int, int, int],
        timeout: float | None = None,
        splits: object = None,
        lists: object = None,
    ) -> None:
        """Makes a call and waits for it. What ends the wait ends the call on all ranks."""
        work = self.start(asked, memory, timeout, splits, lists)
        try:
            work.wait()
        except TrigramError as e:
            work.stop(e)
            raise

    def start(
        self,
        asked: engine_codes.Asked,
        memory: tuple[int, int, int, int],
        timeout: float | None = None,
        splits: object = None,
        lists: object = None,
    ) -> Work:
        """Makes a call."""
        assert splits is None and lists is None
        number, self._next = self._next, self._next + 1
        return Work(self, number, self._call(number), asked, memory, timeout)

    def _call(self, number: int) -> _Call:
        calls = self.engine.network.calls.setdefault(self.key, [])
        while len(calls) <= number:
            calls.append(_Call())
        return calls[number]

    def tell(self, number: int, call: _Call, error: TrigramError) -> None:
        """A call has failed here: the others learn of it."""
        me = self.engine.process.rank
        for rank in self.ranks:
            if rank != me:
                delay = self.engine.network.delay()
                self.engine.network.scheduler.at(delay, lambda rank=rank: call.told.setdefault(rank, error))

    def check_consistency(
        self, asked: engine_codes.Asked, timeout: float | None = None, splits: object = None
    ) -> Work:
        """Whether all ranks make the same call."""
        return self.start((engine_codes.BARRIER, *asked[1:]), (0, 0, 0, 0), timeout)

    def message(
        self,
        sends: bool,
        peer: int | None,
        tag: int,
        dtype: int,
        len: int,
        address: int,
        background: bool,
        shorter: bool,
        timeout: float | None,
    ) -> tuple[Message | None, int | None]:
        """Sends or receives."""
        assert peer is not None
        message = Message(self, sends, self.ranks[peer], tag, address, len * _DTYPES[dtype].itemsize, timeout)
        if background:
            return message, None
        message.wait()
        return None, self.ranks[peer]

    def abort(self, through: int, why: str) -> None:
        """Aborts calls, here and on the others."""
        for number in range(through):
            call, me = self._call(number), self.engine.process.rank
            if me not in call.ended:
                call.told.setdefault(me, AbortedError(why))
                self.tell(number, call, AbortedError(why))


class _Waits:
    """What can be waited for.

    Attributes:
        core: The group in which it is.
        error: Why it has failed; None: it has not.
        completed: It has ended or failed.
    """

    core: Core
    error: TrigramError | None = None
    completed = False

    def is_completed(self) -> bool:
        """Whether it has ended."""
        if not self.completed:
            self._look()
        return self.completed

    def serve_when_done(self) -> None:
        """Of no effect here: who waits looks all the time."""

    def sender(self) -> None:
        """Not known."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for it, and makes meanwhile what other ranks wait for."""
        scheduler = self.core.engine.network.scheduler
        end = None if timeout is None else scheduler.now + timeout
        while not self.completed:
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                return False
            polls = bool(serving._servers.known)
            if polls:
                serving.serve()
                left = _POLL if left is None else min(left, _POLL)
            scheduler.wait(self.is_completed, str(self), left)
        if self.error is not None:
            raise self.error
        return True

    def _look(self) -> None:
        """Ends it, if it can end or fail."""
        raise NotImplementedError


class Message(_Waits):
    """``_core.Work`` of a message."""

    def __init__(
        self, core: Core, sends: bool, peer: int, tag: int, address: int, nbytes: int, timeout: float | None
    ) -> None:
        self.core, self.sends, self.peer, self.address, self.nbytes = core, sends, peer, address, nbytes
        engine, me = core.engine, core.engine.process.rank
        scheduler = engine.network.scheduler
        scheduler.pause(f"{self} begins")
        self.end = None if timeout is None else scheduler.now + timeout
        channel = core.key, (me, peer) if sends else (peer, me), tag
        self.box = engine.network.messages.setdefault(channel, [])
        if not sends:
            turns = engine.network.turns
            self.turn = turns[channel] = turns.get(channel, -1) + 1
        elif engine.closed is None:
            comes = scheduler.now + scheduler.choices.choice((0.0, 0.0, 0.001))
            comes = max(comes, self.box[-1][0]) if self.box else comes  # in the order in which they were sent
            self.box.append((comes, ctypes.string_at(address, nbytes)))
            scheduler.at(comes - scheduler.now, lambda: None)  # who waits looks then

    def __str__(self) -> str:
        return (
            f"a message {'to' if self.sends else 'from'} {self.peer} of {self.core.name!r} {self.core.ranks}"
        )

    def _look(self) -> None:
        engine = self.core.engine
        now = engine.network.scheduler.now
        there = self.sends or (len(self.box) > self.turn and self.box[self.turn][0] <= now)
        if engine.closed is not None:
            self.error = AbortedError(f"{self}: this rank has left")
        elif there:
            if not self.sends:
                _, data = self.box[self.turn]
                assert len(data) == self.nbytes, str(self)
                ctypes.memmove(self.address, data, self.nbytes)
        elif self.peer in engine.known:
            self.error = PeerLostError(f"{self}: it is lost", self.peer)
        elif self.end is not None and now >= self.end:
            self.error = TimeoutError(f"{self}: it has not come")
        else:
            return
        self.completed = True


class Work(_Waits):
    """``_core.Work`` of a collective."""

    def __init__(
        self,
        core: Core,
        number: int,
        call: _Call,
        asked: engine_codes.Asked,
        memory: tuple[int, int, int, int],
        timeout: float | None,
    ) -> None:
        self.core, self.number, self.call, self.asked, self.memory = core, number, call, asked, memory
        self.me = core.engine.process.rank
        scheduler = core.engine.network.scheduler
        scheduler.pause(f"{self} begins")
        self.end = None if timeout is None else scheduler.now + timeout
        self.comes: float | None = None
        if core.engine.closed is None:
            call.asked[self.me] = asked
            call.given[self.me] = ctypes.string_at(memory[0], memory[1]) if memory[1] else b""
        if self.end is not None:
            scheduler.at(timeout or 0.0, self._look)

    def __str__(self) -> str:
        return f"{_NAMES[self.asked[0]]} {self.number} of {self.core.name!r} {self.core.ranks}"

    def stop(self, why: TrigramError) -> None:
        """Who has called it waits no longer, for this reason."""
        if not self.completed:
            self.completed = True
            self.call.ended.add(self.me)
            self.error = AbortedError(f"rank {self.me} stopped waiting for this call: {why}")
            self.core.tell(self.number, self.call, self.error)

    def _look(self) -> None:
        """Ends it, if it can end or fail."""
        if self.completed:
            return
        engine, call = self.core.engine, self.call
        others = [r for r in self.core.ranks if r in call.asked and call.asked[r] != self.asked]
        lost = [r for r, _ in engine.losses() if r in self.core.ranks]
        # Who leaves waits until the others have what it has sent, though perhaps through others that die.
        kinds = {kind for r, kind in engine.losses() if r in self.core.ranks}
        spoils = not engine.network.gentle or kinds != {"left"}
        root = self.core.ranks[self.asked[5]] if _NAMES[self.asked[0]] == "broadcast" else None
        needs = [root] if root is not None else self.core.ranks
        given = all(r in call.given for r in needs)
        there = given and self._has_come()
        error: TrigramError | None = None
        if engine.closed is not None:
            error = AbortedError(f"{self}: this rank has left")
        elif others:
            error = MismatchError(f"{self}: rank {self.me} calls {self.asked}, others {call.asked}")
        elif self.me in call.told and not (there and engine.network.scheduler.choices.random() < 0.3):
            error = call.told[self.me]
        elif given and not there and lost and not spoils:
            return
        elif lost and not (there and (not spoils or engine.network.scheduler.choices.random() < 0.5)):
            error = PeerLostError(f"{self}: rank {lost[0]} is lost", lost[0])
        elif self.end is not None and engine.network.scheduler.now >= self.end and not there:
            missing = [r for r in needs if r not in call.given]
            error = TimeoutError(f"{self}: ranks {missing} have not come")
        elif not there:
            return
        self.completed = True
        call.ended.add(self.me)
        if error is not None:
            self.error = error
            self.core.tell(self.number, call, error)
        else:
            self._write()

    def _has_come(self) -> bool:
        """Whether what all have brought has come here: on some ranks it is late."""
        scheduler = self.core.engine.network.scheduler
        if self.comes is None:
            delay = scheduler.choices.choice(_LATEST) if scheduler.choices.random() < 0.1 else 0.0
            self.comes = scheduler.now + delay
            scheduler.at(delay, self._look)
        return self.comes <= scheduler.now

    def _write(self) -> None:
        kind, dtype, _, op, _, root = self.asked
        name, given, ranks = _NAMES[kind], self.call.given, self.core.ranks
        if name == "all_gather":
            found = b"".join(given[r] for r in ranks)
        elif name == "broadcast":
            found = given[ranks[root]]
        elif name == "all_reduce":
            found = _reduced([given[r] for r in ranks], _DTYPES[dtype], _OPS[op])
        else:
            assert name == "barrier", name
            return
        assert len(found) == self.memory[3], str(self)
        ctypes.memmove(self.memory[2], found, len(found))


def _reduced(given: list[bytes], dtype: torch.dtype, op: str) -> bytes:
    rows = torch.stack([torch.frombuffer(bytearray(each), dtype=dtype) for each in given])
    ops = {"sum": rows.sum, "max": rows.amax, "min": rows.amin, "avg": rows.mean}
    reduced = ops[op](0)
    return reduced.to(dtype).numpy().tobytes()


class Store(ReconnectingStore):
    """A process's connection to the store."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.store: Any = _Values(network.values)
        self.reopen: Any = lambda: self.store
        self.address = ""

    def __call__(self, operation: Callable[[Any], Any], seconds: float = 10.0) -> Any:
        """The result of an operation; None: it is not reached."""
        self.network.scheduler.pause("the store")
        if self.process.rank in self.network.without_store:
            self.network.scheduler.sleep(self.network.scheduler.choices.choice((0.0, min(seconds, 1.0))))
            return None
        return operation(self.store)


class _Values:
    """The operations of a store."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, value: int) -> int:
        found = int(self.values.get(key, b"0")) + value
        self.values[key] = str(found).encode()
        return found

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        now = self.values.get(key, b"")
        if now == (expected.encode() if isinstance(expected, str) else bytes(expected)):
            self.set(key, desired)
            return self.values[key]
        return now
