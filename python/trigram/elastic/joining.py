"""How a rank becomes a member of an elastic job: at the job's start, or later.

A rank that starts late waits, with a world that has no connections, until its script calls ``with_bagua`` or
:func:`trigram.recover`. Then it sends a join request, and the members admit it between two steps.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist

from trigram import _core
from trigram.collectives.consistency import listed
from trigram.elastic import draining, eviction, membership
from trigram.elastic.history import History
from trigram.elastic.join_queue import (
    ADMITTED,
    HANDSHAKE,
    STATUS_TIMEOUT,
    VERDICTS,
    JobWatch,
    JoinQueue,
    JoinRequest,
)
from trigram.elastic.membership import Membership
from trigram.elastic.replicas import Replicas
from trigram.elastic.spares import Spares
from trigram.elastic.succession import Succession
from trigram.errors import AuthError, ConfigError, MisuseError, TimeoutError, TrigramError
from trigram.runtime import job, launchers, world
from trigram.runtime.group import Group
from trigram.runtime.job import World
from trigram.runtime.live_store import connect_again
from trigram.runtime.rendezvous import LateError
from trigram.runtime.world import Settings, use_elastic

_STEP_TIMEOUT = 15.0
"""Seconds that one step of joining may take; after that this rank sends a new request."""
_SILENT_SECONDS = 60.0
"""A job that has run and says nothing for so long has ended: longer than its ranks need to choose another
leader on a busy machine."""
_EMPTY_SECONDS = 20.0
"""The same where a new store has taken the place of one that died with all members: a leader that is alive
writes into it within a second."""
_MOST_MISMATCHES = 3
"""Attempts in a row that fail because settings differ, after which this rank raises the error."""
_CHECK_EVERY = 0.1
"""Seconds between two checks during ``init`` whether the job runs already."""


class Start:
    """How this process enters an elastic job: as one of its first ranks, or late.

    Implements :class:`trigram.runtime.world.ElasticStart`.

    Args:
        store: The store of the ranks; None in a world of one rank.
        rank: This rank.
        size: The number of ranks at the job's start.
        settings: How other ranks reach this one.
        op_timeout: The argument of ``init``, in seconds.
        spare: Whether this rank is a spare.
        replica_size: How many ranks make up a replica.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        settings: Settings,
        op_timeout: float | None,
        spare: bool = False,
        replica_size: int = 1,
    ) -> None:
        self.spare, self.replicas = spare, Replicas(replica_size)
        self.rank, self.size, self.settings, self.op_timeout = rank, size, settings, op_timeout
        draining.check_settings()  # here, where all ranks are told
        self.queue = None
        if store is None:
            return
        mine = job.here().part(draining.Draining)
        evict = functools.partial(eviction.evict, job.here())
        self.queue = JoinQueue(connect_again(store), rank, mine.is_asked, mine.ask, evict, self.replicas)
        self.queue.hosted_store = store
        self.watch = JobWatch(self.queue.store)
        self.checked = 0.0

    def is_late(self) -> bool:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        if self.queue is None or time.monotonic() - self.checked < _CHECK_EVERY:
            return False
        self.checked = time.monotonic()
        return self.watch.status() is not None

    def find_out(self) -> None:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        end = time.monotonic() + STATUS_TIMEOUT
        while self.queue is not None and self.watch.known() and time.monotonic() < end:
            if self.is_late():
                raise LateError
            time.sleep(0.02)

    def late_world(self) -> World:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        group = Group(
            "world (this rank started late and has not joined: call with_bagua or trigram.recover)",
            range(self.size),
            None,
            self.op_timeout,
        )
        spares = Spares(frozenset([self.rank] if self.spare else []))
        mine = Membership([], self.size, self.settings, self.queue, History(), newcomer=True, spares=spares)
        mine.replicas = self.replicas
        engine = cast(_core.Engine, MissingEngine(self.rank))
        return World(engine, group, self.rank, self.size, self.op_timeout, elastic=mine)

    def member(self, spares: Sequence[int]) -> Membership:
        """See :class:`trigram.runtime.world.ElasticStart`."""
        ranks = list(range(self.size))
        known = Spares().with_members(ranks, spares)
        mine = Membership(ranks, self.size, self.settings, self.queue, History(), spares=known)
        mine.replicas = self.replicas
        if self.queue is not None:
            if self.rank == 0:
                Succession(self.queue.store).begin(ranks)
            self.queue.serve(self.rank == 0, mine.status())
        launchers.tell_launcher()
        return mine


use_elastic(Start)


class MissingEngine:
    """In the place of the engine of a rank that has not joined: any use is an error that says how to join."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        raise MisuseError(
            f"rank {self.rank} started late and has not joined the elastic job yet: call "
            "with_bagua(elastic=True), or trigram.recover() in a script without a model"
        )

    def write_out_log(self) -> None:
        """Does nothing: there are no log lines of an engine."""

    def am_sent_away(self) -> bool:
        """Nobody can have."""
        return False

    def shutdown(self, exiting: bool, patient: bool = True) -> None:
        """Does nothing: there are no connections."""


class RefusedError(AuthError):
    """The members do not admit this rank, and will not later."""


def must_join() -> bool:
    """Whether this rank started late and has not joined yet."""
    return not membership.current()[1].ranks


def join(timeout: float = 300.0) -> None:
    """Makes a late rank a member: sends join requests until the members admit it.

    Args:
        timeout: Seconds.

    Raises:
        TimeoutError: The job has not admitted this rank in time, or has ended: no member of it has said
            anything for a minute.
        AuthError: This rank's secret differs from the job's.
        ConfigError: This rank's settings differ from the job's.
    """
    now, mine = membership.current()
    assert mine.queue is not None
    watch, end = JobWatch(mine.queue.store), time.monotonic() + timeout
    reason = "no member of the job responds; is it running, with the same MASTER_ADDR and MASTER_PORT?"
    pause, mismatches, heard = 0.1, 0, time.monotonic()
    while time.monotonic() < end:
        status = watch.status()
        if status is None:
            limit = _SILENT_SECONDS if watch.known() else _EMPTY_SECONDS
            if time.monotonic() - heard > limit and watch.is_reached():
                raise TimeoutError(
                    f"elastic: rank {now.rank} cannot join: the job has run, and no member of it has said "
                    f"anything for {limit:.0f} s, so it has ended; start again. The last try: {reason}"
                )
            time.sleep(0.05)
            continue
        heard = time.monotonic()
        try:
            new = _try_to_join(now, mine, watch, status, end)
        except RefusedError as e:
            raise AuthError(str(e)) from None
        except (TrigramError, ValueError, KeyError, TypeError) as e:  # any process may write to the store
            reason = str(e)
            # One such error may be about another rank, which joins at the same time or has just died.
            mismatches = mismatches + 1 if isinstance(e, AuthError | ConfigError) else 0
            if mismatches == _MOST_MISMATCHES:
                raise
            time.sleep(pause)  # longer each time: all members stop for each request
            pause = min(2 * pause, 5.0)
            continue
        # The script may hold the group that `init` returned: that object becomes the new group.
        new.group, group = now.group, new.group
        new.group.become(group)
        world.replace(new)
        joined = new.elastic
        assert isinstance(joined, Membership)
        mine.queue.serve(new.rank == joined.ranks[0], joined.status())
        launchers.tell_launcher()
        return
    raise TimeoutError(
        f"elastic: rank {now.rank} tried for {timeout:.0f} s to join the job; the last try: {reason}"
    )


def _try_to_join(now: World, mine: Membership, watch: JobWatch, status: dict[str, Any], end: float) -> World:
    """Sends one join request and follows it to its end; returns the world that this rank is then in."""
    ours, theirs = mine.settings[2], status["transport"]
    if ours != theirs and "shm" in (ours, theirs):
        raise ConfigError(
            f"elastic: rank {now.rank} has TRIGRAM_TRANSPORT={ours}, but the job runs with {theirs}; set the "
            "same on all ranks"
        )
    if (theirs := status["replica_size"]) != mine.replicas.size:
        raise ConfigError(
            f"elastic: rank {now.rank} has init(replica_size={mine.replicas.size}), but the job runs with "
            f"{theirs}; pass the same on all ranks"
        )
    store = watch.store
    rendezvous = _core.Rendezvous(now.rank, max(int(status["slots"]), now.rank + 1), *mine.settings)
    is_spare = now.rank in mine.spares.ranks
    request = JoinRequest(store, now.rank, rendezvous.endpoint_record(), is_spare)
    partners = [r for r in mine.replicas.of(now.rank) if r != now.rank]
    others = f"; it admits whole replicas: do rank(s) {listed(partners)} wait too?" if partners else ""
    answer = _await_answer(request, watch, now.rank, end, others)
    if "refused" in answer:
        raise RefusedError(f"elastic: the job refused rank {now.rank}: {answer['refused']}")
    endpoints = [bytes.fromhex(e) for e in answer["endpoints"]]
    succeeded = rendezvous.handshake(endpoints, _STEP_TIMEOUT)
    store.put(HANDSHAKE.format(request.id), "yes" if succeeded else "no")
    verdicts = store.wait(VERDICTS.format(request.id), _STEP_TIMEOUT)
    if verdicts is None:
        raise TimeoutError(f"the members aborted the admission of rank {now.rank}")
    engine = rendezvous.connect(json.loads(verdicts), _STEP_TIMEOUT)
    try:
        before = Membership(
            answer["ranks"],
            len(endpoints),
            mine.settings,
            mine.queue,
            mine.history,
            epoch=answer["epoch"] - 1,
            newcomer=True,
            commits=answer["commits"],
            spares=Spares(frozenset(answer["spares"]), answer["target"]),
            replicas=mine.replicas,
        )
        new = membership.build(
            engine, now, before, answer["ranks"], len(endpoints), answer["stateless"], before.spares
        )
        if store.wait(ADMITTED.format(request.id), _STEP_TIMEOUT, lambda: bool(engine.losses())) is None:
            raise TimeoutError(f"not all members confirmed the admission of rank {now.rank}")
    except TrigramError:
        engine.shutdown(False)
        raise
    return new


def _await_answer(
    request: JoinRequest, watch: JobWatch, rank: int, end: float, others: str
) -> dict[str, Any]:
    """Waits until the leader answers the request; ``end`` is a time of ``time.monotonic``, and ``others`` is
    added to what is said then."""
    while (answer := request.answer()) is None:
        status = watch.status()
        if status is None:
            raise TimeoutError(f"the job stopped responding while rank {rank} waited to join")
        if time.monotonic() > end:
            if rank in status["ranks"]:
                raise TimeoutError(
                    f"another process is rank {rank} of the job and is alive; set another RANK here"
                )
            raise TimeoutError(
                f"the job received the join request of rank {rank}, but did not admit it in time{others}"
            )
        time.sleep(0.02)
    return answer
