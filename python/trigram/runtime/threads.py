"""Which threads of this process can make calls.

A rank whose threads all wait in one call makes no other call any more. The engine knows the threads that have
made calls; a thread that has not made any yet is known here alone.
"""

from __future__ import annotations

import sys
import threading

# Where the functions and classes of threads are that run none of the script's code.
_SILENT = {
    "multiprocessing.queues",
    "torch.utils.data._utils.pin_memory",
    "tqdm._monitor",
    "trigram.elastic.join_queue",
    "trigram.elastic.notices",
    "trigram.observe.dump",
    "trigram.observe.snapshots",
    "trigram.observe.timeline",
    "trigram.runtime.answers",
    "trigram.runtime.logs",
}


def are_all_callers(callers: list[int]) -> bool:
    """Whether only these threads, by the system's numbers, can make calls.

    Any other thread that runs Python code counts as one that can, except those of the standard library,
    PyTorch, tqdm and trigram that only pass on data or messages.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}

    def is_known(ident: int) -> bool:
        thread = threads.get(ident)
        return thread is not None and (thread.native_id in callers or _is_silent(thread))

    return all(is_known(ident) for ident in sys._current_frames())


def _is_silent(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return type(thread).__module__ in _SILENT or getattr(target, "__module__", None) in _SILENT
