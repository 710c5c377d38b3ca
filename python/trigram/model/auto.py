"""``algorithm="auto"``: measures a training, tries what is predicted to be faster, and keeps what is.

The model begins with the mean gradient. Everything happens when a pass is prepared, which all ranks do
together (``GradientSync.at_boundary``), and what happens there follows from the number of passes and from
agreed messages, so it is the same on all ranks:

* *watching*: the times of steps are kept. After 32 passes, and after 64, 128, ... if rank 0 has not trained
  for ``after`` seconds yet, the ranks measure links and arithmetic, and rank 0 predicts and proposes;
* *trying*: blocks of steps without and with the proposal, twice each; the medians over ranks decide;
* *settled*: every 100 passes the ranks compare their steps with those of the decision, and watch again if
  they have changed. If another codec was taken, the norm of the gradients is looked at too.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm
from trigram.collectives.consistency import ranks_unlike_first, tell_all
from trigram.errors import TrigramError
from trigram.model.wrapped import WrappedModel
from trigram.plan import costs, file, measuring, settle
from trigram.plan.choice import Decision, schedule
from trigram.plan.inputs import Compute, Job, Tensor
from trigram.plan.losses import ALLOWED, kind
from trigram.plan.settle import Proposal, Proposals, Settings, Verdict
from trigram.runtime import logs
from trigram.training.compose import compressor
from trigram.training.gradient_probe import GradientProbe
from trigram.training.gradient_sync import GradientSync

FIRST = 32
"""Passes before the ranks may measure."""
WATCHED = 8
"""Passes before that in which the times of gradients are kept."""
UNTIMED, TIMED = 2, 6
"""Passes of a block of a trial."""
AGAIN, SELDOM = 100, 500
"""Passes between two looks at a decision, and between two decisions at least."""
CHANGED = 1.25
"""Steps that have become this many times as long or as short are measured anew."""
NORM_EVERY, NORMS, DEPARTED = 10, 5, 2.0
"""Passes between two looks at the norm of the gradients; how many must depart, and how far."""
_NANO = 1e9
_MAX = (1 << 62) - 1


@dataclass
class _Trial:
    """A trial under way: blocks of passes, before and after in turns.

    Attributes:
        left: What is still to be tried after it.
    """

    proposal: Proposal
    left: list[Proposal]
    passes: int = 0


class Auto:
    """Chooses the algorithm of one model.

    Args:
        wrapped: The model, which has begun with the default algorithm.
        settings: What was asked for.
    """

    def __init__(self, wrapped: WrappedModel, settings: Settings) -> None:
        hooks, groups = wrapped.hooks, wrapped.groups
        assert isinstance(hooks, GradientSync) and groups is not None
        self._wrapped = weakref.ref(wrapped)
        self.settings, self.groups = settings, groups
        self.current = Decision(DEFAULT, {}, wrapped.bucket_bytes / (1 << 20))
        self.safe = self.current  # where to go back to from what is not exact
        self.barred: set[str] = set()  # kinds that have failed here
        self.trial: _Trial | None = None
        self.trials: list[dict[str, Any]] = []
        self.refused = self.said = ""
        self.proposals: tuple[Job, Proposals] | None = None  # of rank 0, for the plan
        self.passes, self.next, self.settled_at = 0, FIRST, 0
        self.settled = False
        self.steps: deque[tuple[float, float]] = deque(maxlen=64)  # seconds, and of them waiting
        self.ready: list[tuple[float, dict[int, float]]] = []
        self.block: list[list[float]] = []
        self.usual = 0.0
        self.norms: deque[float] = deque(maxlen=NORMS)
        self.reference = 0.0
        self.began = time.monotonic()
        self._since, self._waited, self._steps = 0.0, 0.0, -1
        self._processor = time.process_time()
        unfit = self._unfit(hooks)
        if unfit:
            self.next = -1
            self._say(f"stays with {settle.named(self.current)}: {unfit}", 0)
            return
        hooks.at_boundary = self.boundary

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

    @staticmethod
    def _unfit(hooks: GradientSync) -> str:
        """Why predictions do not cover this model; empty if they do. The same on all ranks."""
        trained = [p for p, trains in zip(hooks.params, hooks.trains, strict=True) if trains]
        if any(not p.is_cpu for p in trained):
            return "steps on GPUs are not predicted"
        if any(p.dtype != torch.float32 for p in trained) or hooks.sparse:
            return "steps are predicted for dense float32 parameters only"
        return ""

    # Once per pass, on all ranks.

    def boundary(self) -> None:
        """A pass is prepared, on all ranks."""
        self._note()
        self.passes += 1
        norms = self.passes % NORM_EVERY == 0
        if self.trial is not None:
            self._try()
        elif self.settled:
            self._look()
        elif self.passes >= self.next:
            self._watched()
        self._prepare(norms)

    def _note(self) -> None:
        """Keeps what the last pass was like."""
        hooks, now = self.hooks, time.perf_counter()
        if hooks.steps == self._steps + 1 and self._since and hooks.join is None:
            self.steps.append((now - self._since, hooks.waited - self._waited))
            if self.block:
                self.block[-1].append(now - self._since)
        probe, hooks.probe = hooks.probe, None
        if probe is not None and self._since:
            self.ready.append((self._since, probe.times))
            del self.ready[:-WATCHED]
        if probe is not None and probe.norms:
            self._norm(probe.square)

    def _prepare(self, norms: bool) -> None:
        """Begins to time the next pass; what was done here does not count."""
        hooks = self.hooks
        watched = not self.settled and self.trial is None and self.passes >= self.next - WATCHED
        norms = norms and self.settings.allowed != "exact" and self.trial is None
        if norms or watched:
            hooks.probe = GradientProbe(norms)
        self._since, self._waited, self._steps = time.perf_counter(), hooks.waited, hooks.steps

    # Watching.

    def _watched(self) -> None:
        seen = len(self.steps) >= WATCHED and bool(self.ready)
        everyone = tell_all([int(1e3 * (time.monotonic() - self.began)), seen], self.groups.control)
        if everyone[0][0] < 1e3 * self.settings.after or not all(of for _, of in everyone):
            self.next = self.passes + max(FIRST, self.passes)
            return
        self._begin_trials(self._proposals(self._measure()))

    def _measure(self) -> Job | None:
        """Measures links and arithmetic together with all ranks; the job, on rank 0 only."""
        group, shapes = self.groups.control, [tuple(p.shape) for p in self.hooks.params]
        recent = list(self.steps)[-2 * WATCHED :]
        own = statistics.median(seconds - waited for seconds, waited in recent)
        processor = (time.process_time() - self._processor) / max(1e-9, time.monotonic() - self.began)
        everyone = tell_all([int(_NANO * own), int(1e3 * processor)], group)
        slowest = max(of for of, _ in everyone) / _NANO
        cheap = costs.measure(shapes, 1 << 16, touched=16 << 20)
        known = list(self.groups.main.core.rates())
        machines, measured = measuring.links(group, cheap, known, 1, 8 * measuring.PROBE_BYTES, 5)
        if group.rank != 0:
            return None
        stretch = slowest / max(own, 1e-9)
        ready: dict[int, float] = {}
        for i in set.intersection(*(set(times) for _, times in self.ready)):
            ready[i] = stretch * statistics.median(times[i] - began for began, times in self.ready)
        tensors = tuple(Tensor(shapes[i], ready[i]) for i in sorted(ready, key=lambda i: ready[i]))
        forward = tensors[0].ready if tensors else 0.0
        typical = statistics.median(of for of, _ in everyone) / _NANO
        cores = min(max(0.1, processor), float(torch.get_num_threads()))
        compute = Compute(max(slowest, max(ready.values(), default=0.0)), forward, tensors, cores, typical)
        return Job(compute, machines, measured, f"measured in {len(recent)} steps by auto")

    def _proposals(self, job: Job | None) -> list[Proposal]:
        """What rank 0 proposes, on all ranks."""
        found: list[Any] = []
        if job is not None:
            try:
                given = settle.propose(job, self.current, self.settings.allowed, self._supports)
                self.proposals = job, given
                found = [[asdict(p) for p in given.first], given.refused]
            except (TrigramError, ArithmeticError, ValueError, KeyError, IndexError) as error:
                # The others wait for rank 0: they must hear that there is nothing to try.
                logs.warning(f"auto: no prediction, and nothing is changed: {error}")
                found = [[], ""]
        first, self.refused = json.loads(self._from_first(json.dumps(found)))
        proposals = [Proposal(Decision(**p.pop("decision")), **p) for p in first]
        return [p for p in proposals if p.kind not in self.barred]

    def _supports(self, algorithm: Algorithm) -> bool:
        """Whether the model may be given an algorithm: gradients only, and its options go with it."""
        try:
            self.wrapped.extras.check(algorithm, self.wrapped.size)
        except TrigramError:
            return False
        return algorithm.value.carry == "gradients" and not algorithm.options.get("warmup_steps")

    def _from_first(self, text: str) -> str:
        """The text of rank 0, on all ranks."""
        group, mine = self.groups.control, text.encode()
        length = tell_all([len(mine)], group)[0][0]
        values = torch.zeros(length, dtype=torch.uint8)
        if group.rank == 0:
            values.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        collectives.broadcast(values, group.ranks[0], group)
        return bytes(values.tolist()).decode()

    # Trying.

    def _begin_trials(self, proposals: list[Proposal]) -> None:
        if not proposals:
            self._settle()
            return
        self.trial = _Trial(proposals[0], proposals[1:])
        self.block = [[]]

    def _try(self) -> None:
        trial = self.trial
        assert trial is not None
        if self.hooks.join is not None:
            self.pause()  # ranks without inputs take no time
            return
        trial.passes += 1
        block, at = divmod(trial.passes, UNTIMED + TIMED)
        if at == UNTIMED:
            self.block[-1].clear()
        if at:
            return
        if block < 4:
            self._use(trial.proposal.decision if block % 2 else self.current)
            self.block.append([])
            return
        mine = [int(_NANO * statistics.median(b)) if b else 0 for b in self.block]
        verdict = settle.judge(tell_all(mine, self.groups.control))
        self._decide(trial, verdict)

    def _decide(self, trial: _Trial, verdict: Verdict) -> None:
        self.trial, self.block = None, []
        self.trials.append({**asdict(trial.proposal), **asdict(verdict), "pass": self.passes})
        if verdict.confirmed:
            before, self.current = self.current, trial.proposal.decision
            if trial.proposal.kind == "exact":
                self.safe = self.current
            elif kind(self._algorithm(before)) == "exact":
                self.safe = before
            self._settle()
            return
        self._use(self.current)
        self._begin_trials(trial.left)

    def _settle(self) -> None:
        self.settled, self.settled_at, self.usual = True, self.passes, 0.0
        self.steps.clear()
        self.ready.clear()
        self.norms.clear()
        last = self.trials[-1] if self.trials and self.trials[-1]["pass"] == self.passes else None
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
            if gained >= settle.CONFIRMED:
                text += ", but not in both its turns"
        else:
            text = f"stays with {settle.named(self.current)}: no change is predicted to gain 10 %"
        if self.refused:
            text += f"; not allowed: {self.refused}"
        self._say(text, self.groups.rank)
        self._save()

    # Settled.

    def _look(self) -> None:
        since = self.passes - self.settled_at
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
            self._say(
                f"steps take {1e3 * now:.3g} ms, were {1e3 * self.usual:.3g}: measures again",
                self.groups.rank,
            )
            self.settled, self.next = False, self.passes + 2 * WATCHED

    def _norm(self, square: float) -> None:
        """Looks at the norm of all ranks' gradients; goes back if it has departed under a codec."""
        mine = math.sqrt(square) if square >= 0 else math.inf
        word = int(min(1e6 * mine, _MAX)) if math.isfinite(mine) else _MAX
        everyone = [of for (of,) in tell_all([word], self.groups.control)]
        norm = math.inf if _MAX in everyone else statistics.fmean(everyone)
        if kind(self.wrapped.algorithm) == "exact":
            if math.isfinite(norm):
                self.reference = max(self.reference, norm)
            return
        self.norms.append(norm)
        if len(self.norms) < NORMS or statistics.median(self.norms) <= DEPARTED * self.reference:
            return
        left, of = self.current, self.wrapped.algorithm
        self.barred.add(kind(of))
        self.current = self.safe
        self._use(self.current)
        self.norms.clear()
        seen = f"is {norm:.3g}, and was {self.reference:.3g} at most before"
        self._say(
            f"goes back to {settle.named(self.current)} from {settle.named(left)}: the norm of the gradients "
            f"{seen}",
            self.groups.rank,
        )
        self.settled_at, self.usual = self.passes, 0.0
        self._save()

    # Changes.

    @staticmethod
    def _algorithm(decision: Decision) -> Algorithm:
        return find(decision.algorithm, decision.options)

    def _use(self, decision: Decision) -> None:
        """Averages as a decision says, from the pass that is prepared now; all ranks call it."""
        wrapped, chosen = self.wrapped, self._algorithm(decision)
        other = str(chosen) != str(wrapped.algorithm)
        wrapped.algorithm = chosen
        if decision.bucket_mb is not None:
            wrapped.bucket_bytes = int(decision.bucket_mb * (1 << 20))
        if other:
            self.groups.use_helpers(chosen.value.what == "full")
            self.hooks.times.group = self.groups.main
        with torch.no_grad():
            self.hooks.change(wrapped.bucket_bytes, compressor(chosen, None) if other else None)

    def pause(self) -> None:
        """Ends a trial under way, on all ranks: what is being tried is not what was chosen."""
        if self.trial is not None:
            self.trial, self.block = None, []
            self._use(self.current)
            self.next = self.passes + FIRST
            self.steps.clear()

    def resume(self, state: dict[str, Any]) -> None:
        """Takes the algorithm of a saved state, if it may; all ranks call it."""
        self.pause()
        known = isinstance(state, dict) and {"algorithm", "bucket_bytes"} <= state.keys()
        text = f"{state['algorithm']} {state['bucket_bytes']}" if known else ""
        if self.next < 0 or ranks_unlike_first(text, self.groups.control) or not known:
            return  # whoever loads it says what is wrong with it
        try:
            saved = find(str(state["algorithm"]).partition(" (")[0])
        except TrigramError:
            return
        if kind(saved) in ALLOWED[self.settings.allowed] and self._supports(saved):
            self.current = Decision(saved.name, schedule(saved.name), state["bucket_bytes"] / (1 << 20))
            self._use(self.current)

    # What it says.

    def _say(self, text: str, rank: int) -> None:
        self.said = text
        if rank == 0 and self.groups.rank == 0:
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
        state = "trying" if self.trial else "settled" if self.settled else "watching"
        return {
            "allowed": self.settings.allowed,
            "state": "off" if self.next < 0 else state,
            "decision": asdict(self.current),
            "trials": [dict(trial) for trial in self.trials],
            "said": self.said,
        }
