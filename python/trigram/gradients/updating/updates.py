"""Who updates the weights, and when: what a model's step hooks call around passes and steps of optimizers.

Usually the script's optimizer updates them after backward, and nothing is to be done: :class:`Updates`.
Buckets that are updated in backward are in ``fused_updates``, and an optimizer whose state is divided among
the ranks in ``sharded``.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from trigram.gradients.buckets import Bucket
from trigram.runtime.group import Group
from trigram.steps.step_hooks import StepHooks
from trigram.steps.step_recovery import Arrival, SharedState


class Updates:
    """The script's optimizer updates the weights, when the script says. The methods stand in about
    the order in which they are called.

    Attributes:
        fusing: Whether the pass under way updates weights.
        moves_parameters: Whether parameters move into buckets, and get the strides of their place there.
    """

    fusing = False
    moves_parameters = False
    _hooks: weakref.ref[StepHooks]

    def attach(self, hooks: StepHooks) -> None:
        """The hooks of a model begin to use this; they have neither parameters nor buckets yet."""
        self._hooks = weakref.ref(hooks)  # they end with the model, when the script drops it

    def begin(self) -> None:
        """The hooks have their parameters and buckets, and all ranks the same weights."""

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks the model where weights are read; returns what removes the hooks."""
        return []

    def parameters_found(self) -> None:
        """The parameters that train were found, perhaps anew, and assigned to buckets."""

    # Passes.

    @property
    def before_passes(self) -> Group:
        """The group of the calls that all ranks make between passes."""
        hooks = self._hooks()
        assert hooks is not None
        return hooks.groups.control

    def pass_begins(self) -> None:
        """A pass is about to begin: all weights must be there."""

    def begin_updates(self, param: int | None) -> None:
        """A pass begins with the gradient of parameter ``param``; see :meth:`StepHooks.begin`. From here on
        ``fusing`` says whether it updates weights."""

    def before_average(self, bucket: Bucket) -> None:
        """The average of a bucket is about to start."""

    def update_ready(self) -> None:
        """In backward: averages may have ended since the last call."""

    def averaged(self, k: int) -> None:
        """The ``k``-th bucket has its average; called for each, in order."""

    def count_calls(self) -> int:
        """Calls in the group ``second_phase`` that all ranks count for a pass, beyond those of its
        averages."""
        return 0

    def pass_failed(self, aborted: bool) -> None:
        """The pass has failed; ``aborted``: on this rank, before it was complete."""

    def pass_interrupted(self) -> None:
        """Ctrl-C has ended the wait for the averages; the pass is aborted later."""

    def counted_anew(self) -> None:
        """Passes are counted from 0 again, see :meth:`GradientSync.count_anew`."""

    def pass_ends(self) -> None:
        """The pass is over and counts."""

    # Steps of optimizers.

    def step_begins(self) -> None:
        """An optimizer steps. Gradients that this rank alone has are not averaged yet."""

    def step_has_gradients(self, mine: set[int]) -> None:
        """An optimizer steps, for the parameters with these ``id()``: their gradients are averages."""

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """See :meth:`StepHooks.closure_ignored`."""

    # Between steps.

    def step_failed(self) -> None:
        """Puts the optimizer's parameters back, if a step of the script has raised an exception."""

    def settle(self, timeout: float | None) -> None:
        """Ends what is under way, and a step that has raised an exception."""

    def drain(self, timeout: float | None = None) -> None:
        """Waits until all weights are there."""

    def before_load(self) -> None:
        """The script is about to load weights into the model."""

    def state_loaded(self) -> None:
        """The algorithm's state was loaded from a checkpoint."""

    def release(self) -> None:
        """Leaves the optimizer alone, with all its state; all ranks call it, between steps."""

    def close_without_calls(self) -> None:
        """Leaves the optimizer alone: the job has ended."""

    # Elastic jobs; see `StepHooks`.

    @property
    def shared(self) -> SharedState:
        """What of the training state all ranks have."""
        return SharedState()

    def follow(self, part: Arrival) -> None:
        """The ranks have changed; all ranks call it, with the buckets of the new epoch."""

    def stats(self, found: dict[str, Any]) -> dict[str, Any]:
        """Counters: those of the hooks, with more."""
        return found
