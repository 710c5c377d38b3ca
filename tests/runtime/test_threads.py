"""Threads that may still make a call: their rank is never taken for one that waits for ever."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time

import pytest

import trigram
from tests.support.harness import run
from trigram.runtime.threads import are_all_callers

pytestmark = pytest.mark.waits


def in_a_script(rank: int, world: int) -> None:
    me, done = [thread.native_id or 0 for thread in threading.enumerate()], threading.Event()
    assert are_all_callers(me)
    assert not are_all_callers([])
    other = threading.Thread(target=done.wait, daemon=True)
    other.start()
    assert not are_all_callers(me)
    assert are_all_callers([*me, other.native_id or 0])
    done.set()
    other.join()
    queue: mp.Queue[int] = mp.Queue()
    queue.put(1)  # starts the queue's thread
    assert queue.get() == 1
    assert are_all_callers(me)


def test_threads_of_the_script_may_make_calls() -> None:
    run(1, in_a_script)  # a process of its own: what runs the tests has threads too


def saves_in_a_thread(rank: int, world: int) -> None:
    """Rank 0 trains on while a new thread of it saves, and then tells rank 1, which waits for that."""
    training, saved = trigram.new_group([0, 1]), trigram.new_group([0, 1])

    def save() -> None:
        time.sleep(3)
        trigram.barrier(saved)

    if rank == 0:
        thread = threading.Thread(target=save)
        thread.start()
        trigram.barrier(training)
        thread.join()
    else:
        trigram.barrier(saved)
        trigram.barrier(training)


def test_a_thread_that_makes_its_first_call_late() -> None:
    run(2, saves_in_a_thread)
