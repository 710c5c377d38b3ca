"""The handle of an asynchronous collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trigram import _core
from trigram.errors import MisuseError, TimeoutError
from trigram.gpu import device
from trigram.runtime import callbacks, job, logs
from trigram.runtime.job import Part


class InFlight(Protocol):
    """What holds the tensors of a call."""

    def is_completed(self) -> bool:
        """Whether the call has finished or failed."""


class _Held:
    """Calls whose tensors stay alive until the engine has finished with them, even if the caller drops the
    Work.

    One for all jobs of a process: it only keeps memory. Threads change it at any time: only single operations
    of the set are used, which no other thread interrupts, and no loop over the set itself, which could find
    it changed.

    Attributes:
        limit: With more in flight, those that have finished are dropped.
    """

    def __init__(self) -> None:
        self.works: set[InFlight] = set()
        self.limit = 64

    def add(self, work: InFlight) -> None:
        """Keeps a call's tensors."""
        self.works.add(work)
        if len(self.works) > self.limit and not device.capturing():
            self.drop_finished()
            # Not at every call while many are in flight: each would look at all of them.
            self.limit = max(64, 2 * len(self.works))

    def drop_finished(self) -> None:
        """Drops works that have finished, and with them their resources on GPUs."""
        for work in self.works.copy():
            # An error of one call, such as a GPU's, is raised by its wait; here another call starts.
            with contextlib.suppress(Exception):
                if work.is_completed():
                    self.works.discard(work)


_held = _Held()
hold = _held.add
"""Keeps the tensors of a call alive until it has finished."""
release = _held.works.discard
"""Ends :func:`hold`: the call has finished."""


def held() -> set[InFlight]:
    """The calls that :func:`hold` keeps; some may have finished."""
    return _held.works.copy()


@job.told
class _DropsFinished(Part):
    """At the end of a job: the engine that drops resources on GPUs still runs."""

    def finish(self) -> None:
        """See the class."""
        _held.drop_finished()


class Work:
    """The handle of an asynchronous collective, from a call with ``async_op=True``."""

    __slots__ = ("__weakref__", "_core", "_describe", "_outputs", "_tensors", "_what")

    def __init__(
        self,
        core: _core.Work | device.Call,
        tensors: tuple[torch.Tensor | None, ...],
        what: str,
        describe: Callable[[], str] | None = None,
        outputs: int = 1,
    ) -> None:
        self._core = core
        self._outputs = outputs
        self._describe = describe
        self._tensors = tensors
        self._what = what
        hold(self)

    def is_completed(self) -> bool:
        """Whether the collective has finished or failed."""
        return self._core.is_completed()

    def serve_when_done(self) -> None:
        """When it has ended, threads that wait make the calls that follow: see
        :mod:`trigram.runtime.serving`. Those on GPUs tell nobody; threads that wait look at them."""
        if isinstance(self._core, _core.Work):
            self._core.serve_when_done()

    @property
    def is_message(self) -> bool:
        """Whether it is of a call of two ranks, and not of all of a group."""
        return self._what in ("send", "recv", "batch_send_recv")

    def source_rank(self) -> int:
        """The world rank whose message a receive has taken.

        Raises:
            MisuseError: It is no receive, it was on a GPU, or it is from any source and no message has come.
        """
        sender = self._core.sender() if isinstance(self._core, _core.Work) else None
        if sender is None or self._what != "recv":
            raise MisuseError(f"source_rank: this {self._what} has received no message yet; wait for a recv")
        return sender

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
                release(self)
            raise
        if not done:
            raise TimeoutError(
                f"{self._what}: not finished after {timeout} s; it is still running, call wait() again"
            )
        release(self)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the list of output tensors.

        Its callbacks run in one thread of this rank, for the collectives of one group in the order in which
        their futures were asked for. For GPU tensors a thread of its own waits for the collective.
        """
        outputs = self._tensors[len(self._tensors) - self._outputs :]
        devices: list[Any] = [t.device for t in outputs if t is not None and not t.is_cpu]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)

        def finish() -> None:
            try:
                self.wait()
            except Exception as e:
                future.set_exception(e)  # type: ignore[arg-type]  # torch's stub is wrong
            else:
                future.set_result([t for t in outputs if t is not None])

        if isinstance(self._core, _core.Work):
            callbacks.when_done(self._core, finish)
        else:
            job.here().thread("trigram-future", finish)
        return future
