"""torchft: ``Manager(pg=ProcessGroupTrigram(), ...)``.

A process group that torchft's manager reconfigures at each quorum, in the place of its ``ProcessGroupGloo``.
Ranks may be threads of one process, as in torchft's own tests: each configuration is a
:class:`trigram.Job` of its own. Interface: torchft 0.2.0, ``process_group.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trigram.backend.process_group import ProcessGroup
from trigram.errors import PeerLostError, TimeoutError, TrigramError
from trigram.runtime import world
from trigram.runtime.job import Job

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as e:
    raise ImportError("trigram.integrations.torchft needs torchft: pip install 'torchft>=0.2'") from e

__all__ = ["ProcessGroupTrigram"]


class ProcessGroupTrigram(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group over Trigram's engine that torchft reconfigures.

    Args:
        timeout: For the ranks to meet, and of each call.
    """

    _pg: Any

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def getBackendName(self) -> str:
        """``torchft-trigram``."""
        return "torchft-trigram"

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> ProcessGroup:
        seconds = self._timeout.total_seconds()
        with _as_torchft_says(self._timeout), Job().here():
            group = world.init(store, rank, world_size, init_timeout=seconds, op_timeout=seconds)
            return ProcessGroup(group, store, self._timeout, None, owns=True)

    def abort(self, errored: bool = True) -> None:
        """Leaves the job without waiting for the other ranks; calls under way fail, here and there."""
        self.shutdown()
        super().abort(errored)  # for torchft's log

    def shutdown(self) -> None:
        """As :meth:`abort`."""
        before, self._pg = self._pg, None
        if isinstance(before, ProcessGroup):
            before.leave_at_once()

    def set_timeout(self, timeout: timedelta) -> None:
        """Of calls from now on, and of the ranks' next meeting."""
        super().set_timeout(timeout)
        if isinstance(self._pg, ProcessGroup):
            self._pg.trigram_group.timeout = timeout.total_seconds()

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return _Work(work)

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        with _as_torchft_says(self._timeout):
            yield


class _Work(dist.Work):
    """A call, whose errors are told in torchft's words."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See ``torch.distributed.Work``."""
        with _as_torchft_says(timeout):
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def get_future(self) -> torch.futures.Future[Any]:
        """A plain future, whose callbacks run at once if the call has ended: torchft's manager needs that."""
        inner, devices = self._work.get_future(), [t.device for t in self._work.result() if not t.is_cpu]
        plain: torch.futures.Future[Any] = torch.futures.Future(devices=list(set(devices)))  # type: ignore[arg-type]

        def hand_on(ended: torch.futures.Future[Any]) -> None:
            try:
                with _as_torchft_says(None):
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def _as_torchft_says(timeout: timedelta | None) -> Iterator[None]:
    """torchft knows errors by words of gloo's: they come first, and then what has happened."""
    try:
        yield
    except TimeoutError as e:
        raise TimeoutError(f"timed out: timeout after {_ms(timeout)}ms: {e}") from e
    except PeerLostError as e:
        raise PeerLostError(f"Connection closed by peer: {e}", e.rank) from e
    except TrigramError as e:
        if "abort" in str(e):
            raise type(e)(f"Connection closed by peer: {e}") from e
        raise


def _ms(timeout: timedelta | None) -> int:
    return round(timeout.total_seconds() * 1000) if timeout is not None else 0
