"""Collective calls on tensors, and functions that need nothing but them.

What lives here: the calls (``calls.py``, ``messages.py``), their arguments (``arguments.py``) and how they
reach the engine (``dispatch.py``), :class:`Work` (``work.py``), many tensors in one (``coalesced.py``),
states as bytes (``serialization.py``), checks that ranks agree (``consistency.py``).
Uses: errors, runtime, gpu.
"""

from trigram.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from trigram.collectives.messages import batch_send_recv, recv, send
from trigram.collectives.work import Work

__all__ = [
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_send_recv",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
