"""The handle of a call, as c10d has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trigram import _core
from trigram.backend.handles.callbacks import Callbacks
from trigram.backend.handles.futures import Future
from trigram.backend.handles.timeouts import seconds
from trigram.collectives import work as in_flight
from trigram.errors import TimeoutError

_finishing = threading.RLock()
"""Held while results are copied to where the caller wants them, so that it happens once."""


class Work(dist.Work):
    """A call in flight, or one that has ended.

    The engine's call is an object with ``wait(seconds)`` and ``is_completed()``. What remains to do
    afterwards, such as copying a result from a buffer, runs in the first ``wait`` or callback.
    """

    # Slots, all set by `handle`: a dictionary costs a quarter of a microsecond.
    __slots__ = (
        "_call",
        "_callbacks",
        "_ended",
        "_error",
        "_finish",
        "_future",
        "_kept",
        "_limit",
        "_outputs",
        "_peer",
        "_sender",
        "_what",
    )

    _call: Any
    _callbacks: Callbacks | None
    _ended: Callable[[], object] | None
    _error: Exception | None
    _finish: Callable[[], None] | None
    _future: Future | None
    _kept: Any
    _limit: float | None
    _outputs: Sequence[torch.Tensor]
    _peer: int
    _sender: Callable[[], int] | None
    _what: str

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the call has finished. On a GPU only the current stream waits, as in torch.

        Args:
            timeout: None or 0: the timeout of the call itself.

        Returns:
            True.

        Raises:
            TimeoutError: The timeout has passed; the call continues.
            TrigramError: The call has failed.
        """
        call = self._call
        if call is None:
            if self._error is not None:
                raise self._error
            if self._ended is not None:
                self._ended()
            return True
        try:
            if not call.wait(seconds(timeout) if timeout else None):
                raise TimeoutError(
                    f"{self._what}: not finished after {seconds(timeout)} s; it is still running, call "
                    "wait() again"
                )
            if not isinstance(call, _core.Work):
                self._finish_on_device(call)
            elif self._finish is not None:
                self._finish_once()
        except Exception as e:
            if not call.is_completed():
                raise
            self._error = explained(e, self._limit)
            self._release()
            raise self._error from None
        self._release()
        return True

    def _release(self) -> None:
        self._call, self._kept = None, ()
        in_flight.release(self)

    def _finish_once(self) -> None:
        with _finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None  # only now: another thread that waits returns when the results are there

    def _finish_on_device(self, call: Any) -> None:
        """As ``_finish_once``; each later wait makes its current stream wait, too."""
        with _finishing:
            if self._ended is not None:
                self._ended()
            elif self._finish is None:
                self._ended = call.wait
            else:
                self._finish()
                self._ended = call.here()
                self._finish = None

    def call(self) -> Any:
        """The engine's call; None if it has ended."""
        return self._call

    def is_completed(self) -> bool:
        """Whether the call has finished or failed."""
        call = self._call
        return call is None or bool(call.is_completed())

    def is_success(self) -> bool:
        """Whether the call has finished without an error."""
        if not self.is_completed():
            return False
        try:
            return self.wait()
        except Exception:
            return False

    def exception(self) -> Exception | None:
        """The error of a call that has failed; None if it has not, or is in flight."""
        if self.is_completed() and self._call is not None:
            self.is_success()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as ``wait``: on a GPU only the current stream waits."""
        self.wait()

    def source_rank(self) -> int:
        """The group rank that sent a received message; -1 if it is not known yet."""
        if self._peer < 0 and self._sender is not None:
            self._peer = self._sender()
        return self._peer

    _source_rank = source_rank

    def get_future(self) -> Future:
        """A future of the list of output tensors. Callbacks of one process group's futures run on one
        thread, in the order in which they were added."""
        if self._future is None:
            assert self._callbacks is not None
            self._future = self._callbacks.future_of(self)
        return self._future


def explained(error: Exception, limit: float | None) -> Exception:
    """The error of a call, with a word on where its timeout comes from."""
    if not isinstance(error, TimeoutError) or limit is None:
        return error
    return TimeoutError(f"{error}; the timeout of the process group or of this call is {limit:g} s")


def handle(
    callbacks: Callbacks | None,
    outputs: Sequence[torch.Tensor],
    call: Any = None,
    kept: Any = (),
    what: str = "",
    limit: float | None = None,
) -> Work:
    """The handle of a call.

    Args:
        callbacks: Where the callbacks of its future run.
        outputs: The caller's tensors that it writes.
        call: The engine's call; None: it has finished.
        kept: Tensors that the engine uses.
        what: The name of the call, for errors.
        limit: Its timeout in seconds.
    """
    work = Work()
    work._call, work._kept, work._what, work._limit = call, kept, what, limit
    work._callbacks, work._outputs = callbacks, outputs
    work._ended = work._error = work._finish = work._future = work._sender = None
    work._peer = -1
    return work
