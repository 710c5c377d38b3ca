"""The futures of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_POLL = 0.5
"""Seconds after which a wait looks whether it is interrupted."""


class Thread(Protocol):
    """The thread on which callbacks run; :class:`trigram.backend.handles.callbacks.Callbacks` is one."""

    def put(self, task: Callable[[], None]) -> None:
        """Queues a task."""

    def is_current(self) -> bool:
        """Whether the caller is this thread."""


class _Failure:
    """The value of a future that has failed, for C++, which reads it by pickling: that raises the error.

    torch's futures tell an exception of Python to Python only; C++ takes the exception for a result.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    def __repr__(self) -> str:
        # DDP quotes it: "Unable to cast ... to Tensor".
        return f"{type(self.error).__name__}: {self.error}"


def _raise(failure: _Failure) -> None:
    raise failure.error


class Future(torch.futures.Future[Any]):
    """A future whose callbacks run on one thread, in the order in which they were added.

    A plain future runs a callback on the thread that completes it, or inline if it is complete already; so
    two ranks may run the callbacks of two futures in different orders, and callbacks that communicate wait
    for each other.

    Args:
        thread: Where callbacks run.
        run: Gives the value; it is called once.
        anywhere: Whether a thread that waits may call ``run`` itself; otherwise only ``thread`` does.
        devices: Of the value's tensors on GPUs.
    """

    def __init__(
        self, thread: Thread, run: Callable[[], Any], anywhere: bool, devices: list[torch.device]
    ) -> None:
        super().__init__(devices=devices)  # type: ignore[arg-type]  # torch's stub is narrower
        self._thread, self._anywhere, self._devices = thread, anywhere, devices
        self._run: Callable[[], Any] | None = run
        self._running = threading.RLock()
        self._complete: threading.Event | None = None if anywhere else threading.Event()

    def complete(self) -> None:
        """Runs what gives the value, unless that has happened."""
        with self._running:
            run, self._run = self._run, None
            if run is None:
                return
            try:
                value = run()
            except Exception as e:
                self._set_unwrap_func(_raise)
                value = _Failure(e)
            self.set_result(value)
            if self._complete is not None:
                self._complete.set()

    def wait(self) -> Any:
        """Waits for the value; raises the error if there is none."""
        if self._anywhere or self._thread.is_current():
            self.complete()
        elif self._complete is not None:
            while not self._complete.wait(_POLL):
                pass
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """A future of what ``callback`` returns; it is called with this future, when that is complete."""

        def run() -> Any:
            self.complete()
            return callback(self)

        following = Future(self._thread, run, False, self._devices)
        self._thread.put(following.complete)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback`` with this future when it is complete."""

        def run() -> None:
            self.complete()
            callback(self)

        self._thread.put(run)
