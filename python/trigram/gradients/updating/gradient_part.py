"""Parts of the hooks that average a model's gradients: they do not keep the hooks, which end with the model
when the script drops it."""

from __future__ import annotations

import weakref

from trigram.gradients.gradient_sync import GradientSync
from trigram.steps.step_hooks import StepHooks


class GradientPart:
    """A part of a :class:`GradientSync`, which keeps it."""

    _hooks: weakref.ref[StepHooks]

    def attach(self, hooks: StepHooks) -> None:
        """The hooks begin to use this; they have neither parameters nor buckets yet."""
        self._hooks = weakref.ref(hooks)

    @property
    def sync(self) -> GradientSync:
        """The hooks."""
        hooks = self._hooks()
        assert isinstance(hooks, GradientSync)
        return hooks
