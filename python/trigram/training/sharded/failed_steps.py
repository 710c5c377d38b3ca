"""Steps of the optimizer that raise an exception on some ranks, while the others wait for their weights."""

from __future__ import annotations

from trigram.errors import MisuseError
from trigram.gpu import routes
from trigram.training.sharded.agreement import StayCheck
from trigram.training.sharded.divided_weights import DividedWeights


class FailedSteps(DividedWeights):
    """Divided weights whose optimizer may fail.

    Attributes:
        job: The job whose ranks make the step.
        ends_at: The number of the next call after the step that runs; None: none runs, or it makes no call.
        gathers_of_step: Whether the gathers under way are those of a step.
        broken: Whether a step has failed after some of its values were updated.
    """

    stay: StayCheck
    ends_at: int | None = None
    gathers_of_step = broken = False
    _versions: tuple[int, ...] = ()

    def step_begins(self, gathers: int) -> None:
        """This rank's slices are in the groups; ``gathers``: calls that follow the update."""
        if gathers and not self.elastic.can_redo:
            self.ends_at = self.groups.main.core.next() + gathers
            self._versions = self._versions_now()

    def step_ended(self) -> None:
        """The optimizer has stepped, and its gathers follow."""
        self.ends_at = None

    def abort_step(self) -> None:
        """Aborts, on all ranks, a step that has raised an exception on this one."""
        ends_at, self.ends_at = self.ends_at, None
        if ends_at is None or self.stay.has_ended:
            return
        why = (
            f"{self.groups.name} aborted its step: optimizer.step() raised an exception; see that rank's log"
        )
        self.groups.main.core.abort(ends_at, why)
        routes.abort(self.groups.main, why)
        self._failed(self._versions != self._versions_now())

    def _failed(self, changed: bool) -> None:
        """All ranks come here for a step that has failed; ``changed``: this one has updated values."""
        self.broken |= changed
        self.passes = 0
        self.count_anew()

    def _versions_now(self) -> tuple[int, ...]:
        """They change with the values of the slices."""
        return tuple(s.value._version for s in self.shards.slices.values())

    def _gather_all(self, updated: set[int]) -> None:
        """See :class:`DividedWeights`."""
        self.gathers_of_step = True
        super()._gather_all(updated)

    def drain(self, timeout: float | None = None, *args: object, between_steps: bool = False) -> None:
        """See :class:`DividedWeights`."""
        try:
            super().drain(timeout, *args, between_steps=between_steps)
        finally:
            if not self.gathers.under_way:
                self.gathers_of_step = False

    def _gather_failed(self) -> None:
        """See :class:`DividedWeights`. Another rank's step has failed, and this one's has updated values."""
        if not self.gathers_of_step:
            super()._gather_failed()
        elif not self.elastic.can_redo:
            self._failed(True)

    def check_steps(self) -> None:
        """Raises if ranks may hold different weights."""
        if self.broken:
            raise MisuseError(
                f"{self.groups.name}: optimizer.step() has failed on some ranks, and some have updated their "
                "part of the weights; load a checkpoint into the model and the optimizer on all ranks, or "
                "start again from one"
            )
