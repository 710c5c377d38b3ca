"""Where training steps end, for algorithms that average weights after them: a state machine without tensors.

It is told what happens (forward passes, backward passes, updates, what the script says), looks at weights and
gradients through :class:`Looks`, and says up to which step *boundaries* are to be made now. A boundary lies
after the update: when optimizers have updated all parameters that have gradients. A step without such an
update (a GradScaler skips it, a script updates weights by hand) ends where the root module is called next, or
just before the next update, if gradients were reset or weights have moved since the backward pass. So all
ranks count the same steps, whether their updates were skipped or not.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

from trigram.errors import MisuseError

MOST_PERTURBATIONS = 40
"""Times in a row that weights may be moved by hand and gradients reset while their optimizer makes no step:
adversarial training does so several times in each of the micro-batches of a step."""


class Looks(Protocol):
    """What can be seen of a model's weights and gradients. Parameters are numbers."""

    @property
    def title(self) -> str:
        """Names the algorithm and the weights, for errors."""

    @property
    def taken(self) -> bool:
        """Whether the weights and gradients after a backward pass are known."""

    def moved(self) -> bool:
        """Whether weights differ from those."""

    def reset(self, but: int | None) -> bool:
        """Whether gradients were set to None or 0 since, but for that of parameter ``but``."""

    def has_optimizer(self) -> bool:
        """Whether an optimizer has the parameters, even if it has not stepped yet."""

    def is_assigned(self, updated: AbstractSet[int]) -> bool:
        """Whether the script has assigned gradients of these parameters, or written into earlier ones."""

    def assigned(self) -> None:
        """These gradients are those of a step that has had no backward pass."""

    def used(self, updated: AbstractSet[int]) -> None:
        """The gradients of these parameters have been used."""

    def with_gradients(self, reached: AbstractSet[int]) -> set[int]:
        """Those of these parameters that have gradients; of all if there are none."""

    def managed(self, unknown: AbstractSet[int]) -> set[int]:
        """Those of these parameters that an optimizer has."""


class StepTracker:
    """The training steps of one model.

    Attributes:
        steps: Steps that had their backward pass.
        last: The last step whose boundary was made.
        owed: Boundaries up to this step are made as soon as weights may change.
        early: The step whose boundary was made before its update, or instead of it.
        begun: Whether the next averaging step knows that its training step has begun.
        forward_begun: Whether that was told by a forward pass of the root module.
        covered: Parameters that were updated since the boundary.
        reached: Those that passes of the step that is due have reached.
        looks: What can be seen of the model.
    """

    def __init__(self, looks: Looks) -> None:
        self.looks = looks
        self.steps = self.last = self.owed = 0
        self.early = -1
        self.begun = self.forward_begun = False
        self.covered: set[int] = set()
        self.reached: set[int] = set()
        self._managed: set[int] = set()  # an optimizer has these
        self._unmanaged: set[int] = set()  # and none these
        self._perturbed = False  # weights were moved since the backward pass, and by no update
        self._perturbations = 0
        self._told = 0

    @property
    def due(self) -> bool:
        """Whether a training step has had its backward pass and not its boundary."""
        return self.steps > max(self.last, self.owed)

    def is_over(self, param: int | None = None) -> bool:
        """Whether the update of the step that is due has been made or skipped.

        Args:
            param: A parameter that has received a gradient of the next step already.
        """
        if self.covered:
            return True
        if self._perturbed or not self.looks.taken:
            return False
        moved = self.looks.moved()
        if moved and self.looks.has_optimizer():
            # Not the update: the optimizer makes that. SAM moves weights between two backward passes.
            self._perturbed = True
            self._perturbations += self.looks.reset(param)
            if self._perturbations >= MOST_PERTURBATIONS:
                raise MisuseError(
                    f"{self.looks.title} were changed {self._perturbations} times without a step of their "
                    "optimizer; if these are the updates, call trigram.step(model) after each, on all ranks"
                )
            return False
        return moved or self.looks.reset(param)

    # Events. Each returns the step up to which boundaries are to be made.

    def late(self) -> int:
        """Nothing of the last step can follow any more: the root module is called, or inputs end."""
        return self.steps if self.due and self.is_over() else self.owed

    def root_called(self) -> None:
        """The root module's forward pass begins: the next step has begun."""
        self.forward_begun = True

    def reach(self, params: AbstractSet[int]) -> None:
        """A backward pass has reached these parameters."""
        self.reached |= params

    def pass_begins(self, param: int | None) -> None:
        """A backward pass begins, with the gradient of ``param``: boundaries come when weights may change."""
        if self.due and self.is_over(param):
            if self.looks.taken and not self.covered and not self.looks.has_optimizer():
                raise MisuseError(
                    f"{self.looks.title} were changed without an optimizer of torch.optim and without a call "
                    "of the model itself, so trigram cannot tell where a training step ends; call "
                    "trigram.step(model) after each update, on all ranks"
                )
            self.owed = self.steps
        self.covered.clear()

    def pass_ends(self) -> None:
        """The backward pass has ended: the training step needs a boundary."""
        if not self.due:
            self.steps += 1

    def weights_may_change(self) -> int:
        """The backward pass is over, outside of an optimizer's step."""
        self._perturbed = False
        return self.steps if self.covered else self.last  # optimizers have stepped inside backward

    def pass_failed(self) -> None:
        """The last pass has raised an exception: no update follows."""
        self.owed = self.steps

    def updated(self, mine: AbstractSet[int], inside: bool) -> int:
        """An optimizer has updated these parameters, or skipped that.

        Args:
            mine: The parameters.
            inside: Inside a backward pass, or the step of another optimizer.
        """
        self.covered |= mine
        self._managed |= mine
        if inside:
            return self.last
        self._perturbations = 0
        if not self.due and self.looks.is_assigned(mine):
            self.steps += 1
            self.looks.assigned()
        self.looks.used(mine)
        # A gradient that no pass of this step has reached is one of an earlier step, of another optimizer's.
        used = self.looks.with_gradients(self.reached)
        if self.due and not used <= self._managed | self._unmanaged:
            unknown = used - self._managed  # their optimizers may not have stepped yet
            self._managed |= self.looks.managed(unknown)
            self._unmanaged |= unknown - self._managed
        return self.steps if self.due and used & self._managed <= self.covered else self.last

    def script_step(self) -> int:
        """The script says that a training step is over (``trigram.step``)."""
        if not self.due and self.last == self._told:
            self.steps += 1  # a step without a backward pass
        return self.steps

    def idle_step(self) -> None:
        """The other ranks make a step, and this one has no inputs."""
        self.steps += 1

    def draining(self) -> int:
        """This rank's step is over, even if no update has followed its backward pass."""
        if not self.due:
            return self.last
        self.early = self.steps
        return self.steps

    # What follows.

    def step_begins(self) -> None:
        """The averaging step that is due knows of the new training step."""
        self.begun = True

    def next_boundary(self) -> int:
        """A boundary is made: its step."""
        self.last += 1
        self.covered.clear()
        if not self.due:
            self.reached.clear()
        self.begun = self.forward_begun = False
        return self.last

    def skip_boundary(self) -> None:
        """A boundary that is of no effect, on all ranks."""
        self.last += 1

    def all_made(self) -> None:
        """All boundaries up to the last call of :meth:`script_step` are made."""
        self._told = self.last

    def start_at(self, step: int, last: int) -> None:
        """Continues where other ranks are, or a checkpoint was: the next call of :meth:`script_step` is of
        the next step."""
        self.steps, self.last, self.owed, self._told = step, last, last, last

    def awaits(self) -> bool:
        """Whether the step that is due, or whose boundary was made early, may yet have its update."""
        return self.due or self.early == self.steps

    def awaits_update(self) -> bool:
        """Whether a backward pass has made gradients, and their optimizer has not used them."""
        return self.awaits() and not self.is_over() and self.looks.has_optimizer()
