"""Ranks that disagree, are missing, late or die: every rank is told who and what, and nobody hangs."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, run, say, until
from tests.support.threads import as_threads, returned
from trigram.runtime import serving

pytestmark = pytest.mark.waits

CASES = Cases()


def disagree(rank: int, world: int, usual: Callable[[], Any], other: Callable[[], Any], *both: str) -> None:
    """The last rank does the other thing: MismatchError with both sides everywhere; then the group works."""
    for _ in range(2):
        says(raises(trigram.MismatchError, other if rank == world - 1 else usual), *both)
        for n in (3, 100_003):
            t = torch.full((n,), rank + 1.0)
            trigram.all_reduce(t)
            equal(t, torch.full((n,), world * (world + 1) / 2), "after the mismatch")


def ones(n: int = 10, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def asynchronous(work: Any) -> None:
    work.wait()


DISAGREEMENTS: dict[str, tuple[Callable[[int, int], Any], Callable[[int, int], Any], tuple[str, ...]]] = {
    "operation": (
        lambda r, w: trigram.all_reduce(ones()),
        lambda r, w: trigram.broadcast(ones(), 0),
        ("all_reduce", "broadcast"),
    ),
    "barrier": (
        lambda r, w: trigram.barrier(),
        lambda r, w: trigram.all_reduce(ones()),
        ("barrier", "all_reduce"),
    ),
    "op": (
        lambda r, w: trigram.all_reduce(ones(), "sum"),
        lambda r, w: trigram.all_reduce(ones(), "max"),
        ("sum", "max"),
    ),
    "dtype": (
        lambda r, w: trigram.all_reduce(ones()),
        lambda r, w: trigram.all_reduce(ones(10, torch.int32)),  # as many bytes
        ("float32", "int32"),
    ),
    "size": (
        lambda r, w: trigram.all_reduce(ones(10)),
        lambda r, w: trigram.all_reduce(ones(12)),
        ("10", "12"),
    ),
    "large size": (
        lambda r, w: trigram.all_reduce(ones(1_000_000)),
        lambda r, w: trigram.all_reduce(ones(1_000_003)),
        ("1000000", "1000003"),
    ),
    "root": (
        lambda r, w: trigram.broadcast(ones(), 0),
        lambda r, w: trigram.broadcast(ones(), 1),
        ("0", "1"),
    ),
    "reduce root": (
        lambda r, w: trigram.reduce(ones(), 0),
        lambda r, w: trigram.reduce(ones(), 1),
        ("0", "1"),
    ),
    "gather size": (
        lambda r, w: trigram.all_gather(torch.empty(4 * w), ones(4)),
        lambda r, w: trigram.all_gather(torch.empty(6 * w), ones(6)),
        ("4", "6"),
    ),
    "via": (
        lambda r, w: trigram.all_reduce(ones(), via="ring"),
        lambda r, w: trigram.all_reduce(ones(), via="tree"),
        ("ring", "tree"),
    ),
    "asynchronous": (
        lambda r, w: asynchronous(trigram.all_reduce(ones(10), async_op=True)),
        lambda r, w: asynchronous(trigram.all_reduce(ones(12), async_op=True)),
        ("10", "12"),
    ),
}


@CASES.over(*DISAGREEMENTS)
def disagreement(rank: int, world: int, what: str) -> None:
    usual, other, both = DISAGREEMENTS[what]
    disagree(rank, world, lambda: usual(rank, world), lambda: other(rank, world), *both)


@CASES
def order(rank: int, world: int) -> None:
    """Two jobs at once, in another order on the last rank: both fail everywhere."""
    sizes = (10, 12) if rank < world - 1 else (12, 10)
    works = [trigram.all_reduce(ones(n), async_op=True) for n in sizes]
    for work in works:
        says(raises(trigram.MismatchError, work.wait), "10", "12")
    t = ones(5)
    trigram.all_reduce(t)
    equal(t, torch.full((5,), float(world)), "after the wrong order")


@CASES
def splits(rank: int, world: int) -> None:
    """Rank 0 sends one row more than the last rank expects: the receiver at least must know; all go on."""
    inputs = [1] * world
    if rank == 0:
        inputs[world - 1] = 2
    outcome: BaseException | None = None
    try:
        trigram.all_to_all(torch.empty(world), torch.ones(sum(inputs)), [1] * world, inputs)
    except trigram.TrigramError as e:
        outcome = e
    if rank == world - 1:
        assert isinstance(outcome, trigram.MismatchError), outcome
        says(str(outcome), "all_to_all")
    trigram.barrier()


@CASES
def message(rank: int, world: int) -> None:
    """A message of another length or type than the receiver's tensor."""
    for dtype, words in ((torch.float32, ("5", "3")), (torch.int32, ("float32", "int32"))):
        if rank == 0:
            try:
                trigram.send(torch.ones(5), 1)
            except trigram.MismatchError as e:
                says(str(e), *words)
        elif rank == 1:
            n = 3 if dtype == torch.float32 else 5
            says(raises(trigram.MismatchError, trigram.recv, torch.zeros(n, dtype=dtype), 0), *words)
        trigram.barrier()


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_mismatch(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport, patience=20)


def test_one_tree_of_errors() -> None:
    kinds = [
        "PeerLostError",
        "TimeoutError",
        "MismatchError",
        "CorruptError",
        "UnsupportedError",
        "AuthError",
        "AbortedError",
    ]
    for kind in kinds:
        assert issubclass(getattr(trigram, kind), trigram.TrigramError), kind
    assert issubclass(trigram.TrigramError, Exception)
    assert issubclass(trigram.TimeoutError, builtins.TimeoutError)
    assert issubclass(trigram.MismatchError, ValueError) and issubclass(trigram.UnsupportedError, ValueError)


def _init_missing(rank: int, world: int) -> tuple[str, float]:
    start = time.monotonic()
    text = raises(trigram.TimeoutError, trigram.init, init_timeout=2)
    assert not trigram.is_initialized()
    return text, time.monotonic() - start


@pytest.mark.parametrize("missing", [2, 1, 0])
def test_a_missing_peer_is_named(missing: int, transport: str) -> None:
    """Also rank 0, whose address the others dial; they know it then by address."""
    present = [r for r in range(3) if r != missing]
    with Ranks(3, _init_missing, transport=transport, only=present) as ranks:
        port = ranks.env["MASTER_PORT"]
        for text, seconds in ranks.results(40):
            if missing == 0:
                assert "rank 0" in text or port in text, text
            else:
                says(text, str(missing), "rank")
                assert not any(f"rank {r} is missing" in text or f"ranks {r}" in text for r in present), text
            assert seconds < 20, f"init_timeout=2 took {seconds} s"


def _loop(rank: int, world: int, n: int) -> tuple[int, str]:
    """all_reduce until a peer is lost; who it was, and the text."""
    t = torch.full((n,), float(rank))
    for i in itertools.count():
        if i == 10:
            say("in the loop")
        try:
            trigram.all_reduce(t, "max")
        except trigram.PeerLostError as e:
            raises(trigram.TrigramError, trigram.all_reduce, t)  # and again: at once, no hang
            return e.rank, str(e)
    raise AssertionError


def _train_loop(rank: int, world: int, n: int) -> tuple[int, str]:
    """The same in a training."""
    model = trigram.with_bagua(torch.nn.Linear(n, 1, bias=False))
    for i in itertools.count():
        if i == 10:
            say("in the loop")
        try:
            model(torch.ones(2, n)).sum().backward()
        except trigram.PeerLostError as e:
            return e.rank, str(e)
    raise AssertionError


KILLED = [
    (_loop, 2, 1, 1),
    (_loop, 2, 0, 1_000_003),
    (_loop, 3, 2, 100_003),
    (_loop, 3, 0, 1),
    (_train_loop, 2, 1, 1000),
]


@pytest.mark.parametrize("loop, world, victim, n", KILLED)
def test_killed_peer(loop: Callable[..., Any], world: int, victim: int, n: int, transport: str) -> None:
    with Ranks(world, loop, n, transport=transport) as ranks:
        for r in range(world):
            ranks.await_said(r, "in the loop")
        ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(30, dies=[victim])
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
        else:
            assert result[0] == victim, result
            says(result[1], f"rank {victim}")


def _gossip(rank: int, world: int) -> str:
    """What a rank of a training in pairs says when its partner is gone, whichever it is."""
    model = trigram.with_bagua(torch.nn.Linear(9, 1, bias=False), algorithm="decentralized")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    try:
        for step in itertools.count():
            if step == 10:
                say("in the loop")
            optimizer.zero_grad()
            model(torch.ones(2, 9)).sum().backward()
            optimizer.step()
    except trigram.PeerLostError as e:
        return str(e)
    raise AssertionError


@pytest.mark.parametrize("victim", [0, 2])
def test_the_dead_are_named_in_pairs_too(victim: int, transport: str) -> None:
    """The partner of a dead rank ends its script; the next one has only heard that this one has left."""
    with Ranks(4, _gossip, transport=transport) as ranks:
        for r in range(4):
            ranks.await_said(r, "in the loop")
        ranks.signal(victim, signal.SIGKILL)
        results = ranks.results(30, dies=[victim])
    for text in results[:victim] + results[victim + 1 :]:
        says(text, f"rank {victim} ")


def _crossed_messages(rank: int, world: int) -> None:
    """Two ranks that receive from each other, or send much, or wait in a message and a collective."""
    trigram.init(op_timeout=60)
    few, many = torch.zeros(5), torch.ones(5_000_000)

    def crossed(call: Callable[[], Any]) -> None:
        began = time.monotonic()
        says(raises(trigram.MismatchError, call), "each waits for the other", "rank 0", "rank 1")
        assert time.monotonic() - began < patience.seconds(15)

    crossed(lambda: trigram.recv(few, 1 - rank))
    crossed(lambda: trigram.send(many, 1 - rank, tag=3))
    # Who is late only is waited for, and what has been sent comes.
    for late in (0, 1):
        if rank == late:
            time.sleep(2.5)
            trigram.send(few, 1 - rank, tag=9)
        else:
            trigram.recv(few, 1 - rank, tag=9)
        trigram.barrier()
    work = trigram.send(torch.full((5,), rank + 1.0), 1 - rank, tag=10, async_op=True)
    if rank == 1:
        time.sleep(2.5)
    trigram.barrier()
    trigram.recv(few, 1 - rank, tag=10)
    assert work is not None
    work.wait()
    equal(few, torch.full((5,), 2.0 - rank))
    crossed(trigram.barrier if rank == 0 else lambda: trigram.recv(few, 0, tag=7))


def test_two_ranks_that_wait_for_messages_of_each_other_are_told(transport: str) -> None:
    run(2, _crossed_messages, transport=transport, timeout=90)


def _late(rank: int, world: int) -> None:
    """op_timeout None: a peer that is alive is awaited. A wait with a timeout ends, the job goes on."""
    trigram.init()
    trigram.barrier()
    if rank == world - 1:
        await_flag("go")
    t = torch.ones(1003)
    work = trigram.all_reduce(t, async_op=True)
    if rank == 0:
        error: BaseException | None = None
        try:
            work.wait(timeout=0.3)
        except builtins.TimeoutError as e:
            error = e
        assert isinstance(error, trigram.TimeoutError), error
        says(str(error), "all_reduce")
        assert not work.is_completed()
        flag("go")
    work.wait()
    equal(t, torch.full((1003,), float(world)), "after a wait that timed out")


def test_wait_with_a_timeout(transport: str) -> None:
    run(3, _late, transport=transport, timeout=30)


def _op_timeout(rank: int, world: int) -> str | None:
    trigram.init(op_timeout=1.0)
    trigram.barrier(timeout=30)
    text = None
    if rank != 1:
        text = raises(trigram.TimeoutError, trigram.all_reduce, torch.ones(10))
        flag(f"timed out {rank}")
    else:
        for r in range(world):
            if r != 1:
                await_flag(f"timed out {r}")
    return text


def test_op_timeout_names_the_late(transport: str) -> None:
    """Each says whom it waited for: not always the culprit, it may be one that itself waits."""
    results = run(3, _op_timeout, transport=transport, timeout=30)
    for r in (0, 2):
        says(results[r], "all_reduce", "rank")
    assert any("rank 1" in results[r] for r in (0, 2)), results


class _Interrupt(BaseException):
    """Of no class of ours, as KeyboardInterrupt."""


def _stopped(rank: int, world: int, raised: BaseException, has_stopped: threading.Event) -> str:
    """Rank 1 stops waiting for rank 2, which comes late; rank 0 waits for both. What each was told."""

    def look() -> None:
        raise raised

    if rank == 2:  # Later than that rank 1 *has* stopped: before, its share might do for the others' result.
        assert has_stopped.wait(20)
    try:
        with serving.looking(look) if rank == 1 else contextlib.nullcontext():
            trigram.all_reduce(torch.ones(1003))
    except (trigram.AbortedError, _Interrupt) as e:
        told = f"{type(e).__name__}: {e}"
        has_stopped.set()
    after = torch.ones(1003)
    trigram.all_reduce(after)
    equal(after, torch.full((1003,), float(world)), "after it")
    return told


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(trigram.AbortedError("the members change"), "the members change"), (_Interrupt(), "_Interrupt")],
    ids=["reason", "interrupt"],
)
def test_the_others_are_told_why_a_rank_has_stopped_waiting(raised: BaseException, reason: str) -> None:
    """An elastic job knows by the reason what to do, see trigram.elastic.membership.why_aborted."""
    told = returned(as_threads(3, _stopped, raised, threading.Event()))
    says(told[1], reason)
    for rank in (0, 2):
        says(told[rank], "AbortedError", "rank 1 stopped waiting for this call", reason)


def test_hung_ranks_are_reported() -> None:
    """The harness itself: a rank that hangs is named, shown with its stack, and gone."""
    from tests.support.harness import RanksFailed

    with Ranks(2, _hang) as ranks:
        pid = ranks.pid(1)
        with pytest.raises(RanksFailed, match=r"(?s)TIMEOUT.*rank\(s\) \[1\].*in _hang"):
            ranks.results(3)
        until(lambda: not Path(f"/proc/{pid}").exists(), 5)


def _hang(rank: int, world: int) -> None:
    if rank == 1:
        await_flag("never", 1e6)
