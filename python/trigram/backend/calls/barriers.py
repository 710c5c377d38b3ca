"""Barriers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from trigram.backend.calls.arguments import is_async, options
from trigram.backend.calls.point_to_point import MESSAGES, PointToPoint
from trigram.backend.handles.timeouts import seconds
from trigram.backend.handles.work import Work
from trigram.collectives import work as in_flight
from trigram.errors import TimeoutError, TrigramError
from trigram.runtime import engine_codes

_BARRIER = (engine_codes.BARRIER, engine_codes.DTYPES[torch.uint8], 0, 0, 0, 0)
_TAG = (1 << 31) - 1
"""The tag of the messages of ``monitored_barrier``."""


class Barriers(PointToPoint):
    """The part of a process group that waits for its ranks."""

    _awaited: dict[int, Work]

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Waits until every rank has called it, and until the collectives that this rank has started in the
        group before have ended: as with gloo, their results are there after a barrier. It raises the error of
        one of these that nobody has waited for."""
        opts = options(c10d.BarrierOptions, opts, timeout)
        earlier = [
            work
            for work in in_flight.held()
            if isinstance(work, Work) and work._callbacks is self._callbacks and work._what not in MESSAGES
        ]

        def end_earlier() -> None:
            for work in earlier:
                work.wait()

        finish = end_earlier if earlier else None
        return self._start("barrier", _BARRIER, None, None, is_async(opts), seconds(opts.timeout), finish)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that tells on rank 0 which ranks have not come.

        Args:
            timeout: How long rank 0 waits for the others; None: the timeout of the group.
            wait_all_ranks: Name all ranks that are absent, not only the first.

        Raises:
            TimeoutError: On rank 0: ranks are absent, and the message names them. On the others: rank 0 has
                not released them.
        """
        group = self.trigram_group
        limit = group.timeout if timeout is None else timeout.total_seconds()
        end = None if limit is None else time.monotonic() + limit
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")

        def left() -> timedelta | None:
            if end is None:
                return None
            return timedelta(seconds=max(end - time.monotonic(), 0.001))

        if group.rank != 0:
            try:
                self.send([word], 0, _TAG).wait(left())
                self.recv([word], 0, _TAG).wait(left())
            except TrigramError as e:
                raise TimeoutError(
                    f"monitored_barrier: Rank {group.ranks[group.rank]} successfully reached "
                    f"monitoredBarrier, but received errors while waiting for send/recv from rank "
                    f"{group.ranks[0]}, which did not release it within {_milliseconds(limit)}: {e}"
                ) from e
            return
        late, self._awaited = self._awaited, {}
        arrivals = {
            r: late[r] if r in late else self.recv([word.clone()], r, _TAG) for r in range(1, group.size)
        }
        absent = []
        for r, arrival in arrivals.items():
            try:
                arrival.wait(left())
            except TrigramError:
                absent.append(r)
                if not wait_all_ranks:
                    break
        if absent:
            self._awaited = {r: a for r, a in arrivals.items() if not a.is_completed()}
            names = ", ".join(str(group.ranks[r]) for r in absent)
            raise TimeoutError(
                f"monitored_barrier: Rank {group.ranks[0]} timed out in monitoredBarrier after "
                f"{_milliseconds(limit)}: Rank{'s' * (len(absent) > 1)} {names} failed to pass "
                "monitoredBarrier"
            )
        for release in [self.send([word], r, _TAG) for r in arrivals]:
            release.wait(left())


def _milliseconds(limit: float | None) -> str:
    return "time" if limit is None else f"{round(limit * 1000)} ms"
