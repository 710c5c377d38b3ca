"""Elastic training: a step goes on with those who live, and newcomers take part from a step's beginning.

A pass counts when all its members have everything of it: its averages are followed by a small AllReduce,
which ends on no rank before every rank has entered it. So if one rank has counted a pass, all have it
complete; if a rank is lost before, all who live do the pass again, from the gradients that each has kept.

A newcomer contributes nothing to its first pass. Beside it, weights, optimizer and whatever else makes the
state come from the lowest member, as they were when the step began; with the step's averages on top the
newcomer then holds what all hold (the way of torchft's healing).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import serialization
from trigram.collectives.consistency import listed, ranks_that
from trigram.elastic import joining, membership
from trigram.elastic.membership import MembershipChange, current, is_loss
from trigram.errors import MismatchError, MisuseError, TrigramError
from trigram.runtime import logs, world
from trigram.runtime.group import Group
from trigram.runtime.records import broadcast_bytes

_STATE = 5


class Stateful(Protocol):
    """What has a state: optimizers, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Takes it."""


class Follower(Protocol):
    """What a hooks does in an elastic job.

    Attributes:
        in_step: Whether all ranks make the same step at a time.
    """

    in_step: bool

    def meta(self) -> dict[str, Any]:
        """What all must know to go on alike, and a newcomer at once."""

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Goes on among the members of a new world. All of them call it."""


class Pass(Protocol):
    """A backward pass that can be done again, as :meth:`ElasticModel.complete` needs it."""

    def send_rest(self) -> None:
        """What has not left leaves, and everything is awaited."""

    def again(self) -> None:
        """Begins anew with the gradients that this rank had."""


class ElasticModel:
    """A model's part in an elastic job.

    Args:
        model: The module.
        title: The algorithm, written out.
        states: What a newcomer needs beside the weights.
        groups: Where it talks.
        hooks: What hooks the model.
    """

    def __init__(
        self, model: nn.Module, title: str, states: Sequence[Stateful], groups: ModelGroups, hooks: Follower
    ) -> None:
        self.model = weakref.ref(model)
        self.title, self.states, self.groups = title, list(states), groups
        self.hooks = hooks
        self.in_step = hooks.in_step
        groups.interrupted = self.is_called
        serialization.pack([s.state_dict() for s in states], "with_bagua: elastic=True, optimizer and states")
        self.sending: list[collectives.Work] = []
        self.arriving: tuple[torch.Tensor, collectives.Work, int] | None = None
        self.newcomers: list[int] = []
        self.is_new = False

    @property
    def newcomer(self) -> bool:
        """Whether this rank has yet to get the state."""
        return self.arriving is not None

    def renew(self, group: Group, out: MembershipChange, fresh: bool = False) -> None:
        """In a new world: the algorithm goes on, and the state is on its way to newcomers.

        ``fresh``: the groups are of this world already."""
        self.arriving = None
        if not fresh:
            self.groups.renew(group)
        side = self.groups.control
        mine = (
            {"title": self.title, "layout": self._layout(), **self.hooks.meta()}
            if side.ranks[side.rank] == out.source
            else None
        )
        meta = share(mine, out.source, side)
        if meta["title"] != self.title or meta["layout"] != self._layout():
            raise MismatchError(
                f"elastic: rank {side.ranks[side.rank]} has another model or algorithm than the job it "
                f"joins, which trains with {meta['title']}; use the same model and algorithm"
            )
        self.newcomers = out.newcomers
        self.is_new = side.ranks[side.rank] in out.newcomers
        self._send(out, side)
        self.hooks.follow(meta, self)

    def first_with_state(self) -> int:
        """The first place of the group whose rank is no newcomer."""
        ranks = self.groups.control.ranks
        return next(i for i, rank in enumerate(ranks) if rank not in self.newcomers)

    def _layout(self) -> str:
        model = self.model()
        assert model is not None
        return " ".join(
            f"{n}{tuple(t.shape)}{t.dtype}" for n, t in [*model.named_parameters(), *model.named_buffers()]
        )

    def _send(self, out: MembershipChange, side: Group) -> None:
        """Begins what brings the state to newcomers; it goes on beside the training."""
        me = side.ranks[side.rank]
        if me == out.source and out.newcomers:
            state = serialization.pack(self._state(), "elastic: the training state for a joining rank")
            size = torch.tensor([state.numel()])
            for rank in out.newcomers:
                for piece in (size.clone(), state):
                    work = collectives.send(piece, rank, _STATE, side, async_op=True)
                    assert work is not None
                    self.sending.append(work)
        elif me in out.newcomers:
            size = torch.zeros(1, dtype=torch.int64)
            collectives.recv(size, out.source, _STATE, side)
            data = torch.empty(int(size), dtype=torch.uint8)
            work = collectives.recv(data, out.source, _STATE, side, async_op=True)
            assert work is not None
            self.arriving = data, work, out.source

    def _state(self) -> dict[str, Any]:
        model = self.model()
        assert model is not None
        tensors = [t.detach() for t in [*model.parameters(), *model.buffers()]]
        return {"tensors": tensors, "states": [s.state_dict() for s in self.states]}

    def sent(self) -> None:
        """Forgets what newcomers have got, and what they will not get any more."""
        for work in [w for w in self.sending if w.is_completed()]:
            self.sending.remove(work)
            with contextlib.suppress(TrigramError):  # one that has left again: the next pass shows it
                work.wait()

    def abort_calls(self) -> None:
        """Calls that others may wait in for this rank are given up: they shall come too."""
        for group in (self.groups.main, self.groups.second_phase, self.groups.control):
            group.core.abort(
                group.core.next() + 2, "elastic: all ranks stop their calls to change the membership"
            )

    @torch.no_grad()
    def receive(self) -> None:
        """Waits for the state, if this rank is a newcomer, and takes it."""
        if self.arriving is None:
            return
        data, work, source = self.arriving
        work.wait()
        state = serialization.unpack(data, source)
        model = self.model()
        assert model is not None
        for mine, theirs in zip([*model.parameters(), *model.buffers()], state["tensors"], strict=True):
            mine.copy_(theirs)
        for keeper, theirs in zip(self.states, state["states"], strict=True):
            keeper.load_state_dict(theirs)
        self.arriving = None

    # What training calls; trigram.training.elasticity has the same for jobs whose ranks are fixed.

    can_redo = True

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """Between two steps: ranks that wait join. Then all prepare the step together.

        ``prepare`` gets the place of the first rank that has the job's state. If a rank is lost in it, it is
        not done again, unless others are still on their way to it, in the end of the last step.
        """
        _, mine = current()
        if mine.due:
            recover(boundary=True)
        while True:
            try:
                prepare(self.first_with_state())
                return
            except TrigramError as e:
                if not is_loss(e):
                    raise
                if not recover(boundary=False).behind:
                    return

    def complete(self, a_pass: Pass) -> None:
        """Brings a backward pass to its end on all ranks that live."""
        complete = False
        while True:
            try:
                if not complete:
                    a_pass.send_rest()
                    self.receive()
                    complete = True
                due = self._waits()  # ends when all ranks have everything of the pass
            except TrigramError as e:
                if not is_loss(e):
                    raise
                out = recover(boundary=False, complete=complete)
                if not (complete and out.commit):
                    a_pass.again()
                    complete = False
                    continue
                due = False
            _, mine = current()
            mine.commits += 1
            mine.newcomer, mine.due, mine.fresh = False, due, frozenset()
            self.newcomers = []
            self.sent()
            return

    def boundary(self, step: Callable[[], bool]) -> None:
        """A boundary of weights; ``step`` tells whether all ranks are at the same one.

        A step that a rank was lost in is not made again: in the new world all have the mean.
        """
        _, mine = current()
        with self.forgiving():
            if mine.due or self.is_called():
                self.regroup()
            elif step():
                mine.due = self._waits()
        mine = current()[1]
        mine.newcomer, mine.fresh = False, frozenset()
        self.newcomers, self.is_new = [], False
        self.sent()

    def has_state(self) -> None:
        """All members hold the job's state now."""
        _, mine = current()
        mine.newcomer, mine.fresh = False, frozenset()

    def is_called(self) -> bool:
        """Whether this rank is to meet the others: one is lost, or, if ranks are not in step, one waits."""
        return membership.has_lost() or (not self.in_step and membership.asked())

    def is_loss(self, error: TrigramError) -> bool:
        """Whether an error comes of a lost rank, so that the others go on."""
        return is_loss(error)

    def regroup(self, boundary: bool = True) -> None:
        """Meets the others. Those who wait for this rank in a call hear that it does not come."""
        if self.is_called():
            self.abort_calls()
        recover(boundary)

    @contextlib.contextmanager
    def forgiving(self) -> Iterator[None]:
        """What was lost in here is not done again: all ranks go on without it."""
        try:
            yield
        except TrigramError as e:
            if not is_loss(e):
                raise
            self.regroup(boundary=False)

    def _waits(self) -> bool:
        """Whether a rank waits to join, as the leader knows; ends when all ranks have asked."""
        _, mine = current()
        waits = mine.queue is not None and bool(mine.queue.waiting)
        word = torch.tensor([int(waits)])
        collectives.all_reduce(word, "max", None, self.groups.control)
        return bool(word)


_parts: list[ElasticModel] = []


def add(part: ElasticModel) -> None:
    """A model takes part; models are made in the same order on all ranks."""
    now, mine = current()
    _parts[:] = _others(now.group, part)
    if _parts:
        gc.collect()  # a model that the script has let go may still be in a cycle
        _parts[:] = _others(now.group, part)
    if _parts:
        raise MisuseError(
            "with_bagua: this job has another model with elastic=True already, and supports only one: a rank "
            "joins between two steps of that model; put both into one nn.Module"
        )
    _parts.append(part)
    if mine.newcomer:
        # It has come with the world; the members renew theirs at the end of `recover`.
        with _entering():
            part.renew(now.group, _entered, fresh=True)


def _others(group: Group, part: ElasticModel) -> list[ElasticModel]:
    return [p for p in _alive(group) if p.model() is not part.model()]


def _alive(group: Group) -> list[ElasticModel]:
    """The models that are still there, of this job and not of one before."""
    return [p for p in _parts if p.model() is not None and p.groups.group is group]


_entered = MembershipChange([], 0, False, False)


def is_newcomer() -> bool:
    """Whether this rank has yet to take part in a step."""
    return current()[1].newcomer


def join_job() -> None:
    """This process is in an elastic job: from now on, if it was in none; a late rank becomes a member."""
    if not world.is_initialized():
        world.init(elastic=True)
    if world.current().elastic is None:
        raise MisuseError(
            "with_bagua: elastic=True needs trigram.init(elastic=True) at the start of the script"
        )
    enter()


def share(value: Any, src: int, group: Group) -> Any:
    """What rank ``src`` gives, on all ranks."""
    data = b""
    if group.ranks[group.rank] == src:
        data = serialization.pack(value, "elastic").numpy().tobytes()
    data = broadcast_bytes(group, data, group.ranks.index(src))
    return serialization.unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), src)


def enter() -> None:
    """A late rank that has a model now becomes a member."""
    global _entered
    if not joining.is_outside():
        return
    joining.enter()
    now, _ = current()
    # The members make the same call at the end of `recover`: who is new, and who has the state.
    with _entering():
        _entered = _census(now.group, newcomer=True, commit=False)


@contextlib.contextmanager
def _entering() -> Iterator[None]:
    """Lost in here, this rank goes on with the others like any of them."""
    global _entered
    try:
        yield
    except TrigramError as e:
        if not is_loss(e):
            raise
        _entered = recover(boundary=False)


def _census(group: Group, newcomer: bool, commit: bool, behind: bool = False) -> MembershipChange:
    new = ranks_that(newcomer, group)
    return MembershipChange(new, min(r for r in group.ranks if r not in new), commit, True, behind)


def recover(boundary: bool = True, complete: bool = False) -> MembershipChange:
    """The living go on together, and let in who waits; all members call it, and all models follow.

    Where ranks are not in step, each is between two steps whenever it comes here, whether it has heard
    that somebody waits or of calls given up for that; and as such calls are lost, the world is made anew.
    """
    while True:
        loose = not all(part.in_step for part in _alive(current()[0].group))
        out = membership.change_membership(boundary or loose, complete, loose)
        _, mine = current()
        mine.due = False
        if not out.renewed:
            return out
        try:
            now, mine = current()
            if out.commit:
                mine.newcomer = False  # its first pass counts, so it has got the state
            out = _census(now.group, mine.newcomer, out.commit, out.behind)
            _parts[:] = _alive(now.group)
            for part in _parts:
                part.renew(now.group, out)
            logs.warning(
                f"rank {now.rank}: the job continues with ranks {listed(now.group.ranks)}"
                + (f"; {listed(out.newcomers)} joined" if out.newcomers else "")
            )
            return out
        except TrigramError as e:
            if not is_loss(e):
                raise


def public_recover() -> Group:
    """Goes on with those who live: after ``PeerLostError`` in a job that ``init(elastic=True)`` began.

    All living ranks call it, between steps. Ranks that wait to enter are let in, and a late rank enters.
    Models under ``with_bagua(elastic=True)`` need it only where the script makes collective calls of its own.

    Returns:
        The group of all living ranks; it is the one that ``init`` returned.

    Raises:
        PeerLostError: These ranks are too few to go on as the whole.
    """
    now = world.current()
    if now.elastic is None:
        raise MisuseError(
            "recover: the job is not elastic; call trigram.init(elastic=True) at the start of the script"
        )
    if joining.is_outside():
        enter()
        _, mine = current()
        if not _parts:
            mine.newcomer = False
    else:
        recover()
    return world.current().group
