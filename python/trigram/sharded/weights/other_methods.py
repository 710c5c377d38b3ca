"""What an optimizer does with its state outside of ``step``.

``train`` and ``eval`` of schedule-free ones change weights: they are calls of all ranks, and see this rank's
slices as ``step`` does.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from trigram.errors import MisuseError

_NAMES = ("train", "eval")


class Swapping(Protocol):
    """Who divides the optimizer."""

    def swap(self, call: str, method: Callable[[], Any]) -> Any:
        """Calls a method of the optimizer that may change weights."""


class OtherMethods:
    """Stands before ``train`` and ``eval`` of an optimizer, where it has them.

    Args:
        optimizer: The script's optimizer.
        owner: Who divides it.
    """

    def __init__(self, optimizer: Optimizer, owner: Swapping) -> None:
        self.optimizer = optimizer
        self.names = [name for name in _NAMES if callable(getattr(type(optimizer), name, None))]
        for name in self.names:
            vars(optimizer)[name] = _Method(optimizer, owner, name)

    def remove(self) -> None:
        """Leaves the optimizer alone."""
        for name in self.names:
            vars(self.optimizer).pop(name, None)


class _Method:
    """One method."""

    def __init__(self, optimizer: Optimizer, owner: Swapping, name: str) -> None:
        self.optimizer, self.owner, self.name = weakref.ref(optimizer), weakref.ref(owner), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        optimizer, owner = self.optimizer(), self.owner()
        plain = lambda: getattr(type(optimizer), self.name)(optimizer, *args, **kwargs)  # noqa: E731
        return plain() if owner is None else owner.swap(f"optimizer.{self.name}()", plain)


class Divider(Protocol):
    """Who divides a state."""

    def has_elsewhere(self, param: torch.Tensor) -> bool:
        """Whether other ranks have state of the parameter."""


class DividedState(defaultdict[torch.Tensor, Any]):
    """An optimizer's ``state``. Asking for that of a parameter that is divided is an error, and makes no new
    entry.

    Args:
        state: What it holds.
        divider: Who divides it.
    """

    def __init__(self, state: dict[torch.Tensor, Any], divider: Divider) -> None:
        super().__init__(dict, state)
        self.divider = weakref.ref(divider)

    def __missing__(self, key: torch.Tensor) -> Any:
        divider = self.divider()
        if divider is not None and divider.has_elsewhere(key):
            raise MisuseError(
                "sharded: optimizer.state[p] outside of optimizer.step(): each rank has the state of a part "
                "of this parameter; read optimizer.state_dict(), which all ranks call"
            )
        return super().__missing__(key)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())
