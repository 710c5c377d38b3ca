"""The handle of a call, as c10d has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

    _call: Any = None
    _finish: Callable[[], None] | None = None
    _kept: Any = ()
    _outputs: Sequence[torch.Tensor] = ()
    _what = ""
    _callbacks: Callbacks | None = None
    _future: Future | None = None
    _error: Exception | None = None
    _peer = -1

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
        if self._call is None:
            if self._error is not None:
                raise self._error
            return True
        return self._end(seconds(timeout) if timeout else None)

    def _end(self, limit: float | None) -> bool:
        call = self._call
        try:
            if call is not None and not call.wait(limit):
                raise TimeoutError(
                    f"{self._what}: not finished after {limit} s; it is still running, call wait() again"
                )
            if self._finish is not None:
                with _finishing:
                    finish, self._finish = self._finish, None
                    if finish is not None:
                        finish()
        except Exception as e:
            if call is None or not call.is_completed():
                raise
            self._error = e
            self._release()
            raise
        self._release()
        return True

    def _release(self) -> None:
        self._call, self._kept = None, ()
        in_flight.release(self)

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
        """The group rank that sent a received message."""
        return self._peer

    _source_rank = source_rank

    def get_future(self) -> Future:
        """A future of the list of output tensors. Callbacks of one process group's futures run on one
        thread, in the order in which they were added."""
        if self._future is None:
            assert self._callbacks is not None
            self._future = self._callbacks.future_of(self)
        return self._future


def finished(callbacks: Callbacks | None = None, outputs: Sequence[torch.Tensor] = ()) -> Work:
    """The handle of a call that has finished."""
    work = Work()
    work._callbacks, work._outputs = callbacks, outputs
    return work


class Several:
    """Engine calls that are one call of c10d: finished when all are."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self.calls = calls

    def wait(self, limit: float | None = None) -> bool:
        """Waits for all; ``limit`` holds for each."""
        return min([call.wait(limit) for call in self.calls])

    def is_completed(self) -> bool:
        """Whether all have finished or failed."""
        return all(call.is_completed() for call in self.calls)
