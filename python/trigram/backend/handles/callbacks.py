"""The thread on which the callbacks of a process group's futures run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from trigram import _core
from trigram.backend.handles.futures import Future
from trigram.runtime import job, logs
from trigram.runtime.callbacks import when_done

_threads: dict[int, Callbacks] = {}
"""By identity, the threads of all process groups."""


class Callbacks:
    """One thread and its queue; it starts with the first future.

    Attributes:
        key: Identifies the process group, alike on all of its ranks.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ident: int | None = None
        self._job = job.here()

    def future_of(self, work: Any) -> Future:
        """The future of a call's outputs."""

        def run() -> Any:
            work.wait()
            return work.result()

        devices = list({t.device for t in work.result() if not t.is_cpu})
        future = Future(self, run, True, devices)
        # C++ may wait for it, so it is completed here, also if nobody in Python waits.
        call = work.call()
        if call is None:
            future.complete()
        elif isinstance(call, _core.Work):
            when_done(call, future.complete)
        else:
            self.put(future.complete)
        return future

    def put(self, task: Callable[[], None]) -> None:
        """Queues a task."""
        if self._ident is None:
            with self._lock:
                if self._ident is None:
                    thread = threading.Thread(target=self._serve, name="trigram-callbacks", daemon=True)
                    thread.start()
                    assert thread.ident is not None
                    self._ident = thread.ident
                    _threads[thread.ident] = self
        self._queue.put(task)

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.get_ident() == self._ident

    def close(self) -> None:
        """Ends the thread, after the tasks that are queued."""
        if self._ident is not None:
            self._queue.put(None)

    def _serve(self) -> None:
        try:
            with self._job.here():
                while (task := self._queue.get()) is not None:
                    try:
                        task()
                    except Exception as e:
                        logs.warning(f"a callback of a future raised {type(e).__name__}: {e}")
                    del task
        finally:
            _threads.pop(threading.get_ident(), None)


def running() -> Callbacks | None:
    """The thread that calls, if it is one that runs callbacks."""
    return _threads.get(threading.get_ident()) if _threads else None
