"""All that one rank owns, in one object.

A process is one rank, unless it says otherwise: ``with trigram.Job():`` makes the thread inside the block a
rank of its own, so that several ranks may be threads of one process. What the rooms of this package keep for
a rank are *parts* of its job, made when they are first asked for; none is a variable of a module.

Of the process by nature, and shared by the jobs in it: the log and its thread, signals, forks, environment
variables, torch's hooks on optimizers, and torch's random numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from trigram import _core
from trigram.errors import MisuseError
from trigram.runtime import logs
from trigram.runtime.group import Group
from trigram.runtime.weak import copied

_T = TypeVar("_T")
_DERIVED = 1 << 62
"""Ordinals of groups that are derived from others begin here."""


class Membership(Protocol):
    """What the runtime knows of an elastic job's membership; :mod:`trigram.elastic` implements it.

    Attributes:
        ranks: World ranks of the present members.
        newcomer: This rank has joined and not taken part in a step yet.
        commits: Passes that all members have completed.
        counted: World ranks whose gradients counted in the last pass; None: there was none.
    """

    ranks: list[int]
    newcomer: bool
    commits: int
    counted: Sequence[int] | None

    @property
    def replica_size(self) -> int:
        """How many ranks make up a replica."""

    def place(self, rank: int) -> int:
        """What ``trigram.rank`` says on a member; -1 before it is one."""

    def is_idle(self, rank: int) -> bool:
        """Whether a rank is a spare that does not count."""

    def training(self) -> list[int]:
        """World ranks of the present members that count, ascending: all but spares."""

    def leave(self) -> None:
        """Leaves the job: this rank no longer answers join requests."""


@dataclass
class World:
    """The state of an initialised job.

    Attributes:
        engine: The engine, with its connections to all ranks.
        group: The default group: all ranks except helpers.
        rank: This rank.
        size: The number of ranks, helpers included.
        op_timeout: Seconds that a collective may take; None: no limit.
        aided: The group with helpers that the first model's gradients use; None: no helpers, or taken.
        ordinals: How many groups of the same kind and ranks have been created.
        borrowed: The groups of torch's process groups.
        elastic: The membership of an elastic job; None: the job is not elastic.
        store: The store in which the ranks met; None: closed, unless ``TRIGRAM_TOP`` or ``TRIGRAM_REPORT``
            asks for it.
        name: The same on all ranks, and another in each job; "": this rank came late.
        process: The process that has joined; a forked child has only a copy.
    """

    engine: _core.Engine
    group: Group
    rank: int
    size: int
    op_timeout: float | None
    aided: Group | None = None
    ordinals: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    borrowed: dict[dist.ProcessGroup, Group] = field(default_factory=dict)
    elastic: Membership | None = None
    store: Any = None
    name: str = ""
    process: int = field(default_factory=os.getpid)

    def new_group(self, ranks: Sequence[int], name: str, kind: int, helpers: Sequence[int] = ()) -> Group:
        """Creates a group of world ranks; all members create the same groups in the same order."""
        key = (kind, (*ranks, -1, *helpers))
        ordinal = self.ordinals[key] = self.ordinals.get(key, -1) + 1
        core, members = None, [*ranks, *helpers]
        if self.rank in members:
            core = self.engine.group(name, members, kind + ordinal + 1, len(helpers))
        return Group(name, ranks, core, self.op_timeout, helpers, kind + ordinal + 1)

    def derive(self, group: Group, name: str, ranks: Sequence[int]) -> Group:
        """Creates a group of some ranks of ``group``, for its internal communication.

        All ranks of ``group`` derive the same groups in the same order; the order relative to other groups
        does not matter, so several threads may do this.
        """
        group.derived += 1
        return self._derived(group, name, ranks, group.derived)

    def beside(self, group: Group, name: str, key: int) -> Group:
        """A second group of the same ranks, which ``key`` (from 1) identifies: members need not create theirs
        in the same order."""
        return self._derived(group, name, group.ranks, (key * 0xD1342543DE82EF95) % _DERIVED | 1 << 32)

    def among(self, group: Group, name: str, ranks: Sequence[int]) -> Group:
        """A group of some ranks of ``group``; the other ranks need not make it."""
        return self._derived(group, name, ranks, 1 << 33)

    def _derived(self, group: Group, name: str, ranks: Sequence[int], number: int) -> Group:
        ordinal = _DERIVED + (group.ordinal * 0x9E3779B97F4A7C15 + number) % _DERIVED
        core = self.engine.group(name, list(ranks), ordinal, 0) if self.rank in ranks else None
        return Group(name, ranks, core, group.timeout, (), ordinal)


class Part:
    """What a room of this package keeps for one rank. All parts are made without arguments."""

    def begin(self) -> None:
        """This rank has joined the job."""

    def finish(self) -> None:
        """This rank is about to leave the job. What it raises is logged."""

    def left(self) -> None:
        """This rank has left, so that nobody waits for it any more. What it raises is logged."""


_PARTS: list[type[Part]] = []
"""Kinds of parts that are told how the job goes, in the order in which they are told."""


def told(kind: type[Part]) -> type[Part]:
    """A decorator of parts that are told how the job goes: one is made when this rank has joined."""
    _PARTS.append(kind)
    return kind


def told_first(kind: type[Part]) -> type[Part]:
    """As :func:`told`, before those that have been named so far."""
    _PARTS.insert(0, kind)
    return kind


class Stay:
    """The time of a rank in a job, from ``init`` to ``shutdown``.

    Attributes:
        over: Whether it has left.
    """

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False


class Job:
    """A rank of its own for one thread, so that several ranks may be threads of one process::

        def train(rank: int) -> None:
            with trigram.Job():
                trigram.init(store, rank, world_size)
                model = trigram.with_bagua(Net())
                ...

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world_size)]

    Inside the block the functions of this package are those of this rank; outside of all blocks they are
    those of the process. The end of the block leaves the job as ``shutdown`` does. If an exception ends the
    block, it waits for nobody, as a process that fails, and the other ranks see that this one has left.

    The block is one thread's. Another thread that works for the same rank enters :meth:`here`.

    Attributes:
        world: The connections and groups; None before ``init`` and after ``shutdown``.
        let_go: This rank has left an elastic job because it was asked to, and joined no other since.
        stay: The present time in a job; another after each ``shutdown``.
        starting: Held by a thread in ``init``: the first calls of two threads make one world, not two.
        unfinished: What the last ``init`` has met the others with. It keeps its store if that has failed:
            ranks that have called it again may be connected to this rank's server.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.let_go = False
        self.stay = Stay()
        self.starting = threading.RLock()
        self.unfinished: Any = None
        self._joining: int | None = None  # the rank that a thread in `init` is about to be
        self._parts: dict[type, Any] = {}
        self._making = threading.RLock()
        self._entered: Token[Job | None] | None = None
        _jobs.add(self)

    @staticmethod
    def current() -> Job:
        """The job of the calling thread: that of the block it is in, or the process's."""
        return here()

    def part(self, kind: type[_T]) -> _T:
        """This rank's part of a kind."""
        found = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = kind()
        return cast(_T, found)

    def has(self, kind: type) -> bool:
        """Whether anything has asked for the part of a kind."""
        return kind in self._parts

    @contextlib.contextmanager
    def joins(self, rank: int | None) -> Iterator[None]:
        """A block of a thread in ``init``.

        Raises:
            MisuseError: Another thread is in ``init`` for another rank.
        """
        with self._making:
            refuse_another(rank, self._joining)
            first = self._joining is None
            if first:
                self._joining = rank
        try:
            yield
        finally:
            if first:
                self._joining = None

    def begin(self) -> None:
        """This rank has joined: tells the parts."""
        self._leave_at_end_of_child()
        for kind in _PARTS:
            self.part(kind).begin()

    def leave(self, patient: bool = True) -> None:
        """Leaves the job, if this rank is in one.

        Args:
            patient: It waits until the peers have all that this rank has sent.
        """
        with self.here():
            mine = self._is_mine()
            if mine:
                self._tell(lambda part: part.finish())
            self._disconnect(mine, patient)

    def _disconnect(self, mine: bool, patient: bool) -> None:
        world = self.world  # now: an elastic job may have changed while the parts finished
        if world is None:
            return
        self.world, self.stay.over, self.stay = None, True, Stay()
        try:
            if mine and world.elastic is not None:
                world.elastic.leave()
        finally:
            try:
                world.engine.shutdown(False, patient)
            finally:  # Ctrl-C ends the wait for slow peers
                if mine:
                    self._tell(lambda part: part.left())
                logs.flush()

    def _is_mine(self) -> bool:
        """Whether this process has joined; a forked child has only a copy."""
        return self.world is not None and self.world.process == os.getpid()

    def _shut_down(self) -> None:
        """At exit: ends the engine. Those of threads that end with the process wait for nobody."""
        if self.world is not None:
            self.world.engine.shutdown(True, self is of_process)

    def _tell(self, what: Callable[[Part], None]) -> None:
        """Tells all parts; one that raises does not keep the others from their work, nor this rank in the
        job."""
        for kind in list(_PARTS):
            try:
                what(self.part(kind))
            except Exception as error:
                logs.warning(f"at the end of the job: {type(error).__name__}: {error}")

    def _leave_at_end_of_child(self) -> None:
        """In a child of multiprocessing: leaves all jobs when the child's function has returned or raised.

        Such a child ends by ``os._exit``, without the functions at exit; without this its peers would lose
        it.
        """
        if multiprocessing.parent_process() is not None:
            ending = of_process.part(_EndOfChild)
            if ending.process != os.getpid():
                ending.process = os.getpid()
                multiprocessing.util.Finalize(None, _leave_all, exitpriority=100)

    def __repr__(self) -> str:
        world = self.world
        return "Job()" if world is None else f"Job(rank {world.rank} of {world.size})"

    def __enter__(self) -> Job:
        """See the class."""
        if self._entered is not None or self is of_process:
            raise MisuseError(
                "Job: this block has been entered already; make a new Job, or enter job.here() in a thread "
                "that works for the same rank"
            )
        self._entered = _here.set(self)
        return self

    def __exit__(self, kind: object, raised: object, _: object) -> None:
        """See the class."""
        well = raised is None or (isinstance(raised, SystemExit) and raised.code in (0, None))
        try:
            self.leave(patient=well)
        except BaseException:  # Ctrl-C while it finished: the block ends all the same
            self._disconnect(self._is_mine(), False)
            raise
        finally:
            assert self._entered is not None
            _here.reset(self._entered)
            self._entered = None

    def thread(self, name: str, target: Callable[..., object], *args: Any) -> None:
        """Starts a thread that works for this rank, and does not keep the process from its end."""

        def work() -> None:
            with self.here():
                target(*args)

        threading.Thread(target=work, name=name, daemon=True).start()

    @contextlib.contextmanager
    def here(self) -> Iterator[Job]:
        """A block in which the calling thread works for this rank. Its end does not leave the job."""
        before = _here.set(self)
        try:
            yield self
        finally:
            _here.reset(before)


class _EndOfChild:
    """The child of multiprocessing that leaves its jobs when it ends."""

    process = 0


_jobs: weakref.WeakSet[Job] = weakref.WeakSet()
"""Those that exist, for the process's exit."""
_here: ContextVar[Job | None] = ContextVar("trigram.Job", default=None)
of_process = Job()
"""The job outside of all blocks."""


def here() -> Job:
    """The job of the calling thread."""
    return _here.get() or of_process


def _leave_all() -> None:
    of_process.leave()
    for job in copied(_jobs.__iter__):  # of threads that end with the process
        job._disconnect(False, False)


def refuse_another(rank: int | None, present: int | None) -> None:
    """Raises if ``rank`` is to be another one than that which this job is or is about to be."""
    if rank is not None and present is not None and rank != present:
        raise MisuseError(
            f"init: asked for rank {rank}, but this is rank {present} already; where ranks are threads of "
            "one process, each calls init in its own `with trigram.Job():`"
        )


def is_any_other() -> bool:
    """Whether threads of this process are ranks of their own now."""
    return any(job is not of_process and job.world is not None for job in copied(_jobs.__iter__))


@atexit.register
def _exit() -> None:
    """Leaves the process's job. Those of threads that end with the process are not told: their ranks may be
    in the middle of a step. All engines run until the process's own rank has finished, and may need them."""
    mine = of_process._is_mine()
    with of_process.here(), contextlib.ExitStack() as at_last:  # whatever is raised, such as Ctrl-C
        at_last.callback(logs.write_rest)
        for job in copied(_jobs.__iter__):
            at_last.callback(job._shut_down)
        try:
            if mine:
                of_process._tell(lambda part: part.finish())
                if of_process.world is not None and of_process.world.elastic is not None:
                    of_process.world.elastic.leave()
                if of_process.world is not None:
                    of_process.world.engine.write_out_log()
        finally:
            logs.flush()  # before the threads that serve the interpreter stop
    if mine:
        with of_process.here():
            of_process._tell(lambda part: part.left())
