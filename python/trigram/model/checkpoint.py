"""The state of an algorithm in a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from trigram.errors import MisuseError
from trigram.model.wrapped import lookup


def algorithm_state(model: nn.Module) -> dict[str, Any]:
    """The state of the algorithm (residuals, counters, ...), for ``torch.save``; all ranks call it, between
    steps.

    Each rank saves its state separately. Averaging steps under way are ended and applied first, so call
    ``model.state_dict()`` afterwards.
    """
    wrapped = lookup(model, "algorithm_state")
    state: dict[str, Any] = {
        "algorithm": wrapped.algorithm.title,
        "world_size": wrapped.size,
        "behind": wrapped.earlier_steps,
        "warming": wrapped.warming,
    }
    if wrapped.hooks is not None:
        wrapped.hooks.drain()
        state["carrier"] = copy.deepcopy(wrapped.hooks.state())
    return state


def load_algorithm_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores the state that :func:`algorithm_state` returned; call it after ``model.load_state_dict``.

    Every rank loads the state that the same rank saved.

    Raises:
        MisuseError: A different algorithm or a different number of ranks saved the state.
    """
    wrapped = lookup(model, "load_algorithm_state")
    if (state["algorithm"], state["world_size"]) != (wrapped.algorithm.title, wrapped.size):
        raise MisuseError(
            f"load_algorithm_state: the state was saved by {state['algorithm']} on {state['world_size']} "
            f"ranks, but this model uses {wrapped.algorithm.title} on {wrapped.size}; use the same "
            "algorithm and number of ranks, or load only the weights, saved under trigram.consensus"
        )
    if wrapped.warming and not state["warming"]:
        wrapped.proceed()
    wrapped.earlier_steps = state["behind"]
    if wrapped.hooks is not None:
        wrapped.hooks.load(state["carrier"])
