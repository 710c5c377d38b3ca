"""Averages weights instead of gradients: each rank's optimizer changes that rank's weights, and averaging
steps bring them together.

Averaging steps start at *boundaries*, one for each training step: a
:class:`~trigram.training.step_tracker.StepTracker` finds them, and a
:class:`~trigram.training.schedule.StepSchedule` decides at which of them averaging steps run.
"""

from __future__ import annotations

import contextlib
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.elastic.recovery import ElasticModel
from trigram.errors import MismatchError, MisuseError, TimeoutError, TrigramError, UnsupportedError
from trigram.observe import steps
from trigram.runtime import exit_status, job, logs, serving
from trigram.runtime.inference_mode import kept_tensors
from trigram.runtime.job import Part
from trigram.training import adam_variance, optimizer_hooks
from trigram.training.model_changes import agree_on_change
from trigram.training.passes import inside_backward
from trigram.training.schedule import EverySteps, StepSchedule
from trigram.training.step_hooks import StepHooks
from trigram.training.step_tracker import StepTracker
from trigram.training.update_watch import UntrainedPasses, WeightsSnapshot
from trigram.training.weight_looks import WeightLooks


@job.told_first
class RunningModels(Part):
    """The hooks of a rank's asynchronous algorithms, in the order in which they were made.

    They stay here until they have ended on all ranks, even if the script drops the model, because other ranks
    may wait for their messages. In an elastic job the model stays too: a rank that has ended its training may
    have to send its state to a joining rank.
    """

    def __init__(self) -> None:
        self.models: dict[WeightSync, nn.Module | None] = {}

    def add(self, hooks: WeightSync, model: nn.Module | None) -> None:
        """Threads of this process that wait serve the hooks, until :meth:`remove`; keeps ``model``."""
        exit_status.watch()
        self.models[hooks] = model
        serving.add(hooks)

    def remove(self, hooks: WeightSync) -> None:
        """Ends :meth:`add`."""
        self.models.pop(hooks, None)
        serving.remove(hooks)

    def finish(self) -> None:
        """Ends the algorithms together with all ranks, unless this rank has failed."""
        failed = exit_status.has_failed()
        for hooks in self.models:  # they may have been made in another thread
            serving.bind(hooks)
        for hooks in list(self.models):
            if not failed:
                with contextlib.suppress(TrigramError):
                    hooks.drain()
            self.remove(hooks)


class _RanksChange(Exception):
    """A rank was lost or is joining, while this one waits for all."""


def _nobody() -> None:
    """Like a reference to an optimizer that does not exist any more."""


class WeightSync(StepHooks):
    """Averages the weights of one model.

    Args:
        model: The module.
        groups: The model's process groups.
        make: Makes the schedule from the trained parameters, one list per dtype; called again when layers are
            frozen or unfrozen.
        in_step: Whether all ranks make an averaging step at the same training steps.
        of_mean: Whether Adam's second moments become those of the mean gradient, see
            :mod:`trigram.training.adam_variance`.

    Attributes:
        tracker: The training steps, and which of them have had their boundary.
        looks: What it looks at.
    """

    weights_differ = True

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        make: Callable[[list[list[torch.Tensor]]], StepSchedule],
        in_step: bool = True,
        of_mean: bool = False,
    ) -> None:
        self.running = job.here().part(RunningModels)
        self.make = make
        self.in_step = in_step
        self.of_mean = of_mean
        kind = type(model).__name__
        self.looks = WeightLooks(lambda: f"{groups.name}: the weights of {kind}")
        self.tracker = StepTracker(self.looks)
        self.skip_until = -1
        self.trained: list[torch.Tensor] = []
        self.holders: dict[int, weakref.ref[Optimizer] | None] = {}
        self.resting: WeightsSnapshot | None = None
        self.untrained = UntrainedPasses()
        self.averaged: weakref.ref[Optimizer] | None = None
        self.earlier = {"rounds": 0, "waits": 0, "bytes": 0, "waited": 0.0}
        super().__init__(model, groups)
        if not groups.joining:
            self._prepare()
            # Gradients that are there already: a script may write others into them.
            self.looks.used({id(p) for p in self.trained})

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self.tracker.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.tracker.steps = steps

    @kept_tensors()
    def _prepare(self) -> None:
        self.trained = [p for p, trains in zip(self.params, self.trains, strict=True) if trains]
        self.looks.begin(self.trained)
        with torch.no_grad():
            self.schedule = self.make(coalesced.alike(coalesced.as_real(p) for p in self.trained))

    def is_trained(self, param: torch.Tensor) -> bool:
        """Whether the script trains the parameter, if not in this step.

        Parts of a model are frozen in turn, each while an optimizer updates the others. What an optimizer has
        stays trained, and so does everything if there is no optimizer: a script updates its weights by hand.
        """
        if param.requires_grad or id(param) not in self.groups.trained:
            return param.requires_grad
        if self in self.running.models:  # whatever is frozen may be averaged: it changes nothing
            return True
        holder = self.holders.get(id(param), _nobody)
        if holder is not None and holder() is None:
            self._find_holders()
        return id(param) in self.holders

    def _frozen_word(self) -> int:
        """16 bits of which parameters are frozen in this step, of those that train; 0: none."""
        frozen = [name for name, p in zip(self.names, self.params, strict=True) if not p.requires_grad]
        return zlib.crc32("\n".join(frozen).encode()) & 0xFFFF

    def _find_holders(self) -> None:
        """Finds the optimizers of all parameters at once, as it takes long, and forgets what is frozen and in
        none of them."""
        optimizers = optimizer_hooks.optimizers_of(set(self.index))
        self.holders = {} if optimizers else dict.fromkeys(self.index)
        for optimizer in optimizers:
            self.holders |= dict.fromkeys(optimizer_hooks.parameters_of(optimizer), weakref.ref(optimizer))
        self.groups.trained -= {id(p) for p in self.params if not p.requires_grad} - self.holders.keys()

    # Training steps.

    @torch.no_grad()
    def forward_begins(self, model: nn.Module) -> None:
        """Makes a boundary that is due, and begins the next step."""
        self._make_boundaries(self.tracker.late())
        self._follow_changes(model)
        self._check_trains(model)
        self.tracker.root_called()
        self.elastic.between_steps()
        self._begin_step()

    def _check_trains(self, model: nn.Module) -> None:
        """Raises if weights change again and again, and no backward pass tells of a training step: a script
        that uses ``torch.autograd.grad`` and changes weights by hand would train apart from the others."""
        if not self.sync or self.tracker.due or not model.training:
            return
        changes = self.untrained.forward(self.steps, self.trained)
        if changes >= self.untrained.MOST:
            raise MisuseError(
                f"{self.groups.name}: the weights of {self._model_name()} were changed {changes} "
                "times without a backward pass (torch.autograd.grad is none), so trigram cannot tell where a "
                "training step ends; call trigram.step(model) after each update, on all ranks"
            )

    def _begin_step(self) -> None:
        self.tracker.step_begins()
        with self.elastic.forgiving(), self._explaining():
            self.schedule.begin_step()

    def begin(self, param: int | None) -> None:
        """Adds this step's sample weight to the next averaging step."""
        self.pipeline.begin(self.passes.task, True)
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.add_backward()
        if self.updating:
            return  # a closure: the optimizer's step counts, not the passes in it
        self.tracker.pass_begins(None if param is None else id(self.params[param]))
        self._begin_step()

    def local_gradient(self, param: torch.Tensor) -> None:
        """See :class:`StepHooks`."""
        self.tracker.reach({id(param)})

    def gradient(self, i: int, param: torch.Tensor) -> None:
        """Makes progress with averaging steps under way."""
        self.pipeline.arrive(i)
        if not param.is_cpu:
            return  # this is another thread
        try:
            self.schedule.gradient()
        except TrigramError as e:
            # Ranks regroup when the pass is over: weights must not change in it. The error comes again there.
            if not self.elastic.is_loss(e):
                raise

    @torch.no_grad()
    def end(self) -> None:
        """The backward pass has ended: the training step needs a boundary."""
        self.passes.active = False
        self._note_reached()
        with self.elastic.forgiving():
            self.schedule.backward_over()
        self.tracker.pass_ends()
        if self.updating:
            return
        self.looks.backward_ended()
        self._make_boundaries(self.tracker.weights_may_change())

    @torch.no_grad()
    def before_update(self, mine: set[int]) -> None:
        """Makes boundaries that are owed, and applies an overlapping averaging step."""
        self.abort_failed()
        if inside_backward():
            # A hook of the script on a parameter, which is called before ours, steps its optimizer.
            self.passes.begin_in_backward(next(iter(i for i, p in enumerate(self.params) if id(p) in mine)))
            return
        if len(self.updating) > 1:
            return
        self.looks.has_stepped()
        self._make_boundaries(self.tracker.owed)
        model = self.model()
        if model is not None and self.tracker.due:
            self._follow_changes(model)
        if not self.tracker.forward_begun:
            self.elastic.between_steps()
        if not self.tracker.begun:  # the passes are in a closure of the optimizer, or there are none
            self._begin_step()
        before = self.times.enter(steps.WAIT)
        moved = False
        with self.elastic.forgiving(), self._explaining():
            moved = self.schedule.before_update()
        if moved:
            self.moved_here()
        self.times.enter(before)

    @torch.no_grad()
    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """Makes the boundary when optimizers have updated all parameters that have gradients."""
        if self.of_mean:
            adam_variance.adapt(optimizer, mine, self.groups.size)
        self._check_averaged(optimizer)
        self._updated(mine)

    @torch.no_grad()
    def update_skipped(self, mine: set[int]) -> None:
        """The training step is over, as it is on ranks that make the update."""
        self.before_update(mine)
        self._updated(mine)

    def _updated(self, mine: set[int]) -> None:
        inside = bool(self.updating) or inside_backward()
        if not inside:
            self._note_reached()
        self._make_boundaries(self.tracker.updated(mine, inside))

    def _note_reached(self) -> None:
        """Those gradients too of which nothing was told."""
        self.tracker.reach({id(self.params[i]) for i in self.pipeline.take()})

    def _check_averaged(self, optimizer: Optimizer) -> None:
        """Warns, once, of an optimizer whose state is not averaged although that of another is."""
        if self.averaged is None:
            return
        given = self.averaged()
        # Wrappers of an optimizer have its groups.
        if given is None or given.param_groups is not optimizer.param_groups:
            kind = type(optimizer).__name__
            logs.warning(
                f"{self.groups.name}: {self._model_name()} was updated by a {kind} that is not the "
                "optimizer= of with_bagua, so its state is not averaged; call trigram.unwrap(model) and "
                "with_bagua again, with the new optimizer"
            )
            self.averaged = None

    @torch.no_grad()
    def user_step(self) -> None:
        """Makes the boundary of this training step, unless it was made since the last call."""
        self.abort_failed()
        model = self.model()
        if model is not None:
            self._follow_changes(model)
        self._make_boundaries(self.tracker.script_step())
        self.tracker.all_made()

    def awaits_update(self) -> bool:
        """Whether a backward pass has made this rank's gradients, and its optimizer has not used them."""
        return self.tracker.awaits_update()

    def _model_name(self) -> str:
        return type(self.model()).__name__

    def _make_boundaries(self, upto: int) -> None:
        """Makes the boundaries of all training steps up to ``upto``."""
        while self.tracker.last < upto:
            if self.join is not None:
                try:
                    self.join.announce(self)
                except MisuseError:
                    self.tracker.skip_boundary()
                    raise
            self._make_boundary()

    def _make_boundary(self) -> None:
        self.tracker.next_boundary()
        before = self.times.enter(steps.WAIT)
        try:
            with self._explaining():
                self.elastic.boundary(self._boundary)
        finally:
            self.times.enter(before)
        self._rest()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Adds to a ``MismatchError`` what a script may have done."""
        try:
            yield
        except MismatchError as e:
            raise MismatchError(
                f"{self.groups.name}: the ranks average different weights after this training step; if "
                "parameters were frozen, replaced, added or loaded on some ranks only, or a function given "
                f"as every= says something else there, do the same on all ranks ({e})"
            ) from e

    def _boundary(self) -> bool:
        """Makes a boundary; True if all ranks are at the same one."""
        number = self.tracker.last
        if isinstance(self.schedule, EverySteps) and number <= self.skip_until:
            return False
        if self.fidelity is not None and isinstance(self.schedule, EverySteps) and self.join is None:
            self.fidelity.weights(number, self.trained)
        self.schedule.boundary(number)
        return isinstance(self.schedule, EverySteps) and self.schedule.is_due

    # Models that change.

    def _follow_changes(self, model: nn.Module) -> None:
        """Begins again, from equal weights, if a script has changed the model; all ranks do it together."""
        loaded = self.was_loaded()
        other = self.has_other_parameters(model)
        frozen = self.has_other_training()
        if self.in_step:  # the next average meets that of a rank that has frozen other parameters
            self.groups.main.core.set_pass(self._frozen_word())
        if self in self.running.models and (other or frozen):
            raise UnsupportedError(
                f"{self.groups.name}: parameters were unfrozen, replaced or added while an "
                "asynchronous algorithm trains the model; call trigram.switch(model, ...) on all ranks to "
                "apply the change"
            )
        if not (other or frozen or (loaded and self not in self.running.models)):
            return
        with self._explaining():
            agree_on_change(self.tensors(model), self.groups)
        due, known = self.tracker.due, {id(p) for p in self.params}
        new = [t for n, t in self.tensors(model) if id(t) not in known and isinstance(t, nn.Parameter)]
        coalesced.broadcast(new, 0, self.groups.control)
        self.average(model)
        self._keep_counters()
        self.find_parameters(model)
        self.watch(model)
        self._prepare()
        if due:
            self.looks.remember()

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Continues after the ranks have changed, from the mean of the weights of all ranks that have some.

        If one rank has made a boundary, perhaps with an averaging step that was lost, the other ranks skip
        that boundary, so that the next averaging step has all ranks. A joining rank starts at the smallest
        step of all ranks, so that it misses no collective of the script.
        """
        position = torch.tensor(
            [-1, -(1 << 62)] if part.newcomer else [self.tracker.last, -self.tracker.last],
            device="cpu",
        )
        collectives.all_reduce(position, "max", None, self.groups.control)
        self.skip_until = int(position[0])
        if part.newcomer:
            self.tracker.start_at(-int(position[1]), -int(position[1]))
            part.receive()
        model = part.model()
        assert model is not None
        contributing = self.groups.size - len(part.newcomers)
        with torch.no_grad():
            weights = (coalesced.as_real(p.detach()) for p in model.parameters())
            for same in coalesced.alike(w for w in weights if w.is_floating_point()):
                averaged = coalesced.Coalesced(same)
                if not part.is_new:
                    averaged.pack()
                collectives.all_reduce(averaged.memory, "avg", None, self.groups.control)
                averaged.memory.mul_(self.groups.size / contributing)
                averaged.unpack()
        part.has_state()
        if hasattr(self, "schedule"):
            self._keep_counters()
        self._prepare()

    def abort_pass(self) -> None:
        """Counts a failed backward pass like any other, because the other ranks count theirs."""
        if self.passes.active:
            self.passes.clear()
            with torch.no_grad():
                self.end()
            if not self.updating:
                self.tracker.pass_failed()

    @torch.no_grad()
    def inputs_end(self) -> None:
        """Makes the boundary of the last step, and starts an overlapping averaging step that is due: the
        other ranks start it with their next step."""
        self.abort_failed()
        self._make_boundaries(self.tracker.late())
        self.schedule.begin_step()

    @torch.no_grad()
    def step_without_inputs(self, model: nn.Module, src: int) -> None:
        """A step of a rank without inputs: it takes part with the weights it has."""
        self.schedule.before_update()
        self.tracker.idle_step()
        self.idle_steps += 1
        self._make_boundary()
        self.schedule.begin_step()

    def skip_boundary(self) -> None:
        """The other ranks have made their update, and no rank averages after it."""
        self.tracker.idle_step()
        self.idle_steps += 1
        self.tracker.skip_boundary()

    @torch.no_grad()
    def drain(self, timeout: float | None = None, *, between_steps: bool = False) -> None:
        """Waits for all ranks, then ends all averaging steps. Meanwhile it answers ranks that still train.

        Args:
            timeout: Seconds; None for the group's.
            between_steps: Whether this rank's step is over even if no update has followed its backward pass.
                Then it makes the boundary of a skipped update, for which other ranks may wait.

        Raises:
            TimeoutError: Not all ranks called it within ``timeout`` seconds.
        """
        # Averages in the background may take longer: other ranks still train.
        with self.groups.within(timeout if isinstance(self.schedule, EverySteps) else None):
            self.abort_failed()
            self._make_boundaries(self.tracker.late())
            if between_steps:
                self._make_boundaries(self.tracker.draining())
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if self._wait_for_all(timeout, end):
                    self.schedule.drain(timeout)
                    self.moved_here()
                    return
            except TrigramError as e:
                if not self.elastic.is_loss(e):
                    raise
                self.elastic.regroup()

    @torch.no_grad()
    def moved_here(self) -> None:
        """The weights were changed by trigram, which is no update by the script."""
        if self.tracker.awaits():
            self.looks.moved_here()
        self._rest()

    def _rest(self) -> None:
        """The weights are this rank's now, until it trains or a script moves them for a while: asynchronous
        averages may take them."""
        if self in self.running.models:
            self.resting = WeightsSnapshot(self.trained)

    def _wait_for_all(self, timeout: float | None, end: float | None) -> bool:
        """Waits for all ranks; False if the ranks have regrouped meanwhile."""
        serving.bind(self)
        finish = getattr(self.schedule, "finish_pending", None)
        control = self.groups.control
        before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
        arrived: collectives.Work | None = None

        def look() -> None:
            # If the barrier has ended, all ranks were there before the loss.
            if self.elastic.is_called() and not (arrived is not None and arrived.is_completed()):
                raise _RanksChange

        try:
            with serving.looking(look):
                if finish is not None and not serving.until(finish, end, idle=True):
                    raise TimeoutError(
                        f"{self.groups.name}: waited {timeout} s for neighbours to finish their averaging "
                        "steps; check that all ranks make this call, or pass a longer timeout"
                    )
                arrived = collectives.barrier(control, async_op=True)
                assert arrived is not None
                serving.rest(arrived)
        except _RanksChange:
            self.elastic.regroup()
            return False
        finally:
            control.timeout = before
        return True

    def serve(self, idle: bool) -> None:
        """See :class:`trigram.runtime.serving.Server`."""
        if not idle:
            self.schedule.serve(lambda: self.resting is not None and not self.resting.moved(self.trained))
        elif self.schedule.progress():
            self.moved_here()

    def average(self, model: nn.Module, timeout: float | None = None) -> None:
        """Replaces the weights by their mean over all ranks."""
        self.drain(timeout)
        with torch.no_grad():
            mean_of(
                [t.detach() for n, t in model.named_parameters() if n not in self.groups.ignored], self.groups
            )

    def state(self) -> dict[str, Any]:
        """The number of steps, and the state of the schedule."""
        return {**super().state(), "seen": self.tracker.last, "rounds": self.schedule.state()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.tracker.start_at(state["steps"], state["seen"])
        self.looks.forget()
        self.schedule.load(state["rounds"])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        now = self._counters()
        self.bytes, self.waited = now["bytes"], now["waited"]
        return {**super().stats(), "rounds": now["rounds"], "waits": now["waits"]}

    def _counters(self) -> dict[str, Any]:
        """The counters of this schedule and of those before it."""
        schedule = self.schedule
        now = {
            "rounds": schedule.steps_done,
            "waits": schedule.waits,
            "bytes": schedule.sent(),
            "waited": schedule.waited,
        }
        return {name: value + self.earlier[name] for name, value in now.items()}

    def _keep_counters(self) -> None:
        """Called before the schedule is replaced."""
        self.earlier = self._counters()
