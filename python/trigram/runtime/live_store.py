"""A store that outlives the start of a job: for elastic jobs, and for ``trigram top``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trigram.runtime.answers import answered
from trigram.runtime.rendezvous import reopen

_POLL = 0.005
"""Seconds between two reads of a key that :meth:`ReconnectingStore.wait` waits for."""
_STORE_TIMEOUT = timedelta(seconds=5)
_ANSWER_SECONDS = 10.0
"""Of an operation; longer than the store's own timeout."""


class ReconnectingStore:
    """A store whose server may stop and start again at the same address. Safe to use from several threads.

    While the store cannot be reached, reads return None and writes are dropped; callers repeat what matters.

    Args:
        store: The store.
        reopen: Opens another connection to the server; None if the store cannot be opened again.
        address: ``HOST:PORT`` of the server; "": it has none.
    """

    def __init__(self, store: Any, reopen: Callable[[], Any] | None, address: str = "") -> None:
        self.store, self.reopen = store, reopen
        self.address = address
        self.lock = threading.Lock()

    def __call__(self, operation: Callable[[Any], Any], seconds: float = _ANSWER_SECONDS) -> Any:
        """The result of ``operation(store)``; None while the store cannot be reached.

        Args:
            operation: What is asked of the store.
            seconds: So long an answer is waited for.
        """
        end = time.monotonic() + seconds
        if not self.lock.acquire(timeout=seconds):
            return None  # another thread waits for its answer
        try:
            if self.store is None and self.reopen is not None:
                self.store = self.reopen()
            store = self.store
            left = max(end - time.monotonic(), _POLL)
            return None if store is None else answered(lambda: operation(store), left)
        except (dist.DistError, OSError, RuntimeError):
            if self.reopen is not None:
                self.store = None
            return None
        finally:
            self.lock.release()

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if the key does not exist."""
        found: bytes | None = self(lambda s: bytes(s.get(key)) if s.check([key]) else None)
        return found

    def put(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self(lambda s: s.set(key, value))

    def wait(self, key: str, seconds: float, stop: Callable[[], bool] = lambda: False) -> bytes | None:
        """Waits for a key; returns its value, or None after ``seconds`` or once ``stop()`` is true."""
        end = time.monotonic() + seconds
        while (value := self.get(key)) is None and time.monotonic() < end and not stop():
            time.sleep(_POLL)
        return value


def connect_again(store: dist.Store) -> ReconnectingStore:
    """A second connection to the store of ``init``, for another thread."""
    # Prefixes may differ from one start to the next; the running job keeps the same keys in all of them.
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return ReconnectingStore(dist.PrefixStore("trigram", base), None)
    host, port = base.host, base.port
    try:
        client: dist.Store = answered(
            lambda: dist.TCPStore(host, port, None, False, timeout=_STORE_TIMEOUT, wait_for_workers=False),
            _ANSWER_SECONDS,
        )
    except (dist.DistError, OSError, RuntimeError):
        client = base
    return ReconnectingStore(
        dist.PrefixStore("trigram", client), lambda: reopen(host, port), f"{host}:{port}"
    )
