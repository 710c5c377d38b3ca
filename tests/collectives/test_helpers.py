"""Ranks that only help: right sums with any number of them, in training too, through failures, to the end."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import trigram
from tests.support.checks import fingerprint, raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, run, say
from tests.support.marks import long_unless
from tests.support.models import train

SIZES = [1, 0, 1003, 70_001, 2**20, 600_000, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def _sums(rank: int, world: int, workers: int, rounds: int) -> None:
    """Sums and means of whole numbers, several in flight; the helpers do nothing else than help."""
    trigram.init()
    helpers = range(workers, world)
    group = trigram.new_group(range(workers), helpers)
    assert (group.size, group.helpers) == (workers, list(helpers))
    if rank in helpers:
        group.help()
        return None
    for round_ in range(rounds):
        for dtype in DTYPES:
            for op in ("sum", "max") if dtype == torch.int64 else ("sum", "avg"):
                tensors = [torch.full((n,), rank + i + round_ % 3, dtype=dtype) for i, n in enumerate(SIZES)]
                works = [trigram.all_reduce(t, op, group=group, async_op=True) for t in tensors]
                for i, (t, work) in enumerate(zip(tensors, works, strict=True)):
                    assert work is not None
                    work.wait()
                    each = [float(r + i + round_ % 3) for r in range(workers)]
                    right = {"sum": sum(each), "avg": sum(each) / workers, "max": max(each)}[op]
                    expected = torch.full_like(t, right)
                    assert torch.equal(t, expected), f"{op} of {dtype}, {t.numel()} elements, round {round_}"


ALL = [(by, *n) for by in ("shm", "tcp") for n in ((1, 1), (2, 1), (3, 1), (3, 2), (4, 1))]
SOME = [("shm", 1, 1), ("shm", 2, 1), ("shm", 3, 2), ("tcp", 3, 1), ("tcp", 4, 1)]


@pytest.mark.parametrize("transport, workers, helpers", long_unless(SOME, ALL))
def test_sums(workers: int, helpers: int, transport: str) -> None:
    run(workers + helpers, _sums, workers, 3, transport=transport)


def test_sums_while_links_are_measured() -> None:
    """Long enough for shares by trial, then by measured rates."""
    run(4, _sums, 3, 12, transport="tcp", timeout=90)


def _train(rank: int, world: int, workers: int) -> tuple[list[float], list[str]] | None:
    if rank >= workers:
        group = trigram.init(helper=True)
        assert group.ranks == list(range(workers))
        says(raises(trigram.MisuseError, trigram.barrier), "not in group")
        counters = trigram.runtime.world.current().engine.counters()
        assert counters["calls"] >= 30, "it has not helped"
        return None
    trigram.init()
    assert (trigram.rank(), trigram.world_size()) == (rank, workers)

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        return trigram.with_bagua(model, bucket_mb=0.01)

    history = train("small digits", wrap, rank, workers, 30, torch.float64)
    return history.losses, history.weights


def test_training_with_a_helper(transport: str) -> None:
    """The weights are the same on all workers after every step, and the losses those of a training alone.

    In float64: steps amplify what the order of additions leaves in the last bit.
    """
    alone = run(3, _train, 3, transport=transport)
    *helped, helper = run(4, _train, 3, transport=transport)
    assert helper is None
    assert len({tuple(weights) for _, weights in helped}) == 1
    for (a, _), (b, _) in zip(alone, helped, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1e-10


def _not_last(rank: int, world: int) -> str:
    return raises(trigram.MisuseError, lambda: trigram.init(helper=rank == 0))


def test_helpers_are_the_last() -> None:
    for message in run(3, _not_last):
        says(message, "ranks [0] of 3 are helpers", "last")


def _misuse(rank: int, world: int) -> None:
    """What a group with helpers does not offer is refused on every worker, and it goes on."""
    trigram.init()
    group = trigram.new_group([0, 1, 2], [3])
    if rank == 3:
        says(
            raises(trigram.MisuseError, lambda: trigram.all_reduce(torch.ones(3), group=group)), "only helps"
        )
        group.help()
        return
    x = torch.ones(5)
    says(raises(trigram.UnsupportedError, lambda: trigram.broadcast(x, 0, group=group)), "helpers")
    says(raises(trigram.UnsupportedError, lambda: trigram.all_reduce(x, via="ring", group=group)), "helpers")
    with pytest.raises(trigram.MisuseError, match="not one of its helpers"):
        group.help()
    bad = torch.ones(400_000 + rank)
    says(raises(trigram.MismatchError, lambda: trigram.all_reduce(bad, group=group)), "rank", "40000")
    for n in (7, 500_000):
        y = torch.full((n,), float(rank))
        trigram.all_reduce(y, group=group)
        assert bool((y == 3).all())


def test_misuse(transport: str) -> None:
    run(4, _misuse, transport=transport)


def _loop(rank: int, world: int) -> tuple[int, str] | None:
    trigram.init()
    group = trigram.new_group([0, 1, 2], [3])
    if rank == 3:
        say("in the loop")
        group.help()
        return None
    x = torch.ones(300_000)
    for step in range(1_000_000):
        if step == 5:
            say("in the loop")
        try:
            trigram.all_reduce(x.fill_(1.0), group=group)
        except trigram.PeerLostError as e:
            return e.rank, str(e)
    raise AssertionError


@pytest.mark.parametrize("victim", [1, 3])
def test_a_death_is_named_and_ends_the_help(victim: int, transport: str) -> None:
    with Ranks(4, _loop, transport=transport) as ranks:
        for r in range(4):
            ranks.await_said(r, "in the loop")
        ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(30, dies=[victim])
    assert results[victim] == Died(-signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert results[rank][0] == victim, results
    if victim != 3:
        assert results[3] is None


def _bits(rank: int, world: int) -> str | None:
    trigram.init()
    group = trigram.new_group([0, 1, 2], [3])
    if rank == 3:
        group.help()
        return None
    t = torch.linspace(-1, 1, 400_003) * (0.1 + rank)
    trigram.all_reduce(t, group=group)
    return fingerprint([t])


def test_all_workers_hold_the_same_bits(transport: str) -> None:
    first, *others, helper = run(4, _bits, transport=transport)
    assert others == [first, first]
    assert helper is None


def _never_helps(rank: int, world: int) -> tuple[int, str] | None:
    """Six calls in which the helper has nothing to do; the next waits for what its link carries."""
    trigram.init()
    group = trigram.new_group([0, 1, 2], [3])
    say("in the group")
    if rank == 3:
        await_flag("never", timeout=60)
    x = torch.ones(64 * 5000)  # Whole cache lines, so that nothing is left over for the helper.
    for _ in range(20):
        try:
            trigram.all_reduce(x.fill_(1.0), group=group)
        except trigram.PeerLostError as e:
            return e.rank, str(e)
    raise AssertionError("twenty calls without the helper")


def test_a_helper_that_dies_before_it_helps(transport: str) -> None:
    """Over TCP the workers wait for its rate by then, in a call that has not begun; nobody waits for ever."""
    with Ranks(4, _never_helps, transport=transport) as ranks:
        for r in range(4):
            ranks.await_said(r, "in the group")
        time.sleep(1.0)
        ranks.signal(3, signal.SIGKILL)
        results = ranks.results(30, dies=[3])
    assert [r[0] for r in results[:3]] == [3, 3, 3], "\n".join(map(str, results))


def _workers_leave(rank: int, world: int) -> None:
    """The processes live on after trigram.shutdown(): their leaving is what ends the help."""
    trigram.init()
    group = trigram.new_group([0, 1, 2], [3])
    if rank == 3:
        group.help()
        flag("helped")
        return
    x = torch.ones(300_000)
    trigram.all_reduce(x, group=group)
    assert bool((x == 3).all())
    trigram.shutdown()
    await_flag("helped", timeout=20)
    assert group.size == 3  # It is kept until here, and with it the engine's connections.


def test_help_ends_when_workers_leave(transport: str) -> None:
    run(4, _workers_leave, transport=transport)
