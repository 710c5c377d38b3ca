"""Averaging steps that go on when enough ranks are there (Decoupled DiLoCo, arXiv 2604.21428).

The engine's collectives need all members of a group, so these averaging steps use messages between two ranks.
The first rank of the group, the *leader*, decides who takes part: at its averaging step it waits for a
quorum, then for a grace window, and tells all ranks who is in. Those average their weights, weighted by the
training steps (or samples) that each has made since its last average. A rank that comes too late does not
wait: it trains on, and is in the leader's next averaging step, where it counts for all that it has trained.

With an outer optimizer they average the differences of their weights to those that they agreed on last. Such
a rank agreed on them earlier than the others. What it has trained since counts, whatever it began from; and
one of the others gives it the agreed weights and the outer momentum, so that its outer step is theirs.

With several fragments an averaging step is of one of them, which the leader names; a rank that comes too
late for one is in that of the next.

An averaging step takes a snapshot where it begins: at a boundary; or where a late rank hears that it takes
part, in a backward pass or while it waits in some call. It is awaited at the boundary, or travels during the
next training step (``overlap``) and is applied before the update of that.

Messages: HERE (a rank has reached its averaging step), a decision (who takes part), and two that end a
training. Each rank sends one HERE and no other until a decision has taken it in. Two more keep ranks from
waiting for each other, one here and one in a collective of the script, for they are at different steps of it:
WAITS (a rank waits for a decision), to which a leader that waits elsewhere answers that the rank goes on;
and ASK (the leader waits for a quorum), to which a rank that waits elsewhere answers HERE.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all
from trigram.errors import MisuseError, TimeoutError
from trigram.mixing.quorum_average import BEHIND, IN, QuorumAverage, Rule
from trigram.observe import spans
from trigram.runtime import serving

_HERE, _LEAVES, _FLUSH, _WAITS = 1, 2, 3, 7
_DECISION, _LEFT, _ENDED, _ASK, _GO_ON = 4, 5, 6, 8, 9
_TO_LEADER, _FROM_LEADER = 4, 5
"""Tags of messages."""
_ADAPTIVE = 0.1
"""The default grace window, as a part of the time since the leader's last averaging step."""
_POLL = 0.002
"""Seconds between two looks at messages inside a backward pass."""
_PATIENCE = 0.2
"""Seconds after which the leader's wait may be for ranks that wait elsewhere."""


class _Inbox:
    """Receives the control messages of one rank: a kind, a fragment, a number, and others."""

    def __init__(self, groups: ModelGroups, sender: int, tag: int, words: int) -> None:
        self.group, self.sender, self.tag = groups.main, groups.main.ranks[sender], tag
        self.memory = torch.zeros(words, dtype=torch.int32, device="cpu")
        self.receiving: collectives.Work | None = None
        self.taken: collectives.Work | None = None
        self.listen()

    def listen(self) -> None:
        """Starts to receive the next message."""
        self.receiving = collectives.recv(self.memory, self.sender, self.tag, self.group, async_op=True)
        assert self.receiving is not None
        self.receiving.serve_when_done()  # wherever this rank waits then

    def serve_again(self) -> None:
        """Has threads that wait look at this as if the last message had just arrived."""
        if self.taken is not None:
            self.taken.serve_when_done()

    @property
    def has_mail(self) -> bool:
        """Whether a message has arrived."""
        return self.receiving is not None and self.receiving.is_completed()

    def take(self) -> list[int] | None:
        """The next message if one has arrived, else None. After a flush none follows."""
        if self.receiving is None or not self.receiving.is_completed():
            return None
        self.receiving.wait()
        found = self.memory.tolist()
        self.taken, self.receiving = self.receiving, None
        if found[0] != _FLUSH:
            self.listen()
        return found


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
        self.fragments, self.groups, self.quorum, self.grace = list(fragments), groups, quorum, grace
        self.overlap, self.average = overlap, QuorumAverage(groups)
        self.decided: tuple[list[int], int, int] | None = None  # an averaging step that is about to begin
        self.under_way: tuple[int, int, spans.Span | None] | None = None  # its fragment and number
        self.in_step = False  # a training step has begun, and its boundary is not made
        self.every = every // len(fragments)
        n, self.rank = groups.size, groups.rank
        self.steps_done = self.waits = 0
        self.waited = self.looked = 0.0
        self.trained = [0] * len(fragments)  # training steps of this rank since its last average of each
        self.weighed = [0.0] * len(fragments)  # their sample weights
        self.made = 0  # boundaries since the last; in an elastic job, counted so that all are due together
        self.agreed = [0] * len(fragments)  # averaging steps of each until this rank's agreement
        self.next = 1 % len(fragments)  # the fragment of the next averaging step, as elsewhere
        self.here = [False] * n  # of the leader: who has said so; of another rank: whether it has
        self.theirs: dict[int, list[int]] = {}  # of the leader: `agreed` of those who have
        self.there = [True] * n  # who has not ended its training
        self.waiting: set[int] = set()  # of the leader: who waits for a decision
        self.leads = self.follows = False  # this rank waits for a quorum, or for a decision
        self.asked = False  # of another rank: the leader does
        self.released = False  # likewise: it does not wait until a decision takes it in
        if groups.sample_weight is not None:
            groups.sample_weight.divide(len(fragments))
        self.late = False  # the averaging step that this rank's next one belongs to went on without it
        self.leaves = False
        self.flushed_by: set[int] = set()
        self.last = time.perf_counter()
        senders = range(1, n) if self.rank == 0 else [0]
        tag = _TO_LEADER if self.rank == 0 else _FROM_LEADER
        self.words = 3 + max(n, len(fragments))
        self.inboxes = {j: _Inbox(groups, j, tag, self.words) for j in senders}

    # Boundaries.

    def boundary(self, step: int) -> None:
        """See :class:`trigram.training.schedule.StepSchedule`."""
        if self.leaves:
            raise MisuseError(
                f"{self.groups.name}: a call such as trigram.consensus has failed on rank "
                f"{self.groups.group.ranks[self.rank]} while the ranks ended their averaging steps "
                "(quorum=), so they cannot go on; restart from a checkpoint, and let all ranks make that call"
            )
        self._settle(moved=True)  # this training step had no update before which it could end
        self.in_step = False
        self._count_step()
        self._listen()
        # By this rank's own steps since its last average: one that came late is in step again after the next.
        if self.made > 0 and self.made % self.every == 0:
            since = time.perf_counter()
            if self.rank == 0:
                self._lead(since)
            elif self.there[0]:
                self._follow()
            self.waited += time.perf_counter() - since
        if not self.overlap:
            self._settle(moved=False)

    def _count_step(self) -> None:
        """The training step that ends here is in the weights, and so in the averaging steps that follow."""
        self.made += 1
        self.trained = [steps + 1 for steps in self.trained]
        self.weighed = self._weights()
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.begin_again()

    def _weights(self) -> list[float]:
        """The sample weights since the last average of each fragment, with those of the step under way."""
        weight = self.groups.sample_weight
        if weight is None:
            return self.weighed
        return [sum(both) for both in zip(self.weighed, weight.pending, strict=True)]

    def behind(self, steps: int) -> None:
        """See :class:`trigram.training.schedule.StepSchedule`: all ranks have their next averaging step at
        the same training step, or one would wait for it while another waits in a collective of the script."""
        self.made = int(math.fmod(-steps, self.every))

    def _lead(self, since: float) -> None:
        """Waits for the quorum and the grace window, and decides."""
        grace = _ADAPTIVE * (since - self.last) if self.grace is None else self.grace
        there: list[int] = []
        enough: float | None = None
        asked: set[int] = set()

        def is_enough() -> bool:
            nonlocal there, enough
            self._listen()
            there = [j for j in range(1, self.groups.size) if self.there[j]]
            missing = [j for j in there if not self.here[j]]
            now = time.perf_counter()
            if enough is None and len(there) - len(missing) + 1 >= min(self.quorum, len(there) + 1):
                enough = now
            if not missing or (enough is not None and now - enough >= grace):
                return True
            if enough is None and now - since > _PATIENCE:
                for j in set(missing) - asked:
                    self._tell(j, [_ASK])
                asked.update(missing)
            self._check_limit(since, missing, f"a quorum of {self.quorum}")
            return False

        self.leads = True
        try:
            self._until(is_enough)
        finally:
            self.leads = False
        flags = [0] * self.groups.size
        for j in (0, *(j for j in there if self.here[j])):
            behind = j and self.theirs[j][self.next] != self.agreed[self.next]
            flags[j] = BEHIND if behind else IN
        for j in there:
            self._tell(j, [_DECISION, self.next, self.agreed[self.next], *flags])
        self.here, self.waiting = [False] * self.groups.size, set()
        fragment = self.next
        self._count(fragment, flags)
        self._decide(flags, fragment, self.agreed[fragment])
        self.last = time.perf_counter()

    def _follow(self) -> None:
        """Says that this rank is there, and waits for the decision, unless that was made before."""
        if self.released:
            return
        before, since = self._begun, time.perf_counter()
        if not self.here[self.rank]:
            self.here[self.rank] = True
            self._tell(0, [_HERE, 0, 0, *self.agreed])
        self._tell(0, [_WAITS])

        def is_decided() -> bool:
            self._listen()
            if self.late or self._begun > before or not self.there[0]:
                return True
            self._check_limit(since, [0], "the decision of the first rank")
            return False

        self.follows = True
        try:
            self._until(is_decided)
        finally:
            self.follows = False
        self.late = False  # if it was, it does not wait this time; the next decision takes it in

    def _until(self, done: Callable[[], bool]) -> None:
        """Waits; raises AbortedError if the members of an elastic job change: then one of them leads that
        may not be the leader now."""
        with serving.looking(self.groups.check_interrupted):
            serving.until(done)

    def _check_limit(self, since: float, missing: Sequence[int], what: str) -> None:
        """Raises when the wait has lasted as long as a call of the script may."""
        # The model's own groups have no limit: messages are listened for from one averaging step to the next.
        limit, ranks = self.groups.group.timeout, self.groups.group.ranks
        if limit is not None and time.perf_counter() - since > limit:
            names = ", ".join(str(ranks[j]) for j in missing)
            raise TimeoutError(
                f"quorum: rank {ranks[self.rank]} has waited {limit:g} s for {what}, and not heard from rank "
                f"{names}; it may be stuck, or need more than the op_timeout of trigram.init"
            )

    def _listen(self) -> None:
        """Handles the messages that have arrived."""
        for j, inbox in self.inboxes.items():
            while (found := inbox.take()) is not None:
                kind, fragment, number, flags = found[0], found[1], found[2], found[3:]
                if kind == _HERE:
                    self.here[j], self.theirs[j] = True, flags
                elif kind == _WAITS and self.here[j]:  # else a decision for it is on its way
                    self.waiting.add(j)
                elif kind == _GO_ON:
                    if self.follows:  # else it has heard of a decision meanwhile
                        self.late = self.released = True
                elif kind == _ASK:
                    self.asked = not self.here[self.rank]
                elif kind == _LEAVES:
                    self.there[j] = self.here[j] = False
                    self.waiting.discard(j)
                    if not self.leaves:  # else it has been told, and expects nothing after the flush
                        self._tell(j, [_LEFT])
                elif kind == _LEFT:
                    self.here[self.rank] = self.there[self.rank] = False
                elif kind == _ENDED:
                    self.there[0] = self.here[self.rank] = False
                elif kind == _DECISION:
                    self.asked, flags = False, flags[: self.groups.size]
                    self._count(fragment, flags)
                    if flags[self.rank]:
                        self.here[self.rank] = False
                        self._decide(flags, fragment, number)
                    else:
                        self.late = True
                elif kind == _FLUSH:
                    self.flushed_by.add(j)

    def _count(self, fragment: int, flags: Sequence[int]) -> None:
        """The leader has decided who averages this fragment: unless nobody else does, the next one follows.
        All ranks count, because a state of any of them may be loaded."""
        if any(flags[1:]):
            self.next = (fragment + 1) % len(self.fragments)

    def _tell(self, j: int, words: Sequence[int]) -> None:
        message = torch.zeros(self.words, dtype=torch.int32, device="cpu")
        message[: len(words)] = torch.tensor(words, dtype=torch.int32, device="cpu")
        group = self.groups.main
        tag = _FROM_LEADER if self.rank == 0 else _TO_LEADER
        collectives.send(message, group.ranks[j], tag, group, async_op=True)

    # One averaging step.

    def _decide(self, flags: Sequence[int], fragment: int, number: int) -> None:
        """Notes who takes part in an averaging step of this fragment, and how many there were before."""
        self.late = self.released = False
        if any(flags[1:]):
            self.decided = list(flags), fragment, number
            # A step in which this rank hears of it will not be in the snapshot. It counts for when the next
            # one is due as if it were: who is a moment late would else be due a step before the others.
            self.made = -1 if self.in_step else 0
        else:
            self.steps_done += 1  # what a rank trains alone counts in its next average

    @torch.no_grad()
    def _begin(self) -> None:
        """Takes a snapshot for an averaging step that is decided, and starts its average."""
        if self.decided is None:
            return
        (flags, fragment, number), self.decided, n = self.decided, None, self.steps_done
        members = sum(map(bool, flags))
        span = spans.begin("rounds", lambda: f"round {n} of {members} ranks")
        mine = float(self.trained[fragment])
        self.trained[fragment] = 0
        if self.groups.sample_weight is not None:
            mine, self.weighed[fragment] = self.weighed[fragment], 0.0
        self.under_way = fragment, number, span
        self.average.begin(self.fragments[fragment], flags, mine, n)

    def _finish(self, moved: Callable[[], bool]) -> bool:
        """Waits for the averaging step under way, if there is one, and applies it; returns whether there was.
        ``moved``: whether the weights may be others than in the snapshot."""
        if self.under_way is None:
            return False
        fragment, number, span = self.under_way
        weights = self.fragments[fragment]
        since = time.perf_counter()
        try:
            self.average.wait()
        except BaseException:
            self.groups.line.remove(self.average)
            raise
        finally:
            self.under_way = None  # also if it fails: what all members refuse ends no training
            for j in self.waiting:  # they were not answered meanwhile
                self.inboxes[j].serve_again()
        self.waited += time.perf_counter() - since
        self.agreed[fragment] = number + 1
        weights.conclude()
        weights.apply(moved())
        self.steps_done += 1
        spans.end(span)
        return True

    def _settle(self, moved: bool) -> bool:
        """Makes the averaging step that is decided or under way; returns whether there was one."""
        self._begin()
        return self._finish(lambda: moved)

    @property
    def _begun(self) -> int:
        """Averaging steps that this rank has begun, or is about to."""
        return self.steps_done + (self.under_way is not None) + (self.decided is not None)

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
        """Begins what the leader has decided; and keeps others from waiting for this rank, see the module."""
        self._hear(rests)
        if self.leads or self.leaves or self.under_way is not None:
            return  # it waits in an averaging step itself
        while self.waiting:
            self._tell(self.waiting.pop(), [_GO_ON])
        if self.asked and not self.here[self.rank] and self._begun == self.steps_done and rests():
            self.asked, self.here[self.rank] = False, True
            self._tell(0, [_HERE, 0, 0, *self.agreed])

    def _hear(self, rests: Callable[[], bool]) -> None:
        """Handles messages within a step. A snapshot of weights that are this rank's own changes none; there
        is none of weights that a script has moved for a pass (a perturbation), or updated since the boundary.
        """
        mail = any(inbox.has_mail for inbox in self.inboxes.values())
        if mail and self.rank == 0:
            self._listen()  # nothing begins by what the leader hears
        elif (mail or self.decided is not None) and rests():
            self._listen()
            self._begin()
        self.groups.line.advance()

    # The end of a training, or a pause in it.

    def progress(self) -> bool:
        """Takes part in the average of others while this rank waits elsewhere; True if it did."""
        ended = self._settle(moved=True)
        self._listen()
        return self._settle(moved=False) or ended

    def finish_pending(self) -> bool:
        """Says that this rank makes no more averaging steps; True once no decision may take it in."""
        if not self.leaves:
            self.leaves = True
            if self.rank == 0:
                for j in range(1, self.groups.size):
                    self._tell(j, [_ENDED])
            elif self.there[0]:
                self._tell(0, [_LEAVES])
        self._settle(moved=True)
        self._listen()
        self._settle(moved=False)
        return self.rank == 0 or not self.there[0] or not self.there[self.rank]

    def drain(self, timeout: float | None) -> None:
        """Receives the last messages; all ranks call it when :meth:`finish_pending` has returned True on all.
        Averaging steps may follow."""
        self._flush()
        self._agree()
        self.flushed_by.clear()
        self.leaves = self.late = self.asked = self.released = False
        self.waiting = set()
        self.there, self.here = [True] * self.groups.size, [False] * self.groups.size
        for inbox in self.inboxes.values():
            inbox.listen()

    @torch.no_grad()
    def _agree(self) -> None:
        """Those that are behind get the others' agreement, and keep what they have trained since their own.
        A mean of all weights has what the others did meanwhile, which their next average would count too."""
        control, all_agreed = self.groups.control, tell_all(self.agreed, self.groups.control)
        for f, weights in enumerate(self.fragments):
            newest = max(each[f] for each in all_agreed)
            source = next(j for j, each in enumerate(all_agreed) if each[f] == newest)
            agreement = weights.agreement()
            if not agreement or all(each[f] == newest for each in all_agreed):
                continue
            if behind := self.agreed[f] != newest:
                weights.take()
                weights.contribute()
            for t in agreement:
                collectives.broadcast(t, control.ranks[source], control)
            if behind:
                weights.rejoin()
                weights.apply(moved=False)
                self.agreed[f] = newest

    def _flush(self) -> None:
        """Exchanges the last message with the leader, so that none is under way."""
        for j in self.inboxes:
            self._tell(j, [_FLUSH])

        def are_flushed() -> bool:
            self._listen()
            return len(self.flushed_by) == len(self.inboxes)

        self._until(are_flushed)

    def close(self) -> None:
        """Ends the receives that are open; all ranks call it after :meth:`drain`."""
        self._flush()

    # State between averaging steps.

    def sent(self) -> int:
        """Bytes of weights sent."""
        return self.average.sent

    def state(self) -> dict[str, Any]:
        """The averaging steps so far, and this rank's training steps since the last of each fragment, with
        their weight."""
        kept = {"weight": self._weights()} if self.groups.sample_weight is not None else {}
        # Of one fragment, as earlier versions wrote it, unless the steps trained are others than those that
        # count for when the next one is due: in elastic jobs, and after a step in which this rank took part.
        state = {**kept, "rounds": self.steps_done, "trained": self.made}
        if any(outer := [each.state() for each in self.fragments]):
            state["exchanges"] = outer
        if self.trained == [max(self.made, 0)]:
            return state
        return {**state, "each": list(self.trained), "next": self.next}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.steps_done, self.made = state["rounds"], state["trained"]
        self.trained = list(state.get("each", [max(self.made, 0)]))
        self.next = state.get("next", self.next)
        for each, theirs in zip(self.fragments, state.get("exchanges", ()), strict=False):
            each.load(theirs)
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.load(state["weight"])
            self.weighed = list(self.groups.sample_weight.pending)
            self.groups.sample_weight.begin_again()
