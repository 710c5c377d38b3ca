"""Who is in an elastic job, and how the living agree on it.

A *generation* is a world of its own: connections, boards and groups are made anew for each, so nothing
of an earlier one can be mistaken for the present. Ranks keep the numbers they started with.

When a rank is lost, all others come here (:func:`reform`). Over the connections they still have, those who
can reach each other tell what they know; if they are the quorum they make the next generation, and when
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

from trigram import _core
from trigram.collectives import calls as collectives
from trigram.elastic.join_queue import Door
from trigram.errors import AbortedError, CorruptError, PeerLostError, TrigramError
from trigram.runtime import engine_codes as codes
from trigram.runtime import world
from trigram.runtime.world import Group, World

_ROLL = 4 << 32
_TRIES = 20
_PATIENCE = 10.0
"""Seconds that the steps of a new generation may take once all have come."""
_ANSWER = 3.0
"""Seconds that a newcomer may take, once the members are done, to tell whom it has met."""
_KINDS = ("", "left", "dead", "silent", "refused")
_FRESH = 8
"""Added to how a rank was lost, if it has no state yet."""
_BARRIER, _NOTHING = (codes.BARRIER, 5, 0, 0, 0, 0), (0, 0, 0, 0)


@dataclass
class Membership:
    """This rank's part in an elastic job.

    Attributes:
        ranks: The members' numbers, rising.
        slots: One more than the largest number so far.
        generation: Worlds made so far.
        settings: Interface, address to look toward, and transport.
        door: Where newcomers knock; None: nowhere.
        newcomer: This rank has not taken part in a step yet.
        commits: Passes that all ranks have completed.
        due: Somebody waits at the door, as all ranks know alike.
        refused: How often in this generation all members came together and let nobody in: it had gone.
        fresh: Members that have no state before a step in which all have it: they have no voice in a quorum.
    """

    ranks: list[int]
    slots: int
    settings: tuple[str | None, str | None, str]
    door: Door | None
    generation: int = 0
    newcomer: bool = False
    commits: int = 0
    due: bool = False
    refused: int = 0
    fresh: frozenset[int] = frozenset()
    rolls: dict[tuple[int, ...], Group] = field(default_factory=dict)

    def says(self) -> dict[str, Any]:
        """What newcomers must know before they knock."""
        said = {"generation": self.generation, "slots": self.slots, "ranks": self.ranks}
        return said | {"refused": self.refused, "transport": self.settings[2]}


@dataclass(frozen=True)
class Reformed:
    """What came of a :func:`reform`.

    Attributes:
        newcomers: Members that have no part in the job's state yet.
        donor: The lowest member that has.
        commit: Everybody had completed the pass under way: it counts.
        renewed: Whether there is a new world; else everything is as it was.
        behind: Some were still in a pass that others had left behind them.
    """

    newcomers: list[int]
    donor: int
    commit: bool
    renewed: bool
    behind: bool = False


def quorum(members: Sequence[int], here: Sequence[int], away: Sequence[int]) -> bool:
    """Whether ``here`` may go on as the whole.

    Ranks whose end is known do not count. Of the others those may go on who are more than those they
    cannot reach; of two equal halves the one with the lowest rank. So two halves never both do.

    Args:
        members: All ranks of the generation.
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
    assert now.elastic is not None
    return now, now.elastic


def asked() -> bool:
    """Whether the members are asked to let somebody in: each hears of it in its own time."""
    _, mine = current()
    return mine.door is not None and mine.door.asked == [mine.generation, mine.refused]


def has_lost() -> bool:
    """Whether this rank knows of one that is lost."""
    return bool(current()[0].engine.losses())


def reform(boundary: bool, complete: bool, anew: bool = False) -> Reformed:
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
        lost, plan = dict(now.engine.losses()), None
        if made is not None and made.stands(lost):
            return _adopt(made)
        here = [r for r in mine.ranks if r not in lost]
        try:
            roll = _roll(now, mine, here)
            told = _tell(roll, now, mine, lost, (boundary, complete, anew))
            plan = _plan(roll, mine, told, tries == 0)
            if made is not None:
                failed, made = made, None
                failed.world.engine.shutdown(False)
            if not plan["renew"]:
                mine.refused += 1
                if mine.door is not None:
                    mine.door.says = mine.says()
                return _outcome(told, here, renewed=False)
            _check_quorum(mine, here, told)
            made = Made(_meet(roll, now, mine, plan, told), told, here, plan)
            roll.core.run(_BARRIER, _NOTHING, _PATIENCE)
        except NoQuorumError:
            raise
        except TrigramError:  # a loss, or a newcomer that cannot be met, with whatever it has wrong
            tries += 1
            if tries > _TRIES:
                raise
            if plan is not None and mine.door is not None and not set(now.engine.losses()) - set(lost):
                mine.door.put_off([k["rank"] for k in plan["knocks"]])
            continue
        return _adopt(made)


class NoQuorumError(PeerLostError):
    """These ranks are not the quorum of an elastic job: the others may go on as the whole."""


# One step each.


def _roll(now: World, mine: Membership, here: list[int]) -> Group:
    """The group of those that reach each other."""
    key = tuple(here)
    if key not in mine.rolls:
        core = now.engine.group("the living", here, _ROLL + mine.generation, 0)
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


def _plan(roll: Group, mine: Membership, told: torch.Tensor, lets_in: bool) -> dict[str, Any]:
    """What the lowest rank decides: whether there is to be a new world, and who enters it."""
    data = torch.zeros(1 << 16, dtype=torch.uint8)
    if roll.rank == 0:
        commits, boundary, complete, anew = (told[:, column] for column in range(1, 5))
        calm = bool(boundary.all()) and not bool(complete.any()) and bool((commits == commits[0]).all())
        knocks = mine.door.knocks() if lets_in and calm and mine.door else []
        entering: dict[int, dict[str, Any]] = {}
        for knock in knocks:
            if knock["rank"] not in roll.ranks:  # as it was when it knocked
                entering[knock["rank"]] = knock
        chosen = list(entering.values())[:16]
        renew = bool(chosen) or len(roll.ranks) < len(mine.ranks) or bool(anew.any())
        text = json.dumps({"renew": renew, "knocks": chosen}).encode()
        data[:4] = torch.frombuffer(bytearray(len(text).to_bytes(4, "little")), dtype=torch.uint8)
        data[4 : 4 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    collectives.broadcast(data, roll.ranks[0], roll)
    length = int.from_bytes(bytes(data[:4].tolist()), "little")
    plan: dict[str, Any] = json.loads(data[4 : 4 + length].numpy().tobytes())
    return plan


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


def _meet(roll: Group, now: World, mine: Membership, plan: dict[str, Any], told: torch.Tensor) -> World:
    """The next generation: a world of the living and of those who enter."""
    keeps = roll.rank == 0 and mine.door is not None
    entering = {k["rank"]: k for k in plan["knocks"]}
    slots = max([mine.slots, *(r + 1 for r in entering)])
    rendezvous = _core.Rendezvous(now.rank, slots, *mine.settings)
    card = rendezvous.card()
    padded = torch.zeros(1024, dtype=torch.uint8)
    padded[:2] = torch.frombuffer(bytearray(len(card).to_bytes(2, "little")), dtype=torch.uint8)
    padded[2 : 2 + len(card)] = torch.frombuffer(bytearray(card), dtype=torch.uint8)
    everyone = torch.empty(roll.size, 1024, dtype=torch.uint8)
    collectives.all_gather(everyone, padded, roll)
    cards = [b""] * slots
    for rank, row in zip(roll.ranks, everyone, strict=True):
        cards[rank] = bytes(row[2 : 2 + int.from_bytes(bytes(row[:2].tolist()), "little")].tolist())
    for rank, knock in entering.items():
        cards[rank] = bytes.fromhex(knock["card"])
    ranks = sorted([*roll.ranks, *entering])
    fresh = sorted([*entering, *(r for r, row in zip(roll.ranks, told, strict=True) if row[0])])
    if keeps and mine.door:
        answer = {
            "generation": mine.generation + 1,
            "ranks": ranks,
            "fresh": fresh,
            "commits": int(told[:, 1].max()),
            "cards": [c.hex() for c in cards],
        }
        for knock in entering.values():
            mine.door.answer(knock["id"], answer)
    met = torch.zeros(slots, dtype=torch.int32)
    met[now.rank] = rendezvous.meet(cards)
    if keeps and mine.door:
        for rank, knock in entering.items():
            said = mine.door.store.wait(f"elastic/met/{knock['id']}", _ANSWER)
            met[rank] = said == b"yes"
    collectives.all_reduce(met, "max", None, roll)
    verdicts = [bool(v) for v in met]
    if keeps and mine.door:
        for knock in entering.values():
            mine.door.store.put(f"elastic/verdicts/{knock['id']}", json.dumps(verdicts))
    engine = rendezvous.connect(verdicts, _PATIENCE, now.engine)
    return build(engine, now, mine, ranks, slots, fresh)


def build(
    engine: _core.Engine, now: World, mine: Membership, ranks: list[int], slots: int, fresh: Sequence[int]
) -> World:
    """The world of an engine; returns when all of its ranks have made theirs."""
    name = f"world, generation {mine.generation + 1}"
    core = engine.group(name, ranks, mine.generation + 1, 0)
    core.run(_BARRIER, _NOTHING, _PATIENCE)
    group = Group(name, ranks, core, now.op_timeout)
    after = Membership(
        ranks,
        slots,
        mine.settings,
        mine.door,
        mine.generation + 1,
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
    plan: dict[str, Any]

    def stands(self, lost: dict[int, str]) -> bool:
        """Whether somebody has left the old world for it, as only they do who know that all have made it."""
        left = [r for r in self.world.group.ranks if lost.get(r) == "left"]
        if left:
            time.sleep(0.2)  # who has ended its script leaves both
        return any(r not in self.world.engine.losses() for r in left)


def _adopt(made: Made) -> Reformed:
    """From now on this is the world. The old one's calls have failed, and end here."""
    new, (old, mine) = made.world, current()
    old.engine.shutdown(False)
    # Whoever holds the group of all ranks goes on with it.
    old.group.become(new.group)
    new.group = old.group
    world.replace(new)
    after = new.elastic
    assert after is not None
    knocks = made.plan["knocks"]
    if mine.door is not None:
        mine.door.keep(new.rank == after.ranks[0], after.says())
        for knock in knocks if new.rank == made.here[0] else ():
            mine.door.store.put(f"elastic/go/{knock['id']}", "yes")
            mine.door.forgive(knock["rank"])
    return _outcome(made.told, made.here, renewed=True, entered=[k["rank"] for k in knocks])


def _outcome(told: torch.Tensor, here: list[int], renewed: bool, entered: Sequence[int] = ()) -> Reformed:
    newcomers = [r for r, row in zip(here, told, strict=True) if row[0]]
    donors = [r for r in here if r not in newcomers]
    if not donors:
        raise PeerLostError("elastic: all ranks that had the job's state are gone", here[0])
    _, mine = current()
    # Who has passed a pass's last barrier proves that all have completed it.
    target = int((told[:, 1] + told[:, 3]).min())
    behind = bool(told[:, 1].min() < told[:, 1].max())
    return Reformed(sorted([*newcomers, *entered]), donors[0], target > mine.commits, renewed, behind)


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
