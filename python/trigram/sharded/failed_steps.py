"""Steps of the optimizer that raise an exception on some ranks, while the others wait for their weights."""

from __future__ import annotations

from trigram.errors import MisuseError
from trigram.gpu import routes
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.sharded.agreement import StayCheck
from trigram.sharded.weights.divided_weights import DividedWeights


class FailedSteps(GradientPart):
    """Finds them, and aborts the calls that other ranks are in.

    Args:
        weights: The weights that a step updates.
        stay: In the job whose ranks make the step.

    Attributes:
        ends_at: The number of the next call after the step that runs; None: none runs, or it makes no call.
        gathers_of_step: Whether the gathers under way are those of a step.
        broken: Whether a step has failed after some of its values were updated.
    """

    def __init__(self, weights: DividedWeights, stay: StayCheck) -> None:
        self.weights, self.stay = weights, stay
        self.ends_at: int | None = None
        self.gathers_of_step = self.broken = False
        self._versions: tuple[int, ...] = ()

    def step_begins(self, gathers: int) -> None:
        """This rank's slices are in the groups; ``gathers``: calls that follow the update."""
        if gathers and not self.sync.elastic.can_redo:
            self.ends_at = self.sync.groups.main.core.next() + gathers
            self._versions = self._versions_now()

    def step_ended(self) -> None:
        """The optimizer has stepped, and its gathers follow."""
        self.ends_at = None

    def abort(self) -> None:
        """Aborts, on all ranks, a step that has raised an exception on this one."""
        ends_at, self.ends_at = self.ends_at, None
        if ends_at is None or self.stay.has_ended:
            return
        groups = self.sync.groups
        why = f"{groups.name} aborted its step: optimizer.step() raised an exception; see that rank's log"
        groups.main.core.abort(ends_at, why)
        routes.abort(groups.main, why)
        self.note(self._versions != self._versions_now())

    def note(self, changed: bool) -> None:
        """All ranks come here for a step that has failed; ``changed``: this one has updated values."""
        self.broken |= changed
        self.sync.since_update = 0
        self.sync.count_anew()

    def _versions_now(self) -> tuple[int, ...]:
        """They change with the values of the slices."""
        return tuple(s.value._version for s in self.weights.shards.slices.values())

    def check(self) -> None:
        """Raises if ranks may hold different weights."""
        if self.broken:
            raise MisuseError(
                f"{self.sync.groups.name}: optimizer.step() has failed on some ranks, and some have updated "
                "their part of the weights; load a checkpoint into the model and the optimizer on all ranks, "
                "or start again from one"
            )
