"""Elastic jobs: how all members go on together when ranks are lost, leave or join.

What a model does then is in :mod:`trigram.steps.elastic_model`; who may go on is decided in
:mod:`trigram.elastic.membership`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from torch import nn

from trigram.collectives.consistency import listed, ranks_that
from trigram.elastic import draining, joining, losses, membership, orders, places
from trigram.elastic.answers import Answers
from trigram.elastic.membership import Leaving, MembershipChange, current
from trigram.errors import DrainError, MisuseError, TimeoutError
from trigram.runtime import job, logs, serving, world
from trigram.runtime.group import Group
from trigram.runtime.job import Part

_JOIN_POLL = 0.1
"""Seconds between two looks for ranks that join while all others wait for them."""


class _Shared(Protocol):
    """What of a model's training state all ranks have."""

    def most_leaving(self) -> int:
        """So many ranks may leave in one change, and all of the training state is on others."""


class Steps(Protocol):
    """What a change of the members asks of a model's steps."""

    @property
    def keeps_weights(self) -> bool:
        """Whether weights must not change now, as the mean of them does that a change of members takes."""

    @property
    def shared(self) -> _Shared:
        """What all ranks have."""

    def hand_over(self, group: Group) -> None:
        """Ranks are about to leave: the others of the group get what only these have."""

    def leave(self) -> None:
        """This rank has left, in good order."""


class Model(Protocol):
    """What a change of the members asks of a model.

    Attributes:
        members: The group of the job in which it is.
        in_step: All ranks make the same step at the same time.
        behind: When the last change began, some ranks had yet to complete what others had.
    """

    members: Group
    in_step: bool
    behind: bool

    @property
    def recovery(self) -> Steps:
        """How its steps go on."""

    def model(self) -> nn.Module | None:
        """The module; None: the script has dropped it."""

    @property
    def sends_now(self) -> bool:
        """Whether this rank would send its state at once to those that join; else when its step is over."""

    def describe(self) -> dict[str, Any]:
        """What changes in the job's status while an epoch lasts; any thread may call it."""

    def renew(self, group: Group, change: MembershipChange, fresh: bool = False) -> None:
        """Goes on in a new epoch; ``fresh``: its groups were made in this epoch already."""

    def regroup(self, boundary: bool = True, complete: bool = False) -> MembershipChange:
        """Calls :func:`recover`, and ends the calls in which others wait for this rank."""

    def is_called(self) -> bool:
        """Whether this rank must change the members with the others."""

    def receive(self) -> object:
        """On a new rank: waits for the training state."""

    def end_step(self) -> None:
        """A step is over that all members have made."""


@job.told
class _Models(Part):
    """The models of this rank; one of them at most is in use.

    Attributes:
        join_change: On a rank that has joined: what the members know of its first epoch.
    """

    def __init__(self) -> None:
        self.models: list[Model] = []
        self.join_change = MembershipChange([], 0, False, False)

    def left(self) -> None:
        """Lets the models go."""
        self.models = []

    def of(self, group: Group) -> list[Model]:
        """The models that exist still and belong to the job of this group, not to an earlier one."""
        return [m for m in self.models if m.model() is not None and m.members is group]


def trained() -> list[Model]:
    """The models of the present job."""
    return job.here().part(_Models).of(current()[0].group)


def add(part: Model) -> None:
    """Registers a model. All ranks make their models in the same order.

    Raises:
        MisuseError: The job has another elastic model.
    """
    now, mine = current()
    known = job.here().part(_Models)
    known.models = _others(known, now.group, part)
    if known.models:
        gc.collect()  # a model that the script has dropped may be in a reference cycle
        known.models = _others(known, now.group, part)
    if known.models:
        raise MisuseError(
            "with_bagua: this job has another model with elastic=True already, and supports only one: a rank "
            "joins between two steps of that model; put both into one nn.Module"
        )
    known.models.append(part)
    if mine.queue is not None:
        mine.queue.describe = part.describe
    job.here().part(draining.Draining).trains = True
    if mine.newcomer:
        # The members call `renew` at the end of `recover`; this rank's groups were made after it joined.
        with losses.caught() as lost:
            part.renew(now.group, known.join_change, fresh=True)
        if losses.agreed(bool(lost)):
            known.join_change = recover(boundary=False)


def _others(known: _Models, group: Group, part: Model) -> list[Model]:
    return [m for m in known.of(group) if m.model() is not part.model()]


def enter_job() -> None:
    """Calls ``init(elastic=True)`` if nothing has called ``init``.

    Raises:
        MisuseError: ``init`` was called without ``elastic=True``.
    """
    if not world.is_initialized():
        world.init(elastic=True)
    if world.current().elastic is None:
        raise MisuseError(
            "with_bagua: elastic=True needs trigram.init(elastic=True) at the start of the script"
        )


def join_job() -> None:
    """Makes a rank that has started late a member of its elastic job.

    Raises:
        TimeoutError, AuthError, ConfigError: See :func:`trigram.elastic.joining.join`.
    """
    if not joining.must_join():
        return
    joining.join()
    job.here().part(Answers).joins = True
    now, known = current()[0], job.here().part(_Models)
    # The members make the same call at the end of `recover`.
    with losses.caught() as lost:
        known.join_change = _describe_change(now.group, newcomer=True, commit=False)
    if losses.agreed(bool(lost)):  # this rank recovers like all
        known.join_change = recover(boundary=False)


def _describe_change(
    group: Group, newcomer: bool, commit: bool, behind: bool = False, together: bool = False
) -> MembershipChange:
    """The change, with the new ranks that all members name in the new epoch. All of them call it."""
    mine = current()[1]
    # A replica has the training state if all of its ranks have.
    touched = mine.replicas.touched(ranks_that(newcomer, group))
    newcomers = [r for r in group.ranks if r in touched]
    mine.newcomer = group.ranks[group.rank] in touched
    source = places.first([r for r in group.ranks if r not in newcomers])
    now = all(model.sends_now for model in job.here().part(_Models).of(group))
    behind |= job.here().part(Answers).settle(group, newcomers, source, now)
    return MembershipChange(newcomers, source, commit, True, behind, together=together)


def recover(boundary: bool = True, complete: bool = False, renew: bool = False) -> MembershipChange:
    """Removes lost ranks, admits new ones, and lets all models continue. All members call it.

    Where ranks are not in step, each call begins a new epoch: some ranks may have come because their calls
    were aborted, and calls aborted in an epoch cannot be made again.

    Args:
        boundary: This rank is between two steps.
        complete: This rank has all results of the backward pass under way.
        renew: Begin a new epoch, also if its members are the same.

    Raises:
        PeerLostError: The ranks that this rank reaches are too few to continue the job.
        DrainError: All ranks were asked to leave.
        SystemExit: This one was, and has left.
    """
    # What looks whether a call is to end, such as because a rank is lost, is not to end this.
    with current()[1].history.waste(), serving.looking(lambda: None):
        return _recover(boundary, complete, renew)


def _recover(boundary: bool, complete: bool, renew: bool) -> MembershipChange:
    """See :func:`recover`."""
    before = current()[0].group.ranks
    while True:
        models = job.here().part(_Models).of(current()[0].group)
        out_of_step = not all(m.in_step for m in models)
        change = membership.change_membership(boundary, complete, out_of_step or renew, _leaving(models))
        if change.leaves:
            leave(models)
        _, mine = current()
        mine.change_pending = False
        if not change.renewed:
            for model in job.here().part(_Models).of(current()[0].group):
                model.behind = change.behind
            return _answered(change, current()[0].group)
        drained = change.drained
        now, mine = current()
        if change.commit:
            mine.newcomer = False  # its first pass counts, so it has received the training state
        with losses.caught() as lost:
            change = _describe_change(now.group, mine.newcomer, change.commit, change.behind, change.together)
            known = job.here().part(_Models)
            known.models = known.of(now.group)
            for model in known.models:
                model.renew(now.group, change)
        if losses.agreed(bool(lost)):
            continue
        if renew and now.group.ranks == before:
            return _answered(replace(change, drained=drained), now.group)
        logs.warning(
            f"rank {now.rank}: the job continues with ranks {listed(now.group.ranks)}"
            + (f"; {listed(change.newcomers)} joined" if change.newcomers else "")
            + (f"; {listed(mine.idle())} spare" if mine.idle() else "")
        )
        return _answered(replace(change, drained=drained), now.group)


def _answered(change: MembershipChange, group: Group) -> MembershipChange:
    """The change; raises if all ranks were asked to leave: they are still in the job, and able to save it."""
    if not change.drained:
        return change
    asked = job.here().part(draining.Draining)
    by, asked.asked = asked.asked or "with its replica", None
    raise DrainError(
        f"elastic: all ranks of the job ({listed(group.ranks)}) were asked to leave it (this one: {by}), so "
        "nobody would go on with the training; save a checkpoint where this error is caught, and start the "
        "job again from it"
    )


def _leaving(models: Sequence[Model]) -> Leaving:
    """How ranks leave these models."""

    def hand_over(group: Group) -> None:
        for model in models:
            model.recovery.hand_over(places.among(group))

    at_once = min((model.recovery.shared.most_leaving() for model in models), default=sys.maxsize)
    return Leaving(at_once, hand_over)


def leave(models: Sequence[Model]) -> NoReturn:
    """Leaves the job, which goes on without this rank, and ends its script."""
    here = job.here()
    rank, asked = world.current().rank, here.part(draining.Draining).asked or "with its replica"
    # Others of its replica may have read it before, and have taken this rank along.
    queue = current()[1].queue
    if queue is not None and queue.is_ordered():
        asked = orders.BY
    for model in models:
        model.recovery.leave()
    logs.warning(f"rank {rank} leaves the job, as it was asked to ({asked}); the other ranks go on")
    here.leave()
    here.let_go = True
    raise SystemExit(draining.exit_status(asked))


def withdraw() -> None:
    """A rank that joins has failed to begin: it leaves the job at once, because the others would wait for its
    first step, whatever its script does now. It may join again."""
    present = world.present()
    if present is not None and present.elastic is not None and present.elastic.newcomer:
        job.here().leave(patient=False)


def regroup() -> None:
    """Goes on after a loss in a call that the model knows nothing of; like ``ElasticModel.regroup``."""
    if models := trained():
        models[0].regroup(False)
    else:
        recover(boundary=False)


def public_recover() -> Group:
    """Continues with the remaining ranks after ``PeerLostError``, in a job that ``init(elastic=True)`` began.

    All remaining ranks call it between two steps. It admits the ranks that wait to join; on a rank that has
    started late it joins the job. Models under ``with_bagua(elastic=True)`` recover without it; a script
    needs it for the collectives that it calls itself.

    Returns:
        The group of all members; the same object that ``init`` returned.

    Raises:
        MisuseError: The job is not elastic.
        PeerLostError: The ranks that this rank reaches are too few to continue the job.
    """
    now = world.current()
    if now.elastic is None:
        raise MisuseError(
            "recover: the job is not elastic; call trigram.init(elastic=True) at the start of the script"
        )
    if joining.must_join():
        join_job()
        _, mine = current()
        if not job.here().part(_Models).models:
            mine.newcomer = job.here().part(Answers).joins = False
    else:
        recover()
    return world.current().group


def await_members(count: int, timeout: float) -> None:
    """Waits until the job has ``count`` ranks again, for a launcher that starts lost ranks again.

    All ranks call it between two steps. A rank that has joined and makes no step has the training state
    afterwards.

    Args:
        count: Number of ranks.
        timeout: Seconds to wait for them.

    Raises:
        TimeoutError: They have not joined in time.
    """
    end = time.monotonic() + timeout
    while (present := world.current().group.size) < count:
        if time.monotonic() > end:
            raise TimeoutError(
                f"elastic: {count - present} of {count} ranks have not joined within {timeout:.0f} s; "
                f"rank(s) {listed(world.current().group.ranks)} are present"
            )
        public_recover()
        time.sleep(_JOIN_POLL)
    for model in job.here().part(_Models).of(world.current().group):
        model.receive()
        model.end_step()
