"""Ranks as threads of one process, each with a job of its own."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import trigram


def as_threads(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **init: Any
) -> list[Any]:
    """Calls `fn(rank, world, *args)` in a thread for each rank; what each has returned or raised, in rank
    order. RuntimeError if a thread is still running after `timeout` seconds."""
    store, found = dist.HashStore(), [None] * world  # type: list[Any]

    def rank_of(rank: int) -> None:
        try:
            with trigram.Job():
                trigram.init(store, rank, world, **init)
                found[rank] = fn(rank, world, *args)
        except BaseException as e:
            e.add_note("".join(traceback.format_exception(e))) if hasattr(e, "add_note") else None
            found[rank] = e

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.1))
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hung:
        raise RuntimeError(f"ranks {hung} are still running after {timeout} s; the others: {found}")
    return found


def returned(found: list[Any]) -> list[Any]:
    """What `as_threads` has found, if no rank has raised."""
    for rank, value in enumerate(found):
        if isinstance(value, BaseException):
            raise RuntimeError(f"rank {rank} raised {value!r}") from value
    return found
