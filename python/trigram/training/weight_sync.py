"""Averages weights instead of gradients: each rank's optimizer changes that rank's weights, and averaging
steps bring them together.

Averaging steps start at *boundaries*: at the start of the forward pass after a backward pass, when nothing
else uses the weights. A :class:`~trigram.training.schedule.StepSchedule` decides at which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.elastic.recovery import ElasticModel
from trigram.errors import TimeoutError, TrigramError, UnsupportedError
from trigram.training.schedule import EverySteps, StepSchedule
from trigram.training.step_hooks import StepHooks

running: dict[WeightSync, nn.Module | None] = {}
"""The hooks of asynchronous algorithms, in the order in which they were made. They stay here until they have
ended on all ranks, even if the script drops the model, because other ranks may wait for their messages. In an
elastic job the model stays too: a rank that has ended its training may have to send its state to a joining
rank."""


class WeightSync(StepHooks):
    """Averages the weights of one model.

    Args:
        model: The module.
        groups: The model's process groups.
        make: Makes the schedule from the trained parameters, one list per dtype; called again when layers are
            frozen or unfrozen.
        in_step: Whether all ranks make an averaging step at the same training steps.
    """

    weights_differ = True

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        make: Callable[[list[list[torch.Tensor]]], StepSchedule],
        in_step: bool = True,
    ) -> None:
        self.make = make
        self.in_step = in_step
        self.last_boundary = 0
        self.skip_until = -1
        super().__init__(model, groups)
        if not groups.joining:
            self._prepare()

    def _prepare(self) -> None:
        trained = [p for p, trains in zip(self.params, self.trains, strict=True) if trains]
        with torch.no_grad():
            self.schedule = self.make(list(coalesced.alike(p.detach() for p in trained)))

    @torch.no_grad()
    def before_step(self, model: nn.Module, src: int) -> None:
        """Calls the boundary if there was a backward pass since the last one."""
        if self.has_changed(model):
            if self in running:
                raise UnsupportedError(
                    f"{self.groups.name}: parameters were frozen, unfrozen or added while an asynchronous "
                    "algorithm trains the model; call trigram.switch(model, ...) on all ranks to apply the "
                    "change"
                )
            self.average(model)  # the new schedule starts from equal weights
            self.find_parameters(model)
            self._prepare()
        if self.steps > self.last_boundary:
            self.last_boundary = self.steps
            self.elastic.boundary(self._boundary)

    def _boundary(self) -> bool:
        """Makes a boundary; True if all ranks are at the same one."""
        if isinstance(self.schedule, EverySteps) and self.steps <= self.skip_until:
            return False
        self.schedule.boundary(self.steps)
        return isinstance(self.schedule, EverySteps) and self.steps % self.schedule.every == 0

    def begin(self) -> None:
        """Adds this step's sample weight to the next averaging step."""
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.add_backward()

    @torch.no_grad()
    def end(self) -> None:
        """Backward has ended: applies an overlapping averaging step before the optimizer step."""
        self.active = False
        with self.elastic.forgiving():
            self.schedule.backward_over()
        self.steps += 1

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Continues after the ranks have changed, from the mean of the weights of all ranks that have some.

        If one rank has made a boundary, perhaps with an averaging step that was lost, the other ranks skip
        that boundary, so that the next averaging step has all ranks. A joining rank starts at the smallest
        step of all ranks, so that it misses no collective of the script.
        """
        position = torch.tensor([-1, -(1 << 62)] if part.newcomer else [self.last_boundary, -self.steps])
        collectives.all_reduce(position, "max", None, self.groups.control)
        self.skip_until = int(position[0])
        if part.newcomer:
            self.steps = self.last_boundary = -int(position[1])
            part.receive()
        model = part.model()
        assert model is not None
        contributing = self.groups.size - len(part.newcomers)
        with torch.no_grad():
            for same in coalesced.alike(p.detach() for p in model.parameters() if p.is_floating_point()):
                averaged = coalesced.Coalesced(same)
                if not part.is_new:
                    averaged.pack()
                collectives.all_reduce(averaged.memory, "avg", None, self.groups.control)
                averaged.memory.mul_(self.groups.size / contributing)
                averaged.unpack()
        part.has_state()
        self._prepare()

    def abort_pass(self) -> None:
        """Counts a failed backward pass like any other, because the neighbours have made their averaging
        step."""
        if self.active:
            with torch.no_grad():
                self.end()

    def step_without_inputs(self) -> None:
        """A step of a rank without inputs: it takes part with the weights it has."""
        self.end()

    @torch.no_grad()
    def drain(self, timeout: float | None = None) -> None:
        """Waits for all ranks, then ends all averaging steps. Meanwhile it answers ranks that still train.

        Raises:
            TimeoutError: Not all ranks called it within ``timeout`` seconds.
        """
        self.abort_pass()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if self._wait_for_all(timeout, end):
                    self.schedule.drain(timeout)
                    return
            except TrigramError as e:
                if not self.elastic.is_loss(e):
                    raise
                self.elastic.regroup()

    def _wait_for_all(self, timeout: float | None, end: float | None) -> bool:
        """Waits for all ranks; False if the ranks have regrouped meanwhile."""
        finish = getattr(self.schedule, "finish_pending", None)
        while finish is not None and not finish():
            if self._regroup_if_needed():
                return False
            self._progress()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"{self.groups.name}: waited {timeout} s for neighbours to finish their averaging steps; "
                    "check that all ranks make this call, or pass a longer timeout"
                )
            time.sleep(0.001)
        control = self.groups.control
        before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
        try:
            arrived = collectives.barrier(control, async_op=True)
        finally:
            control.timeout = before
        assert arrived is not None
        while running and not arrived.is_completed():
            if self._regroup_if_needed(arrived):
                return False
            if not self._progress():
                time.sleep(0.001)
        arrived.wait()
        return True

    def _regroup_if_needed(self, arrived: collectives.Work | None = None) -> bool:
        """Regroups with the others if a rank was lost or is joining; True if it did.

        It does not if the barrier ``arrived`` has completed: then all ranks were there before the loss.
        """
        if not self.elastic.is_called():
            return False
        if arrived is not None and arrived.is_completed():
            return False
        self.elastic.regroup()
        return True

    def _progress(self) -> bool:
        """Makes progress for the other ranks in all models of this process while this rank waits."""
        progressed = [hooks.schedule.progress() for hooks in running]  # type: ignore[attr-defined]
        return any(progressed)

    def average(self, model: nn.Module, timeout: float | None = None) -> None:
        """Replaces the weights by their mean over all ranks."""
        self.drain(timeout)
        with torch.no_grad():
            mean_of([p.detach() for p in model.parameters()], self.groups)

    def state(self) -> dict[str, Any]:
        """The number of steps, and the state of the schedule."""
        return {**super().state(), "seen": self.last_boundary, "rounds": self.schedule.state()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.last_boundary = state["seen"]
        self.schedule.load(state["rounds"])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        self.bytes, self.waited = self.schedule.sent(), self.schedule.waited
        return {**super().stats(), "rounds": self.schedule.steps_done, "waits": self.schedule.waits}
