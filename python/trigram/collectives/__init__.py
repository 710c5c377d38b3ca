"""Collective calls on tensors, and what is built of them alone.

What lives here: the calls (``calls.py``), :class:`Work` (``work.py``), many tensors as one (``coalesced.py``),
nested states as bytes (``serialization.py``), which ranks differ (``consistency.py``). Uses: errors,
runtime, gpu.
"""

from trigram.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exchange,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from trigram.collectives.work import Work

__all__ = [
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exchange",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
