"""Ranks that share one core with each other and with processes that compute."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import trigram
from tests.collectives.test_calls import CASES
from tests.support.harness import run
from tests.support.marks import long

SHORT = [name for name in CASES if name.endswith(("-1003", "-1000"))]
NAMES = ["barrier", "shapes", *SHORT, "all_reduce_length-1000003", "all_to_all-786432"]
CALLS, ROWS = 50, 8


def pin(process: int = 0) -> None:
    """The process, and what it starts later, runs on one core: the last one that it may use."""
    os.sched_setaffinity(process, {max(os.sched_getaffinity(process))})


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute on that core until the block ends."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        for process in processes:
            pin(process.pid)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def collectives(rank: int, world: int) -> None:
    pin()
    trigram.init()
    for name in NAMES:
        CASES[name](rank, world)


def short_calls(rank: int, world: int) -> int:
    """How many times this rank gave its core away, or lost it, without being asleep, in the best of some rows
    of calls: in others, who wakes beside it took the core from it."""
    pin()
    trigram.init()
    t = torch.ones(1)
    trigram.all_reduce(t)
    counts = []
    for _ in range(ROWS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        for _ in range(CALLS):
            trigram.all_reduce(t, "max")
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before)
    assert t.item() == world
    return min(counts)


@pytest.mark.parametrize("transport, world", [("shm", 3), ("tcp", 2), long("shm", 2), long("tcp", 3)])
def test_collectives_are_right_beside_processes_that_compute(transport: str, world: int) -> None:
    with busy(1):
        run(world, collectives, transport=transport, timeout=150)


@pytest.mark.parametrize("transport, world", [("shm", 2), ("tcp", 2), long("shm", 3), long("tcp", 3)])
def test_a_rank_that_waits_on_a_busy_core_sleeps(transport: str, world: int) -> None:
    """A rank that yields gives its core away for a time slice in each call."""
    with busy(2):
        counts = run(world, short_calls, transport=transport, timeout=120)
    assert max(counts) < CALLS / 2, counts
