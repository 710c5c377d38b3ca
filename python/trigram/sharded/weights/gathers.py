"""The gathers of weights that are under way."""

from __future__ import annotations

import contextlib
import time
from functools import partial

from trigram import collectives
from trigram.errors import TrigramError
from trigram.observe import spans
from trigram.runtime.group import Group
from trigram.sharded.weights.weight_buckets import WeightBucket


class Gathers:
    """Calls at whose end a bucket has the weights of all ranks.

    Attributes:
        under_way: Each bucket with its call.
        sent: Bytes that this rank has sent.
    """

    def __init__(self) -> None:
        self.under_way: list[tuple[WeightBucket, collectives.Work]] = []
        self.sent = 0

    def start(self, k: int, bucket: WeightBucket, group: Group) -> None:
        """Starts to collect the ``k``-th bucket; all ranks of the group call it."""
        with spans.naming(group, partial(_name, k)):
            self.add(bucket, bucket.gather(group))

    def add(self, bucket: WeightBucket, work: collectives.Work) -> None:
        """A call has been started that gives the bucket the weights of all ranks."""
        self.under_way.append((bucket, work))
        self.sent += bucket.sent

    def wait(self, timeout: float | None) -> tuple[TrigramError | None, bool]:
        """Awaits all.

        Args:
            timeout: Seconds for all of them together; None: no limit.

        Returns:
            The first error, and whether one has failed. Those that have not ended in time stay under way.
        """
        gathers, self.under_way = self.under_way, []
        error: TrigramError | None = None
        failed, began = False, time.perf_counter()
        for bucket, work in gathers:
            try:
                work.wait(None if timeout is None else max(began + timeout - time.perf_counter(), 0.0))
            except TrigramError as e:
                error = error or e
                if work.is_completed():
                    failed = True
                else:
                    self.under_way.append((bucket, work))
        return error, failed

    def end(self) -> None:
        """Awaits all, and forgets their errors: the pass that they belong to has failed."""
        gathers, self.under_way = self.under_way, []
        for _, work in gathers:
            with contextlib.suppress(TrigramError):
                work.wait()


def _name(k: int) -> str:
    return f"weights {k}"
