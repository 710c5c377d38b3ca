"""What each rank of a simulated job runs, and what must hold of what they have done."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import trigram
from tests.support.simulated.network import Engine, Network, Process, Rendezvous, Store
from tests.support.simulated.scheduler import Scheduler, Task, virtual_time
from trigram.elastic import (
    draining,
    join_queue,
    joining,
    membership,
)
from trigram.elastic.membership import current
from trigram.elastic.replicas import Replicas
from trigram.errors import DrainError, PeerLostError, TimeoutError
from trigram.runtime import job, live_store, serving
from trigram.runtime.group import Group
from trigram.runtime.job import Job, World

_ROOMS = "elastic", "training", "mixing", "averaging", "model"
"""Those whose modules wait, or look at the clock."""
_POLL = 0.05
"""Virtual seconds between two looks of who waits for what is no single call."""


def _modules() -> list[Any]:
    rooms = tuple(f"trigram.{room}." for room in _ROOMS)
    found = [m for name, m in sys.modules.items() if name.startswith(rooms)]
    return [*found, serving, live_store]


LR, MOMENTUM = 0.125, 0.5
_OP_TIMEOUT = 120.0
_COMPUTES = 0.0, 0.05, 0.1
"""Seconds that a rank takes for its part of a step."""
_SETTINGS = (None, None, "auto")


@dataclass(frozen=True)
class Faults:
    """What happens in a run.

    Attributes:
        kills: By process, the number of the point at which it is killed, among those where another may run.
        joins: Ranks that start after so many seconds.
        drains: By rank, the number of the point at which it is asked to leave.
        parts: After so many seconds the connections between these ranks and all others are reset.
        outages: From when until when, in seconds, these ranks do not reach the store.
    """

    kills: dict[str, int] = field(default_factory=dict)
    joins: tuple[tuple[float, int], ...] = ()
    drains: dict[str, int] = field(default_factory=dict)
    parts: tuple[tuple[float, tuple[int, ...]], ...] = ()
    outages: tuple[tuple[float, float, tuple[int, ...]], ...] = ()


@dataclass
class Outcome:
    """What a process has done.

    Attributes:
        steps: By step, the weight after it and the ranks that counted.
        answers: What :func:`trigram.elastic_all_gather` gave it, by step.
        means: The weight in :func:`trigram.consensus`, by step.
        error: What its script has raised.
        left: It has left because it was asked to.
        asked: It was asked to leave.
        joins: It has started late.
        place: Its place in its replica.
        partners: The other ranks of its replica.
        points: How often it came to where another may run, once it is in the job; a rank that joins, from its
            start.
    """

    steps: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    means: dict[int, float] = field(default_factory=dict)
    error: BaseException | None = None
    left: bool = False
    asked: bool = False
    joins: bool = False
    place: int = 0
    partners: tuple[int, ...] = ()
    points: int = -1


class Run:
    """One run of a job.

    Args:
        seed: Of all that is chosen.
        ranks: How many there are at the start.
        steps: How many each makes.
        faults: What happens.
        hosts: Ranks of a host, one after the other; 0: all are on one.
        gathers: The script calls ``elastic_all_gather`` between steps.
        evaluates: After so many steps the script looks at the mean of the weights; 0: never.
        spares: So many of the first ranks, the last of them, are spares.
        replica_size: How many ranks make up a replica.
        algorithm, options: Of ``with_bagua``.
        sparse: The model's gradient is sparse.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        steps: int,
        faults: Faults,
        hosts: int = 0,
        gathers: bool = True,
        evaluates: int = 0,
        spares: int = 0,
        replica_size: int = 1,
        algorithm: str = "gradient_allreduce",
        sparse: bool = False,
        **options: Any,
    ) -> None:
        self.sparse = sparse
        self.spares, self.replica_size = spares, replica_size
        self.algorithm, self.options, self.evaluates = algorithm, options, evaluates
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        # A replica whose ranks have made the last step would be lost when the first of them ends.
        self.network.gentle = replica_size > 1
        self.ranks, self.steps, self.faults, self.gathers = ranks, steps, faults, gathers
        if hosts:
            self.network.hosts = {rank: rank // hosts for rank in range(64)}
        self.outcomes: dict[str, Outcome] = {}
        self.processes: dict[str, Process] = {}
        self.jobs: dict[str, Job] = {}
        self.first: dict[int, Engine] = {}
        self.begun = 0
        self.scheduler.before_step = self._point

    def go(self, longest: float = 400.0) -> dict[str, Outcome]:
        """Runs it; returns what each process has done."""
        for rank in range(self.ranks):
            self._start(Process(rank, 0), late=False)
        for at, rank in self.faults.joins:
            number = sum(p.rank == rank for p in self.processes.values())
            process = Process(rank, number)
            self.processes[str(process)] = process
            self.scheduler.at(at, functools.partial(self._start, process, True))
        for at, here in self.faults.parts:
            self.scheduler.at(at, functools.partial(self._part, here))
        for begins, ends, ranks in self.faults.outages:
            self.scheduler.at(begins, functools.partial(self.network.without_store.update, ranks))
            self.scheduler.at(ends, self.network.without_store.clear)
        with virtual_time(_modules()), _stand_ins(self.network):
            try:
                self.scheduler.run(longest)
            finally:
                self.scheduler.end()
        return self.outcomes

    def _part(self, here: tuple[int, ...]) -> None:
        mine = [p for p in self.processes.values() if p.rank in here]
        self.network.part(mine, [p for p in self.processes.values() if p not in mine])

    def _point(self, task: Task) -> None:
        """A thread has come to where another may run."""
        name = str(task.process)
        if task.daemon or (mine := self.outcomes[name]).points < 0 or self.begun < self.ranks:
            return
        mine.points += 1
        if self.faults.kills.get(name) == mine.points:
            self.network.kill(task.process)
        if self.faults.drains.get(name) == mine.points:
            mine.asked = True
            self.jobs[name].part(draining.Draining).ask("a test")

    def _start(self, process: Process, late: bool) -> None:
        name = str(process)
        self.processes[name], self.outcomes[name] = process, self._outcome(process, late)
        self.scheduler.start(name, process, lambda: self._rank(process, late))

    def _outcome(self, process: Process, late: bool) -> Outcome:
        size = self.replica_size
        partners = [r for r in Replicas(size).of(process.rank) if r != process.rank]
        return Outcome(joins=late, place=process.rank % size, partners=tuple(partners))

    def _rank(self, process: Process, late: bool) -> None:
        mine = self.outcomes[str(process)]
        try:
            with Job() as here:
                self.jobs[str(process)] = here
                self._script(here, process, late, mine)
        except SystemExit as e:
            assert e.code == 0
            mine.left = True
        except Exception as e:
            mine.error = e

    def _script(self, here: Job, process: Process, late: bool, mine: Outcome) -> None:
        rank = process.rank
        store = Store(self.network, process)
        spare = not late and rank >= self.ranks - self.spares
        start = joining.Start(
            store,  # type: ignore[arg-type]
            rank,
            self.ranks,
            _SETTINGS,
            _OP_TIMEOUT,
            spare,
            self.replica_size,
        )
        if late:
            mine.points = 0
            here.world = start.late_world()
        else:
            everyone = list(range(self.ranks))
            engine: Any = Engine(self.network, process, "first", everyone, self.first)
            group = Group("world", everyone, engine.group("world", everyone, 0, 0), _OP_TIMEOUT)
            group.core.run(membership._BARRIER, membership._NOTHING, 10.0)
            here.world = World(engine, group, rank, self.ranks, _OP_TIMEOUT)
            here.world.elastic = start.member(everyone[self.ranks - self.spares :])
        for kind in job._PARTS:
            here.part(kind).begin()
        model, target = _Weight(self.sparse), torch.zeros(1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
        trigram.with_bagua(
            model, self.algorithm, optimizer=optimizer, elastic=[counted := _Counter()], **self.options
        )
        mine.points = max(mine.points, 0)
        self.begun += not late  # who is lost before all have begun ends the job
        target[0] = 1 << rank
        while counted.steps < self.steps:
            self.scheduler.sleep(self.scheduler.choices.choice(_COMPUTES))
            if self.gathers:
                mine.answers[counted.steps] = tuple(trigram.elastic_all_gather(rank))
            loss = model(target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counted.steps += 1
            assert counted.steps not in mine.steps, f"step {counted.steps} twice"
            row = [r for r in current()[1].counted or () if r % self.replica_size == mine.place]
            mine.steps[counted.steps] = model.weight.item(), tuple(row)
            if self.evaluates and counted.steps % self.evaluates == 0:
                with trigram.consensus(model, _OP_TIMEOUT):
                    mine.means[counted.steps] = model.weight.item()


class _Weight(nn.Module):
    """A weight, whose gradient is what it is called with."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.one = nn.Embedding(1, 1, sparse=sparse).double()
        nn.init.ones_(self.one.weight)
        self.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(torch.zeros(1, dtype=torch.int64)) * x).sum()


class _Counter:
    """The script's own count of steps, a part of the training state."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state."""
        self.steps = state["steps"]


@contextmanager
def _stand_ins(network: Network) -> Iterator[None]:
    """A block in which elastic jobs have the simulated engine."""

    class Core:
        """``trigram._core``."""

        Engine = Engine
        Rendezvous = staticmethod(functools.partial(Rendezvous, network))

        @staticmethod
        def is_endpoint_record(record: bytes, rank: int) -> bool:
            """Whether it is one of that rank."""
            return record in network.endpoints and network.endpoints[record].rank == rank

    before = joining.connect_again, membership._core, serving._POLL
    servers = set(serving._servers.known)
    modules: list[Any] = [membership, joining, join_queue]
    try:
        joining.connect_again = lambda store: store  # type: ignore[assignment, return-value]
        for module in modules:
            module._core = Core
        serving._POLL = _POLL
        yield
    finally:
        joining.connect_again, serving._POLL = before[0], before[2]
        for server in set(serving._servers.known) - servers:  # of killed processes
            serving.remove(server)
        for module in modules:
            module._core = before[1]


def check(
    outcomes: dict[str, Outcome], killed: set[str], steps: int, may_stop: bool = False, exact: bool = True
) -> None:
    """What must hold of every run.

    Args:
        outcomes: What the processes have done.
        killed: Those that were killed.
        steps: How many steps the job has.
        may_stop: Ranks may stop, because they do not reach the others.
        exact: Ranks average gradients, so that all have the same weights.
    """
    weights: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    for name, one in outcomes.items():
        for step, made in one.steps.items():
            if weights.setdefault((one.place, step), made) != made and exact:
                raise AssertionError(f"step {step}: {name} has {made}, others {weights[one.place, step]}")
    # Who is lost, or goes on no more because it does not reach the others, may have had another answer.
    lived = [one for name, one in outcomes.items() if name not in killed and one.error is None]
    for step in {step for one in lived for step in one.answers}:
        # Who joins, or is the only one left, has its own.
        found = {one.answers[step] for one in lived if len(one.answers.get(step, ())) > 1}
        assert len(found) <= 1 or not exact, f"step {step}: ranks have the answers {found}"
    for step in range(1, steps):  # at the last one others may have ended, and a rank that is left has its own
        means = {(one.place, one.means[step]) for one in lived if step in one.means}
        assert len(dict(means)) == len(means), f"step {step}: ranks have the means {means}"
    gone = {int(name.split()[1]) for name, one in outcomes.items() if name in killed or one.left or one.error}
    for name, one in outcomes.items():
        if name not in killed and one.error is not None and not _may_raise(one, gone, may_stop):
            raise AssertionError(f"{name} has raised {type(one.error).__name__}: {one.error}") from one.error
    lives = [n for n, o in outcomes.items() if not (n in killed or o.left or o.error)]
    if lives and not any(step == steps for _, step in weights):
        raise AssertionError("no rank has made all steps")
    for place in {place for place, _ in weights} if exact else ():
        weight, momentum = 1.0, 0.0
        for step in sorted(step for of, step in weights if of == place):
            found, counted = weights[place, step]
            momentum = MOMENTUM * momentum + sum(1 << r for r in counted) / len(counted)
            weight -= LR * momentum
            assert abs(found - weight) < 1e-6, f"step {step}: the weight is {found}, and {weight} is right"


def _may_raise(one: Outcome, gone: set[int], may_stop: bool) -> bool:
    """Whether what a rank has raised is right."""
    if may_stop and isinstance(one.error, PeerLostError):
        return True
    if isinstance(one.error, DrainError):
        return one.asked or any(r in gone for r in one.partners)
    if isinstance(one.error, membership.ReplicaLostError):
        return any(r in gone for r in one.partners)
    # The job had ended when this rank would have joined, or ended before it had the state.
    return one.joins and not one.steps and isinstance(one.error, PeerLostError | TimeoutError)
