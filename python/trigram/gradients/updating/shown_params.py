"""Other tensors in the groups of an optimizer, for the time of its step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.errors import MisuseError

Choose = Callable[[torch.Tensor], Sequence[tuple[torch.Tensor, torch.Tensor | None]]]
"""For a parameter, the tensors in its place, each with its gradient."""

_owners: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(optimizer: Optimizer, model: Any, name: str) -> None:
    """Notes which model divides or fuses an optimizer's step.

    Raises:
        MisuseError: Another model does: each would put back what the other has put into the groups.
    """
    other = _owners.get(optimizer)
    owner = other() if other is not None else None
    if owner is not None and owner is not model:
        raise MisuseError(
            f"{name}: the optimizer is sharded or fused for another model, {type(owner).__name__}, already; "
            "wrap one module that holds both, such as nn.ModuleList([a, b]), or give each model its own "
            "optimizer"
        )
    _owners[optimizer] = weakref.ref(model)


def disclaim(optimizer: Optimizer) -> None:
    """The optimizer is a plain one again."""
    _owners.pop(optimizer, None)


class ShownParams:
    """What the groups of an optimizer hold while it steps, in place of the script's parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def active(self) -> bool:
        """Whether other tensors are in the groups now."""
        return bool(self._groups)

    def show(self, choose: Choose, given: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        """Puts other tensors into the groups.

        Args:
            choose: For each parameter, the tensors in its place, each with its gradient.
            given: Only these parameters of each group; None: all.
        """
        given = given or [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, given, strict=True):
            self._groups.append((group, group["params"]))
            shown = []
            for p in params:
                for tensor, gradient in choose(p):
                    self._gradients.append((tensor, tensor.grad))
                    tensor.grad = gradient
                    shown.append(tensor)
            group["params"] = shown

    def restore(self) -> None:
        """Puts the parameters back, and the gradients."""
        groups, self._groups = self._groups, []
        gradients, self._gradients = self._gradients, []
        for group, params in groups:
            group["params"] = params
        for tensor, gradient in gradients:
            tensor.grad = gradient
