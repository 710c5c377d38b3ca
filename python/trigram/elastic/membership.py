"""Which ranks are members of an elastic job, and how the remaining members agree on it.

Each change of the members begins an *epoch*. Each epoch has new connections, control segments and
groups, so that no message of an earlier epoch can be taken for one of the present. Ranks keep their numbers.

When a rank is lost, all others call :func:`change_membership`:

1. Over the connections of the present epoch, the members that reach each other gather what each knows.
2. If they are the quorum, they connect the next epoch.
3. A barrier in the present epoch ends when all of them have done so. Then each closes the present epoch.

Members that were asked to leave (``draining.py``) do all of this too, but connect no next epoch.

A rank lost during these steps makes the others repeat them. A rank that passes the barrier knows that all
have reached it. A rank whose barrier fails does not know; it finds out from the losses of the present epoch:
a rank that has left it uses the next one, see :meth:`PreparedWorld.is_committed`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trigram import _core, collectives
from trigram.collectives.consistency import listed
from trigram.elastic import eviction, knowledge
from trigram.elastic.draining import Draining
from trigram.elastic.history import History
from trigram.elastic.join_queue import ADMITTED, HANDSHAKE, VERDICTS, JoinQueue
from trigram.elastic.knowledge import Knowledge
from trigram.elastic.replicas import Replicas
from trigram.elastic.spares import Spares
from trigram.elastic.succession import Succession
from trigram.errors import AbortedError, CorruptError, PeerLostError, TimeoutError, TrigramError
from trigram.runtime import engine_codes, job, world
from trigram.runtime.group import Group
from trigram.runtime.job import World
from trigram.runtime.records import all_gather_bytes, broadcast_bytes
from trigram.runtime.world import EPOCH_ORDINALS, REACHABLE_ORDINALS

_REACHABLE = "the reachable members"
"""The name of their group in error messages."""
_MAX_TRIES = 20
_QUORUM_POLL = 0.1
"""Seconds between two looks whether ranks have left that the quorum waits for."""
_CONNECT_TIMEOUT = 10.0
"""Seconds that a step of connecting a new epoch may take once all members have begun it."""
_LEAVE_TIMEOUT = 3 * _CONNECT_TIMEOUT
"""Seconds that a rank that leaves waits until the others have connected the next epoch."""
_LEFT_TIMEOUT = 1.0
"""Seconds after its barrier has failed until a rank that leaves knows whether others have passed it."""
_HANDSHAKE_TIMEOUT = 3.0
"""Seconds that the leader waits for a joining rank's handshake after those of the members are done."""
_LOSS_REPORT_TIMEOUT = 3.0
"""Seconds after a failed call until the loss behind it is known on this rank."""
_LEAST_PATIENCE = 60.0
"""Seconds that members are waited for at least: one may be in a step of connecting an epoch that has failed,
or silent and not lost yet."""
_SUCCESSION_PATIENCE = 1.0
"""Seconds that the smaller part of a job waits whether the larger has ended."""
_MOST_ADMISSIONS = 16
"""Ranks that one change of the membership admits at most."""
_BARRIER, _NOTHING = (engine_codes.BARRIER, 5, 0, 0, 0, 0), (0, 0, 0, 0)


@dataclass
class Membership:
    """What this rank knows of the elastic job in the present epoch.

    Attributes:
        ranks: The members, ascending; empty on a rank that has not joined.
        slots: One more than the largest rank that has ever been a member.
        epoch: The number of epochs before this one.
        settings: Network interface, an address that all ranks reach, and transport.
        queue: Where new ranks ask to join; None in a job without a store.
        history: What has happened in the job.
        newcomer: This rank has joined and not taken part in a step yet.
        commits: Backward passes that all members have completed.
        counted: World ranks whose gradients counted in the last of them; None: there was none.
        change_pending: A rank waits to join or is to leave; all members hold the same value.
        empty_regroups: How often in this epoch all members regrouped and admitted none, because the rank that
            waited had ended.
        spares: The spares among them, and how many ranks train; the same on all members.
        replicas: Which ranks come and leave together; the same on all members.
        stateless: Members that have no training state yet: they do not count in a quorum.
        reachable_groups: The groups of reachable members made in this epoch, by their ranks.
        places: The groups of those of them that have this rank's place in their replicas, likewise.
        replica_group: The ranks of this one's replica in this epoch; None: not made yet.
    """

    ranks: list[int]
    slots: int
    settings: tuple[str | None, str | None, str]
    queue: JoinQueue | None
    history: History
    epoch: int = 0
    newcomer: bool = False
    commits: int = 0
    counted: Sequence[int] | None = None
    change_pending: bool = False
    empty_regroups: int = 0
    spares: Spares = field(default_factory=Spares)
    replicas: Replicas = field(default_factory=Replicas)
    stateless: frozenset[int] = frozenset()
    reachable_groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    places: dict[tuple[int, ...], Group] = field(default_factory=dict)
    replica_group: Group | None = None

    @property
    def replica_size(self) -> int:
        """See :class:`trigram.runtime.job.Membership`."""
        return self.replicas.size

    def training(self) -> list[int]:
        """See :class:`trigram.runtime.job.Membership`."""
        return self.spares.training(self.ranks)

    def idle(self) -> list[int]:
        """The spares that do not count now, ascending."""
        return self.spares.idle(self.ranks)

    def is_idle(self, rank: int) -> bool:
        """See :class:`trigram.runtime.job.Membership`."""
        return rank in self.idle() if self.ranks else rank in self.spares.ranks

    def place(self, rank: int) -> int:
        """See :class:`trigram.runtime.job.Membership`."""
        return [*self.training(), *self.idle()].index(rank) if self.ranks else -1

    def leave(self) -> None:
        """See :class:`trigram.runtime.job.Membership`."""
        if self.queue is not None:
            self.queue.close()

    def status(self) -> dict[str, Any]:
        """What a rank must know of the job before it sends a join request."""
        status = {"epoch": self.epoch, "slots": self.slots, "ranks": self.ranks, "spares": self.idle()}
        status |= {"empty_regroups": self.empty_regroups, "transport": self.settings[2]}
        return status | {"replica_size": self.replicas.size}


@dataclass(frozen=True)
class MembershipChange:
    """The result of :func:`change_membership`.

    Attributes:
        newcomers: Members that do not have the training state yet, ascending.
        source: The lowest rank that has the training state.
        commit: All ranks had completed the backward pass under way, so it counts.
        renewed: There is a new epoch; otherwise nothing has changed.
        leaves: This rank is no member any more, because it was asked to leave.
        drained: All members were asked to leave, so that none has.
        behind: Some ranks have yet to come to what all do before a pass, see :attr:`Knowledge.behind`.
        together: All members have asked for a new epoch, at the same place.
    """

    newcomers: list[int]
    source: int
    commit: bool
    renewed: bool
    behind: bool = False
    leaves: bool = False
    drained: bool = False
    together: bool = False


def current() -> tuple[World, Membership]:
    """The world, and this rank's membership in it."""
    now = world.current()
    assert isinstance(now.elastic, Membership)
    return now, now.elastic


def replica_group() -> Group | None:
    """The group of the ranks of this one's replica, for its decisions; None if the replica is one rank, or if
    this rank has left the job."""
    now = world.present()  # not `current`, which begins a job
    mine = None if now is None else now.elastic
    if now is None or not isinstance(mine, Membership):
        return None
    if mine.replica_group is None and mine.replicas.size > 1 and mine.ranks:
        mine.replica_group = now.among(now.group, "replica", mine.replicas.of(now.rank))
    return mine.replica_group


def regroup_requested() -> bool:
    """Whether the leader asks the members to regroup and admit a rank. Ranks read this at different times."""
    _, mine = current()
    return mine.queue is not None and mine.queue.regroup_request == [mine.epoch, mine.empty_regroups]


def why_aborted() -> str:
    """Why a rank that is about to change the membership aborts its calls, or waits in them no longer. Those
    who wait in them are told it and come too, also if they know of nothing yet, because the loss, or the
    store's word, has not come to them."""
    return f"elastic: all ranks stop their calls to change the membership of epoch {current()[1].epoch}"


def has_lost() -> bool:
    """Whether this rank knows that a member is lost."""
    return bool(current()[0].engine.losses())


@dataclass(frozen=True)
class Leaving:
    """What an algorithm asks of a change of the membership in which ranks leave.

    Attributes:
        at_once: So many may leave in one change.
        hand_over: Gives the others of a group what only the ranks that leave have; all its ranks call it.
    """

    at_once: int
    hand_over: Callable[[Group], None]


def change_membership(boundary: bool, complete: bool, renew: bool, leaving: Leaving) -> MembershipChange:
    """Removes lost ranks and those that were asked to leave, and admits new ones. All members call it.

    Args:
        boundary: This rank is between two steps.
        complete: This rank has all results of the backward pass under way and waits only for the others.
        renew: Begin a new epoch even if no rank is lost, none joins and none leaves.
        leaving: How ranks leave.

    Raises:
        PeerLostError: The ranks that this rank reaches are not the quorum: they must not continue the job. Or
            another rank of this one's replica is lost.
        TimeoutError: A member that runs has not called it within ``op_timeout`` seconds.
    """
    prepared: PreparedWorld | None = None
    without: list[int] | None = None  # the next epoch, if this rank leaves
    tries = 0
    patience = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        now, mine = current()
        if without is not None and _has_begun(without, now):
            return MembershipChange([], 0, False, False, leaves=True)
        lost, decision, without = dict(now.engine.losses()), None, None
        if prepared is not None and prepared.is_committed(lost):
            return _switch_to(prepared)
        _check_replica(now, mine, lost, prepared)
        reachable = mine.replicas.whole([r for r in mine.ranks if r not in lost])
        asked = job.here().part(Draining).is_asked()
        try:
            group = _reachable_group(now, mine, reachable)
            try:
                known = _exchange_knowledge(group, now, mine, lost, (boundary, complete, renew, asked))
            except TimeoutError as late:
                why = f"elastic: not all members have come to change the membership: {late}"
                raise AbsentError(why) from late
            decision = _decide(group, now, known, tries == 0, leaving.at_once)
            if prepared is not None:
                failed, prepared = prepared, None
                failed.world.engine.shutdown(False)
            if mine.queue is not None and decision["succession"] == "entered":
                mine.queue.owes_entry = False
            if not decision["renew"]:
                _check_succession(known, decision)
                mine.empty_regroups += 1
                if mine.queue is not None:
                    mine.queue.status = mine.status()
                return _result(known, decision, renewed=False)
            if not _check_quorum(known, time.monotonic() < patience):
                time.sleep(_QUORUM_POLL)
                continue
            _check_succession(known, decision)
            if decision["leave"]:
                leaving.hand_over(group)
            new = _connect_epoch(group, now, mine, decision, known)
            if new is None:
                without = [r for r in reachable if r not in decision["leave"]]
                _await_next_epoch(group)
                return MembershipChange([], 0, False, False, leaves=True)
            prepared = PreparedWorld(new, known, decision)
            group.core.run(_BARRIER, _NOTHING, _CONNECT_TIMEOUT)
        except NoQuorumError:
            mine.leave()  # it must not lead, nor look alive to ranks that join
            eviction.evict(job.here(), ())  # if that is why the others do not hear it
            raise
        except AbsentError:
            if prepared is not None:
                prepared.world.engine.shutdown(False)
            raise
        except TrigramError:  # a member was lost, or a joining rank could not be connected
            tries += 1
            if tries > _MAX_TRIES:
                raise
            if decision is not None and mine.queue is not None and not set(now.engine.losses()) - set(lost):
                mine.queue.defer([r["rank"] for r in decision["requests"]])
            continue
        return _switch_to(prepared)


class NoQuorumError(PeerLostError):
    """The reachable ranks are not the quorum of an elastic job: the others may continue it."""


class ReplicaLostError(PeerLostError):
    """Another rank of this one's replica is lost: the others go on without this replica."""


class AbsentError(TimeoutError):
    """Members that run have not come to a change of the membership within the limit of a collective."""


class StateLostError(PeerLostError):
    """Part of the training state was on lost ranks only, so the job cannot continue."""


# The steps of `change_membership`.


def _check_replica(
    now: World, mine: Membership, lost: dict[int, str], prepared: PreparedWorld | None
) -> None:
    """Raises if a rank of this one's replica is lost: the others take the whole replica for lost."""
    gone = [r for r in mine.replicas.of(now.rank) if r in lost]
    if not gone:
        return
    if prepared is not None:
        prepared.world.engine.shutdown(False)
    mine.leave()  # it must not lead, nor look alive to ranks that join
    raise ReplicaLostError(
        f"elastic: rank(s) {listed(gone)} of the replica of rank {now.rank} (ranks "
        f"{listed(mine.replicas.of(now.rank))}) are lost, so the replica leaves the job; the other replicas "
        "go on. Start all ranks of this replica again to join",
        gone[0],
    )


def _reachable_group(now: World, mine: Membership, reachable: list[int]) -> Group:
    """The group of the members that this rank reaches."""
    key = tuple(reachable)
    if key not in mine.reachable_groups:
        ordinal = REACHABLE_ORDINALS + mine.epoch
        core = now.engine.group(_REACHABLE, reachable, ordinal, 0)
        mine.reachable_groups[key] = Group(_REACHABLE, reachable, core, None, (), ordinal)
    return mine.reachable_groups[key]


def _exchange_knowledge(
    group: Group, now: World, mine: Membership, lost: dict[int, str], position: Sequence[bool]
) -> Knowledge:
    """Gathers what each rank of the group knows; ``position``: see :func:`knowledge.row`."""
    row = knowledge.row(mine.newcomer, mine.commits, position, lost, mine.stateless, mine.slots)
    rows = torch.empty(group.size, row.numel(), dtype=torch.int64, device="cpu")
    limit = None if now.op_timeout is None else max(now.op_timeout, _LEAST_PATIENCE)
    collectives.all_gather(rows, row, group, timeout=limit)
    return Knowledge(rows, mine.ranks, group.ranks, mine.replicas)


def _decide(group: Group, now: World, known: Knowledge, may_admit: bool, at_once: int) -> dict[str, Any]:
    """The leader's decision.

    It has ``renew``, whether there is a new epoch; ``requests``, which it admits; ``leave``, the ranks that
    leave, ``at_once`` at most; ``drained``: all were asked to, so none does; and ``succession``, see
    :func:`_enter`.
    """
    text, mine = b"", current()[1]
    if group.rank == 0:
        incomplete = len(group.ranks) < len(mine.ranks)
        leave = known.asked if known.between_steps else []
        drained = len(leave) == len(group.ranks)
        # Nobody leaves while another is lost, who may have had the only other copy of what that rank has, or
        # while one that has joined has no state yet: a step later they do.
        if drained or incomplete or known.newcomers:
            leave = []
        leave = mine.replicas.first(leave, at_once) if at_once else []
        # A leader that leaves admits nobody: it would have to tell that rank how its admission ended. Nobody
        # is admitted to a job that ends.
        may_admit = may_admit and known.between_steps and not drained and group.ranks[0] not in leave
        requests = mine.queue.requests() if may_admit and mine.queue else []
        joining: dict[int, dict[str, Any]] = {}
        for request in requests:
            if request["rank"] not in group.ranks:  # it was one when the request was read
                joining[request["rank"]] = request
        admitted = mine.replicas.first(mine.replicas.whole(sorted(joining)), _MOST_ADMISSIONS)
        succession, begin = "unknown", bool(leave) or incomplete or known.renew
        owes = mine.queue is not None and mine.queue.owes_entry
        if (begin or admitted or owes) and mine.queue is not None and known.outvote(known.alive()):
            epoch = mine.epoch + bool(begin or admitted)
            succession = _enter(now, mine.queue, epoch, known, admitted)
            # Nobody joins where that could not be entered: it would be missing among the members.
            if succession == "unknown" and mine.queue.store.reopen is not None:
                admitted = []
        told = {"renew": begin or bool(admitted), "requests": [joining[r] for r in admitted], "leave": leave}
        text = json.dumps(told | {"drained": drained, "succession": succession}).encode()
    decision: dict[str, Any] = json.loads(broadcast_bytes(group, text, 0))
    return decision


def _enter(now: World, queue: JoinQueue, epoch: int, known: Knowledge, joining: Sequence[int]) -> str:
    """On the leader: enters the members of an epoch in the store, see :meth:`Succession.enter`.

    If the ranks that seem to have ended would be more, were they alive, they are waited for, so that the
    larger part goes on.
    """
    more = not known.outvote(known.cut_off(now.engine.hosts))
    patience = _SUCCESSION_PATIENCE if more else 0.0
    return Succession(queue.store).enter(epoch, known.reachable, joining, patience)


def _check_quorum(known: Knowledge, may_wait: bool) -> bool:
    """Whether the reachable ranks may continue; False: not yet. A rank whose replica has lost another leaves,
    so it is waited for, while all reach it.

    Raises:
        NoQuorumError: They may not.
    """
    alive = known.alive()
    if known.outvote(alive):
        return True
    if may_wait and known.leaving():
        return False
    refusing = known.lost("refused")
    evicted = f"; ranks {listed(sorted(refusing))} hear them, and have evicted them" if refusing else ""
    raise NoQuorumError(
        f"elastic: ranks {listed(known.reachable)} of {len(known.members)} cannot reach ranks "
        f"{listed([r for r in alive if r not in refusing] or alive)}{evicted}. The others may continue the "
        f"job; ranks {listed(known.reachable)} stop. Restart them when the network works again",
        alive[0],
    )


def _check_succession(known: Knowledge, decision: dict[str, Any]) -> None:
    """Raises if another part of the job goes on."""
    if decision["succession"] == "lost":
        here = listed(known.reachable)
        others = [r for r in known.members if r not in known.reachable]
        raise NoQuorumError(
            f"elastic: ranks {here} of {len(known.members)} have lost their connections with ranks "
            f"{listed(others)}, which have not ended: the job's store says that they continue the job; ranks "
            f"{here} stop. Restart them when the network works again",
            others[0] if others else known.reachable[0],
        )


def _connect_epoch(
    group: Group, now: World, mine: Membership, decision: dict[str, Any], known: Knowledge
) -> World | None:
    """Connects the next epoch: the reachable members without those that leave, and the ranks that join.

    Returns:
        Its world; None on a rank that leaves.
    """
    joining = {request["rank"]: request for request in decision["requests"]}
    slots = max([mine.slots, *(r + 1 for r in joining)])
    rendezvous = _core.Rendezvous(now.rank, slots, *mine.settings)
    endpoints = [b""] * slots
    stay = [r for r in group.ranks if r not in decision["leave"]]
    for rank, endpoint in zip(
        group.ranks, all_gather_bytes(group, rendezvous.endpoint_record()), strict=True
    ):
        endpoints[rank] = endpoint if rank in stay else b""
    for rank, request in joining.items():
        endpoints[rank] = bytes.fromhex(request["endpoint"])
    ranks = sorted([*stay, *joining])
    stateless = sorted([*joining, *(r for r in known.newcomers if r in stay)])
    spares = mine.spares.with_members(ranks, [r for r, request in joining.items() if request["spare"]])
    queue = mine.queue if group.rank == 0 else None  # the leader answers
    if queue is not None:
        answer = {
            "epoch": mine.epoch + 1,
            "ranks": ranks,
            "stateless": stateless,
            "spares": sorted(spares.ranks),
            "target": spares.target,
            "commits": known.commits,
            "endpoints": [e.hex() for e in endpoints],
        }
        for request in joining.values():
            queue.answer(request["id"], answer)
    succeeded = torch.zeros(slots, dtype=torch.int32, device="cpu")
    if now.rank in stay:
        succeeded[now.rank] = rendezvous.handshake(endpoints, _CONNECT_TIMEOUT)
    if queue is not None:
        until = time.monotonic() + _HANDSHAKE_TIMEOUT  # for all of them: the members wait meanwhile
        for rank, request in joining.items():
            left = max(until - time.monotonic(), 0.05)
            value = queue.store.wait(HANDSHAKE.format(request["id"]), left)
            succeeded[rank] = value == b"yes"
    collectives.all_reduce(succeeded, "max", None, group)
    verdicts = [bool(v) for v in succeeded]
    if queue is not None:
        for request in joining.values():
            queue.store.put(VERDICTS.format(request["id"]), json.dumps(verdicts))
    if now.rank not in stay:
        return None
    engine = rendezvous.connect(verdicts, _CONNECT_TIMEOUT, now.engine)
    return build(engine, now, mine, ranks, slots, stateless, spares)


def _await_next_epoch(group: Group) -> None:
    """On a rank that leaves: ends when the others have connected the next epoch."""
    group.core.run(_BARRIER, _NOTHING, _LEAVE_TIMEOUT)


def _has_begun(without: list[int], now: World) -> bool:
    """On a rank that leaves and whose barrier has failed: whether the next epoch, of these ranks, has begun.

    A rank that uses it has left the present one, and so all have connected it. That is known here at once, or
    a moment after the death that made the barrier fail.
    """
    end = time.monotonic() + _LEFT_TIMEOUT
    while True:
        losses = dict(now.engine.losses())
        if any(losses.get(r) == "left" for r in without):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


def build(
    engine: _core.Engine,
    now: World,
    mine: Membership,
    ranks: list[int],
    slots: int,
    stateless: Sequence[int],
    spares: Spares,
) -> World:
    """The world of a newly connected engine; returns when all of its ranks have called this."""
    name = f"world, epoch {mine.epoch + 1}"
    ordinal = EPOCH_ORDINALS + mine.epoch
    core = engine.group(name, ranks, ordinal, 0)
    core.run(_BARRIER, _NOTHING, _CONNECT_TIMEOUT)
    group = Group(name, ranks, core, now.op_timeout, (), ordinal)
    after = Membership(
        ranks,
        slots,
        mine.settings,
        mine.queue,
        mine.history,
        mine.epoch + 1,
        mine.newcomer,
        mine.commits,
        mine.counted,
        spares=spares,
        replicas=mine.replicas,
        stateless=frozenset(stateless),
    )
    return World(engine, group, now.rank, slots, now.op_timeout, elastic=after)


@dataclass
class PreparedWorld:
    """A connected next epoch that is not in use yet, and what it was made from.

    Attributes:
        world: The next epoch.
        known: What the members that made it know.
        decision: The result of :func:`_decide`.
    """

    world: World
    known: Knowledge
    decision: dict[str, Any]

    def is_committed(self, lost: dict[int, str]) -> bool:
        """Whether a rank uses the next epoch, which it does only if all have connected it.

        Args:
            lost: The losses of the present epoch: a rank that uses the next one has left the present one.
        """
        left = [r for r in self.world.group.ranks if lost.get(r) == "left"]
        if left:
            time.sleep(0.2)  # a rank whose script has ended leaves both epochs: let both losses arrive
        gone = dict(self.world.engine.losses())
        return any(r not in gone for r in left)


def _switch_to(prepared: PreparedWorld) -> MembershipChange:
    """Makes the next epoch the current one and closes the one before, whose calls fail."""
    new, (old, mine) = prepared.world, current()
    _note(prepared, old, mine)  # before this rank leaves the old epoch, where all are then gone
    old.engine.shutdown(False)
    # The script may hold the group of all ranks: that object becomes the new group.
    old.group.become(new.group)
    new.group = old.group
    world.replace(new)
    after = new.elastic
    assert isinstance(after, Membership)
    requests = prepared.decision["requests"]
    if mine.queue is not None:
        unknown = prepared.decision["succession"] == "unknown"
        mine.queue.owes_entry = unknown and mine.queue.store.reopen is not None
        mine.queue.serve(new.rank == after.ranks[0], after.status())
        for request in requests if new.rank == prepared.known.reachable[0] else ():
            mine.queue.store.put(ADMITTED.format(request["id"]), "yes")
            mine.queue.admitted(request["rank"])
    return _result(prepared.known, prepared.decision, renewed=True)


def _note(prepared: PreparedWorld, old: World, mine: Membership) -> None:
    """Notes in the history who was lost, has left and has joined."""
    losses, leave = dict(old.engine.losses()), prepared.decision["leave"]
    gone = [r for r in mine.ranks if r not in prepared.known.reachable]
    for what in sorted({losses.get(r, "dead") for r in gone}):
        mine.history.add(mine.epoch, what, [r for r in gone if losses.get(r, "dead") == what])
    mine.history.add(mine.epoch, "asked to leave", leave)
    mine.history.add(mine.epoch, "joined", [r["rank"] for r in prepared.decision["requests"]])
    after = prepared.world.elastic
    assert isinstance(after, Membership)
    idle, counts = after.idle(), after.training()
    mine.history.add(mine.epoch, "takes a place", [r for r in mine.idle() if r in counts])
    mine.history.add(mine.epoch, "is a spare again", [r for r in idle if r in mine.training()])


def _result(known: Knowledge, decision: dict[str, Any], renewed: bool) -> MembershipChange:
    left, joined = decision["leave"], [request["rank"] for request in decision["requests"]]
    newcomers = [r for r in known.newcomers if r not in left]
    sources = [r for r in known.reachable if r not in newcomers and r not in left]
    if not sources:
        raise PeerLostError(
            "elastic: no rank that has the training state is left; restart the job from a checkpoint",
            known.reachable[0],
        )
    return MembershipChange(
        sorted([*newcomers, *joined]),
        sources[0],
        known.completed > current()[1].commits,
        renewed,
        known.behind,
        drained=decision["drained"],
        together=known.together,
    )


def is_loss(error: TrigramError) -> bool:
    """Whether an error is due to a lost rank, or to members that regroup to admit one.

    It waits for up to three seconds, because the error may arrive before the loss does.
    """
    if isinstance(error, NoQuorumError | StateLostError | ReplicaLostError):
        return False
    if not isinstance(error, PeerLostError | AbortedError | CorruptError):
        return False
    if why_aborted() in str(error):
        return True
    end = time.monotonic() + _LOSS_REPORT_TIMEOUT
    while time.monotonic() < end:
        if current()[0].engine.losses() or (isinstance(error, AbortedError) and regroup_requested()):
            return True
        time.sleep(0.005)
    return False
