"""The schedule of averaging steps with a quorum: :mod:`trigram.mixing.quorum`.

An averaging step takes a snapshot where it begins: at a boundary; or where a late rank hears that it takes
part, in a backward pass or while it waits in some call. It is awaited at the boundary, or travels during the
next training step (``overlap``) and is applied before the update of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all
from trigram.errors import MisuseError, TimeoutError
from trigram.mixing.quorum.average import QuorumAverage, Rule
from trigram.mixing.quorum.counts import Counts
from trigram.mixing.quorum.mail import Mail
from trigram.mixing.quorum.protocol import OUT, Decision, Follower, Leader, Seat
from trigram.observe import spans
from trigram.runtime import serving

_POLL = 0.002
"""Seconds between two looks at messages inside a backward pass."""


class QuorumSteps:
    """The schedule of averaging steps every h training steps, which not all ranks need to reach in time.

    Args:
        fragments: What is averaged of each fragment of the weights.
        groups: The model's process groups; the first rank is the leader.
        every: h, a multiple of the number of fragments.
        quorum: Ranks, with the leader, without which the leader does not go on. Ranks that have ended their
            training are not waited for.
        grace: Seconds that the leader then waits for the others; None: a tenth of the time since its last
            averaging step.
        overlap: An averaging step travels during the next training step, and is applied before its update.
            Without it the averaging step ends at the boundary at which it begins.
    """

    assigns = True

    def __init__(
        self,
        fragments: Sequence[Rule],
        groups: ModelGroups,
        every: int,
        quorum: int,
        grace: float | None,
        overlap: bool = False,
    ) -> None:
        self.fragments, self.groups, self.overlap = list(fragments), groups, overlap
        self.counts = Counts(every // len(fragments), len(fragments), groups.sample_weight)
        self.mail, self.average = Mail(groups, len(fragments)), QuorumAverage(groups)
        self.seat: Seat = (
            Leader(groups.size, quorum, grace, self.mail.tell, time.perf_counter())
            if groups.rank == 0
            else Follower(groups.rank, groups.size, self.mail.tell)
        )
        self.decided: Decision | None = None  # of an averaging step that is about to begin
        self.under_way: tuple[Decision, spans.Span | None] | None = None
        self.awaits = False  # this rank waits for it
        self.in_step = False  # a training step has begun, and its boundary is not made
        self.waits = 0
        self.waited = self.looked = 0.0

    @property
    def steps_done(self) -> int:
        """See :class:`trigram.training.schedule.StepSchedule`."""
        return self.counts.averaged

    # Boundaries.

    def boundary(self, step: int) -> None:
        """See :class:`trigram.training.schedule.StepSchedule`."""
        if self.seat.has_left:
            raise MisuseError(
                f"{self.groups.name}: a call such as trigram.consensus has failed on rank "
                f"{self.groups.group.ranks[self.groups.rank]} while the ranks ended their averaging steps "
                "(quorum=), so they cannot go on; restart from a checkpoint, and let all ranks make that call"
            )
        self._settle(moved=True)  # this training step had no update before which it could end
        self.in_step = False
        self.counts.step()
        self._listen()
        if self.counts.is_due():
            since = time.perf_counter()
            self._meet(since)
            self.waited += time.perf_counter() - since
        if not self.overlap:
            self._settle(moved=False)

    def behind(self, steps: int) -> None:
        """See :class:`trigram.training.schedule.StepSchedule`."""
        self.counts.wait_for(steps)

    def _meet(self, since: float) -> None:
        """Waits until the leader has decided, or this rank need not wait for that."""
        if not self.seat.come(since, self.counts.agreed):
            return

        def is_over() -> bool:
            self._listen()
            now = time.perf_counter()
            if self.seat.is_over(now):
                return True
            self._check_limit(now - since)
            return False

        try:
            self._until(is_over)
        finally:
            self.seat.waits = False
        fragment = self.counts.next
        decision = self.seat.conclude(time.perf_counter(), fragment, self.counts.agreed[fragment])
        if decision is not None:
            self._note(decision)

    def _until(self, done: Callable[[], bool]) -> None:
        """Waits; raises AbortedError if the members of an elastic job change: then one of them leads that
        may not be the leader now."""
        with serving.looking(self.groups.check_interrupted):
            serving.until(done)

    def _check_limit(self, waited: float) -> None:
        """Raises when the wait has lasted as long as a call of the script may."""
        # The model's own groups have no limit: messages are listened for from one averaging step to the next.
        limit, ranks = self.groups.group.timeout, self.groups.group.ranks
        if limit is not None and waited > limit:
            missing, what = self.seat.lacking()
            names = ", ".join(str(ranks[j]) for j in missing)
            raise TimeoutError(
                f"quorum: rank {ranks[self.groups.rank]} has waited {limit:g} s for {what}, and not heard "
                f"from rank {names}; it may be stuck, or need more than the op_timeout of trigram.init"
            )

    def _listen(self) -> None:
        """Handles the messages that have arrived."""
        for j, message in self.mail.take():
            decision = self.seat.hear(j, message)
            if decision is not None:
                self._note(decision)

    # One averaging step.

    def _note(self, decision: Decision) -> None:
        """The leader has decided. All ranks count which fragment follows, because a state of any of them may
        be loaded."""
        counts = self.counts
        if not decision.is_of_several:
            counts.averaged += self.groups.rank == 0  # what a rank trains alone counts in its next average
            return
        counts.next = (decision.fragment + 1) % len(self.fragments)
        if decision.how[self.groups.rank] != OUT:
            self.decided = decision
            # A step in which this rank hears of it will not be in the snapshot. It counts for when the next
            # one is due as if it were: who is a moment late would else be due a step before the others.
            counts.made = -1 if self.in_step else 0

    @torch.no_grad()
    def _begin(self) -> None:
        """Takes a snapshot for an averaging step that is decided, and starts its average."""
        if self.decided is None:
            return
        decision, self.decided, n = self.decided, None, self.counts.averaged
        members = sum(how != OUT for how in decision.how)
        span = spans.begin("rounds", lambda: f"round {n} of {members} ranks")
        mine = self.counts.take(decision.fragment)
        self.under_way = decision, span
        self.average.begin(self.fragments[decision.fragment], decision.how, mine, n)

    def _finish(self, moved: Callable[[], bool]) -> bool:
        """Waits for the averaging step under way, if there is one, and applies it; returns whether there was.
        ``moved``: whether the weights may be others than in the snapshot."""
        if self.under_way is None:
            return False
        decision, span = self.under_way
        weights = self.fragments[decision.fragment]
        since, self.awaits = time.perf_counter(), True
        try:
            self.average.wait()
        except BaseException:
            self.groups.line.remove(self.average)
            raise
        finally:
            self.awaits = False
            self.under_way = None  # also if it fails: what all members refuse ends no training
            self.mail.serve_again(self.seat.waited_for_by)  # they were not answered meanwhile
        self.waited += time.perf_counter() - since
        self.counts.agreed[decision.fragment] = decision.number + 1
        weights.conclude()
        weights.apply(moved())
        self.counts.averaged += 1
        spans.end(span)
        return True

    def _settle(self, moved: bool) -> bool:
        """Makes the averaging step that is decided or under way; returns whether there was one."""
        self._begin()
        return self._finish(lambda: moved)

    # Between boundaries: an averaging step under way is applied before the next update.

    def begin_step(self) -> None:
        """See :class:`trigram.training.schedule.StepSchedule`. What is to overlap begins here, and not at the
        boundary, after which a script may load other weights."""
        self.in_step = True
        self._begin()

    def gradient(self, rests: Callable[[], bool]) -> None:
        """Begins what the leader has decided meanwhile, so that the others do not wait for the boundary of a
        late rank."""
        if (now := time.perf_counter()) - self.looked > _POLL:
            self.looked = now
            self._hear(rests)

    def backward_over(self, rests: Callable[[], bool]) -> None:
        """The same."""
        self._hear(rests)

    @torch.no_grad()
    def before_update(self, changed: Callable[[], bool]) -> bool:
        """See :class:`trigram.training.schedule.StepSchedule`."""
        return self._finish(changed)

    def serve(self, rests: Callable[[], bool]) -> None:
        """Begins what the leader has decided; and keeps others from waiting for this rank, see
        :mod:`trigram.mixing.quorum.protocol`."""
        self._hear(rests)
        self._answer(rests)

    def _answer(self, rests: Callable[[], bool]) -> None:
        """Keeps others from waiting for this rank, which waits elsewhere."""
        if self.seat.waits or self.seat.has_left or self.awaits:
            return  # it waits in an averaging step itself

        def may_come() -> bool:  # not before what is under way is in its weights
            return self.decided is None and self.under_way is None and rests()

        self.seat.serve(self.counts.agreed, may_come)

    def _hear(self, rests: Callable[[], bool]) -> None:
        """Handles messages within a step. A snapshot of weights that are this rank's own changes none; there
        is none of weights that a script has moved for a pass (a perturbation), or updated since the boundary.
        """
        if self.mail.has_come and self.groups.rank == 0:
            self._listen()  # nothing begins by what the leader hears
        elif (self.mail.has_come or self.decided is not None) and rests():
            self._listen()
            self._begin()
        self.groups.line.advance()

    # The end of a training, or a pause in it.

    def progress(self) -> bool:
        """Takes part in the average of others while this rank waits elsewhere; True if it did."""
        ended = self._settle(moved=True)
        self._listen()
        ended |= self._settle(moved=False)
        self._answer(lambda: True)
        return ended

    def finish_pending(self) -> bool:
        """Says that this rank makes no more averaging steps; True once no decision may take it in."""
        if not self.seat.has_left:
            self.seat.leave()
        self.progress()
        return self.seat.is_free()

    def drain(self, timeout: float | None) -> None:
        """Receives the last messages; all ranks call it when :meth:`finish_pending` has returned True on all.
        Averaging steps may follow."""
        self._flush()
        self._agree()
        self.seat.begin_again()
        self.mail.listen()

    @torch.no_grad()
    def _agree(self) -> None:
        """Those that are behind get the others' agreement, and keep what they have trained since their own.
        A mean of all weights has what the others did meanwhile, which their next average would count too."""
        agreed, control = self.counts.agreed, self.groups.control
        all_agreed = tell_all(agreed, control)
        for f, weights in enumerate(self.fragments):
            newest = max(each[f] for each in all_agreed)
            source = next(j for j, each in enumerate(all_agreed) if each[f] == newest)
            agreement = weights.agreement()
            if not agreement or all(each[f] == newest for each in all_agreed):
                continue
            if behind := agreed[f] != newest:
                weights.take()
                weights.contribute()
            for t in agreement:
                collectives.broadcast(t, control.ranks[source], control)
            if behind:
                weights.rejoin()
                weights.apply(moved=False)
                agreed[f] = newest

    def _flush(self) -> None:
        """Exchanges the last message with the leader, so that none is under way."""
        self.mail.flush()

        def is_flushed() -> bool:
            self._listen()
            return self.mail.is_flushed

        self._until(is_flushed)

    def close(self) -> None:
        """Ends the receives that are open; all ranks call it after :meth:`drain`."""
        self._flush()

    # State between averaging steps.

    def sent(self) -> int:
        """Bytes of weights sent."""
        return self.average.sent

    def state(self) -> dict[str, Any]:
        """See :meth:`Counts.state`."""
        return self.counts.state([each.state() for each in self.fragments])

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.counts.load(state)
        for each, theirs in zip(self.fragments, state.get("exchanges", ()), strict=False):
            each.load(theirs)
