"""``init``, groups and ``shutdown``.

``init`` needs no server of Trigram's: ranks gather each other's endpoint records, a few hundred bytes each,
through any ``torch.distributed.Store``, and then connect to each other.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trigram import _core
from trigram.errors import ConfigError, MisuseError, PeerLostError, UnsupportedError
from trigram.runtime import engine_codes, far_links, job, logs
from trigram.runtime.group import Group
from trigram.runtime.job import Job, Membership, World
from trigram.runtime.rendezvous import AgainError, LateError, StoreGather, find_store

_TRANSPORTS = ("auto", "shm", "tcp")
_MOST_LANES = 64
OP_TIMEOUT = 600.0
"""Seconds that a collective may take by default, as in torch's process groups."""
HANDSHAKE_TIMEOUT = 60.0
"""Seconds that ``init`` waits for a slow rank of this host, before its ranks do without shared memory."""
_TELL_SECONDS = 30.0
"""How long a rank whose arguments are wrong looks for the store, to tell the others."""

_WORKER, _HELPER, _SPARE = b"w", b"h", b"s"
_KIND_BYTES = 1 + 4
"""Before each endpoint record: what the rank is, and the size of its replica."""
_BARRIER = (engine_codes.BARRIER, 5, 0, 0, 0, 0)
_NOTHING = (0, 0, 0, 0)

# An ordinal distinguishes groups of the same ranks; all members count it in the same way. Each purpose has
# its own range of ordinals, so that a group that one rank creates earlier than another does not shift the
# others.
_USER, _BORROWED, _INTERNAL, _AIDED, _TORCH = 0, 1 << 32, 2 << 32, 3 << 32, 4 << 32
EPOCH_ORDINALS = 5 << 32
"""Of the default groups of an elastic job after its first epoch."""
REACHABLE_ORDINALS = 6 << 32
"""Of the groups in which the ranks of an elastic job that reach each other decide how to go on."""
REPLICA_ORDINALS = 7 << 32
"""Of the groups of an elastic job with replicas of several ranks."""

Settings = tuple[str | None, str | None, str]
"""How the other ranks reach this one: network interface, an address that all ranks can reach, and
transport."""


class ElasticStart(Protocol):
    """The start of one elastic ``init``; :mod:`trigram.elastic` implements it."""

    def is_late(self) -> bool:
        """Whether the job runs already, without this rank."""

    def find_out(self) -> None:
        """Raises LateError if a job left its status in the store, and goes on."""

    def late_world(self) -> World:
        """The world of a late rank: without connections, and replaced when the rank joins."""

    def member(self, spares: Sequence[int]) -> Membership:
        """The membership of a rank that has been present since the start of the job; ``spares``: all of
        them."""


StartElastic = Callable[[dist.Store, int, int, Settings, float | None, bool, int], ElasticStart]
"""From the store, rank, world size, settings, op_timeout, whether this rank is a spare, and the size of a
replica, to the start of an elastic job."""

_START_ELASTIC: list[StartElastic] = []


def use_elastic(start: StartElastic) -> None:
    """Registers what ``init(elastic=True)`` calls, because the runtime does not import trigram.elastic."""
    _START_ELASTIC[:] = [start]


TOP, REPORT = "TRIGRAM_TOP", "TRIGRAM_REPORT"
"""If one of them is set, the store stays open while the job runs: ranks leave snapshots in it, or their part
of the report, for which one host needs none."""


def asks(variable: str) -> bool:
    """Whether an environment variable is set, and not to 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def is_initialized() -> bool:
    """Whether ``init`` has been called, without a ``shutdown`` since."""
    return job.here().world is not None


def present() -> World | None:
    """The current world; None if there is none."""
    return job.here().world


def replace(new: World) -> None:
    """Makes ``new`` the current world, after an elastic job has changed its membership."""
    job.here().world = new


def rank() -> int:
    """This rank, from 0. In an elastic job, its index among the present members; -1 before a late rank has
    joined, and when this one has left because it was asked to. A spare that does not count has a number from
    :func:`world_size` on."""
    if job.here().let_go:
        return -1
    now = current()
    return now.rank if now.elastic is None else now.elastic.place(now.rank)


def world_size() -> int:
    """The number of ranks that train: without helpers, and without spares that do not count; 0 when this rank
    has left because it was asked to."""
    if job.here().let_go:
        return 0
    return len(training())


def training() -> Sequence[int]:
    """World ranks of those that :func:`world_size` counts."""
    now = current()
    return now.group.ranks if now.elastic is None or not now.elastic.ranks else now.elastic.training()


def is_spare() -> bool:
    """Whether this rank trains along and does not count: a spare (``init(spare=True)``) that takes no place
    of another rank now, or has not joined yet."""
    if job.here().let_go:
        return False
    now = current()
    return now.elastic is not None and now.elastic.is_idle(now.rank)


def current() -> World:
    """The current world; calls ``init()`` if there is none."""
    mine = job.here()
    if mine.world is None:
        if mine.let_go:
            raise MisuseError(
                "this rank has left the elastic job, because it was asked to, and the others go on without "
                "it; trigram.init would begin another job"
            )
        if mine is not job.of_process:
            raise MisuseError(
                "this rank is in no job: it has not called trigram.init(store, rank, world_size) in its "
                "trigram.Job(), or its job has been shut down"
            )
        if job.is_any_other():
            raise MisuseError(
                "this thread is in no job, and other threads of this process are ranks: enter job.here() in "
                "it, with job = trigram.Job.current() of the thread for whose rank it works"
            )
        init()
    assert mine.world is not None
    return mine.world


def new_group(ranks: Sequence[int], helpers: Sequence[int] = (), timeout: float | None = None) -> Group:
    """Creates a group of some ranks of the world.

    Every member must create the same groups in the same order. Other ranks may call it too; they get a group
    whose collectives raise ``MisuseError``.

    Args:
        ranks: World ranks; their order defines the group ranks.
        helpers: Other world ranks, which have no data and do part of the reduction, as much as the
            bandwidth of their links allows. Such a group supports only ``all_reduce``. Helpers call
            ``new_group`` too, and then :meth:`Group.help`.
        timeout: Seconds that a call of the group may take by default; None: the ``op_timeout`` of ``init``,
            ``math.inf`` or 0: no limit. The attribute ``timeout`` of the group changes it.

    Raises:
        MisuseError: A rank is listed twice or is not in the world, or there are no ranks.
        ConfigError: The timeout is negative or not a number.
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
    limit = world.op_timeout if timeout is None else _limit(timeout, "new_group: timeout")
    group = world.new_group(ranks, f"of ranks {ranks}", _USER, helpers)
    group.timeout = limit
    return group


def _listed(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"ranks 0 to {len(ranks) - 1}"
    return (
        f"ranks {list(ranks)}"
        if ranks
        else "no ranks yet: this rank started late and has not joined the running job"
    )


def internal_group(group: Group, name: str) -> Group:
    """A second group of the same ranks, whose calls need no order relative to those of the first."""
    made = current().new_group(group.ranks, name, _INTERNAL)
    made.timeout = group.timeout
    return made


def torch_group(ranks: Sequence[int]) -> Group:
    """The group of a process group of torch that has our backend; members make those of the same ranks in the
    same order."""
    return current().new_group(ranks, f"of ranks {list(ranks)}", _TORCH)


def aided_group(group: Group) -> Group | None:
    """The group with helpers, for the gradients of one model.

    Returns:
        None if the job has no helpers, if another model has the group already, or if ``group`` is not all
        ranks with data.
    """
    world = current()
    aided, world.aided = (world.aided, None) if group.ranks == world.group.ranks else (None, world.aided)
    return aided


AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None
"""A group argument: a Trigram group, a torch process group, a DeviceMesh with one dimension, or None for the
world."""


def resolve(group: AnyGroup) -> Group:
    """The Trigram group of a group argument.

    Raises:
        MisuseError: The argument is no group, or a process group that was destroyed.
    """
    if group is None:
        return current().group
    if isinstance(group, Group):
        return group
    world = current()
    if not isinstance(group, dist.ProcessGroup):
        group = _of_mesh(group)
    carries: Group | None = getattr(group, "trigram_group", None)
    if carries is not None:
        if (why := group._aborted) is not None:  # type: ignore[attr-defined]
            raise MisuseError(f"group: the process group was ended: {why}; pass one that is in use")
        return carries
    found = world.borrowed.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = world.borrowed[group] = world.new_group(ranks, f"of ranks {ranks}", _BORROWED)
    return found


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of a DeviceMesh with one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise MisuseError(
            "group: expected a trigram.Group, a torch ProcessGroup, a DeviceMesh with one dimension or None, "
            f"got {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise MisuseError(
            f"group: the DeviceMesh has {mesh.ndim} dimensions; pass one of them, such as "
            f"mesh[{(mesh.mesh_dim_names or ('dp',))[0]!r}]"
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


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
    spare: bool | None = None,
    replica_size: int = 1,
) -> Group:
    """Joins this process to the job. ``with_bagua`` and the collectives call it if it has not been called.

    Without arguments it uses the store of ``torch.distributed`` if that is initialised, otherwise torchrun's
    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Those that are absent it sets from the
    variables of srun, mpiexec or a TrainJob; if these say that there are several processes and do not
    suffice, it raises. Without any of them, the job has one rank. Calling it again returns the same group.

    Args:
        store: Any ``torch.distributed.Store`` that all ranks share; requires ``rank`` and ``world_size``.
        rank: This rank, from 0. Children of ``torch.multiprocessing.spawn`` pass it and ``world_size``.
        world_size: The number of ranks.
        init_timeout: Seconds to wait for the other ranks.
        op_timeout: Seconds that a collective may take if all peers are alive; then it raises
            ``TimeoutError``. ``None``: 600, as in torch's process groups. ``math.inf`` or 0: a collective
            waits without limit for a peer that is alive. A log line names the peer after 10 s; a peer that
            dies raises ``PeerLostError`` at once. Asynchronous algorithms, whose ranks do not wait for each
            other, have no such limit.
        iface: Network interface or address to use between hosts, or several with commas in between; also
            ``TRIGRAM_IFACE``.
        elastic: The job continues when ranks are lost, and admits ranks while it runs, see docs/elastic.md. A
            late rank joins in ``with_bagua(elastic=True)`` or :func:`trigram.recover`.
        helper: This rank has no model and no data. It reduces gradients for the other ranks, as much as the
            bandwidth of its link allows, and ``init`` returns when one of them has left. Helpers must be the
            last ranks. They help the first model that uses ``gradient_allreduce``, if there are three or more
            workers.
        spare: In an elastic job: this rank trains along with the others and does not count, until one of
            them is gone, whose place it takes at once, see docs/elastic.md. It is one of the ``world_size``.
            None: whether ``TRIGRAM_SPARE`` is 1.
        replica_size: In an elastic job: so many ranks that follow each other make up a replica, such as
            those that shard a model with ``fully_shard``. They come into the job and leave it together, and
            averages are between ranks with the same place in their replicas, see docs/elastic.md.

    Returns:
        The group of all ranks except helpers.

    Raises:
        TimeoutError: Ranks are missing; the message names them.
        MisuseError: This is another rank already: a thread that is to be a rank needs a :class:`trigram.Job`.
        ConfigError: A setting or an environment variable is wrong, or a launcher's do not suffice.
        AuthError: Ranks have different ``TRIGRAM_SECRET``, or a record in the store was forged.
        AbortedError: ``init`` failed on another rank; the message has its error.
    """
    mine = job.here()
    with mine.joins(rank), mine.starting:
        if mine.world is not None and mine.world.elastic is None:
            job.refuse_another(rank, mine.world.rank)
        if mine.world is None:
            kinds = elastic, helper, spare, replica_size
            _start(mine, store, rank, world_size, init_timeout, op_timeout, iface, *kinds)
            mine.let_go = False
            mine.begin()
        assert mine.world is not None
        return mine.world.group


def _limit(op_timeout: float | None, what: str = "init: op_timeout") -> float | None:
    """The seconds that a collective may take; None: no limit."""
    if op_timeout is None:
        return OP_TIMEOUT
    if not op_timeout >= 0:
        raise ConfigError(
            f"{what}={op_timeout!r} is invalid; pass a number of seconds, None for "
            f"{OP_TIMEOUT:.0f}, or math.inf for no limit"
        )
    return None if op_timeout in (0, math.inf) else float(op_timeout)


def _start(
    mine: Job,
    store: dist.Store | None,
    rank: int | None,
    world_size: int | None,
    init_timeout: float,
    op_timeout: float | None,
    iface: str | None,
    elastic: bool,
    helper: bool,
    spare: bool | None,
    replica_size: int,
) -> None:
    """Makes the world of a job; the other arguments are those of ``init``."""
    _core.check_process()  # before it registers as a rank
    logs.start()
    deadline = time.monotonic() + init_timeout
    try:
        limit, transport, kind = _limit(op_timeout), _checked(elastic, helper), _kind(elastic, helper, spare)
        kind += _replica(elastic, replica_size)
    except Exception as wrong:
        _tell(mine, wrong, store, rank, world_size, init_timeout)
        raise
    store, rank, world_size, toward = find_store(store, rank, world_size, deadline, grows=elastic)
    kept = store if asks(TOP) or asks(REPORT) else None
    settings = iface or os.environ.get("TRIGRAM_IFACE") or None, toward, transport
    gather, start = StoreGather(store, rank, world_size, deadline), None
    mine.unfinished = gather
    try:
        if elastic:
            is_spare = kind.startswith(_SPARE)
            start = _START_ELASTIC[0](store, rank, world_size, settings, limit, is_spare, replica_size)
            gather.late = start.is_late
            start.find_out()
        del store
        while True:
            try:
                engine, everyone, records = _connect(gather, settings, kind)
                break
            except AgainError:
                gather.begin()
    except LateError:
        assert start is not None
        gather.close()
        mine.world = start.late_world()
        mine.world.store = kept
        return
    except TimeoutError:  # the others' too; whoever calls init again finds those who still wait
        raise
    except PeerLostError:
        gather.ask_lost()
        raise
    except Exception as error:
        gather.fail(error)
        raise
    # This may raise, and the rank that serves the store must not end while others read from it: so only now.
    _check_replicas(records, replica_size)
    workers = _workers([record[:1] == _HELPER for record in records])
    spares = [rank for rank, record in enumerate(records) if record[:1] == _SPARE]
    if len(spares) == workers:
        raise MisuseError(
            f"init: all {workers} ranks are spares (spare=True, or TRIGRAM_SPARE=1), so none would count; at "
            "least one rank must not be a spare"
        )
    if workers == world_size:
        group = Group("world", range(workers), everyone, limit)
        world = mine.world = World(engine, group, rank, world_size, limit)
    else:
        core = None if helper else engine.group("workers", list(range(workers)), 0, 0)
        group = Group("workers", range(workers), core, limit)
        world = mine.world = World(engine, group, rank, world_size, limit)
        helpers = range(workers, world_size)
        world.aided = world.new_group(group.ranks, "gradients, with helpers", _AIDED, helpers)
        if helper:
            world.aided.help()
    if start is not None:
        world.elastic = start.member(spares)
    world.store = kept if asks(TOP) or len(set(engine.hosts)) > 1 else None
    world.name = hashlib.sha256(b"".join(records)).hexdigest()[:16]


def _connect(
    gather: StoreGather, settings: Settings, kind: bytes
) -> tuple[_core.Engine, _core.Group, list[bytes]]:
    """Connects this rank with the others; returns the engine, the group of all ranks and their records."""
    rank, size, deadline = gather.rank, gather.size, gather.deadline
    rendezvous = _core.Rendezvous(rank, size, *settings)
    records = gather.all_gather(kind + rendezvous.endpoint_record())
    limit = min(max(deadline - time.monotonic(), 0.1), HANDSHAKE_TIMEOUT)
    accepted = rendezvous.handshake([record[_KIND_BYTES:] for record in records], limit, gather.look)
    verdicts = [v == b"yes" for v in gather("handshake", b"yes" if accepted else b"no")]
    engine = rendezvous.connect(verdicts, max(deadline - time.monotonic(), 0.1), look=gather.look)
    everyone = engine.group("world", list(range(size)), 0, 0)
    # All ranks have read what they need from the store. The second barrier: all ranks have closed it, so that
    # no forked worker inherits its sockets, and no later init finds this one's server.
    try:
        everyone.run(_BARRIER, _NOTHING, max(deadline - time.monotonic(), 0.1))
        gather.close()
        everyone.run(_BARRIER, _NOTHING, max(deadline - time.monotonic(), 0.1))
    except BaseException:
        engine.shutdown(False, False)  # the exception holds it, and the others would take this rank for alive
        raise
    return engine, everyone, records


def _workers(helps: list[bool]) -> int:
    """The number of ranks that are not helpers.

    Raises:
        MisuseError: The helpers are not the last ranks, or all ranks are helpers.
    """
    workers = helps.index(True) if True in helps else len(helps)
    if workers == 0 or not all(helps[workers:]):
        asked = [rank for rank, helper in enumerate(helps) if helper]
        raise MisuseError(
            f"init: ranks {asked} of {len(helps)} are helpers (helper=True); helpers must be the last ranks, "
            "and at least one rank must not be a helper"
        )
    return workers


def _tell(
    mine: Job,
    wrong: Exception,
    store: dist.Store | None,
    rank: int | None,
    world_size: int | None,
    init_timeout: float,
) -> None:
    """Tells the other ranks what is wrong with the arguments of this one.

    It does not wait for them as long as ``init``: they may have the same arguments and have ended.
    """
    deadline = time.monotonic() + min(init_timeout, _TELL_SECONDS)
    with suppress(Exception):  # what is wrong is what this rank raises
        found, rank, size, _ = find_store(store, rank, world_size, deadline)
        mine.unfinished = StoreGather(found, rank, size, deadline)
        mine.unfinished.fail(wrong)


def _replica(elastic: bool, size: int) -> bytes:
    """The size of this rank's replica, as it tells it to the others."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 1 << 16:
        raise ConfigError(f"init: replica_size={size!r} is invalid; pass the number of ranks of a replica")
    if size > 1 and not elastic:
        raise MisuseError(
            f"init: replica_size={size} says which ranks of an elastic job come and leave together, and "
            "needs elastic=True"
        )
    return size.to_bytes(4, "little")


def _check_replicas(records: list[bytes], mine: int) -> None:
    """Raises, on all ranks, if ranks have different sizes of replicas, if the last one is not complete, or if
    only some of its ranks are spares."""
    sizes = [int.from_bytes(record[1:_KIND_BYTES], "little") for record in records]
    if len(set(sizes)) > 1:
        other = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
        raise MisuseError(
            f"init: rank 0 has replica_size={sizes[0]} and rank {other} has {sizes[other]}; pass the same on "
            "all ranks"
        )
    if len(records) % mine:
        raise MisuseError(
            f"init: replica_size={mine} does not divide the {len(records)} ranks of the job: the last "
            "replica would not be complete"
        )
    for first in range(0, len(records), mine):
        kinds = {record[:1] for record in records[first : first + mine]}
        if len(kinds) > 1:
            raise MisuseError(
                f"init: of the replica of ranks {first} to {first + mine - 1} only some are spares "
                "(spare=True, or TRIGRAM_SPARE=1); make all of them spares, or none"
            )


def _kind(elastic: bool, helper: bool, spare: bool | None) -> bytes:
    """What this rank tells the others that it is: one byte.

    Raises:
        ConfigError: ``TRIGRAM_SPARE`` is wrong.
        MisuseError: A spare needs an elastic job.
    """
    text = os.environ.get("TRIGRAM_SPARE", "0")
    if text not in ("", "0", "1"):
        raise ConfigError(f"TRIGRAM_SPARE={text!r} is invalid; set it to 0 or 1")
    if not (text == "1" if spare is None else spare):
        return _HELPER if helper else _WORKER
    if not elastic:
        raise MisuseError(
            "init: a spare (spare=True, or TRIGRAM_SPARE=1) takes the place of a lost rank, which needs "
            "elastic=True"
        )
    return _SPARE


def _checked(elastic: bool, helper: bool) -> str:
    """The transport that the environment names.

    Raises:
        ConfigError: A variable is wrong, also one of those that the engine reads itself.
        UnsupportedError: The arguments of ``init`` exclude each other.
    """
    if elastic and helper:
        raise UnsupportedError("init: elastic=True and helper=True exclude each other; pass only one of them")
    transport = os.environ.get("TRIGRAM_TRANSPORT", "auto")
    if transport not in _TRANSPORTS:
        raise ConfigError(
            f"TRIGRAM_TRANSPORT={transport!r} is invalid; set it to one of {', '.join(_TRANSPORTS)}"
        )
    checksum = os.environ.get("TRIGRAM_CHECKSUM", "auto")
    if checksum not in ("auto", "on", "off"):
        raise ConfigError(f"TRIGRAM_CHECKSUM={checksum!r} is invalid; set it to auto, on or off")
    lanes = os.environ.get("TRIGRAM_LANES", "auto")
    if lanes not in ("auto", *map(str, range(_MOST_LANES + 1))):
        raise ConfigError(
            f"TRIGRAM_LANES={lanes!r} is invalid; set it to auto or a number of threads from 0 to "
            f"{_MOST_LANES}"
        )
    far_links.check()
    kill = os.environ.get("TRIGRAM_KILL", "off")
    if kill not in ("on", "off"):
        raise ConfigError(f"TRIGRAM_KILL={kill!r} is invalid; set it to on or off")
    silence = os.environ.get("TRIGRAM_SILENCE", "15")
    try:
        right = 0.5 <= float(silence) <= 86_400
    except ValueError:
        right = False
    if not right:
        raise ConfigError(
            f"TRIGRAM_SILENCE={silence!r} is invalid; set it to a number of seconds from 0.5 to 86400"
        )
    return transport


def shutdown() -> None:
    """Leaves the job. Collectives in flight fail, here and on the peers; a second call does nothing.

    First it completes asynchronous training: this rank takes part until all ranks have finished. It returns
    when the peers have all that this rank has sent; a log line names a peer that takes nothing for 10 s.
    """
    job.here().leave()
