"""Elastic training: what a model does when ranks are lost or join.

A backward pass counts when all members have all of its results: after its averages the members make a small
AllReduce, which ends on no rank before every rank has begun it. So if one rank has counted a pass, all have
its results. If a rank is lost before that, the remaining ranks repeat the pass from the gradients they have
kept.

A new rank contributes nothing to its first pass. Meanwhile it receives weights, optimizer state and
everything else that belongs to the training state from the lowest rank that has it, as of the beginning of
the step. With the averages of that step applied, it then holds what all ranks hold (as in the live recovery
of torchft). Where weights are averaged, its weights come from the mean that all take (ADR 63).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced, serialization
from trigram.elastic import draining, local_state, losses, membership, places
from trigram.elastic.answers import Answers
from trigram.elastic.membership import Membership, MembershipChange, current, is_loss
from trigram.elastic.recovery import leave, recover
from trigram.elastic.state_transfer import StateTransfer
from trigram.errors import MismatchError, MisuseError, TrigramError
from trigram.runtime import job
from trigram.runtime.group import Group
from trigram.runtime.records import broadcast_bytes
from trigram.runtime.world import REPLICA_ORDINALS
from trigram.steps.step_recovery import Stateful, StepRecovery


class Owner(Protocol):
    """What has a model's hooks.

    Attributes:
        earlier_steps: Steps that the model has made with earlier hooks.
    """

    earlier_steps: int

    def proceed(self) -> object:
        """Begins the algorithm after its warm-up, with other hooks."""

    def begin_after(self, steps: int) -> None:
        """On a joining rank: so many were made with earlier hooks."""


class Pass(Protocol):
    """A backward pass that can be done again, as :meth:`ElasticModel.complete` needs it."""

    def send_rest(self) -> None:
        """Starts the averages that have not started, and waits for all."""

    def again(self) -> None:
        """Starts the pass again with the gradients that this rank has kept."""


class ElasticModel:
    """A model in an elastic job. Implements :class:`trigram.steps.elasticity.Elasticity`.

    Args:
        model: The module.
        title: The algorithm and its options, as text; the same on all ranks.
        states: What belongs to the training state beside the weights: optimizer, schedulers.
        groups: The model's process groups.
        recovery: How the model's steps go on.
        owner: What has the model's step hooks.
        warms: The algorithm has a warm-up.

    Attributes:
        arrived: World ranks that joined and contribute nothing to the step under way.
        members: The group of all members; the same object while the job lasts.
        everyone: Ends a step on all members together; of their places only, see :mod:`replicas`, are the
            model's groups.
        is_new: This rank has joined in the present epoch.
        admitted: Ranks have made their first pass in the last one that counts.
        behind: When the last change of the membership began, some ranks had yet to complete what others had,
            a step or a call of the script's own: these do again what they do together before a pass.

    Raises:
        UnsupportedError: A state holds a value that cannot be sent.
    """

    can_redo = True

    def __init__(
        self,
        model: nn.Module,
        title: str,
        states: Sequence[Stateful],
        groups: ModelGroups,
        recovery: StepRecovery[Any],
        owner: Owner,
        warms: bool,
    ) -> None:
        self.model = weakref.ref(model)
        self.title, self.groups, self.recovery = title, groups, recovery
        self.states = [local_state.of(s) for s in recovery.shared.state_sources(states)]
        self.members = current()[0].group
        self._find_places()
        self.in_step = recovery.in_step
        self._owner, self._warms = owner, warms
        groups.interrupted = self.is_called
        groups.silent = self._silent_places
        groups.source = self.first_with_state
        # Now, not when the first rank joins: what cannot be sent is an error at the start of the job.
        serialization.pack(
            [s.state_dict() for s in self.states], "with_bagua: elastic=True, optimizer and states"
        )
        self.transfer = StateTransfer(self.is_called)
        self.arrived: list[int] = []
        self.is_new = self.behind = self.admitted = self._between_steps = False
        self._owed: tuple[list[int], Group] | None = None
        self._owes_change = False  # since a call in a step was aborted, or a rank was lost in it
        self._stay, self._history = job.here().stay, current()[1].history

    def _find_places(self) -> None:
        """Makes the groups beside those of the model, in a new epoch."""
        now, mine = current()
        self.everyone = self.groups.control
        if mine.replicas.size > 1:
            self.everyone = now.new_group(self.members.ranks, "commit", REPLICA_ORDINALS)
            # A pass that fails in one place fails in all of them, or these would wait in its commit.
            self.groups.everyone = self.everyone
            if self.groups.non_finite_check is not None:
                self.groups.non_finite_check.group = self.everyone

    def begins_again(self, recovery: StepRecovery[Any]) -> None:
        """The model has other hooks from now on."""
        self.recovery, self.in_step = recovery, recovery.in_step

    # The end of a warm-up is a change of the membership without a change of its members (ADR 65): it happens
    # on all ranks or on none, also if one is lost meanwhile, and a joining rank finds out which.

    def end_warmup(self) -> None:
        """After the update of its last step: ends the warm-up, with all members.

        The script may have to end what belongs to the step, such as a scheduler's, so nobody is admitted.
        """
        before = self.recovery
        while (
            self.recovery is before
        ):  # another may have come because of a loss, in the middle of its last step
            self._between_steps = False
            recover(boundary=False, renew=True)

    def _follow_warmup(self, together: bool) -> None:
        """In a new epoch, ends the warm-up if all members have asked for it, or if it has ended before.

        Args:
            together: All of them have.
        """
        if not self._warms:
            return
        ends = not self.recovery.warming or (together and not self.is_new)
        told = torch.tensor([int(ends)], device="cpu")
        collectives.all_reduce(told, "max", None, self.everyone)
        if not told[0]:
            return
        if self.recovery.warming:
            joining, self.groups.joining = self.groups.joining, True  # no calls: the weights are equal
            try:
                self._owner.proceed()
            finally:
                self.groups.joining = joining
        # Nobody makes a step before all have come so far: who is lost now is lost to ranks between two steps.
        collectives.barrier(self.everyone)

    @property
    def newcomer(self) -> bool:
        """Whether this rank has not received the training state yet."""
        return self.transfer.receiving is not None

    @property
    def is_idle(self) -> bool:
        """Whether this rank is a spare that contributes nothing to the step under way."""
        return not self.newcomer and current()[0].rank in self.silent

    @property
    def newcomers(self) -> list[int]:
        """Those of the model's ranks that joined and contribute nothing to the step under way."""
        return [r for r in self.arrived if r in self.groups.control.ranks]

    @property
    def silent(self) -> list[int]:
        """Those of the model's ranks that contribute nothing to the step under way: those that joined, and
        spares. A rank that joins takes its place when that step is over; until then a spare has it."""
        counting = self._counting()
        return [r for r in self.groups.control.ranks if r not in counting]

    def _counting(self) -> list[int]:
        """The members that contribute to the step under way."""
        _, mine = current()
        return mine.spares.training([r for r in mine.ranks if r not in self.arrived])

    def _silent_places(self) -> list[int]:
        ranks = self.groups.control.ranks
        return [ranks.index(r) for r in self.silent]

    def renew(self, group: Group, change: MembershipChange, fresh: bool = False) -> None:
        """Continues in a new epoch, and starts to send the training state to new ranks. All members call it.

        Args:
            group: The group of all members.
            change: What has changed.
            fresh: The model's groups were made in this epoch already.

        Raises:
            MismatchError: This rank's model or algorithm is not that of the job.
        """
        # The epoch has ended in which it was to come.
        self.transfer.receiving, self._owed, self._owes_change = None, None, False
        if not fresh:
            if (ranks := places.training_group()) is not group:
                self.groups.group.become(ranks)
            self.groups.renew(self.groups.group)
            self._find_places()
        control = self.groups.control
        rank = control.ranks[control.rank]
        # The source's replica has the state of each place.
        (source,) = current()[1].replicas.row(rank, current()[1].replicas.of(change.source))
        mine: dict[str, Any] | None = None
        if rank == source:
            mine = {"title": self.title, "layout": self._layout()}
        meta = _broadcast(mine, source, control)
        if meta["title"] != self.title:
            raise MismatchError(
                f"elastic: rank {rank} has another algorithm than the job it joins, which trains with "
                f"{meta['title']}; here it is {self.title}; use the same algorithm and options; after "
                "trigram.switch, those that the job has switched to"
            )
        if differs := _difference(meta["layout"], self._layout()):
            raise MismatchError(
                f"elastic: rank {rank} has another model than the job it joins: {differs}; use the same model"
            )
        self.arrived = change.newcomers
        self.is_new = rank in change.newcomers
        self.behind = change.behind
        self._follow_warmup(change.together)
        if rank == source:
            trained = self.groups.trained
            mine = {"trained": [(id(p) in trained, p.requires_grad) for p in self._parameters()]}
            mine |= {
                "later": not self.sends_now,
                "earlier": self._owner.earlier_steps,
                **self.recovery.meta(),
            }
        meta = _broadcast(mine, source, control)
        if self.is_new:
            self._owner.begin_after(meta["earlier"])
        self._start_transfer(source, control, meta["later"])
        if self.is_new:  # a script may freeze and unfreeze as it goes, which this rank has not seen
            for p, (is_trained, requires_grad) in zip(self._parameters(), meta["trained"], strict=True):
                p.requires_grad_(requires_grad)
                if is_trained:
                    self.groups.trained.add(id(p))
        self.recovery.follow(meta, self)

    def first_with_state(self) -> int:
        """The place in the group of the rank whose buffers count."""
        ranks = self.groups.control.ranks
        return ranks.index(places.first([r for r in ranks if r not in self.arrived]))

    def describe(self) -> dict[str, Any]:
        """What changes in the job's status while an epoch lasts; any thread may call it."""
        model, mine = self.model(), self._history
        return {
            "model": type(model).__name__,
            "algorithm": self.title.split(",")[0],
            "steps": self.recovery.steps,
        } | (mine.summary())

    def _parameters(self) -> list[nn.Parameter]:
        model = self.model()
        assert model is not None
        return list(model.parameters())

    def _layout(self) -> list[str]:
        """Names, shapes and dtypes of parameters and buffers."""
        model = self.model()
        assert model is not None
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors]

    def _start_transfer(self, source: int, control: Group, later: bool) -> None:
        """Starts to send the training state to new ranks, in the background of the training.

        Args:
            source: Whose state it is.
            control: The ranks of the model.
            later: It is sent when that rank's step is over.
        """
        rank = control.ranks[control.rank]
        if rank == source and self.newcomers:
            self._owed = self.newcomers, control
            if not later:
                self.send_owed()
                job.here().part(Answers).tells = False  # all know it
        elif rank in self.newcomers:
            self.transfer.expect(source, self.newcomers, control, later)

    @property
    def sends_now(self) -> bool:
        """See :class:`trigram.elastic.recovery.Model`. In a pass that averages gradients a rank that joins
        gets the state of its beginning. Otherwise, in the middle of a step, the script has not ended what
        belongs to it: schedulers, its own counters."""
        return self._between_steps or not self.recovery.takes_mean

    def send_owed(self) -> None:
        """Between two steps: starts to send the training state to ranks that joined in the middle of one."""
        if self._owed is not None:
            (newcomers, control), self._owed = self._owed, None
            self.transfer.send(self._state(), newcomers, control)
            job.here().part(Answers).tells = True

    def _state(self) -> dict[str, Any]:
        model = self.model()
        assert model is not None
        tensors = [t.detach() for t in self._sent(model)]
        states = [s.state_dict() for s in self.states]
        calls, meta = job.here().part(Answers).done, self.recovery.meta()
        return {"tensors": tensors, "states": states, "calls": calls, "meta": meta}

    def _sent(self, model: nn.Module) -> list[torch.Tensor]:
        """What of a model is sent to a joining rank: not weights of which all take the mean."""
        taken: set[int] = set()
        if self.recovery.takes_mean:
            averaged = self.groups.averaged(model)
            taken = {id(p) for p in averaged if coalesced.as_real(p.detach()).is_floating_point()}
        return [*(p for p in model.parameters() if id(p) not in taken), *model.buffers()]

    def abort_calls(self) -> None:
        """Aborts this rank's next calls, so that ranks that wait for it in one of them regroup as well."""
        self.groups.line.clear()
        mine = job.here().part(Answers).group()
        groups = self.groups.main, self.groups.second_phase, self.groups.control, self.everyone, mine
        for group in {id(g): g for g in groups}.values():
            group.core.abort(group.core.next() + 2, membership.why_aborted())

    @torch.no_grad()
    def receive(self) -> dict[str, Any] | None:
        """On a new rank: waits for the training state and loads it.

        Returns:
            What :meth:`StepRecovery.meta` gave there when it was sent; None: there is nothing to receive.
        """
        if self.transfer.receiving is None:
            return None
        later, state = self.transfer.receiving.later, self.transfer.receive()
        if later:
            job.here().part(Answers).begin_at(state["calls"])
        model = self.model()
        assert model is not None
        coalesced.copy_all(self._sent(model), state["tensors"])
        for stateful, theirs in zip(self.states, state["states"], strict=True):
            stateful.load_state_dict(theirs)
        self.transfer.receiving = None
        meta: dict[str, Any] = state["meta"]
        return meta

    # What training calls; trigram.steps.elasticity.FixedRanks has the same for jobs whose ranks are fixed.

    def before_step(self, prepare: Callable[[int], None], src: int) -> None:
        """Between two steps, admits ranks that wait and lets those go that were asked to leave; then prepares
        the step on all members together.

        Args:
            prepare: Called with the place of the first rank that has the training state. It is not repeated
                after a loss, except while some ranks have yet to complete the last step.
            src: Of no effect here.
        """
        job.here().part(Answers).joins = False
        if self._mine().change_pending:
            self._between_steps = True
            recover(boundary=True)
        while True:
            with losses.caught() as lost:
                prepare(self.first_with_state())
            if not self.agreed(bool(lost)):
                return
            self.regroup(boundary=False)
            if not self.behind:
                return

    def complete(self, a_pass: Pass) -> None:
        """Completes a backward pass on all remaining ranks, and repeats it if a rank is lost before that."""
        complete = change_pending = admitted = False
        counted: list[int] = []
        while True:
            begun = time.monotonic()
            with losses.caught() as lost:
                if not complete:
                    a_pass.send_rest()
                    self.receive()
                    complete = True
                    # Now: if all have completed the pass, those count that are lost before its commit.
                    counted, admitted = self._counting(), bool(self.arrived)
                change_pending = self._commit()
            if self.agreed(bool(lost)):
                self._history.wasted += time.monotonic() - begun
                change = self.regroup(boundary=False, complete=complete)
                if not (complete and change.commit):
                    a_pass.again()
                    complete = False
                    continue
                change_pending = False
            _, mine = current()
            mine.commits += 1
            mine.counted = counted
            mine.newcomer, mine.change_pending, mine.stateless = False, change_pending, frozenset()
            self.admitted, self.arrived = admitted, []
            self.transfer.release_sent()
            return

    def boundary(self, step: Callable[[], bool]) -> None:
        """Makes an averaging step of weights, unless this rank must regroup.

        Args:
            step: Makes the step and returns whether all ranks are at the same one. It is not repeated after a
                loss: in the new epoch all ranks get the mean of the weights.
        """
        mine = self._mine()
        lost: list[TrigramError] = []
        if not (called := self.is_called()):  # else `between_steps` regroups
            with losses.caught() as lost:
                if step():
                    mine.change_pending = self._is_change_pending()
        # The other ranks of the replica may have made the step, or not know of the loss yet.
        called = called and mine.replicas.size > 1
        if self.agreed(bool(lost) or called):
            self._regroup_in_step()
        self.end_step()

    def between_steps(self) -> None:
        """Regroups if a rank waits to join or to leave, or was lost. The script has ended a step with all
        that belongs to it (schedulers, its own counters), so that a joining rank receives a complete
        state."""
        job.here().part(Answers).joins = False
        self.send_owed()
        if self.agreed(self._mine().change_pending or self._owes_change or self.is_called()):
            self.regroup()
            self.end_step()
        elif not self.in_step and job.here().part(draining.Draining).is_overdue():
            # The store, through which the others would have learned of it, has gone. They find out now.
            leave([self])

    def _mine(self) -> Membership:
        """This rank's membership of the job in which the model is.

        Raises:
            MisuseError: It has left that job; :func:`current` would begin another.
        """
        if self._stay.over:
            raise MisuseError(
                f"{self.groups.name}: this rank has left the elastic job in which the model was wrapped: it "
                "was asked to, or called trigram.shutdown; call trigram.with_bagua on the model again, or "
                "trigram.unwrap to train it without trigram"
            )
        return current()[1]

    def end_step(self) -> None:
        """A step is over that all members have made: who has joined has the training state."""
        self.has_state()
        self.arrived, self.is_new = [], False
        self.transfer.release_sent()

    def has_state(self) -> None:
        """Records that all members have the training state now."""
        _, mine = current()
        mine.newcomer, mine.stateless = False, frozenset()

    def is_called(self) -> bool:
        """Whether this rank must regroup: a rank is lost, or one waits to join or leave ranks that are not in
        step."""
        return membership.has_lost() or (not self.in_step and membership.regroup_requested())

    def has_lost(self) -> bool:
        """Whether this rank knows that a member is lost."""
        return membership.has_lost()

    def is_loss(self, error: TrigramError) -> bool:
        """Whether an error is due to a lost rank, so that the job continues."""
        return is_loss(error)

    def losses(self) -> contextlib.AbstractContextManager[list[TrigramError]]:
        """See :func:`trigram.elastic.losses.caught`."""
        return losses.caught()

    def regroup(self, boundary: bool = True, complete: bool = False) -> MembershipChange:
        """Changes the membership with the other ranks, see :func:`recover`; aborts the calls in which they
        wait for this rank: such a call does not fail by itself if who is gone has left in good order."""
        self._between_steps = boundary
        if self.is_called():
            self.abort_calls()
        return recover(boundary, complete)

    @contextlib.contextmanager
    def forgiving(self) -> Iterator[None]:
        """A block that is not repeated if a rank is lost in it: the ranks regroup and continue after it."""
        with losses.caught() as lost:
            yield
        if self.agreed(bool(lost)):
            self._regroup_in_step()

    def _regroup_in_step(self) -> None:
        """Regroups in the middle of a step, or, where ranks are not in step, when it is over: ranks join and
        leave only if all are between two steps, and here a rank that is comes to others that are not."""
        if self.in_step:
            self.regroup(boundary=False)
        else:
            self._owes_change = True

    def agreed(self, lost: bool) -> bool:
        """See :func:`trigram.elastic.losses.agreed`."""
        return losses.agreed(lost)

    def _commit(self) -> bool:
        """Ends when all members have the results of the pass; returns whether one waits to join or leave."""
        mine = self.recovery.shared.fingerprint()
        pending, largest, least = self._largest(mine, -mine)
        if largest != -least:
            raise self.recovery.shared.fingerprints_differ()
        return bool(pending)

    def _is_change_pending(self) -> bool:
        """Whether a rank waits to join or to leave, on all members; ends when all have called it."""
        return bool(self._largest()[0])

    def _largest(self, *numbers: int) -> list[int]:
        """The largest of all members: whether a rank waits to join or to leave, and these numbers."""
        _, mine = current()
        pending = mine.queue is not None and mine.queue.wants_change  # the leader knows who waits to join
        pending = pending or draining.draining()
        values = torch.tensor([int(pending), *numbers], device="cpu")
        collectives.all_reduce(values, "max", None, self.everyone)
        found: list[int] = values.tolist()
        return found


def _difference(theirs: Sequence[str], mine: Sequence[str]) -> str:
    """The first tensor that two models do not have alike; empty: there is none."""
    pairs = zip_longest(theirs, mine, fillvalue="nothing")
    return next((f"{a} there, {b} here" for a, b in pairs if a != b), "")


def _broadcast(value: Any, src: int, group: Group) -> Any:
    """The value of world rank ``src``, on all ranks of the group."""
    data = b""
    if group.ranks[group.rank] == src:
        data = serialization.pack(value, "elastic").numpy().tobytes()
    data = broadcast_bytes(group, data, group.ranks.index(src))
    return serialization.unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), src)
