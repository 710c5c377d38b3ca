"""Thousands of calls under way: each gets its own data, in whatever order messages come; all end if a rank
dies."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch

import trigram
from tests.support.harness import Died, await_flag, flag, run
from tests.support.marks import long

MANY = 4000


def _messages(rank: int, world: int, early: bool) -> None:
    """Rank 0 receives MANY messages with tags of their own, among which all ranks sum."""
    trigram.init()
    tags = list(range(MANY))
    random.Random(rank).shuffle(tags)
    sums: list[tuple[torch.Tensor, trigram.Work]] = []

    def add(n: int) -> None:
        t = torch.full((17,), float(rank + n))
        work = trigram.all_reduce(t, async_op=True)
        assert work is not None
        sums.append((t, work))

    if rank == 0:
        received = []
        if early:
            await_flag("sent", 60)
        for n, tag in enumerate(tags):
            t = torch.empty(3)
            received.append((tag, t, trigram.recv(t, 1, tag=tag, async_op=True)))
            if n % 10 == 0:
                add(n)
        flag("waits")
        for tag, t, work in received:
            assert work is not None
            work.wait()
            assert t.tolist() == [float(tag)] * 3
    else:
        if not early:
            for n in range(0, MANY, 10):
                add(n)
            await_flag("waits", 60)
        sent = [
            trigram.send(torch.full((3,), float(tag)), 0, tag=tag, async_op=True) for tag in tags if rank == 1
        ]
        if rank == 1:
            flag("sent")
        if early:
            for n in range(0, MANY, 10):
                add(n)
        for work in sent:
            assert work is not None
            work.wait()
    for n, (t, work) in zip(range(0, MANY, 10), sums, strict=True):
        work.wait()
        assert torch.equal(t, torch.full_like(t, world * (world - 1) / 2 + world * n))


@pytest.mark.parametrize("early", [False, True], ids=["waited for", "early"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_of_many_messages_finds_its_call(transport: str, early: bool) -> None:
    run(2, _messages, early, transport=transport, timeout=120)


def _sums(rank: int, world: int) -> None:
    """As many collectives at once, of sizes that take different ways."""
    trigram.init()
    sizes = [1, 5000, 17, 40_000]
    works = []
    for n in range(MANY):
        t = torch.full((sizes[n % 4],), float(rank + n % 7))
        works.append((n, t, trigram.all_reduce(t, async_op=True)))
    random.Random(rank).shuffle(works)
    for n, t, work in works:
        assert work is not None
        work.wait()
        assert torch.equal(t, torch.full_like(t, world * (world - 1) / 2 + world * (n % 7)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_collectives_at_once(transport: str) -> None:
    run(3, _sums, transport=transport, timeout=120)


def _loses(rank: int, world: int) -> int:
    """A rank dies while others have MANY calls under way with it."""
    trigram.init()
    trigram.barrier()
    if rank == 1:
        await_flag("waits", 60)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [trigram.all_reduce(torch.ones(5), async_op=True) for _ in range(MANY // 2)]
    works += [trigram.recv(torch.ones(5), 1, tag=n, async_op=True) for n in range(MANY // 2)]
    if rank == 0:
        flag("waits")
    failed = 0
    for work in works:
        assert work is not None
        with pytest.raises(trigram.PeerLostError) as caught:
            work.wait()
        failed += caught.value.rank == 1
    return failed


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_a_death_ends_all_of_many_calls(transport: str) -> None:
    assert run(3, _loses, transport=transport, dies=[1], timeout=120) == [MANY, Died(-signal.SIGKILL), MANY]
