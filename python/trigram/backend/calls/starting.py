"""How a call of a process group starts: which engine group carries it, and what handle the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram.backend.calls import tensors
from trigram.backend.handles.callbacks import Callbacks, running
from trigram.backend.handles.work import Work, explained, handle
from trigram.collectives import work as in_flight
from trigram.collectives.dispatch import Memory, Places, places, start
from trigram.errors import AbortedError, TrigramError
from trigram.gpu import device, routes
from trigram.observe import profiling
from trigram.runtime import engine_codes
from trigram.runtime.group import Group
from trigram.runtime.job import Job

_NOTHING: tuple[torch.Tensor, ...] = ()


class OnDevice:
    """A call on GPU tensors: to wait without a timeout is to make the current stream wait.

    Attributes:
        here: Records an event on the current stream; see :class:`trigram.gpu.device.Device`.
    """

    __slots__ = ("call", "here")

    def __init__(self, call: Any, at: torch.device) -> None:
        self.call, self.here = call, device.find(at).here

    def wait(self, limit: float | None = None) -> bool:
        """As :meth:`trigram.gpu.device.Call.wait`; without a limit only the current stream waits."""
        if limit is not None:
            return bool(self.call.wait(limit))
        self.call.order()
        return True

    def is_completed(self) -> bool:
        """See :class:`trigram.gpu.device.Call`."""
        return bool(self.call.is_completed())


class Starting:
    """The part of a process group that starts calls.

    Attributes:
        trigram_group: The group whose engine group carries the calls.
    """

    trigram_group: Group
    _aborted: str | None
    _callbacks: Callbacks
    _beside: dict[int, Group]
    _job: Job

    def _start_with(self, group: Group) -> None:
        self.trigram_group = group
        self._aborted = None
        self._callbacks = Callbacks(group.ordinal)
        self._beside = {}
        self._done = handle(self._callbacks, _NOTHING)

    def _group(self) -> Group:
        """The group that carries the calls of this thread.

        Callbacks of futures make their calls in a group of their own: the order of these calls among
        themselves is the same on all ranks, but not relative to those of other threads.
        """
        if self._aborted is not None:
            raise AbortedError(f"{self.trigram_group.name}: the process group was aborted: {self._aborted}")
        caller = running()
        if caller is None:
            return self.trigram_group
        found = self._beside.get(caller.key)
        if found is None:
            name = f"{self.trigram_group.name}, callbacks"
            present = self._job.world
            if present is None:
                raise AbortedError(f"{self.trigram_group.name}: its job has been shut down")
            found = present.beside(self.trigram_group, name, caller.key + 1)
            found.timeout = self.trigram_group.timeout
            self._beside[caller.key] = found
        return found

    def _start(
        self,
        what: str,
        asked: engine_codes.Asked,
        source: Memory | None,
        target: Memory | None,
        background: bool,
        timeout: float | None = None,
        finish: Callable[[], None] | None = None,
        outputs: Sequence[torch.Tensor] = _NOTHING,
        splits: engine_codes.Splits = None,
        inputs: Sequence[torch.Tensor] = _NOTHING,
    ) -> Work:
        """Starts a collective of the engine, or runs it.

        Args:
            what: Its name, for errors and the profiler.
            asked: The call.
            source: What it reads.
            target: What it writes; it may be ``source``.
            background: Return before it has finished.
            timeout: Seconds; None: that of the group.
            finish: What remains to do when it has finished.
            outputs: The caller's tensors that it writes.
            splits: Lengths of the parts.
            inputs: The caller's tensors that it reads, for the profiler.
        """
        group = self._group()
        if timeout is None:
            timeout = group.timeout
        event = profiling.begin(what, inputs or outputs) if profiling.enabled() else None
        try:
            if source is not None and (target is not source or asked[0] == engine_codes.ALL_TO_ALL):
                given, wanted = places(source), places(target)
                if tensors.overlap(given, wanted) and not _in_place(asked[0], given, wanted, group, splits):
                    source = tensors.copied(source)  # the call writes to what it has yet to read
            call = self._call(group, asked, source, target, splits, timeout, background)
            if not background:
                if finish is not None:
                    finish()
                return handle(self._callbacks, outputs) if outputs else self._done
        except BaseException:
            profiling.end(event)
            raise
        finally:
            if not background:
                profiling.end(event)
        return self._handle(what, call, (source, target, inputs), outputs, finish, event, timeout)

    def _call(
        self,
        group: Group,
        asked: engine_codes.Asked,
        source: Memory | None,
        target: Memory | None,
        splits: engine_codes.Splits,
        timeout: float | None,
        background: bool,
    ) -> Any:
        """The call in flight; None: it has ended."""
        t = source if source is not None else target
        listed = isinstance(source, list) or isinstance(target, list)
        if isinstance(t, torch.Tensor) and not listed and (not t.is_cpu or "cpu" in device.kinds):
            with self._job.here():  # DistributedDataParallel may be in a thread of autograd's
                call = OnDevice(start(group, asked, source, target, splits, timeout, True, True), t.device)
            if background:
                return call
            call.wait()
            return None
        try:
            return start(group, asked, source, target, splits, timeout, False, background)
        except TrigramError as e:
            if background:
                raise
            raise explained(e, timeout) from None

    def _handle(
        self,
        what: str,
        call: Any,
        kept: Any,
        outputs: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
        event: Any = None,
        timeout: float | None = None,
    ) -> Work:
        """The handle of a call in flight, which holds its tensors until it has finished."""
        limit = self.trigram_group.timeout if timeout is None else timeout
        work = handle(self._callbacks, outputs, call, kept, what, limit)
        if event is not None:
            finish = profiling.ending(event, finish)
        if finish is not None:
            work._finish = finish
        in_flight.hold(work)
        return work


def _in_place(what: int, given: Places, wanted: Places, group: Group, splits: engine_codes.Splits) -> bool:
    """Whether this rank's part of a call is where it belongs in the whole, as the engine allows."""
    if what in (engine_codes.ALL_GATHER, engine_codes.GATHER):
        part, whole = given, wanted
    elif what in (engine_codes.REDUCE_SCATTER, engine_codes.SCATTER):
        part, whole = wanted, given
    else:
        return False
    if len(whole) == group.size * len(part):
        return whole[group.rank * len(part) : (group.rank + 1) * len(part)] == part
    if len(part) != 1 or len(whole) != 1:
        return False
    at, size = part[0]
    before = size * group.rank
    if splits is not None and (own := splits[0][group.rank]):
        before = sum(splits[0][: group.rank]) * (size // own)
    return at == whole[0][0] + before


def failed(group: Group, error: TrigramError, timeout: float | None) -> Exception:
    """The error of a call on CPU tensors. Other ranks may have made it on GPU tensors: those end too."""
    routes.abort(group, str(error))
    return explained(error, timeout)
