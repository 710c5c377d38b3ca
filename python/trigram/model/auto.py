"""``algorithm="auto"``: measures a training, tries what is predicted to be faster, and keeps what is.

The model begins with the mean gradient. Everything happens when the first pass of an update is prepared,
which all ranks do together (``GradientSync.at_boundary``), and what happens there follows from the number of
updates and from agreed messages, so it is the same on all ranks:

* *watching*: the times of passes are kept. After 32 updates, and after 64, 128, ... if rank 0 has not trained
  for ``after`` seconds yet, the ranks measure links and arithmetic, and rank 0 predicts and proposes;
* *trying*: blocks of updates without and with the proposal, twice each; the medians over ranks decide;
* *settled*: every 100 updates the ranks compare their steps with those of the decision, and watch again if
  they have changed. If another codec was taken, the norm of the gradients is looked at too.

Inside ``trigram.join`` nothing is tried: ranks without inputs take no time, and make no updates.
"""

from __future__ import annotations

import enum
import json
import math
import statistics
import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm
from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all, tell_all_floats
from trigram.errors import TrigramError
from trigram.gradients import compressors
from trigram.gradients.gradient_sync import GradientSync
from trigram.gradients.probe import GradientProbe
from trigram.model.wrapped import WrappedModel
from trigram.plan import costs, file, measuring, settle
from trigram.plan.choice import Decision, schedule
from trigram.plan.inputs import Compute, Costs, Job, Tensor
from trigram.plan.losses import ALLOWED, kind
from trigram.plan.settle import Proposal, Proposals, Settings, Verdict
from trigram.runtime import logs

FIRST = 32
"""Updates before the ranks may measure."""
WATCHED = 8
"""Updates before that in which the times of gradients are kept."""
UNTIMED, TIMED = 2, 6
"""Updates of a block of a trial."""
AGAIN, SELDOM = 100, 500
"""Updates between two looks at a decision, and between two decisions at least."""
CHANGED = 1.25
"""Steps that have become this many times as long or as short are measured anew."""
NORM_EVERY = 10
"""Updates between two looks at the norm of the gradients."""
_NANO = 1e9


class State(enum.Enum):
    """What auto does now."""

    OFF = "off"  # nothing: it does not fit the model
    WATCHING = "watching"
    TRYING = "trying"
    SETTLED = "settled"


@dataclass
class _Trial:
    """A trial under way: blocks of updates, before and after in turns.

    Attributes:
        left: What is still to be tried after it.
        blocks: Seconds of the updates of each block so far, divided by their passes.
    """

    proposal: Proposal
    left: list[Proposal]
    updates: int = 0
    blocks: list[list[float]] = field(default_factory=lambda: [[]])


class Auto:
    """Chooses the algorithm of one model.

    Args:
        wrapped: The model, which has begun with the default algorithm.
        settings: What was asked for.
    """

    def __init__(self, wrapped: WrappedModel, settings: Settings) -> None:
        self._wrapped = weakref.ref(wrapped)
        self.settings = settings
        # What is averaged with now, what was chosen, and where to go back to from what is not exact.
        self.using = self.current = self.safe = Decision(DEFAULT, {}, wrapped.bucket_bytes / (1 << 20))
        self.barred: set[str] = set()  # kinds that have failed here
        self.state = State.WATCHING
        self.trial: _Trial | None = None  # if trying
        self.trials: list[dict[str, Any]] = []
        self.refused = self.failed = self.said = ""
        self.proposals: tuple[Job, Proposals] | None = None  # of rank 0, for the plan
        self.updates, self.next, self.settled_at = 0, FIRST, 0
        self.updated = False  # whether an optimizer has been seen: else each pass counts as an update
        self.joined = False
        self.steps: deque[tuple[float, float]] = deque(maxlen=64)  # seconds, and of them waiting
        self.probe: GradientProbe | None = None  # of the last update's first pass
        self.ready: list[tuple[float, dict[int, float]]] = []
        self.samples: tuple[torch.Tensor, torch.Tensor] | None = None  # of own gradients, and of means
        self.usual = 0.0
        self.norms: deque[float] = deque(maxlen=settle.REFERENCE + settle.LOOKS)
        self.began = time.monotonic()
        self._since, self._waited, self._steps = 0.0, 0.0, 0
        self._processor = time.process_time()
        unfit = self._unfit(wrapped)
        if unfit:
            self.state = State.OFF
            self._say(f"stays with {settle.named(self.current)}: {unfit}")
            return
        self.hooks.at_boundary = self.boundary

    # What it is attached to.

    @property
    def wrapped(self) -> WrappedModel:
        """The model; it exists while its hooks call."""
        wrapped = self._wrapped()
        assert wrapped is not None
        return wrapped

    @property
    def hooks(self) -> GradientSync:
        """The model's hooks."""
        hooks = self.wrapped.hooks
        assert isinstance(hooks, GradientSync)
        return hooks

    @property
    def groups(self) -> ModelGroups:
        """The model's process groups."""
        groups = self.wrapped.groups
        assert groups is not None
        return groups

    @staticmethod
    def _unfit(wrapped: WrappedModel) -> str:
        """Why predictions do not cover this model; empty if they do. The same on all ranks."""
        hooks = wrapped.hooks
        if not isinstance(hooks, GradientSync):
            return "one rank averages with nobody"
        trained = hooks.parameters.trained
        return measuring.unfit(trained, bool(hooks.sparse))

    # Once per pass, on all ranks.

    def boundary(self) -> None:
        """A pass is prepared, on all ranks."""
        hooks = self.hooks
        if hooks.probe is not None:
            self.probe, hooks.probe = hooks.probe, None
        joined = hooks.join is not None
        self.updated |= not hooks.since_update and hooks.steps > self._steps
        if self.updated and hooks.since_update and not joined:
            return  # inside an update; ranks without inputs make none, and cannot tell
        self._note()
        self.updates += 1
        if joined:
            self._join()
        elif self.state is State.TRYING:
            self._try()
        elif self.state is State.SETTLED:
            self._look()
        elif self.updates >= self.next:
            self._watched()
        self._prepare(joined)

    def _note(self) -> None:
        """Keeps what the last update was like."""
        hooks, now = self.hooks, time.perf_counter()
        passes = hooks.steps - self._steps
        if passes > 0 and self._since:
            seconds = (now - self._since) / passes
            self.steps.append((seconds, (hooks.waited - self._waited) / passes))
            if self.trial is not None:
                self.trial.blocks[-1].append(seconds)
        probe, self.probe = self.probe, None
        if probe is not None and self._since:
            self.ready.append((self._since, probe.times))
            del self.ready[:-WATCHED]
        if probe is not None and probe.own and probe.means:
            self.samples = torch.cat(probe.own), torch.cat(probe.means)
        if probe is not None and probe.norms:
            self._norm(probe.square)

    def _prepare(self, joined: bool) -> None:
        """Begins to time the next pass; what was done here does not count."""
        hooks, idle = self.hooks, self.trial is None or joined
        watched = self.state is State.WATCHING and self.updates >= self.next - WATCHED
        norms = self.updates % NORM_EVERY == 0 and self.settings.allowed != "exact" and idle
        if norms or watched:
            hooks.probe = GradientProbe(norms, samples=watched)
        self._since, self._waited = 0.0 if joined else time.perf_counter(), hooks.waited
        self._steps = hooks.steps

    def _join(self) -> None:
        """The next pass is one inside ``trigram.join``."""
        self.pause()
        if self.state is not State.SETTLED and not self.joined:
            self.joined = True
            self._say(f"stays with {settle.named(self.current)}: nothing is tried inside trigram.join")

    # Watching.

    def _watched(self) -> None:
        seen = len(self.steps) >= WATCHED and bool(self.ready)
        everyone = tell_all([int(1e3 * (time.monotonic() - self.began)), seen], self.groups.control)
        if everyone[0][0] < 1e3 * self.settings.after or not all(of for _, of in everyone):
            self.next = self.updates + max(FIRST, self.updates)
            return
        self._begin_trials(self._proposals(self._measure()))

    def _measure(self) -> Job | str:
        """Measures links and arithmetic together with all ranks; the job, on rank 0 only, or why not."""
        group = self.groups.control
        recent = list(self.steps)[-2 * WATCHED :]
        own, processor, mine = 0.0, 0.0, ""
        cheap: Costs | None = None
        probe: torch.Tensor | None = None
        try:
            own = statistics.median(seconds - waited for seconds, waited in recent)
            processor = (time.process_time() - self._processor) / max(1e-9, time.monotonic() - self.began)
            mine = json.dumps(list(self._ready().items()))
            probe = measuring.memory(8 * measuring.PROBE_BYTES)
            cheap = costs.measure([tuple(p.shape) for p in self.hooks.params], 1 << 16, touched=16 << 20)
            if self.samples is not None:
                cheap = replace(cheap, exact=costs.exact(*self.samples))
        except Exception as error:
            # The others must hear of it, whatever it is: they would wait for this rank.
            logs.warning(f"auto: this rank cannot measure its steps: {error!r}")
        everyone = tell_all([int(_NANO * own), int(1e3 * processor), cheap is not None], group)
        failed = [rank for rank, of in zip(group.ranks, everyone, strict=True) if not of[2]]
        if failed or cheap is None or probe is None:
            return f"rank(s) {listed(failed)} could not measure their steps, see their log"
        # A rank may be late in a part of its step only: its own gradients say when they are ready.
        slowest = max(range(group.size), key=lambda rank: everyone[rank][0])
        ready = json.loads(self._from_rank(slowest, mine))
        known = list(self.groups.main.core.rates())
        machines, measured = measuring.links(group, cheap, probe, known, 1, 5)
        try:
            compute = self._compute([of / _NANO for of, _, _ in everyone], dict(ready), processor)
            return Job(compute, machines, measured, f"measured in {len(recent)} steps by auto")
        except Exception as error:
            return repr(error)

    def _ready(self) -> dict[int, float]:
        """When each gradient of this rank is ready, in seconds after the step's begin; by parameter."""
        both = set.intersection(*(set(times) for _, times in self.ready)) if self.ready else set[int]()
        return {i: statistics.median(times[i] - began for began, times in self.ready) for i in both}

    def _compute(self, everyone: list[float], ready: dict[int, float], processor: float) -> Compute:
        """The step of the slowest rank.

        Args:
            everyone: Seconds of each rank's step, without waiting.
            ready: When its gradients are ready.
            processor: Cores that this rank keeps busy.
        """
        slowest = max(everyone)
        shapes = [tuple(p.shape) for p in self.hooks.params]
        tensors = tuple(Tensor(shapes[i], ready[i]) for i in sorted(ready, key=lambda i: ready[i]))
        forward = tensors[0].ready if tensors else 0.0
        cores = min(max(0.1, processor), float(torch.get_num_threads()))
        longest = max(slowest, max(ready.values(), default=0.0))
        return Compute(longest, forward, tensors, cores, statistics.median(everyone))

    def _proposals(self, job: Job | str) -> list[Proposal]:
        """What rank 0 proposes, on all ranks."""
        found: list[Any] = [[], "", str(job)]
        if self.groups.rank == 0 and isinstance(job, Job):
            try:
                given = settle.propose(job, self.current, self.settings.allowed, self._supports)
                self.proposals = job, given
                found = [[asdict(p) for p in given.first], given.refused, ""]
            except Exception as error:
                # The others wait for rank 0: they must hear that there is nothing to try, whatever it is.
                found = [[], "", repr(error)]
        first, self.refused, self.failed = json.loads(self._from_first(json.dumps(found)))
        proposals = [Proposal(Decision(**p.pop("decision")), **p) for p in first]
        return [p for p in proposals if p.kind not in self.barred]

    def _supports(self, algorithm: Algorithm) -> bool:
        """Whether the model may be given an algorithm: gradients only, and its options go with it."""
        try:
            self.wrapped.extras.check(algorithm, self.wrapped.size)
        except TrigramError:
            return False
        return algorithm.value.carry == "gradients" and not algorithm.options.warmup_steps

    def _from_first(self, text: str) -> str:
        """The text of rank 0, on all ranks."""
        return self._from_rank(0, text)

    def _from_rank(self, rank: int, text: str) -> str:
        """The text of a rank of the group, on all ranks."""
        group, mine = self.groups.control, text.encode()
        length = tell_all([len(mine)], group)[rank][0]
        values = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if group.rank == rank:
            values.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        collectives.broadcast(values, group.ranks[rank], group)
        return bytes(values.tolist()).decode()

    # Trying.

    def _begin_trials(self, proposals: list[Proposal]) -> None:
        if not proposals:
            self._settle()
            return
        self.state, self.trial = State.TRYING, _Trial(proposals[0], proposals[1:])

    def _try(self) -> None:
        trial = self.trial
        assert trial is not None
        trial.updates += 1
        block, at = divmod(trial.updates, UNTIMED + TIMED)
        if block < 4:  # at each update: the trial may have been suspended
            self._use(trial.proposal.decision if block % 2 else self.current)
        if at == UNTIMED:
            trial.blocks[-1].clear()
        if at:
            return
        if block < 4:
            trial.blocks.append([])
            return
        mine = [int(_NANO * statistics.median(b)) if b else 0 for b in trial.blocks]
        verdict = settle.judge(tell_all(mine, self.groups.control), settle.enough(trial.proposal.kind))
        self._decide(trial, verdict)

    def _decide(self, trial: _Trial, verdict: Verdict) -> None:
        self.trial = None
        self.trials.append({**asdict(trial.proposal), **asdict(verdict), "update": self.updates})
        if verdict.confirmed:
            before, self.current = self.current, trial.proposal.decision
            if trial.proposal.kind == "exact":
                self.safe = self.current
            elif kind(self._algorithm(before)) == "exact":
                self.safe = before
        self._use(self.current)
        self._begin_trials([] if verdict.confirmed else trial.left)

    def _settle(self) -> None:
        self.state, self.settled_at, self.usual = State.SETTLED, self.updates, 0.0
        self.steps.clear()
        self.ready.clear()
        self.samples = None
        last = self.trials[-1] if self.trials and self.trials[-1]["update"] == self.updates else None
        if last is not None and last["confirmed"]:
            text = (
                f"takes {settle.named(self.current)}: {1e3 * last['after']:.3g} ms per step in a trial, was "
                f"{1e3 * last['before']:.3g} (predicted to gain {last['gain']:.0%})"
            )
        elif last is not None:
            gained = 1 - last["after"] / last["before"] if last["before"] else 0.0
            text = (
                f"stays with {settle.named(self.current)}: {settle.named(Decision(**last['decision']))} was "
                f"predicted to gain {last['gain']:.0%}, and gained {gained:.0%} in a trial"
            )
            if gained >= settle.enough(last["kind"]):
                text += ", but not in both its turns"
        elif self.failed:
            text = f"stays with {settle.named(self.current)}: there is no prediction ({self.failed})"
        else:
            text = f"stays with {settle.named(self.current)}: no change is predicted to gain enough"
        if self.refused:
            text += f"; not allowed: {self.refused}"
        self._say(text)
        self._save()

    # Settled.

    def _look(self) -> None:
        since = self.updates - self.settled_at
        if since % AGAIN:
            return
        seen = [seconds for seconds, _ in self.steps]
        mine = int(_NANO * statistics.median(seen)) if len(seen) >= WATCHED else 0
        everyone = [of for (of,) in tell_all([mine], self.groups.control)]
        now = max(everyone) / _NANO
        if 0 in everyone:
            return  # some have made too few comparable steps, in trigram.join for instance
        if not self.usual:
            self.usual = now
        elif since >= SELDOM and not 1 / CHANGED < now / self.usual < CHANGED:
            self._say(f"steps take {1e3 * now:.3g} ms, were {1e3 * self.usual:.3g}: measures again")
            self.state, self.next = State.WATCHING, self.updates + 2 * WATCHED

    def _norm(self, square: float) -> None:
        """Looks at the norm of all ranks' gradients; goes back if it has departed under a codec."""
        mine = math.sqrt(square) if square >= 0 else math.inf
        everyone = tell_all_floats([mine], self.groups.control)
        # Ranks without inputs, in trigram.join, have gradients of 0.
        self.norms.append(statistics.fmean([of for (of,) in everyone if of] or [0.0]))
        of = self.wrapped.algorithm
        if kind(of) == "exact" or not (seen := settle.departed(list(self.norms))):
            return
        self.barred.add(kind(of))
        left, self.current, self.trial = self.current, self.safe, None
        self._use(self.current)
        self.norms.clear()
        self._say(f"goes back to {settle.named(self.current)} from {settle.named(left)}: {seen}")
        self.state, self.settled_at, self.usual = State.SETTLED, self.updates, 0.0
        self._save()

    # Changes.

    @staticmethod
    def _algorithm(decision: Decision) -> Algorithm:
        return find(decision.algorithm, decision.options)

    def _use(self, decision: Decision) -> None:
        """Averages as a decision says, from the pass that is prepared now; all ranks call it."""
        if decision == self.using:
            return
        wrapped, chosen = self.wrapped, self._algorithm(decision)
        other = str(chosen) != str(wrapped.algorithm)
        self.using, wrapped.algorithm = decision, chosen
        if decision.bucket_mb is not None:
            wrapped.bucket_bytes = int(decision.bucket_mb * (1 << 20))
        if other:
            self.groups.use_helpers(chosen.value.what == "full")
            self.hooks.times.group = self.groups.main
        with torch.no_grad():
            self.hooks.order.change(wrapped.bucket_bytes, compressors.of(chosen, None) if other else None)

    def pause(self) -> None:
        """Suspends a trial until the next update, on all ranks: what is tried is not what was chosen."""
        self._since = 0.0  # what the script does meanwhile is no part of a step
        if self.trial is not None:
            self._use(self.current)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps: the norms seen, which are the same on all ranks."""
        return {"norms": list(self.norms)}

    def resume(self, state: dict[str, Any]) -> None:
        """Ends a trial, and takes the algorithm of a saved state, if it may; all ranks call it."""
        self.pause()
        if self.state is State.OFF:
            return
        if self.trial is not None:
            self.state, self.trial, self.next = State.WATCHING, None, self.updates + FIRST
            self.steps.clear()
        known = isinstance(state, dict) and {"algorithm", "bucket_bytes"} <= state.keys()
        text = f"{state['algorithm']} {state['bucket_bytes']}" if known else ""
        if ranks_unlike_first(text, self.groups.control) or not known:
            return  # whoever loads it says what is wrong with it
        norms = self._from_first(json.dumps(state.get("auto", {}).get("norms", [])))
        try:
            saved = find(str(state["algorithm"]).partition(" (")[0])
        except TrigramError:
            return
        if kind(saved) in ALLOWED[self.settings.allowed] and self._supports(saved):
            self.current = Decision(saved.name, schedule(saved.name), state["bucket_bytes"] / (1 << 20))
            self._use(self.current)
            self.norms.clear()
            self.norms.extend(json.loads(norms))

    # What it says.

    def _say(self, text: str) -> None:
        self.said = text
        if self.wrapped.group.rank == 0:
            logs.warning(f'algorithm="auto:{self.settings.allowed}" {text}')

    def _save(self) -> None:
        if self.settings.save_plan is None or self.groups.rank != 0 or self.proposals is None:
            return
        job, found = self.proposals
        try:
            file.write(
                Path(self.settings.save_plan), job, found.comparison, self.settings.allowed, self.current
            )
        except OSError as error:
            logs.warning(f"auto: cannot write the plan to {self.settings.save_plan}: {error}")

    def report(self) -> dict[str, Any]:
        """``allowed``, ``state`` (``watching``, ``trying``, ``settled`` or ``off``), ``decision``, ``trials``
        and ``said``: the last line that rank 0 logged."""
        return {
            "allowed": self.settings.allowed,
            "state": self.state.value,
            "decision": asdict(self.current),
            "trials": [dict(trial) for trial in self.trials],
            "said": self.said,
        }
