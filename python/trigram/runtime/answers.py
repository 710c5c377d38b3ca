"""Operations of torch's stores, with a limit.

A ``TCPStore`` waits without end, and without answering Ctrl-C, for a server that is stopped, or behind a
network that drops what is sent: its timeouts are for keys, not for answers. So each operation runs in a
thread of its own. One that gets no answer keeps its thread until its connection ends or the process does.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trigram import _core

T = TypeVar("T")


class NoAnswerError(dist.DistNetworkError):  # type: ignore[misc]  # torch does not type it
    """The store's server has accepted a connection, and does not answer."""


def answered(operation: Callable[[], T], seconds: float) -> T:
    """What an operation on a store returns or raises.

    Args:
        operation: It may go on after this has raised, and must use nothing that another thread uses then.
        seconds: At least this long it is waited for.

    Raises:
        NoAnswerError: It took longer.
    """
    _keep_out_at_exit()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(operation())
        except BaseException as error:  # raised below, where it was asked for
            errors.append(error)

    thread = threading.Thread(target=run, name="trigram-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()  # and not kept here: its traceback refers to this frame
    if not results:
        raise NoAnswerError(f"its server accepts connections and has not answered for {seconds:.0f} s")
    return results[0]


@functools.cache
def _keep_out_at_exit() -> None:
    """A thread that gets its answer while the interpreter ends must not end the process."""
    atexit.register(_core.keep_threads_out)


class AnsweringStore:
    """A store whose operations are all :func:`answered`.

    Args:
        store: The store.
        deadline: The time of ``time.monotonic`` until which its operations have time, but at least a second.
    """

    def __init__(self, store: dist.Store, deadline: float) -> None:
        self._store, self._deadline = store, deadline

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)
        return lambda *args: answered(lambda: operation(*args), max(self._deadline - time.monotonic(), 1.0))
