"""Events of calls for torch's profiler: ``trigram:all_reduce``, with the shapes of the tensors.

They are marked as asynchronous, as those of torch's own backends are: an event is that if another thread
ends it. So a thread does only that, while a profiler runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs; a call looks at nothing else while none does."""

PREFIX = "trigram:"


class _Ender:
    """The thread that ends events; it starts with the first event."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[torch.futures.Future[None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def end(self, event: Event) -> None:
        """Ends an event, and returns when it has ended: the profiler may stop then."""
        with self._lock:
            if not self._started:
                threading.Thread(target=self._serve, name="trigram-profiler", daemon=True).start()
                self._started = True
        begun, ended = event
        self._queue.put(begun)
        ended.wait()  # and not for the first, which is complete before its callbacks have run

    def _serve(self) -> None:
        while True:
            # The record ends in a callback of this future, which carries the profiler of the thread that
            # began it: a profiler belongs to a thread.
            self._queue.get().set_result(None)


_ender = _Ender()

Event = tuple[torch.futures.Future[None], torch.futures.Future[None]]
"""An event that has begun: it ends when the first future is complete, and the second is complete then."""


def begin(what: str, tensors: Sequence[torch.Tensor]) -> Event:
    """Begins the event of a call."""
    record = torch._C._autograd._record_function_with_args_enter(PREFIX + what, *tensors)
    begun: torch.futures.Future[None] = torch.futures.Future()
    ended = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, begun)
    return begun, ended


def end(event: Event | None) -> None:
    """Ends an event; None is no event."""
    if event is not None:
        _ender.end(event)


def ending(event: Event, finish: Callable[[], None] | None) -> Callable[[], None]:
    """What remains to do after a call, and then to end its event."""

    def run() -> None:
        try:
            if finish is not None:
                finish()
        finally:
            end(event)

    return run
