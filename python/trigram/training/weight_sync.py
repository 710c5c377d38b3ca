"""Averages weights instead of gradients: each rank's optimizer changes that rank's weights, and averaging
steps bring them together.

Averaging steps start at *boundaries*, one for each training step: a
:class:`~trigram.steps.step_tracker.StepTracker` finds them, and a
:class:`~trigram.training.schedule.StepSchedule` decides at which of them averaging steps run.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.errors import TrigramError, UnsupportedError
from trigram.observe import steps
from trigram.optimizers import adam_variance, shared_optimizers
from trigram.runtime import job
from trigram.runtime.inference_mode import kept_tensors
from trigram.steps.model_changes import agree_on_change
from trigram.steps.parameters import FrozenInTurn
from trigram.steps.passes import inside_backward
from trigram.steps.step_hooks import StepHooks
from trigram.steps.step_tracker import StepTracker
from trigram.steps.update_watch import UntrainedPasses
from trigram.steps.weight_looks import WeightLooks
from trigram.training.boundaries import Boundaries
from trigram.training.fragments import Fragment, of_model
from trigram.training.model_checks import AveragedOptimizer
from trigram.training.running_models import RunningModels, wait_for_all
from trigram.training.schedule import Counters, EverySteps, StepSchedule


class WeightSync(StepHooks):
    """Averages the weights of one model.

    Args:
        model: The module.
        groups: The model's process groups.
        make: Makes the schedule from the trained weights, and whether parameters may be divided; called again
            when layers are frozen or unfrozen.
        in_step: Whether all ranks make an averaging step at the same training steps.
        of_mean: Whether Adam's second moments become those of the mean gradient, see
            :mod:`trigram.optimizers.adam_variance`.
        pieces: Whether parameters are divided between fragments.

    Attributes:
        tracker: The training steps, and which of them have had their boundary.
        boundaries: Makes them.
        averaged: The optimizer whose state is averaged; None: no state is.
        looks: What it looks at.
    """

    weights_differ = True
    parameters: FrozenInTurn

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        make: Callable[[Fragment, bool], StepSchedule],
        in_step: bool = True,
        of_mean: bool = False,
        pieces: bool = True,
    ) -> None:
        self.running = job.here().part(RunningModels)
        self.make = make
        self.in_step = in_step
        self.of_mean = of_mean
        self.pieces = pieces
        kind = type(model).__name__
        self.looks = WeightLooks(lambda: f"{groups.name}: the weights of {kind}")
        self.tracker = StepTracker(self.looks)
        self.boundaries = Boundaries(self)
        self.trained: list[torch.Tensor] = []
        self.untrained = UntrainedPasses(
            f"{groups.name}: the weights of {kind}",
            " (torch.autograd.grad is none), so trigram cannot tell where a training step ends; call "
            "trigram.step(model) after each update, on all ranks",
        )
        self.averaged: AveragedOptimizer | None = None
        self.counters = Counters()
        me, running = weakref.ref(self), self.running
        self.parameters = FrozenInTurn(groups, lambda: me() in running.models)
        super().__init__(model, groups, self.parameters)
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
        self.trained = self.parameters.trained
        self.looks.begin(self.trained)
        with torch.no_grad():
            self.schedule = self.make(of_model(self.trained), self.pieces)

    # Training steps.

    @torch.no_grad()
    def forward_begins(self, model: nn.Module) -> None:
        """Makes a boundary that is due, and begins the next step."""
        self.boundaries.make(self.tracker.late())
        self._follow_changes(model)
        if self.sync and model.training and not self.tracker.due:
            self.untrained.forward(self.steps, self.trained)
        self.tracker.root_called()
        self.elastic.between_steps()
        self._begin_step()

    def _begin_step(self) -> None:
        self.tracker.step_begins()
        with self.elastic.forgiving(), self.boundaries.explaining():
            self.schedule.begin_step()
        if self.schedule.assigns:
            self.looks.step_begins()

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
            self.schedule.gradient(self.looks.at_rest)
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
            self.schedule.backward_over(self.looks.at_rest)
        self.tracker.pass_ends()
        if self.updating:
            return
        self.looks.backward_ended()
        self.boundaries.make(self.tracker.weights_may_change())

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
        self.boundaries.make(self.tracker.owed)
        model = self.model()
        if model is not None and self.tracker.due:
            self._follow_changes(model)
        if not self.tracker.forward_begun:
            self.elastic.between_steps()
        if not self.tracker.begun:  # the passes are in a closure of the optimizer, or there are none
            self._begin_step()
        before = self.times.enter(steps.WAIT)
        moved = False
        with self.elastic.forgiving(), self.boundaries.explaining():
            moved = self.schedule.before_update(self.looks.changed)
        if moved:
            self.moved_here()
        self.times.enter(before)

    @torch.no_grad()
    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """Makes the boundary when optimizers have updated all parameters that have gradients."""
        if self.of_mean:
            adam_variance.adapt(optimizer, mine, self.groups.size)
        if self.averaged is not None:
            self.averaged.check(optimizer)
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
        self.boundaries.make(self.tracker.updated(mine, inside))

    def _note_reached(self) -> None:
        """Those gradients too of which nothing was told."""
        self.tracker.reach({id(self.params[i]) for i in self.pipeline.take()})

    @torch.no_grad()
    def user_step(self) -> None:
        """Makes the boundary of this training step, unless it was made since the last call."""
        self.abort_failed()
        model = self.model()
        if model is not None:
            self._follow_changes(model)
        self.boundaries.make(self.tracker.script_step())
        self.tracker.all_made()

    # Models that change.

    def _follow_changes(self, model: nn.Module) -> None:
        """Begins again, from equal weights, if a script has changed the model; all ranks do it together."""
        loaded = self.parameters.were_loaded(self.has_failed)
        other = self.parameters.were_replaced(model)
        frozen = self.parameters.train_otherwise()
        if self.in_step:  # the next average meets that of a rank that has frozen other parameters
            self.groups.main.core.set_pass(self.parameters.frozen_word())
        if self in self.running.models and (other or frozen):
            raise UnsupportedError(
                f"{self.groups.name}: parameters were unfrozen, replaced or added while an "
                "asynchronous algorithm trains the model; call trigram.switch(model, ...) on all ranks to "
                "apply the change"
            )
        if not (other or frozen or (loaded and self not in self.running.models)):
            return
        with self.boundaries.explaining():
            agree_on_change(self.parameters.tensors(model), self.groups)
        due = self.tracker.due
        coalesced.broadcast(self.parameters.new(model), self.groups.source(), self.groups.control)
        self.average(model)
        self.counters.keep(self.schedule)
        self.find_parameters(model)
        self.watch(model)
        self._prepare()
        if due:
            self.looks.remember()

    def begin_again(self) -> None:
        """The ranks have changed, and all have the mean of the weights."""
        if hasattr(self, "schedule"):
            self.counters.keep(self.schedule)
        if self.groups.sample_weight is not None and not self.tracker.due:
            self.groups.sample_weight.begin_again()  # what is due has been trained, and is in no weights yet
        self._prepare()
        self.schedule.behind(self.boundaries.skip_until - self.tracker.last)

    def abort_pass(self) -> None:
        """Counts a failed backward pass like any other, because the other ranks count theirs."""
        if self.passes.active:
            self.passes.clear()
            with torch.no_grad():
                self.end()
            if not self.updating:
                self.tracker.pass_failed()

    @torch.no_grad()
    def drain(self, timeout: float | None = None, *, between_steps: bool = False) -> None:
        """Waits for all ranks, then ends all averaging steps. Meanwhile it answers ranks that still train.

        Args:
            timeout: Seconds; None for the group's.
            between_steps: Whether all ranks call it in the same place of their scripts, and this rank's step
                is over even if no update has followed its backward pass. Then it makes the boundary of a
                skipped update, for which other ranks may wait; and nobody joins or leaves meanwhile.

        Raises:
            TimeoutError: Not all ranks called it within ``timeout`` seconds.
        """
        self._make_late(timeout, between_steps)
        if not between_steps:
            self.elastic.send_owed()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            change = False
            try:
                with self.elastic.losses() as lost:
                    change = not wait_for_all(self, timeout, end, admits=not between_steps)
                    if not change:
                        self.schedule.drain(timeout)
            except TrigramError:
                self.elastic.agreed(False)  # the other ranks of the replica ask, too
                raise
            if not self.elastic.agreed(change or bool(lost)):
                self.moved_here()
                return
            self.elastic.regroup(boundary=not between_steps)

    @torch.no_grad()
    def settle(self, timeout: float | None) -> bool:
        """Like :meth:`drain` between steps, but once: False if the members of an elastic job must change."""
        self._make_late(timeout, between_steps=True)
        end = None if timeout is None else time.monotonic() + timeout
        if not wait_for_all(self, timeout, end, admits=False):
            return False
        self.schedule.drain(timeout)
        self.moved_here()
        return True

    def _make_late(self, timeout: float | None, between_steps: bool) -> None:
        """Makes the boundaries of the steps before :meth:`drain`."""
        # Averages in the background may take longer: other ranks still train.
        with self.groups.within(timeout if isinstance(self.schedule, EverySteps) else None):
            self.abort_failed()
            self.boundaries.make(self.tracker.late())
            if between_steps:
                self.boundaries.make(self.tracker.draining())

    @torch.no_grad()
    def moved_here(self) -> None:
        """The weights were changed by trigram, which is no update by the script."""
        if self.tracker.awaits():
            self.looks.moved_here()
        self.rest()

    def rest(self) -> None:
        """The weights are this rank's now, until it trains or a script moves them for a while: asynchronous
        averages may take them."""
        if self in self.running.models:
            self.looks.rest()

    def serve(self, idle: bool) -> None:
        """See :class:`trigram.runtime.serving.Server`."""
        if not idle:
            self.schedule.serve(self.looks.at_rest)
        elif self.schedule.progress():
            self.moved_here()

    def average(self, model: nn.Module, timeout: float | None = None) -> None:
        """Replaces the weights by their mean over all ranks."""
        self.drain(timeout)
        with torch.no_grad():
            mean_of([p.detach() for p in self.groups.averaged(model)], self.groups)

    def equal_optimizers(self, model: nn.Module) -> None:
        """Gradients are averaged from now on: gives all ranks the optimizers of the first that has the
        state."""
        why = "each rank's optimizer has followed its own gradients"
        source = self.groups.source()
        shared_optimizers.share(self.groups.averaged(model), source, self.groups, "switch", why)

    def state(self) -> dict[str, Any]:
        """The number of steps, and the state of the schedule."""
        state = {**super().state(), "seen": self.tracker.last, "rounds": self.schedule.state()}
        # A state without the word is of a version that divided no parameter; its fragments may be others.
        divided = self.pieces and len(self.schedule.fragments) > 1
        return {**state, "pieces": True} if divided else state

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.tracker.start_at(state["steps"], state["seen"])
        self.looks.forget()
        self.schedule.load(state["rounds"])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        now = self.counters.now(self.schedule)
        self.bytes, self.waited = now["bytes"], now["waited"]
        return {**super().stats(), "rounds": now["rounds"], "waits": now["waits"]}
