"""The handle of an asynchronous collective."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from trigram import _core
from trigram.collectives import callbacks
from trigram.errors import TimeoutError
from trigram.gpu import device
from trigram.runtime import logs, world

# These keep their tensors alive until the engine has finished with them, even if the caller drops the Work.
# Threads change it at any time: only single operations of the set are used, which no other thread interrupts,
# and no loop over the set itself, which could find it changed.
_in_flight: set[Work] = set()


class Work:
    """The handle of an asynchronous collective, from a call with ``async_op=True``."""

    __slots__ = ("__weakref__", "_core", "_describe", "_tensors", "_what")

    def __init__(
        self,
        core: _core.Work | device.Call,
        tensors: tuple[torch.Tensor | None, ...],
        what: str,
        describe: Callable[[], str] | None = None,
    ) -> None:
        self._core = core
        self._describe = describe
        self._tensors = tensors
        self._what = what
        _in_flight.add(self)  # first: if what follows raises, the engine still has the tensors
        if len(_in_flight) > 64 and not device.capturing():
            _collect()

    def is_completed(self) -> bool:
        """Whether the collective has finished or failed."""
        return self._core.is_completed()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the collective has finished.

        Args:
            timeout: Seconds; None: the ``op_timeout`` of ``init``, counted from the start of the collective.

        Returns:
            True.

        Raises:
            TimeoutError: The timeout expired; the collective continues, and ``wait`` may be called again.
            TrigramError: The collective failed.
        """
        try:
            if self._describe is None:
                done = self._core.wait(timeout)
            else:
                with logs.waiting(self._what, self._describe):
                    done = self._core.wait(timeout)
        except BaseException:
            if self._core.is_completed():
                _in_flight.discard(self)
            raise
        if not done:
            raise TimeoutError(
                f"{self._what}: not finished after {timeout} s; it is still running, call wait() again"
            )
        _in_flight.discard(self)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the list of output tensors.

        Its callbacks run in one thread per process, for the collectives of one group in the order in which
        their futures were asked for. For GPU tensors a thread of its own waits for the collective.
        """
        devices: list[Any] = [t.device for t in self._tensors[-1:] if t is not None and not t.is_cpu]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)

        def finish() -> None:
            try:
                self.wait()
            except Exception as e:
                future.set_exception(e)  # type: ignore[arg-type]  # torch's stub is wrong
            else:
                future.set_result([t for t in self._tensors[-1:] if t is not None])

        if isinstance(self._core, _core.Work):
            callbacks.when_done(self._core, finish)
        else:
            threading.Thread(target=finish, name="trigram-future", daemon=True).start()
        return future


def _collect() -> None:
    """Drops works that have finished, and with them their resources on GPUs."""
    for work in _in_flight.copy():
        # An error of one call, such as a GPU's, is raised by its wait; here another call starts.
        with contextlib.suppress(Exception):
            if work.is_completed():
                _in_flight.discard(work)


world.at_exit.append(_collect)
