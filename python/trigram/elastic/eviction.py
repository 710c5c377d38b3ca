"""How a rank that does not end its step is taken out of an elastic job (``trigram evict``).

A rank whose script hangs is alive: it sends heartbeats, and the others wait for it. So who runs the job may
have it evicted. All members take it for lost then, and its process says where it was, and ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Collection

from trigram.errors import TrigramError
from trigram.runtime import job, logs
from trigram.runtime.job import Job

BY = "trigram evict"
_TELL_SECONDS = 1.0


def evict(here: Job, ranks: Collection[int]) -> None:
    """On a member of the job: takes these ranks for lost, and ends this process if it is one of them, or if
    others have told so. Any thread may call it, and again."""
    present = here.world
    if present is None:
        return
    engine, others = present.engine, [rank for rank in ranks if rank != present.rank]
    try:
        for rank in others:
            engine.send_away(rank, f"{BY}: it was removed from the job")
    except TrigramError:
        return  # the job ends, or begins its next epoch: then the order is read no more
    # Ranks that are threads of one process cannot end alone: their next call fails.
    if here is job.of_process and (present.rank in ranks or engine.am_sent_away()):
        until = time.monotonic() + _TELL_SECONDS  # the others hear of those from this rank
        while not set(others) <= {rank for rank, _ in engine.losses()} and time.monotonic() < until:
            time.sleep(0.001)
        _end(present.rank)


def _end(rank: int) -> None:
    """Ends this process, whatever its main thread does."""
    logs.warning(f"{BY}: rank {rank} ends at once, the other ranks go on; its threads were here:")
    logs.flush()
    if sys.stderr is not None:
        faulthandler.dump_traceback(sys.stderr)
    os._exit(1)
