"""torchft: ``Manager(pg=ProcessGroupTrigram(), ...)``.

A process group that torchft's manager reconfigures at each quorum, in the place of its ``ProcessGroupGloo``.
Ranks may be threads of one process, as in torchft's own tests: each configuration is a
:class:`trigram.Job` of its own. Interface: torchft 0.2.0, ``process_group.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trigram.backend.process_group import ProcessGroup
from trigram.errors import AbortedError, PeerLostError, TimeoutError
from trigram.runtime import world
from trigram.runtime.job import Job

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as e:
    raise ImportError("trigram.integrations.torchft needs torchft: pip install 'torchft>=0.2'") from e

__all__ = ["ProcessGroupTrigram"]

_MOST_WORKS = 64
"""With more calls on GPU tensors known, those that have succeeded are let go."""


class ProcessGroupTrigram(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group over Trigram's engine that torchft reconfigures.

    Args:
        timeout: For the ranks to meet, and of each call.
    """

    _pg: Any

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._on_gpu: list[_Work] = []
        self._dropped: Any = None

    def getBackendName(self) -> str:
        """``torchft-trigram``."""
        return "torchft-trigram"

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> ProcessGroup:
        seconds = self._timeout.total_seconds()
        with _as_torchft_says(self._timeout), Job().here():
            group = world.init(store, rank, world_size, init_timeout=seconds, op_timeout=seconds)
            made = ProcessGroup(group, store, self._timeout, None, owns=True)
        # A group that is dropped without shutdown: the others are not to take this rank for alive.
        self._dropped = weakref.finalize(self, made.leave_at_once)
        self._dropped.atexit = False
        return made

    def abort(self, errored: bool = True) -> None:
        """Leaves the job without waiting for the other ranks; calls under way fail, here and there."""
        before, self._pg = self._taken(), None
        if before is not None:
            before.leave_at_once()
        super().abort(errored)  # for torchft's log

    def shutdown(self) -> None:
        """Leaves the job, when the other ranks have what this one has sent."""
        before, self._pg = self._taken(), None
        if before is not None:
            before.shutdown()

    def _taken(self) -> ProcessGroup | None:
        if self._dropped is not None:
            self._dropped.detach()
        return self._pg if isinstance(self._pg, ProcessGroup) else None

    def errored(self) -> Exception | None:
        """The error of a call on GPU tensors since the last time: their ``wait`` makes only a stream wait."""
        works, self._on_gpu = self._on_gpu, []
        for work in works:
            try:
                work.wait(self._timeout)
            except Exception as e:
                return e
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Of calls from now on, and of the ranks' next meeting."""
        super().set_timeout(timeout)
        if isinstance(self._pg, ProcessGroup):
            self._pg.set_timeout(timeout)

    def _wrap_work(self, work: Any, opts: object) -> Any:
        wrapped = _Work(work, self._timeout)
        if not all(t.is_cpu for t in work.result()):
            self._on_gpu.append(wrapped)
            if len(self._on_gpu) > _MOST_WORKS:
                self._on_gpu = [w for w in self._on_gpu if not (w.is_completed() and w.is_success())]
        return wrapped

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        with _as_torchft_says(self._timeout):
            yield


class _Work(dist.Work):
    """A call, whose errors are told in torchft's words.

    Args:
        work: The call.
        timeout: Of the group.
    """

    def __init__(self, work: Any, timeout: timedelta) -> None:
        super().__init__()
        self._work, self._timeout = work, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See ``torch.distributed.Work``."""
        with _as_torchft_says(timeout or self._timeout):
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def get_future(self) -> torch.futures.Future[Any]:
        """A plain future, whose callbacks run at once if the call has ended: torchft's manager needs that."""
        inner, devices = self._work.get_future(), [t.device for t in self._work.result() if not t.is_cpu]
        plain: torch.futures.Future[Any] = torch.futures.Future(devices=list(set(devices)))  # type: ignore[arg-type]

        def hand_on(ended: torch.futures.Future[Any]) -> None:
            try:
                with _as_torchft_says(self._timeout):
                    value = ended.wait()
            except Exception as e:
                plain.set_exception(e)  # type: ignore[arg-type]  # torch's stub is wrong
            else:
                plain.set_result(value)

        if self._work.is_completed():
            hand_on(inner)
        else:
            inner.add_done_callback(hand_on)
        return plain

    # torch's class has these in C++, where they know nothing of our call.

    def is_completed(self) -> bool:
        """See ``torch.distributed.Work``."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """See ``torch.distributed.Work``."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """See ``torch.distributed.Work``."""
        return self._work.exception()

    def result(self) -> Any:
        """See ``torch.distributed.Work``."""
        return self._work.result()

    def source_rank(self) -> int:
        """See ``torch.distributed.Work``."""
        return int(self._work.source_rank())

    def synchronize(self) -> None:
        """See ``torch.distributed.Work``."""
        with _as_torchft_says(self._timeout):
            self._work.synchronize()

    def block_current_stream(self) -> None:
        """See ``torch.distributed.Work``."""
        with _as_torchft_says(self._timeout):
            self._work.block_current_stream()


@contextlib.contextmanager
def _as_torchft_says(timeout: timedelta) -> Iterator[None]:
    """torchft knows errors by words of gloo's: they come first, and then what has happened."""
    try:
        yield
    except TimeoutError as e:
        after = round(timeout.total_seconds() * 1000)
        raise TimeoutError(f"timed out: timeout after {after}ms: {e}") from e
    except PeerLostError as e:
        raise PeerLostError(f"Connection closed by peer: {e}", e.rank) from e
    except AbortedError as e:
        raise AbortedError(f"Connection closed by peer: {e}") from e
