"""Receives from any source: which message each takes, and what becomes of them when senders go."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import trigram
from tests.collectives.test_calls import BIG, MIB3
from tests.support import patience
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.data import numbers
from tests.support.harness import await_flag, flag, run
from tests.support.marks import long_unless

CASES = Cases()


@CASES.over(0, 1, 1003, MIB3, BIG)
def from_any(rank: int, world: int, n: int) -> None:
    """Every rank is the receiver once. Lengths are below and above what is sent unasked (1 MiB)."""
    for to in range(world):
        if rank == to:
            left = set(range(world)) - {rank}
            while left:
                t = torch.zeros(n)
                sender = trigram.recv(t)
                assert sender in left, f"{sender} is not one of {left}"
                left.remove(sender)
                equal(t, numbers(sender, n), f"from {sender}")
        else:
            trigram.send(numbers(rank, n), to)


@CASES
def in_the_background(rank: int, world: int) -> None:
    """Receives that were made before any message came; each knows its sender."""
    if rank == 0:
        ts = [torch.zeros(3) for _ in range(world - 1)]
        works = [trigram.recv(t, async_op=True) for t in ts]
        says(raises(trigram.MisuseError, works[0].source_rank), "source_rank") if works else None
    trigram.barrier()
    if rank == 0:
        for work in works:
            work.wait()
        senders = [work.source_rank() for work in works]
        assert sorted(senders) == list(range(1, world)), senders
        for sender, t in zip(senders, ts, strict=True):
            equal(t, torch.full((3,), float(sender)), f"from {sender}")
    else:
        trigram.send(torch.full((3,), float(rank)), 0)


@CASES
def tags(rank: int, world: int) -> None:
    """A receive takes no message with another tag, large or small."""
    if rank == 0:
        for tag in (3, 2, 1):
            for _ in range(world - 1):
                t = torch.zeros(MIB3 if tag == 3 else 1)
                sender = trigram.recv(t, tag=tag)
                assert bool((t == 10 * sender + tag).all()), (sender, tag, t)
    else:
        works = [
            trigram.send(torch.full((MIB3 if tag == 3 else 1,), 10.0 * rank + tag), 0, tag, async_op=True)
            for tag in (1, 2, 3)
        ]
        for work in works:
            work.wait()


@CASES
def the_order_of_receives(rank: int, world: int) -> None:
    """Messages of one rank go to receives in the order in which these were made, named or not."""
    if world < 2 or rank > 1:
        return
    for _ in range(20):
        if rank == 0:
            ts = [torch.zeros(1) for _ in range(6)]
            works = [
                trigram.recv(t, src, async_op=True)
                for t, src in zip(ts, (1, None, 1, None, 1, 1), strict=True)
            ]
            trigram.send(torch.zeros(1), 1, tag=5)
            for work in works:
                work.wait()
                assert work.source_rank() == 1
            assert [t.item() for t in ts] == [0, 1, 2, 3, 4, 5]
        else:
            trigram.recv(torch.zeros(1), 0, tag=5)
            for i in range(6):
                trigram.send(torch.tensor([float(i)]), 0)


@CASES
def a_named_receive_behind(rank: int, world: int) -> None:
    """Rank 2's message goes to the receive from any source; the later one from rank 1 is not held up."""
    if world < 3 or rank > 2:
        return
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        any_source, named = trigram.recv(first, async_op=True), trigram.recv(second, 1, async_op=True)
        for dst in (2, 1):  # rank 1 sends only when rank 2's message is here
            trigram.send(torch.zeros(1), dst, tag=5)
            (any_source if dst == 2 else named).wait()
        assert (any_source.source_rank(), named.source_rank()) == (2, 1)
        assert (first.item(), second.item()) == (2.0, 1.0)
    else:
        trigram.recv(torch.zeros(1), 0, tag=5)
        trigram.send(torch.tensor([float(rank)]), 0)


@CASES
def nobody_waits_long(rank: int, world: int) -> None:
    """A rank that sends without pause does not keep the others' messages from being received."""
    if world < 3:
        return
    count = 300
    if rank == 0:
        senders = [trigram.recv(torch.zeros(1)) for _ in range(count + world - 2)]
        for other in range(2, world):
            assert senders.count(other) == 1
    elif rank == 1:
        for _ in range(count):
            trigram.send(torch.zeros(1), 0)
    else:
        trigram.send(torch.zeros(1), 0)


@CASES
def by_name_after_it_was_announced(rank: int, world: int) -> None:
    """Large messages that wait for their receiver can be received by name too, and numbers stay in step."""
    if world < 2 or rank > 1:
        return
    for sender in (None, 1, None, 1):
        if rank == 1:
            trigram.send(numbers(1, BIG), 0)
        else:
            time.sleep(0.05)
            t = torch.zeros(BIG)
            assert trigram.recv(t, sender) == 1
            equal(t, numbers(1, BIG))


@CASES
def in_a_group(rank: int, world: int) -> None:
    """Only members' messages of that group; the sender is named by its world rank."""
    if world < 3:
        return
    members = [world - 1, 0]
    group = trigram.new_group(members)
    if rank == 0:
        t = torch.zeros(1)
        assert trigram.recv(t, group=group) == world - 1
        assert t.item() == 7
        assert trigram.recv(t, src=None) in range(1, world)
    elif rank == world - 1:
        trigram.send(torch.tensor([8.0]), 0)
        trigram.send(torch.tensor([7.0]), 0, group=group)
    trigram.barrier()


@CASES
def another_size_is_named(rank: int, world: int) -> None:
    if world < 2 or rank > 1:
        return
    if rank == 1:
        # A small message may have left before the receiver finds out.
        says(raises(trigram.MismatchError, trigram.send, torch.zeros(BIG), 0), "1000003", "7 elements")
    else:
        says(raises(trigram.MismatchError, trigram.recv, torch.zeros(7)), "1000003", "7 elements")


@CASES
def a_timeout_names_all(rank: int, world: int) -> None:
    if world < 2:
        return
    group = trigram.new_group(list(range(world)))
    group.timeout = 0.2
    if rank == 0:
        says(
            raises(trigram.TimeoutError, trigram.recv, torch.zeros(7), group=group),
            *map(str, range(1, world)),
        )
        group.timeout = 60
        trigram.barrier()
        for _ in range(world - 1):
            trigram.recv(torch.zeros(7), group=group)  # what was given up took no message
    else:
        group.timeout = 60
        trigram.barrier()
        trigram.send(torch.zeros(7), 0, group=group)


def _apart(check: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """With a barrier behind it: no rank sends what the next check is about while others are in this one."""

    def checked(rank: int, world: int) -> None:
        check(rank, world)
        trigram.barrier()

    return checked


CASES.update({name: _apart(check) for name, check in CASES.items()})
WORLDS = [(by, n) for by in ("shm", "tcp") for n in (1, 2, 3, 4, 5)]
SOME = [("shm", 2), ("shm", 3), ("shm", 5), ("tcp", 3)]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", long_unless(SOME, WORLDS))
def test_any_source(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


@pytest.mark.parametrize("case", list(CASES))
def test_any_source_across_hosts(in_launch: Callable[..., None], several_hosts: None, case: str) -> None:
    in_launch("CASES", case, 3, transport="auto", hosts=[0, 1, 1])


def _a_death(rank: int, world: int) -> None:
    """A message that came before is received; then the death is told, though rank 1 lives."""
    import os

    trigram.init()
    if rank == 2:
        trigram.send(torch.tensor([2.0]), 0)
        flag("sent")
        await_flag("received")
        os._exit(9)
    if rank == 1:
        await_flag("over")
        return
    await_flag("sent")
    t = torch.zeros(1)
    assert trigram.recv(t) == 2
    assert t.item() == 2
    flag("received")
    began = time.monotonic()
    error = raises(trigram.PeerLostError, trigram.recv, t)
    says(error, "rank 2")
    assert time.monotonic() - began < patience.seconds(5)
    says(raises(trigram.PeerLostError, trigram.recv, t), "rank 2")
    flag("over")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_death_ends_the_receive(transport: str) -> None:
    run(3, _a_death, transport=transport, dies=[2])


def _leaves(rank: int, world: int) -> None:
    """Ranks that have sent all they had may go: an error only when nobody is left."""
    trigram.init()
    if rank:
        if rank > 1:
            await_flag(f"left-{rank - 1}")
        trigram.send(torch.tensor([float(rank)]), 0)
        trigram.shutdown()
        flag(f"left-{rank}")
        return
    t = torch.zeros(1)
    assert [trigram.recv(t) for _ in range(world - 1)] == list(range(1, world))
    says(raises(trigram.PeerLostError, trigram.recv, t), "left")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_leaves_does_not(transport: str) -> None:
    run(4, _leaves, transport=transport)
