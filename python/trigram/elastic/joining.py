"""How a rank becomes a member of an elastic job: from its beginning, or late.

A late rank stays outside, with a world that has no connections, until it has a model and calls
``with_bagua``, or :func:`trigram.recover`. Then it knocks; the members let it in at a step boundary.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from trigram import _core
from trigram.elastic import membership
from trigram.elastic.join_queue import FRESH, JoinQueue, JoinRequest, Store, Watch
from trigram.elastic.membership import Membership
from trigram.errors import AuthError, ConfigError, MisuseError, TimeoutError, TrigramError
from trigram.runtime import world
from trigram.runtime.group import Group
from trigram.runtime.rendezvous import LateError, StoreGather, reopen
from trigram.runtime.world import Settings, World, use_elastic

_STEP = 15.0
"""Seconds that a step of entering may take; then this rank knocks again."""
_MISFITS = 3
"""Times in a row that this rank's settings do not fit before it gives up."""


class Start:
    """How this process comes into an elastic job: from the job's beginning, or late.

    Args:
        store: The store that the ranks meet in; None in a world of one.
        rank: This rank.
        size: The number of ranks at the job's beginning.
        settings: How this rank is reached.
        op_timeout: That of ``init``.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, size: int, settings: Settings, op_timeout: float | None
    ) -> None:
        self.rank, self.size, self.settings, self.op_timeout = rank, size, settings, op_timeout
        self.queue = None if store is None else JoinQueue(own_store(store), rank)
        if self.queue is None:
            return
        self.queue.offered = store  # a store that this process offers lives as long as the job
        self.watch = Watch(self.queue.store)
        self.looked = 0.0

    def is_late(self) -> bool:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        if self.queue is None or time.monotonic() - self.looked < 0.1:
            return False
        self.looked = time.monotonic()
        return self.watch.look() is not None

    def wait_outside(self, exchange: StoreGather) -> World | None:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        if self.queue is None:
            return None
        try:
            # What an earlier start has left in the store must not be taken for ranks of this one.
            end = time.monotonic() + FRESH
            while self.watch.known() and time.monotonic() < end:
                if self.is_late():
                    raise LateError
                time.sleep(0.02)
            exchange("here", b"yes")
            return None
        except LateError:
            exchange.abort()
        group = Group(
            "world, which this late rank has not joined; with_bagua does",
            range(self.size),
            None,
            self.op_timeout,
        )
        mine = Membership([], self.size, self.settings, self.queue, newcomer=True)
        engine = cast(_core.Engine, NoEngine())
        return World(engine, group, self.rank, self.size, self.op_timeout, elastic=mine)

    def member(self) -> Membership:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        mine = Membership(list(range(self.size)), self.size, self.settings, self.queue)
        if self.queue is not None:
            self.queue.keep(self.rank == 0, mine.says())
        return mine


def own_store(store: dist.Store) -> Store:
    """A connection of its own to the store that ranks meet in."""
    # Attempts of torchrun have keys of their own; the job that lives on is the same in all.
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.TCPStore):
        host, port = base.host, base.port
        try:
            limit = timedelta(seconds=5)
            own: dist.Store = dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)
        except (dist.DistError, OSError, RuntimeError):
            own = base
        return Store(dist.PrefixStore("trigram", own), lambda: reopen(host, port))
    return Store(dist.PrefixStore("trigram", base), None)


use_elastic(Start)


class NoEngine:
    """The engine of a rank that has not entered: it says what to do."""

    def __getattr__(self, name: str) -> Any:
        raise MisuseError(
            "this rank came late to an elastic job and has not entered it: call with_bagua(elastic=True), or "
            "trigram.recover() where there is no model"
        )

    def shutdown(self, linger: bool) -> None:
        """There is nothing to leave."""


class RefusedError(AuthError):
    """The members do not let this rank in."""


def is_outside() -> bool:
    """Whether this rank has yet to enter."""
    return not membership.current()[1].ranks


def enter(timeout: float = 300.0) -> None:
    """A late rank becomes a member; returns when it is.

    Raises:
        TimeoutError: The job does not let it in, or has ended.
        AuthError, ConfigError: This rank's secret or settings differ from the job's.
    """
    now, mine = membership.current()
    assert mine.queue is not None
    store, watch, end = mine.queue.store, Watch(mine.queue.store), time.monotonic() + timeout
    why, rest, misfits = "no member shows that the job lives", 0.1, 0
    while time.monotonic() < end:
        live = watch.look()
        if live is None:
            time.sleep(0.05)
            continue
        try:
            new = _once(now, mine, store, watch, live, end)
        except RefusedError as e:
            raise AuthError(str(e)) from None
        except (TrigramError, ValueError, KeyError, TypeError) as e:  # anybody may write to the store
            why = str(e)
            # Once it may have been another's: of one who entered beside this rank, or who died meanwhile.
            misfits = misfits + 1 if isinstance(e, AuthError | ConfigError) else 0
            if misfits == _MISFITS:
                raise
            time.sleep(rest)  # each knock makes the members stop for a moment
            rest = min(2 * rest, 5.0)
            continue
        new.group, group = now.group, new.group
        new.group.become(group)
        world.replace(new)
        entered = new.elastic
        assert isinstance(entered, Membership)
        mine.queue.keep(new.rank == entered.ranks[0], entered.says())
        return
    raise TimeoutError(f"elastic: rank {now.rank} knocked for {timeout:.0f} s and was not let in: {why}")


def _once(
    now: World, mine: Membership, store: Store, watch: Watch, live: dict[str, Any] | None, end: float
) -> World:
    assert live is not None
    own, theirs = mine.settings[2], live["transport"]
    if own != theirs and "shm" in (own, theirs):
        raise ConfigError(f"elastic: TRIGRAM_TRANSPORT={own} here, and {theirs} in the job")
    rendezvous = _core.Rendezvous(now.rank, max(int(live["slots"]), now.rank + 1), *mine.settings)
    knock = JoinRequest(store, now.rank, rendezvous.endpoint_record())
    while (answer := knock.answer()) is None:
        live = watch.look()
        if live is None:
            raise TimeoutError("elastic: nobody answers at the door")
        if time.monotonic() > end:
            if now.rank in live["ranks"]:
                raise TimeoutError("elastic: a process that has this rank's number is a member, and lives")
            raise TimeoutError("elastic: the members do not come together")
        time.sleep(0.02)
    if "refused" in answer:
        raise RefusedError(f"elastic: rank {now.rank} is not let in: {answer['refused']}")
    cards = [bytes.fromhex(c) for c in answer["cards"]]
    met = rendezvous.handshake(cards)
    store.put(f"elastic/met/{knock.id}", "yes" if met else "no")
    verdicts = store.wait(f"elastic/verdicts/{knock.id}", _STEP)
    if verdicts is None:
        raise TimeoutError("elastic: the members gave up letting this rank in")
    engine = rendezvous.connect(json.loads(verdicts), _STEP)
    try:
        before = Membership(
            answer["ranks"],
            len(cards),
            mine.settings,
            mine.queue,
            answer["epoch"] - 1,
            True,
            answer["commits"],
        )
        new = membership.build(engine, now, before, answer["ranks"], len(cards), answer["fresh"])
        gone = lambda: bool(engine.losses())  # noqa: E731
        if store.wait(f"elastic/go/{knock.id}", _STEP, gone) is None:
            raise TimeoutError("elastic: the members did not all come to let this rank in")
    except TrigramError:
        engine.shutdown(False)
        raise
    return new
