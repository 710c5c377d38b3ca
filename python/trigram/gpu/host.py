"""GPU tensors through host memory and the engine, with what is inside of a host done there.

A collective is copied to pinned memory in chunks, each chunk leaves as soon as it is there, and
comes back as soon as it has arrived. With ``inside``, AllReduce first sums among the GPUs of a host
(NCCL), and only shards travel between hosts (:mod:`trigram.gpu.two_level`).

Calls begin when copies are done, in a group of their own. That all ranks make the same ones is for a
*witness* to say, an empty call of the caller's group: where it fails, what is under route is given up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trigram import _core
from trigram.errors import UnsupportedError
from trigram.gpu.device import Call, Device, Parcel, StartCall
from trigram.gpu.two_level import TwoLevelGroups
from trigram.runtime import engine_codes
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group
from trigram.runtime.world import current

CHUNK = 4 << 20
"""Bytes copied at a time: long enough for full speed, short enough to overlap with what is sent."""
_LEAST = 1 << 16

_SUM, _AVG = engine_codes.OPS["sum"], engine_codes.OPS["avg"]


class HostRoute:
    """How a group's tensors travel through the host.

    Args:
        asked: The group whose calls these are.
        group: The same ranks; nobody else calls it.
        device: This rank's.
        inside: Begins a collective inside a host: AllReduce sums there first, if any host has several
            ranks. None: it does not.
    """

    def __init__(self, asked: Group, group: Group, device: Device, inside: StartCall | None) -> None:
        self.asked = asked.core  # not the group itself, which holds what is made here
        self.group, self.device = group, device
        self.broken = False
        self.starter = _Starter()
        weakref.finalize(self, self.starter.queue.put, None).atexit = False
        self.lock = threading.Lock()
        self.free: dict[int, list[tuple[Callable[[], bool], torch.Tensor]]] = {}
        self.two_levels = inside is not None
        self.levels = TwoLevelGroups(group, inside) if inside and TwoLevelGroups.help(group) else None

    def start(
        self,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """Begins a collective, after what the current stream was given."""
        self._check()
        same = target is source
        source = None if source is None else source.detach()
        target = source if same else None if target is None else target.detach()
        if asked[0] == engine_codes.ALL_REDUCE:
            assert target is not None
            return self._all_reduce(asked, target.view(-1), timeout)
        transfer = _Transfer(self, self.asked.witness(asked, timeout))
        host = None if source is None else transfer.fetch(source.view(-1))
        wanted = host if target is source else None if target is None else transfer.room(target.view(-1))
        memory = _address(host) + _address(wanted)
        core = self.group.core
        transfer.begin(partial(core.start, asked, memory, timeout, splits), wanted, target)
        return transfer.go()

    def _check(self) -> None:
        if self.device.capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured, and collectives through host memory cannot be part of it; "
                "move the call out of the capture, or set TRIGRAM_GPU_TRANSPORT=nccl"
            )

    def exchange(self, parcels: Sequence[Parcel]) -> Call:
        """Begins messages that travel together."""
        self._check()
        transfer = _Transfer(self)
        for sends, peer, t, code in parcels:
            self._message(transfer, self.group, sends, peer, 0, t, code)
        return transfer.go()

    def message(self, group: Group, sends: bool, peer: int, tag: int, t: torch.Tensor, code: int) -> Call:
        """Begins one message in any group, which finds its receiver by the tag."""
        self._check()
        transfer = _Transfer(self)
        self._message(transfer, group, sends, peer, tag, t, code)
        return transfer.go()

    def _message(
        self, transfer: _Transfer, group: Group, sends: bool, peer: int, tag: int, t: torch.Tensor, code: int
    ) -> None:
        t = t.detach()
        host = transfer.fetch(t.view(-1)) if sends else transfer.room(t.view(-1))
        core, timeout = group.core, group.timeout

        def send() -> _core.Work:
            work = core.message(sends, peer, tag, code, host.numel(), host.data_ptr(), True, timeout)
            assert work is not None
            return work

        transfer.begin(send, None if sends else host, None if sends else t)

    def _all_reduce(self, asked: Asked, t: torch.Tensor, timeout: float | None) -> Call:
        what, code, count, op, via, root = asked
        transfer = _Transfer(self, self.asked.witness(asked, timeout))
        group = self.group
        if self.levels is not None and op < engine_codes.OPS["band"]:  # NCCL has no bitwise operators
            shards = self.levels.shards(count)
            inside = _SUM if op == _AVG else op
            self.levels.combine(t, shards, inside)
            transfer.last = partial(self._spread, t, shards, op)
            if self.levels.across is None:
                return transfer.go()
            group, op = self.levels.across, inside
            t = self.levels.owned(t, shards)
        step = CHUNK // t.itemsize
        for part in t.split(step) if t.numel() else ():
            host = transfer.fetch(part)
            chunk = (what, code, part.numel(), op, via, root)
            transfer.begin(partial(group.core.start, chunk, _address(host) * 2, timeout), host, part)
        return transfer.go()

    def _spread(self, t: torch.Tensor, shards: list[int], op: int) -> None:
        """The shards are there: all ranks of the host get them."""
        assert self.levels is not None
        self.levels.spread(t, shards)
        if op == _AVG:
            t.div_(self.group.size)

    def abort(self, why: str) -> None:
        """What is under route fails, here and where it waits for this rank; the next call begins anew."""
        self.broken = True
        self.group.core.abort(self.group.core.next(), why)
        if self.levels is not None:
            self.levels.abort(why)

    # Pinned memory.

    def take(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of at least so many bytes."""
        size = max(_LEAST, 1 << max(nbytes - 1, 0).bit_length())
        with self.lock:
            free = self.free.setdefault(size, [])
            for k, (is_free, memory) in enumerate(free):
                if is_free():
                    del free[k]
                    return memory
        return self.device.pinned(size)

    def give(self, memory: Sequence[torch.Tensor]) -> None:
        """Gives it back, to be used when what the current stream was given has been done."""
        is_free = self.device.mark()
        with self.lock:
            for m in memory:
                self.free[m.nbytes].append((is_free, m))


class _Starter:
    """Begins what waits for a copy, in order, in a thread of its own: callers go on meanwhile."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def put(self, begin: Callable[[], None]) -> None:
        """Next."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name="trigram-gpu-copies", daemon=True)
                self.thread.start()
        self.queue.put(begin)

    def _serve(self) -> None:
        while (begin := self.queue.get()) is not None:
            begin()
            del begin


class _Transfer:
    """Copies out, calls of the engine, copies back."""

    def __init__(self, route: HostRoute, witness: _core.Work | None = None) -> None:
        self.route, self.witness = route, witness
        self.arrivals: list[Callable[[], None]] = []
        self.parts: list[tuple[list[Callable[[], None]], Callable[[], _core.Work]]] = []
        self.backs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self.works: list[_core.Work] = []
        self.memory: list[torch.Tensor] = []
        self.last: Callable[[], None] | None = None
        self.begun = threading.Event()
        self.error: BaseException | None = None
        self.landed = 0
        self.over = False

    # What it is made of.

    def room(self, t: torch.Tensor) -> torch.Tensor:
        """Pinned memory like a tensor."""
        memory = self.route.take(t.nbytes)
        self.memory.append(memory)
        return memory[: t.nbytes].view(t.dtype)

    def fetch(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, under route."""
        host = self.room(t)
        self.arrivals.append(self.route.device.fetch(host, t))
        return host

    def begin(
        self, call: Callable[[], _core.Work], host: torch.Tensor | None, target: torch.Tensor | None
    ) -> None:
        """A call that begins when the copies so far are there; ``host`` comes back to ``target``."""
        self.parts.append((self.arrivals, call))
        self.backs.append((host, target))
        self.arrivals = []

    def go(self) -> _Transfer:
        """All is said: it begins."""
        self.after = self.route.device.here()
        self.route.starter.put(self._start)
        return self

    def _start(self) -> None:
        try:
            for arrivals, call in self.parts:
                for arrival in arrivals:
                    arrival()
                self.works.append(call())
        except BaseException as e:
            self.error = e
        self.begun.set()

    # What becomes of it.

    def is_completed(self) -> bool:
        """See :class:`trigram.gpu.device.Call`."""
        if not self.begun.is_set():
            return False
        return all(w.is_completed() for w in self.works) and (not self.witness or self.witness.is_completed())

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`trigram.gpu.device.Call`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.begun.wait(timeout):
            return False
        if self.over:
            if self.error is not None:
                raise self.error
            return True
        try:
            if self.witness is not None and not self.witness.wait(_left(deadline)):
                return False
            while self.landed < len(self.works):
                if not self.works[self.landed].wait(_left(deadline)):
                    return False
                host, target = self.backs[self.landed]
                self.landed += 1
                if host is not None and target is not None:
                    self.after()  # whoever waits may be on another stream than whoever asked
                    target.view(-1).copy_(host, non_blocking=True)
            if self.error is not None:
                raise self.error
            if self.last is not None:
                self.last()
        except Exception as e:
            self.error = e
            if self.witness is not None:
                self.route.abort(f"rank {current().rank}: {e}")
            self._let_go()
            raise
        self._end()
        return True

    def _let_go(self) -> None:
        """Nothing touches the memory any more when this is over."""
        ends: list[Callable[[], object]] = [end for arrivals, _ in self.parts for end in arrivals]
        ends += [work.wait for work in self.works]
        for end in ends:
            with contextlib.suppress(Exception):
                end()
        self.over = True

    def order(self) -> None:
        """See :class:`trigram.gpu.device.Call`."""
        self.wait()

    def _end(self) -> None:
        """The memory is free again once the copies back have been made."""
        self.over = True
        self.route.give(self.memory)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _address(t: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else (t.data_ptr(), t.nbytes)
