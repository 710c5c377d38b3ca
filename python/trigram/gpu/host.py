"""The route of GPU tensors through host memory and the engine.

AllReduce copies its tensor to pinned bounce buffers in chunks: the engine sends a chunk as soon as it is
copied, and the result is copied back as soon as it has arrived. With ``inside``, AllReduce first sums among
the GPUs of each host (NCCL), and only shards are sent between hosts (:mod:`trigram.gpu.two_level`).

The engine's calls start when the copies are done, in a group that only this route uses. A consistency check,
an empty call of the caller's group, compares what the ranks called; if it fails, the route aborts the calls
in flight.
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
from trigram.gpu.device import Call, Device, Message, StartCall
from trigram.gpu.two_level import TwoLevelGroups
from trigram.runtime import engine_codes, job
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group

CHUNK = 4 << 20
"""Bytes per chunk: large enough for full speed, small enough that copying overlaps with sending."""
_SMALLEST_BUFFER = 1 << 16
"""Bytes."""

_LONG = 3600.0
"""Seconds: a deadline that a call of NCCL does not read as none at all."""

_SUM, _AVG = engine_codes.OPS["sum"], engine_codes.OPS["avg"]


class HostRoute:
    """The route through host memory.

    Args:
        asked: The group of the caller; consistency checks use it.
        group: A group of the same ranks that only this route uses.
        device: This rank's device.
        inside: Starts a collective among the GPUs of one host. AllReduce then sums inside each host first, if
            a host has several ranks. None: all ranks send the whole tensor.
    """

    def __init__(self, asked: Group, group: Group, device: Device, inside: StartCall | None) -> None:
        self.asked = asked.core  # not the group, which refers to this route: that would be a cycle
        self.group, self.device = group, device
        self.rank = group.ranks[group.rank]  # also known when the job has ended, in other threads
        self.broken = False
        self.starter, self.finisher = _InOrder("trigram-gpu-copies"), _InOrder("trigram-gpu-results")
        for thread in (self.starter, self.finisher):
            weakref.finalize(self, thread.queue.put, None).atexit = False
        self.lock = threading.Lock()
        self.free: dict[int, list[tuple[Callable[[], bool], torch.Tensor]]] = {}
        self.before: Call | None = None
        self.two_levels = inside is not None
        self.levels = TwoLevelGroups(group, inside) if inside and TwoLevelGroups.applies_to(group) else None

    def start(
        self,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """See :class:`trigram.gpu.device.Route`; it reads ``source`` after the work on the current stream."""
        self._check()
        same = target is source
        source = None if source is None else source.detach()
        target = source if same else None if target is None else target.detach()
        if asked[0] == engine_codes.ALL_REDUCE:
            assert target is not None
            return self._all_reduce(asked, target.view(-1), timeout)
        transfer = _Transfer(self, self.asked.check_consistency(asked, timeout, splits))
        transfer.before, self.before = self.before, None
        host = None if source is None else transfer.fetch(source.view(-1))
        wanted = host if target is source else None if target is None else transfer.buffer(target.view(-1))
        memory = _address(host) + _address(wanted)
        core = self.group.core
        transfer.begin(partial(core.start, asked, memory, timeout, splits), wanted, target)
        return transfer.go()

    def follow(self, call: Call) -> None:
        """The next collective reads what this call writes: it sends nothing if the call fails."""
        self.before = call

    def _check(self) -> None:
        if self.device.capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured, and collectives through host memory cannot be part of it; "
                "move the call out of the capture, or set TRIGRAM_GPU_TRANSPORT=nccl"
            )

    def batch_send_recv(self, messages: Sequence[Message], timeout: float | None) -> Call:
        """See :class:`trigram.gpu.device.Route`."""
        self._check()
        transfer = _Transfer(self)
        for sends, peer, t, code in messages:
            self._message(transfer, self.group, sends, peer, 0, t, code, timeout)
        return transfer.go()

    def message(
        self,
        group: Group,
        sends: bool,
        peer: int,
        tag: int,
        t: torch.Tensor,
        code: int,
        timeout: float | None,
    ) -> Call:
        """Starts sending or receiving one message with a tag, in any group."""
        self._check()
        transfer = _Transfer(self)
        self._message(transfer, group, sends, peer, tag, t, code, timeout)
        return transfer.go()

    def _message(
        self,
        transfer: _Transfer,
        group: Group,
        sends: bool,
        peer: int,
        tag: int,
        t: torch.Tensor,
        code: int,
        timeout: float | None,
    ) -> None:
        t = t.detach()
        host = transfer.fetch(t.view(-1)) if sends else transfer.buffer(t.view(-1))
        core = group.core

        def send() -> _core.Work:
            work, _ = core.message(
                sends, peer, tag, code, host.numel(), host.data_ptr(), True, False, timeout
            )
            assert work is not None
            return work

        transfer.begin(send, None if sends else host, None if sends else t)

    def _all_reduce(self, asked: Asked, t: torch.Tensor, timeout: float | None) -> Call:
        what, code, count, op, via, root = asked
        transfer = _Transfer(self, self.asked.check_consistency(asked, timeout))
        transfer.before, self.before = self.before, None
        group = self.group
        if self.levels is not None and op < engine_codes.OPS["band"]:  # NCCL has no bitwise operators
            shards = self.levels.shards(count)
            inside = _SUM if op == _AVG else op
            try:
                self.levels.prepare(t)
                transfer.before = self.levels.combine(t, shards, inside)
            except Exception as e:
                self.abort(f"rank {self.rank}: {e}")  # the other ranks wait for this one's part
                raise
            transfer.last = partial(self.levels.spread, t, shards)
            transfer.total = t
            transfer.divisor = self.group.size if op == _AVG else 1
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

    def abort(self, why: str) -> None:
        """Aborts the route, on all ranks: others may wait for calls that this one has not made yet."""
        self.broken = True
        self.group.abort(why)
        if self.levels is not None:
            self.levels.abort(why)

    # Bounce buffers.

    def take(self, nbytes: int) -> torch.Tensor:
        """A pinned buffer (uint8) of at least ``nbytes`` bytes."""
        size = max(_SMALLEST_BUFFER, 1 << max(nbytes - 1, 0).bit_length())
        with self.lock:
            free = self.free.setdefault(size, [])
            for k, (is_free, memory) in enumerate(free):
                if is_free():
                    del free[k]
                    return memory
        return self.device.pinned(size)

    def give(self, memory: Sequence[torch.Tensor]) -> None:
        """Returns buffers to the pool; they are free when the current stream has finished its present
        work."""
        is_free = self.device.mark()
        with self.lock:
            for m in memory:
                self.free[m.nbytes].append((is_free, m))


class _InOrder:
    """A thread for one part of all operations of a route, in their order, so that callers need not wait. One
    waits for copies and then starts the engine's calls. Another gives the ranks of a host each other's
    shards, when they have arrived: ranks may wait for their operations in any order, and begin others
    between."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.job = job.here()
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def put(self, begin: Callable[[], None]) -> None:
        """Queues ``begin``; starts the thread if it does not run yet."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self.thread.start()
        self.queue.put(begin)

    def _serve(self) -> None:
        with self.job.here():
            while (begin := self.queue.get()) is not None:
                begin()
                del begin


class _Transfer:
    """One operation in flight: copies to the host, calls of the engine, copies back."""

    def __init__(self, route: HostRoute, consistency_check: _core.Work | None = None) -> None:
        self.route, self.consistency_check = route, consistency_check
        self.arrivals: list[Callable[[], None]] = []
        self.parts: list[tuple[list[Callable[[], None]], Callable[[], _core.Work]]] = []
        self.backs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self.works: list[_core.Work] = []
        self.memory: list[torch.Tensor] = []
        # With two levels ``before`` writes what the engine's calls send; when they have ended, ``last``
        # starts the call that spreads the results, which are then divided.
        self.before: Call | None = None
        self.last: Callable[[], Call] | None = None
        self.total: torch.Tensor | None = None
        self.divisor = 1
        self.begun, self.finished = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        # By threads that wait, under the lock.
        self.landed = 0
        self.written: Callable[[], None] | None = None
        self.over = False

    # Building it.

    def buffer(self, t: torch.Tensor) -> torch.Tensor:
        """A pinned buffer with the size and dtype of a tensor."""
        memory = self.route.take(t.nbytes)
        self.memory.append(memory)
        return memory[: t.nbytes].view(t.dtype)

    def fetch(self, t: torch.Tensor) -> torch.Tensor:
        """Starts copying a tensor to a buffer, and returns the buffer."""
        host = self.buffer(t)
        self.arrivals.append(self.route.device.fetch(host, t))
        return host

    def begin(
        self, call: Callable[[], _core.Work], host: torch.Tensor | None, target: torch.Tensor | None
    ) -> None:
        """Adds a call that starts when the copies so far have finished; then ``host`` is copied to
        ``target``."""
        self.parts.append((self.arrivals, call))
        self.backs.append((host, target))
        self.arrivals = []

    def go(self) -> _Transfer:
        """Hands the calls to the thread that starts them."""
        self.after = self.route.device.here()
        self.route.starter.put(self._start)
        if self.last is not None:
            self.route.finisher.put(self._finish)
        else:
            self.finished.set()
        return self

    def _start(self) -> None:
        try:
            for arrivals, call in self.parts:
                for arrival in arrivals:
                    arrival()
                self._check_before()
                self.works.append(call())
        except BaseException as e:
            self.error = e
        self.begun.set()

    def _check_before(self) -> None:
        """Raises if what the calls send is not whole: the stream goes on after a call of NCCL that failed."""
        while self.before is not None and not self.before.wait(_LONG):
            pass  # it has a deadline of its own

    def _finish(self) -> None:
        """With two levels: waits for the results, on a stream that waits for nothing else."""
        try:
            with self.route.device.behind():
                self._wait_within(None)
        except BaseException as e:
            self.error = self.error or e  # every wait raises it
        finally:
            self.finished.set()

    # Waiting for it.

    def is_completed(self) -> bool:
        """See :class:`trigram.gpu.device.Call`."""
        if not self.begun.is_set() or not self.finished.is_set():
            return False
        # A thread waits for it already. That may be this one: in the wait it makes what other ranks wait for,
        # looks at this call too, and would wait for itself.
        if self.lock.locked() and not self.over:
            return False
        if self.consistency_check is not None and not self.consistency_check.is_completed():
            return False
        if self.before is not None and not self.before.is_completed():
            return False
        return all(w.is_completed() for w in self.works)

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`trigram.gpu.device.Call`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return self.finished.wait(timeout) and self._wait_within(_left(deadline))

    def _wait_within(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.begun.wait(timeout):
            return False
        # Several threads may wait, such as the caller's and one of a future. Each part is copied back once.
        left = _left(deadline)
        if not self.lock.acquire(timeout=-1 if left is None else left):
            return False
        try:
            return self._wait(deadline)
        finally:
            self.lock.release()

    def _wait(self, deadline: float | None) -> bool:
        if self.written is not None:
            self.written()  # on another stream perhaps, from which an earlier wait has copied parts back
        if self.over:
            if self.error is not None:
                raise self.error
            return True
        try:
            if not self._land(deadline):
                return False
            if self.error is not None:
                raise self.error
            if self.last is not None:
                self._spread(self.last)
        except Exception as e:
            self.error = e
            if self.consistency_check is not None:
                self.route.abort(f"rank {self.route.rank}: {e}")
            self._drain()
            raise
        self.written = self.route.device.here()
        self._end()
        return True

    def _land(self, deadline: float | None) -> bool:
        """Copies back what arrives; False: the deadline came before all had arrived."""
        if self.consistency_check is not None and not self.consistency_check.wait(_left(deadline)):
            return False
        before = self.landed
        try:
            while self.landed < len(self.works):
                if not self.works[self.landed].wait(_left(deadline)):
                    return False
                host, target = self.backs[self.landed]
                if host is not None and target is not None:
                    self.after()  # the current stream may differ from that of the caller of start
                    target.view(-1).copy_(host, non_blocking=True)
                self.landed += 1
        finally:
            if self.landed > before:
                self.written = self.route.device.here()
        return True

    def _spread(self, last: Callable[[], Call]) -> None:
        """Gives all ranks of the host all shards, which have arrived."""
        self._check_before()  # a rank that sends no shard has not
        ending = last()
        while not ending.wait(_LONG):
            pass
        if self.total is not None and self.divisor > 1:
            self.total.div_(self.divisor)

    def _drain(self) -> None:
        """Waits until nothing reads or writes the buffers any more."""
        ends: list[Callable[[], object]] = [end for arrivals, _ in self.parts for end in arrivals]
        ends += [work.wait for work in self.works]
        for end in ends:
            with contextlib.suppress(Exception):
                end()
        self._forget()

    def order(self) -> None:
        """See :class:`trigram.gpu.device.Call`."""
        self.wait()

    def _end(self) -> None:
        """Returns the buffers, which are free when the copies back have finished; the current stream comes
        after those on other streams."""
        self.route.give(self.memory)
        self.parts, self.backs, self.memory = [], [], []
        self._forget()

    def _forget(self) -> None:
        """What refers to other calls and tensors is not kept by who keeps this."""
        self.over = True
        self.before = self.last = self.total = None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _address(t: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else (t.data_ptr(), t.nbytes)
