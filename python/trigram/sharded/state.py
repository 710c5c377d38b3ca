"""The state of an optimizer that is divided among the ranks: each updates its slices of the weights, and then
all ranks get all weights."""

from __future__ import annotations

import time

from torch.optim import Optimizer

from trigram.errors import MisuseError
from trigram.gradients.updating.fused_updates import FusedUpdates
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.gradients.updating.updates import Updates
from trigram.observe import steps
from trigram.sharded.agreement import StayCheck, explained
from trigram.sharded.failed_steps import FailedSteps
from trigram.sharded.weights.divided_weights import DividedWeights
from trigram.steps.step_hooks import StepHooks


class ShardedState(GradientPart):
    """The divided state of one model's optimizer.

    Args:
        optimizer: The script's optimizer.
        weights: The weights and this rank's slices of them.
        fused_updates: Updates of slices in backward; else :class:`Updates`, which do nothing.
        overlap: The gather is awaited in the next forward pass instead of in ``step``.

    Attributes:
        stay: In the job whose ranks hold the other parts of the state.
        failed: Steps that raise an exception.
        count: The optimizer's steps so far.
        owed: Whether parts that were lent have been updated, and not collected since.
    """

    def __init__(
        self, optimizer: Optimizer, weights: DividedWeights, fused_updates: Updates, overlap: bool
    ) -> None:
        self.optimizer, self.weights, self.fused_updates = optimizer, weights, fused_updates
        self.overlap = overlap
        self.stay = StayCheck()
        self.failed = FailedSteps(weights, self.stay)
        self.count = 0
        self.owed = False

    def attach(self, hooks: StepHooks) -> None:
        """See :class:`GradientPart`."""
        super().attach(hooks)
        for part in (self.weights, self.fused_updates, self.failed):
            part.attach(hooks)

    @property
    def updated(self) -> set[int]:
        """``id()`` of the parameters that this pass has updated in backward."""
        inner = self.fused_updates
        return inner.stepper.updated if isinstance(inner, FusedUpdates) and inner.fusing else set()

    # All ranks get all weights.

    def gather(self, updated: set[int]) -> None:
        """Collects the weights of a step, but for buckets of which all parameters are in ``updated``."""
        self.failed.gathers_of_step = True
        self.weights.gather(updated)
        if not self.overlap:
            self.drain()

    def drain(self, timeout: float | None = None) -> None:
        """Waits until all weights are there; ``timeout``: seconds, None: no limit."""
        sync, gathers = self.sync, self.weights.gathers
        if not gathers.under_way:
            self.failed.gathers_of_step = False
            return
        before, began = sync.times.enter(steps.WAIT), time.perf_counter()
        try:
            error, failed = gathers.wait(timeout)
            sync.waited += time.perf_counter() - began
            sync.times.enter(before)
            if failed:
                self._gather_failed()
        finally:
            if not gathers.under_way:
                self.failed.gathers_of_step = False
        if error is not None:
            raise explained(error, sync.groups.name, "optimizer.step()")

    def _gather_failed(self) -> None:
        """This rank has not got all weights."""
        sync, inner = self.sync, self.fused_updates
        if self.failed.gathers_of_step:
            # Another rank's step has failed, and this one's has updated values.
            if not sync.elastic.can_redo:
                self.failed.note(True)
        elif isinstance(inner, FusedUpdates) and inner.fusing and not inner.stepper.broken:
            # The pass has failed on another rank when this one had all averages and had counted it: some
            # values may be updated, and others not.
            inner.stepper.broken = True
            sync.steps, sync.since_update = sync.steps - 1, max(sync.since_update - 1, 0)
            sync.count_anew()
            sync.this_pass.abort_calls(sync.this_pass.call_counts(), "a gather of this pass failed")

    def between_steps(self, call: str) -> None:
        """Ends what has failed; raises inside of a step."""
        self.sync.abort_failed()
        self.weights.shards.separate()
        if self.weights.shards.entered:
            raise MisuseError(
                f"{self.sync.groups.name}: {call} of a sharded optimizer inside its step(); call it after "
                "the step"
            )
