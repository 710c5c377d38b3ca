"""Who is in an elastic job, and how the living agree on it.

A *epoch* is a world of its own: connections, boards and groups are made anew for each, so nothing
of an earlier one can be mistaken for the present. Ranks keep the numbers they started with.

When a rank is lost, all others come here (:func:`change_membership`). Over the connections they still have, those who
can reach each other tell what they know; if they are the quorum they make the next epoch, and when
all have made it, they let go of the old one. A rank that was lost on the way makes them begin again. Who
passes the last barrier knows that all others have come as far; who fails there finds out, from those
who have gone on, which of the two worlds stands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trigram import _core, collectives
from trigram.elastic.join_queue import JoinQueue
from trigram.errors import AbortedError, CorruptError, PeerLostError, TrigramError
from trigram.runtime import engine_codes, world
from trigram.runtime.group import Group
from trigram.runtime.records import all_gather_bytes, broadcast_bytes
from trigram.runtime.world import World

_ROLL = 4 << 32
_TRIES = 20
_PATIENCE = 10.0
"""Seconds that the steps of a new epoch may take once all have come."""
_ANSWER = 3.0
"""Seconds that a newcomer may take, once the members are done, to tell whom it has met."""
_KINDS = ("", "left", "dead", "silent", "refused")
_FRESH = 8
"""Added to how a rank was lost, if it has no state yet."""
_BARRIER, _NOTHING = (engine_codes.BARRIER, 5, 0, 0, 0, 0), (0, 0, 0, 0)


@dataclass
class Membership:
    """This rank's part in an elastic job.

    Attributes:
        ranks: The members' numbers, rising.
        slots: One more than the largest number so far.
        epoch: Worlds made so far.
        settings: Interface, address to look toward, and transport.
        queue: Where ranks ask to join; None: nowhere.
        newcomer: This rank has not taken part in a step yet.
        commits: Passes that all ranks have completed.
        due: Somebody waits at the door, as all ranks know alike.
        refused: How often in this epoch all members came together and let nobody in: it had gone.
        fresh: Members that have no state before a step in which all have it: they have no voice in a quorum.
    """

    ranks: list[int]
    slots: int
    settings: tuple[str | None, str | None, str]
    queue: JoinQueue | None
    epoch: int = 0
    newcomer: bool = False
    commits: int = 0
    due: bool = False
    refused: int = 0
    fresh: frozenset[int] = frozenset()
    rolls: dict[tuple[int, ...], Group] = field(default_factory=dict)

    def leave(self) -> None:
        """See :class:`trigram.runtime.world.Membership`."""
        if self.queue is not None:
            self.queue.close()

    def says(self) -> dict[str, Any]:
        """What newcomers must know before they knock."""
        said = {"epoch": self.epoch, "slots": self.slots, "ranks": self.ranks}
        return said | {"refused": self.refused, "transport": self.settings[2]}


@dataclass(frozen=True)
class MembershipChange:
    """What came of a :func:`change_membership`.

    Attributes:
        newcomers: Members that have no part in the job's state yet.
        source: The lowest member that has.
        commit: Everybody had completed the pass under way: it counts.
        renewed: Whether there is a new world; else everything is as it was.
        behind: Some were still in a pass that others had left behind them.
    """

    newcomers: list[int]
    source: int
    commit: bool
    renewed: bool
    behind: bool = False


def quorum(members: Sequence[int], here: Sequence[int], away: Sequence[int]) -> bool:
    """Whether ``here`` may go on as the whole.

    Ranks whose end is known do not count. Of the others those may go on who are more than those they
    cannot reach; of two equal halves the one with the lowest rank. So two halves never both do.

    Args:
        members: All ranks of the epoch.
        here: Those that reach each other.
        away: Those that may live on out of reach.
    """
    assert set(here) <= set(members) and set(away) <= set(members)
    if len(here) != len(away):
        return len(here) > len(away)
    return min(here) < min(away)


def current() -> tuple[World, Membership]:
    """The world and this rank's part in it."""
    now = world.current()
    assert isinstance(now.elastic, Membership)
    return now, now.elastic


def asked() -> bool:
    """Whether the members are asked to let somebody in: each hears of it in its own time."""
    _, mine = current()
    return mine.queue is not None and mine.queue.asked == [mine.epoch, mine.refused]


def has_lost() -> bool:
    """Whether this rank knows of one that is lost."""
    return bool(current()[0].engine.losses())


def change_membership(boundary: bool, complete: bool, anew: bool = False) -> MembershipChange:
    """All members call it: the living agree on who goes on, and let those in who wait.

    Args:
        boundary: This rank is between two steps.
        complete: This rank has everything of the pass under way, and only waits for the others.
        anew: There is to be a new world, even if nobody is lost and nobody comes.

    Raises:
        PeerLostError: These ranks are not the quorum: they must not go on as the whole.
    """
    made: Made | None = None
    tries = 0
    while True:
        now, mine = current()
        lost, decision = dict(now.engine.losses()), None
        if made is not None and made.stands(lost):
            return _adopt(made)
        here = [r for r in mine.ranks if r not in lost]
        try:
            roll = _roll(now, mine, here)
            told = _tell(roll, now, mine, lost, (boundary, complete, anew))
            decision = _decide(roll, mine, told, tries == 0)
            if made is not None:
                failed, made = made, None
                failed.world.engine.shutdown(False)
            if not decision["renew"]:
                mine.refused += 1
                if mine.queue is not None:
                    mine.queue.says = mine.says()
                return _outcome(told, here, renewed=False)
            _check_quorum(mine, here, told)
            made = Made(_meet(roll, now, mine, decision, told), told, here, decision)
            roll.core.run(_BARRIER, _NOTHING, _PATIENCE)
        except NoQuorumError:
            raise
        except TrigramError:  # a loss, or a newcomer that cannot be met, with whatever it has wrong
            tries += 1
            if tries > _TRIES:
                raise
            if decision is not None and mine.queue is not None and not set(now.engine.losses()) - set(lost):
                mine.queue.put_off([k["rank"] for k in decision["knocks"]])
            continue
        return _adopt(made)


class NoQuorumError(PeerLostError):
    """These ranks are not the quorum of an elastic job: the others may go on as the whole."""


# One step each.


def _roll(now: World, mine: Membership, here: list[int]) -> Group:
    """The group of those that reach each other."""
    key = tuple(here)
    if key not in mine.rolls:
        core = now.engine.group("the living", here, _ROLL + mine.epoch, 0)
        mine.rolls[key] = Group("the living", here, core, None)
    return mine.rolls[key]


def _tell(
    roll: Group, now: World, mine: Membership, lost: dict[int, str], stands: tuple[bool, bool, bool]
) -> torch.Tensor:
    """What all know, a row for each: newcomer, commits, where it stands, and how each rank was lost."""
    kinds = [_KINDS.index(lost.get(r, "")) + _FRESH * (r in mine.fresh) for r in range(mine.slots)]
    own = torch.tensor([mine.newcomer, mine.commits, *stands, *kinds], dtype=torch.int64)
    everyone = torch.empty(roll.size, own.numel(), dtype=torch.int64)
    collectives.all_gather(everyone, own, roll)
    return everyone


def _decide(roll: Group, mine: Membership, told: torch.Tensor, lets_in: bool) -> dict[str, Any]:
    """What the lowest rank decides: whether there is to be a new world, and who enters it."""
    text = b""
    if roll.rank == 0:
        commits, boundary, complete, anew = (told[:, column] for column in range(1, 5))
        calm = bool(boundary.all()) and not bool(complete.any()) and bool((commits == commits[0]).all())
        knocks = mine.queue.knocks() if lets_in and calm and mine.queue else []
        entering: dict[int, dict[str, Any]] = {}
        for knock in knocks:
            if knock["rank"] not in roll.ranks:  # as it was when it knocked
                entering[knock["rank"]] = knock
        chosen = list(entering.values())[:16]
        renew = bool(chosen) or len(roll.ranks) < len(mine.ranks) or bool(anew.any())
        text = json.dumps({"renew": renew, "knocks": chosen}).encode()
    decision: dict[str, Any] = json.loads(broadcast_bytes(roll, text, 0))
    return decision


def _check_quorum(mine: Membership, here: list[int], told: torch.Tensor) -> None:
    kinds = told[:, 5:]
    gone = {r for r in mine.ranks if any(_KINDS[int(k) % _FRESH] in ("left", "dead") for k in kinds[:, r])}
    # Who has no state yet has no voice. That it has is known once any rank knows it.
    fresh = {r for r in mine.ranks if bool((kinds[:, r] >= _FRESH).all())}
    voices = [r for r in here if r not in fresh]
    away = [r for r in mine.ranks if r not in here and r not in gone | fresh]
    if away and not (voices and quorum(mine.ranks, voices, away)):
        raise NoQuorumError(
            f"elastic: ranks {', '.join(map(str, here))} of {len(mine.ranks)} cannot reach ranks "
            f"{', '.join(map(str, away))}, which may go on without them; these stop. Restart "
            "them when the network is whole",
            away[0],
        )


def _meet(roll: Group, now: World, mine: Membership, decision: dict[str, Any], told: torch.Tensor) -> World:
    """The next epoch: a world of the living and of those who enter."""
    keeps = roll.rank == 0 and mine.queue is not None
    entering = {k["rank"]: k for k in decision["knocks"]}
    slots = max([mine.slots, *(r + 1 for r in entering)])
    rendezvous = _core.Rendezvous(now.rank, slots, *mine.settings)
    card = rendezvous.endpoint_record()
    cards = [b""] * slots
    for rank, told_card in zip(roll.ranks, all_gather_bytes(roll, card), strict=True):
        cards[rank] = told_card
    for rank, knock in entering.items():
        cards[rank] = bytes.fromhex(knock["card"])
    ranks = sorted([*roll.ranks, *entering])
    fresh = sorted([*entering, *(r for r, row in zip(roll.ranks, told, strict=True) if row[0])])
    if keeps and mine.queue:
        answer = {
            "epoch": mine.epoch + 1,
            "ranks": ranks,
            "fresh": fresh,
            "commits": int(told[:, 1].max()),
            "cards": [c.hex() for c in cards],
        }
        for knock in entering.values():
            mine.queue.answer(knock["id"], answer)
    met = torch.zeros(slots, dtype=torch.int32)
    met[now.rank] = rendezvous.handshake(cards)
    if keeps and mine.queue:
        for rank, knock in entering.items():
            said = mine.queue.store.wait(f"elastic/met/{knock['id']}", _ANSWER)
            met[rank] = said == b"yes"
    collectives.all_reduce(met, "max", None, roll)
    verdicts = [bool(v) for v in met]
    if keeps and mine.queue:
        for knock in entering.values():
            mine.queue.store.put(f"elastic/verdicts/{knock['id']}", json.dumps(verdicts))
    engine = rendezvous.connect(verdicts, _PATIENCE, now.engine)
    return build(engine, now, mine, ranks, slots, fresh)


def build(
    engine: _core.Engine, now: World, mine: Membership, ranks: list[int], slots: int, fresh: Sequence[int]
) -> World:
    """The world of an engine; returns when all of its ranks have made theirs."""
    name = f"world, epoch {mine.epoch + 1}"
    core = engine.group(name, ranks, mine.epoch + 1, 0)
    core.run(_BARRIER, _NOTHING, _PATIENCE)
    group = Group(name, ranks, core, now.op_timeout)
    after = Membership(
        ranks,
        slots,
        mine.settings,
        mine.queue,
        mine.epoch + 1,
        mine.newcomer,
        mine.commits,
        fresh=frozenset(fresh),
    )
    return World(engine, group, now.rank, slots, now.op_timeout, elastic=after)


@dataclass
class Made:
    """A world that has been made, and from what; it stands if all have made it."""

    world: World
    told: torch.Tensor
    here: list[int]
    decision: dict[str, Any]

    def stands(self, lost: dict[int, str]) -> bool:
        """Whether somebody has left the old world for it, as only they do who know that all have made it."""
        left = [r for r in self.world.group.ranks if lost.get(r) == "left"]
        if left:
            time.sleep(0.2)  # who has ended its script leaves both
        return any(r not in self.world.engine.losses() for r in left)


def _adopt(made: Made) -> MembershipChange:
    """From now on this is the world. The old one's calls have failed, and end here."""
    new, (old, mine) = made.world, current()
    old.engine.shutdown(False)
    # Whoever holds the group of all ranks goes on with it.
    old.group.become(new.group)
    new.group = old.group
    world.replace(new)
    after = new.elastic
    assert isinstance(after, Membership)
    knocks = made.decision["knocks"]
    if mine.queue is not None:
        mine.queue.keep(new.rank == after.ranks[0], after.says())
        for knock in knocks if new.rank == made.here[0] else ():
            mine.queue.store.put(f"elastic/go/{knock['id']}", "yes")
            mine.queue.forgive(knock["rank"])
    return _outcome(made.told, made.here, renewed=True, entered=[k["rank"] for k in knocks])


def _outcome(
    told: torch.Tensor, here: list[int], renewed: bool, entered: Sequence[int] = ()
) -> MembershipChange:
    newcomers = [r for r, row in zip(here, told, strict=True) if row[0]]
    donors = [r for r in here if r not in newcomers]
    if not donors:
        raise PeerLostError("elastic: all ranks that had the job's state are gone", here[0])
    _, mine = current()
    # Who has passed a pass's last barrier proves that all have completed it.
    target = int((told[:, 1] + told[:, 3]).min())
    behind = bool(told[:, 1].min() < told[:, 1].max())
    return MembershipChange(sorted([*newcomers, *entered]), donors[0], target > mine.commits, renewed, behind)


def is_loss(error: TrigramError) -> bool:
    """Whether an error comes of a lost rank, or of others that let somebody in.

    They may have heard of it before this one.
    """
    if isinstance(error, NoQuorumError) or not isinstance(error, PeerLostError | AbortedError | CorruptError):
        return False
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        if current()[0].engine.losses() or (isinstance(error, AbortedError) and asked()):
            return True
        time.sleep(0.005)
    return False
