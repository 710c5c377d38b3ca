"""Ranks find each other: ``init``, groups, ``shutdown``.

Nothing of our own has to be started: any ``torch.distributed.Store`` carries a few hundred bytes
from every rank to every other, and connections are made from them.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from trigram import _core
from trigram.errors import ConfigError, MisuseError, TrigramError, UnsupportedError
from trigram.runtime import engine_codes, logs
from trigram.runtime.group import Group
from trigram.runtime.rendezvous import StoreGather, find_store

_TRANSPORTS = ("auto", "shm", "tcp")
_BARRIER = (engine_codes.BARRIER, 5, 0, 0, 0, 0)
_NOTHING = (0, 0, 0, 0)

# Groups of the same ranks are told apart by an ordinal that all members count alike. Groups made
# for different reasons count apart, so that one made lazily does not disturb the others.
_USER, _BORROWED, _INTERNAL, _AIDED = 0, 1 << 32, 2 << 32, 3 << 32
_DERIVED = 1 << 62


Settings = tuple[str | None, str | None, str]
"""Interface, an address that all ranks can reach, and transport: how this rank is reached."""


class Membership(Protocol):
    """What the runtime knows of an elastic job's membership; :mod:`trigram.elastic` implements it.

    Attributes:
        ranks: World ranks of the present members.
    """

    ranks: list[int]

    def leave(self) -> None:
        """This rank leaves the job: it no longer serves join requests."""


class ElasticStart(Protocol):
    """The start of one elastic ``init``; :mod:`trigram.elastic` implements it."""

    def is_late(self) -> bool:
        """Whether the job runs already, without this rank."""

    def wait_outside(self, exchange: StoreGather) -> World | None:
        """Waits until all ranks are here (None), or until the job is known to run without this one: then
        a world without connections, which this rank leaves by joining."""

    def member(self) -> Membership:
        """The membership of a rank that is here from the beginning."""


StartElastic = Callable[[dist.Store, int, int, Settings, float | None], ElasticStart]
"""From the store, rank, world size, settings and op_timeout to the start of an elastic job."""

_start_elastic: StartElastic | None = None


def use_elastic(start: StartElastic) -> None:
    """Says what ``init(elastic=True)`` starts with: the runtime does not import the room above it."""
    global _start_elastic
    _start_elastic = start


@dataclass
class World:
    """What ``init`` has set up."""

    engine: _core.Engine
    group: Group
    rank: int
    size: int
    op_timeout: float | None
    aided: Group | None = None
    ordinals: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    borrowed: dict[dist.ProcessGroup, Group] = field(default_factory=dict)
    elastic: Membership | None = None

    def new_group(self, ranks: Sequence[int], name: str, kind: int, helpers: Sequence[int] = ()) -> Group:
        """A group of world ranks; all members make it, in the same order."""
        key = (kind, (*ranks, -1, *helpers))
        ordinal = self.ordinals[key] = self.ordinals.get(key, -1) + 1
        core, members = None, [*ranks, *helpers]
        if self.rank in members:
            core = self.engine.group(name, members, kind + ordinal + 1, len(helpers))
        return Group(name, ranks, core, self.op_timeout, helpers, kind + ordinal + 1)

    def derive(self, group: Group, name: str, ranks: Sequence[int]) -> Group:
        """A group for what goes on inside of another, among some of its ranks. All of the other's ranks
        derive the same groups in the same order, whatever other threads do with other groups."""
        group.derived += 1
        ordinal = _DERIVED + (group.ordinal * 0x9E3779B97F4A7C15 + group.derived) % _DERIVED
        core = self.engine.group(name, list(ranks), ordinal, 0) if self.rank in ranks else None
        return Group(name, ranks, core, self.op_timeout, (), ordinal)


_world: World | None = None
at_exit: list[Callable[[], None]] = []
"""What is to be ended well before this rank leaves."""


def is_initialized() -> bool:
    """Whether ``init`` has been called, and ``shutdown`` not since."""
    return _world is not None


def replace(new: World) -> None:
    """From now on this is the world: an elastic job has made itself anew."""
    global _world
    _world = new


def rank() -> int:
    """This rank's number in the world, from 0; in an elastic job, its place among the living, -1 if it came
    late and has not entered yet."""
    now = current()
    return now.rank if now.elastic is None else now.group.rank


def world_size() -> int:
    """The number of ranks in the world; those that only help do not count."""
    return current().group.size


def current() -> World:
    """The world, made now with ``init()`` if nobody has."""
    if _world is None:
        init()
    assert _world is not None
    return _world


def new_group(ranks: Sequence[int], helpers: Sequence[int] = ()) -> Group:
    """Makes a group of some ranks of the world.

    Every member makes the same groups in the same order; other ranks may call it too and get a
    group whose collectives refuse them.

    Args:
        ranks: World ranks, in the order of their places.
        helpers: Other world ranks, which have no data and take a share of the reduction, as much as
            their links carry. Such a group offers ``all_reduce`` only. Helpers call ``new_group`` too, and
            then :meth:`Group.help`.

    Raises:
        MisuseError: A rank is named twice, or is not in the world.
    """
    world = current()
    ranks, helpers = [int(r) for r in ranks], [int(r) for r in helpers]
    members = [*ranks, *helpers]
    there = range(world.size) if world.elastic is None else world.elastic.ranks
    if not ranks or len(set(members)) != len(members) or not set(members) <= set(there):
        raise MisuseError(
            f"new_group: ranks {members} must be one or more distinct ranks of the world, which has "
            f"{_listed(there)}"
        )
    return world.new_group(ranks, f"of ranks {ranks}", _USER, helpers)


def _listed(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"ranks 0 to {len(ranks) - 1}"
    return f"ranks {list(ranks)}" if ranks else "no ranks yet: this rank has not joined the running job"


def internal_group(group: Group, name: str) -> Group:
    """A group of the same ranks with calls of its own, so that no order between them is needed."""
    return current().new_group(group.ranks, name, _INTERNAL)


def aided_group(group: Group) -> Group | None:
    """The group for the gradients of the first model whose ranks are all workers of a world with helpers."""
    world = current()
    aided, world.aided = (world.aided, None) if group.ranks == world.group.ranks else (None, world.aided)
    return aided


AnyGroup = Group | dist.ProcessGroup | None
"""What names a group: ours, torch's, or None for the world."""


def resolve(group: AnyGroup) -> Group:
    """Ours, for whatever names a group: ours, torch's, or none for the world."""
    if isinstance(group, Group):
        return group
    world = current()
    if group is None:
        return world.group
    if not isinstance(group, dist.ProcessGroup):
        raise MisuseError(
            f"group: expected a trigram.Group, a torch ProcessGroup or None, got {type(group).__name__}"
        )
    found = world.borrowed.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = world.borrowed[group] = world.new_group(ranks, f"of ranks {ranks}", _BORROWED)
    return found


def init(
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    init_timeout: float = 300.0,
    op_timeout: float | None = None,
    iface: str | None = None,
    elastic: bool = False,
    helper: bool = False,
) -> Group:
    """Joins this process to the job. ``with_bagua`` and the collectives call it when nobody has.

    With nothing given, an initialised ``torch.distributed`` lends its store; else torchrun's
    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are used; else this is a world of
    one. Calling it again returns the same group.

    Args:
        store: Any ``torch.distributed.Store`` that all ranks share; then ``rank`` and
            ``world_size`` too.
        rank: This rank, from 0.
        world_size: The number of ranks.
        init_timeout: Seconds to wait for the other ranks.
        op_timeout: Seconds that a collective may take. ``None``: a peer that is alive is awaited
            however long it takes, and named in a log line; a dead one raises at once.
        iface: Network interface or address to use between hosts; also ``TRIGRAM_IFACE``.
        elastic: Ranks may be lost and may come while the job runs, see docs/elastic.md. A rank that comes
            late enters with ``with_bagua(elastic=True)``, or with :func:`trigram.recover`.
        helper: This rank has no model and no data: it reduces gradients for the others, as much as its
            link carries, and this returns when one of them has left. Helpers are the last ranks of the
            world. One model with ``gradient_allreduce`` is helped, the first; it takes three workers or more.

    Returns:
        The group of all ranks that are no helpers.

    Raises:
        TimeoutError: Ranks are missing; the message names them.
        ConfigError: A setting or an environment variable is wrong.
        AuthError: Ranks have different ``TRIGRAM_SECRET``, or somebody forged what one wrote to the store.
    """
    global _world
    if _world is not None:
        return _world.group
    if elastic and helper:
        raise UnsupportedError("init: elastic=True and helper=True exclude each other; pass only one of them")
    transport = os.environ.get("TRIGRAM_TRANSPORT", "auto")
    if transport not in _TRANSPORTS:
        raise ConfigError(
            f"TRIGRAM_TRANSPORT={transport!r} is invalid; set it to one of {', '.join(_TRANSPORTS)}"
        )
    _check_settings()
    logs.start()
    deadline = time.monotonic() + init_timeout
    found = find_store(store, rank, world_size, deadline)
    store, rank, world_size, toward = found
    iface = iface or os.environ.get("TRIGRAM_IFACE") or None
    rendezvous = _core.Rendezvous(rank, world_size, iface, toward, transport)
    start = None
    if elastic:
        assert _start_elastic is not None
        start = _start_elastic(store, rank, world_size, (iface, toward, transport), op_timeout)
    exchange = StoreGather(store, rank, world_size, deadline, start.is_late if start else None)
    del store, found
    if start is not None:
        late = start.wait_outside(exchange)
        if late is not None:
            _world = late
            return late.group
    cards = exchange("card", (b"h" if helper else b"w") + rendezvous.card())
    try:
        met = rendezvous.meet([card[1:] for card in cards])
    except TrigramError as error:
        exchange.refuse("met", error)
        raise
    verdicts = [v == b"yes" for v in exchange("met", b"yes" if met else b"no")]
    engine = rendezvous.connect(verdicts, max(deadline - time.monotonic(), 0.1))
    everyone = engine.group("world", list(range(world_size)), 0, 0)
    # Everybody has what it needs from the store; then it is let go, so that no forked worker keeps
    # its sockets; then nobody can meet the old one in another init.
    everyone.run(_BARRIER, _NOTHING, max(deadline - time.monotonic(), 0.1))
    exchange.close()
    everyone.run(_BARRIER, _NOTHING, max(deadline - time.monotonic(), 0.1))
    # Not before: whoever offers the store must not leave while others read from it.
    workers = _workers([card[:1] == b"h" for card in cards])
    if workers == world_size:
        group = Group("world", range(workers), everyone, op_timeout)
        _world = World(engine, group, rank, world_size, op_timeout)
    else:
        core = None if helper else engine.group("workers", list(range(workers)), 0, 0)
        group = Group("workers", range(workers), core, op_timeout)
        _world = World(engine, group, rank, world_size, op_timeout)
        helpers = range(workers, world_size)
        _world.aided = _world.new_group(group.ranks, "gradients, with helpers", _AIDED, helpers)
        if helper:
            _world.aided.help()
    if start is not None:
        _world.elastic = start.member()
    return group


def _workers(helps: list[bool]) -> int:
    """How many ranks have data, given which only help."""
    workers = helps.index(True) if True in helps else len(helps)
    if workers == 0 or not all(helps[workers:]):
        asked = [rank for rank, helper in enumerate(helps) if helper]
        raise MisuseError(
            f"init: ranks {asked} of {len(helps)} are helpers (helper=True); helpers must be the last ranks, "
            "and at least one rank must not be a helper"
        )
    return workers


def _check_settings() -> None:
    """What the engine reads of the environment by itself is right."""
    checksum = os.environ.get("TRIGRAM_CHECKSUM", "on")
    if checksum not in ("on", "off"):
        raise ConfigError(f"TRIGRAM_CHECKSUM={checksum!r} is invalid; set it to on or off")
    silence = os.environ.get("TRIGRAM_SILENCE", "1.2")
    try:
        right = 0.5 <= float(silence) <= 86_400
    except ValueError:
        right = False
    if not right:
        raise ConfigError(
            f"TRIGRAM_SILENCE={silence!r} is invalid; set it to a number of seconds from 0.5 to 86400"
        )


def shutdown() -> None:
    """Leaves the job. Work in flight fails, here and on the peers; calling it twice does nothing.

    Asynchronous training is ended well first: this rank takes part until all ranks are through.
    """
    global _world
    if _world is not None:
        for finish in at_exit:
            finish()
    world, _world = _world, None
    if world is not None:
        if world.elastic is not None:
            world.elastic.leave()
        world.engine.shutdown(False)
        logs.flush()


@atexit.register
def _exit() -> None:
    if _world is not None:
        for finish in at_exit:
            finish()
        if _world.elastic is not None:
            _world.elastic.leave()
        _world.engine.shutdown(True)
        logs.flush()
