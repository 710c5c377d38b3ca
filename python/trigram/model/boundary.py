"""``step``: the user says where a training step ends."""

from __future__ import annotations

from torch import nn

from trigram.model.shards import collect
from trigram.model.wrapped import lookup


def step(model: nn.Module) -> None:
    """Ends a training step of the model: call it after ``optimizer.step()``.

    Scripts need it only where nothing else shows the end of a step, for example if they change the weights
    without an optimizer of ``torch.optim``. Algorithms that average weights then start or apply an averaging
    step; under the others it does nothing. All ranks call it after the same steps.

    Args:
        model: A model given to :func:`trigram.with_bagua`.

    Raises:
        MisuseError: The model is not wrapped.
    """
    hooks = lookup(model, "step").hooks
    if hooks is not None:
        hooks.user_step()
    collect(model)
