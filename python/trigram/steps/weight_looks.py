"""What can be seen of a model's weights and gradients between backward passes and updates, see
:class:`~trigram.steps.step_tracker.Looks`. Parameters are known by ``id()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch

from trigram.optimizers import optimizer_hooks
from trigram.steps.update_watch import GradientsSnapshot, UsedGradients, WeightsSnapshot


class WeightLooks:
    """Looks at the parameters of one model that train.

    Args:
        title: Names the algorithm and the weights, for errors.

    Attributes:
        trained: The parameters.
    """

    def __init__(self, title: Callable[[], str]) -> None:
        self._title = title
        self.trained: Sequence[torch.Tensor] = ()
        self._ids: set[int] = set()
        self._weights: WeightsSnapshot | None = None
        self._gradients = GradientsSnapshot(())
        self._used = UsedGradients()
        self._resting: WeightsSnapshot | None = None
        self._at_begin: WeightsSnapshot | None = None
        self._has_optimizer = self._has_looked = False

    @property
    def title(self) -> str:
        """See the class."""
        return self._title()

    def begin(self, trained: Sequence[torch.Tensor]) -> None:
        """From now on these parameters train. Gradients that they have are not of the next step."""
        self.trained, self._ids = trained, {id(p) for p in trained}
        self._weights = None
        self._gradients = GradientsSnapshot(trained)

    def remember(self) -> None:
        """The weights and gradients are those after a backward pass."""
        self._weights, self._gradients = WeightsSnapshot(self.trained), GradientsSnapshot(self.trained)

    def backward_ended(self) -> None:
        """A backward pass has computed gradients."""
        self._used.clear()
        self.remember()

    def moved_here(self) -> None:
        """The weights were changed by trigram."""
        if self._weights is not None:
            self._weights = WeightsSnapshot(self.trained)

    def step_begins(self) -> None:
        """A training step begins in which :meth:`changed` may be asked."""
        self._at_begin = WeightsSnapshot(self.trained)

    def changed(self) -> bool:
        """Whether a script has changed the weights since its step began: in place, or since the backward pass
        in any way (``param.data``) that more than a few values show."""
        return self.moved() or (self._at_begin is not None and self._at_begin.moved(self.trained))

    def rest(self) -> None:
        """The weights are what they are to be until this rank trains, or a script moves them for a while."""
        self._resting = WeightsSnapshot(self.trained)

    def at_rest(self) -> bool:
        """Whether they still are: asynchronous averages may take them."""
        return self._resting is not None and not self._resting.moved(self.trained)

    def forget(self) -> None:
        """The weights are others: a checkpoint was loaded."""
        self._weights = None

    def has_stepped(self) -> None:
        """An optimizer of ``torch.optim`` updates the parameters."""
        self._has_optimizer = True

    # What the tracker of steps asks.

    @property
    def taken(self) -> bool:
        """See :class:`Looks`."""
        return self._weights is not None

    def moved(self) -> bool:
        """See :class:`Looks`."""
        return self._weights is not None and self._weights.moved(self.trained)

    def reset(self, but: int | None) -> bool:
        """See :class:`Looks`."""
        place = next((k for k, p in enumerate(self.trained) if id(p) == but), None)
        return self._gradients.reset(self.trained, place)

    def has_optimizer(self) -> bool:
        """See :class:`Looks`. Looking takes long; an optimizer that is made later shows itself."""
        if not self._has_optimizer and not self._has_looked:
            self._has_looked = True
            self._has_optimizer = bool(optimizer_hooks.optimizers_of(self._ids))
        return self._has_optimizer

    def is_assigned(self, updated: AbstractSet[int]) -> bool:
        """See :class:`Looks`."""
        ids = set(updated)
        return bool(self._gradients.foreign(self.trained, ids)) or bool(
            self._used.rewritten(self.trained, ids)
        )

    def assigned(self) -> None:
        """See :class:`Looks`."""
        self._gradients = GradientsSnapshot(self.trained)
        self._used.clear()  # those of other optimizers were assigned for the same step

    def used(self, updated: AbstractSet[int]) -> None:
        """See :class:`Looks`. A script may write others into them."""
        self._used.keep(self.trained, set(updated))

    def with_gradients(self, reached: AbstractSet[int]) -> set[int]:
        """See :class:`Looks`."""
        return {id(p) for p in self.trained if p.grad is not None and (not reached or id(p) in reached)}

    def managed(self, unknown: AbstractSet[int]) -> set[int]:
        """See :class:`Looks`."""
        found: set[int] = set()
        for optimizer in optimizer_hooks.optimizers_of(set(unknown)):
            found |= optimizer_hooks.parameters_of(optimizer) & unknown
        return found
