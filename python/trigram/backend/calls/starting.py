"""How a call of a process group starts: which engine group carries it, and what handle the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram.backend.calls import profiling
from trigram.backend.handles.callbacks import Callbacks, running
from trigram.backend.handles.work import Several, Work, finished
from trigram.collectives import work as in_flight
from trigram.errors import AbortedError, TrigramError
from trigram.gpu import routes
from trigram.runtime import engine_codes, world
from trigram.runtime.group import Group

_NOTHING: tuple[torch.Tensor, ...] = ()


class _OnDevice:
    """A call on GPU tensors: to wait without a timeout is to make the current stream wait."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call

    def wait(self, limit: float | None = None) -> bool:
        if limit is not None:
            return bool(self.call.wait(limit))
        self.call.order()
        return True

    def is_completed(self) -> bool:
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

    def _start_with(self, group: Group) -> None:
        self.trigram_group = group
        self._aborted = None
        self._callbacks = Callbacks(group.ordinal)
        self._beside = {}
        self._done = finished(self._callbacks)

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
            found = world.current().beside(self.trigram_group, name, caller.key + 1)
            found.timeout = self.trigram_group.timeout
            self._beside[caller.key] = found
        return found

    def _start(
        self,
        what: str,
        asked: engine_codes.Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
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
            source: What it reads, contiguous.
            target: What it writes, contiguous; it may be ``source``.
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
            t = source if source is not None else target
            if t is not None and not t.is_cpu:
                call: Any = _OnDevice(routes.start(group, asked, source, target, splits))
                if not background:
                    call.wait()
            else:
                given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
                if target is source:
                    wanted = given
                else:
                    wanted = (0, 0) if target is None else (target.data_ptr(), target.nbytes)
                if background:
                    call = group.core.start(asked, given + wanted, timeout, splits)
                else:
                    self._run(group, asked, given + wanted, timeout, splits)
            if not background:
                if finish is not None:
                    finish()
                return finished(self._callbacks, outputs) if outputs else self._done
        except BaseException:
            profiling.end(event)
            raise
        finally:
            if not background:
                profiling.end(event)
        return self._handle(what, call, (source, target, inputs), outputs, finish, event)

    def _run(
        self, group: Group, asked: engine_codes.Asked, memory: Any, timeout: float | None, splits: Any
    ) -> None:
        try:
            group.core.run(asked, memory, timeout, splits)
        except TrigramError as e:
            routes.abort(group, str(e))  # other ranks may have called it on GPU tensors, which must end
            raise

    def _handle(
        self,
        what: str,
        call: Any,
        kept: Any,
        outputs: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
        event: Any = None,
    ) -> Work:
        """The handle of a call in flight, which holds its tensors until it has finished."""
        work = Work()
        work._call, work._kept = call, kept
        work._what, work._outputs, work._callbacks = what, outputs, self._callbacks
        if event is not None:
            finish = profiling.ending(event, finish)
        if finish is not None:
            work._finish = finish
        in_flight.hold(work)
        return work

    def _together(self, works: list[Work]) -> Work:
        """One handle of several calls that have been started."""
        flying = [work for work in works if work._call is not None]
        outputs = [t for work in works for t in work.result()]
        if not flying:
            return works[-1]

        def finish() -> None:
            for work in flying:
                work.wait()

        calls = Several([work._call for work in flying])
        return self._handle(flying[0]._what, calls, flying, outputs, finish)
