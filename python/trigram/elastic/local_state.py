"""The state of an object whose tensors are sharded (DTensors), such as the optimizer of a model that
``fully_shard`` divides: what this rank holds of it, to be sent to a rank that holds the same shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def of(state: Any) -> Any:
    """What gives the state of an object as plain tensors: usually the object itself."""
    if isinstance(state, Optimizer):
        return LocalState(state) if any(_is_sharded(p) for p in _params(state)) else state
    found: list[Any] = []
    _mapped(state.state_dict(), lambda value: found.append(_is_sharded(value)))
    return LocalTensors(state) if any(found) else state


class LocalState:
    """An optimizer of DTensors, whose state is that of this rank's shards.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's, with the local tensors of DTensors in their places."""
        found = self.optimizer.state_dict()
        local = {
            key: {name: value._local_tensor if _is_sharded(value) else value for name, value in kept.items()}
            for key, kept in found["state"].items()
        }
        return {**found, "state": local}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave on a rank with the same shards."""
        params = dict(enumerate(_params(self.optimizer)))
        whole = {
            key: {name: _sharded_as(params[int(key)], value) for name, value in kept.items()}
            for key, kept in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": whole})


class LocalTensors:
    """Any other object whose state has DTensors: an average of the weights, say. One that loads has DTensors
    in the same places.

    Args:
        inner: The object.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        """As the object's, with the local tensors of DTensors in their places."""
        local: dict[str, Any] = _mapped(
            self.inner.state_dict(), lambda value: value._local_tensor if _is_sharded(value) else value
        )
        return local

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave on a rank with the same shards."""
        self.inner.load_state_dict(_like(self.inner.state_dict(), state))


def _mapped(value: Any, what: Callable[[Any], Any]) -> Any:
    """What a function makes of each leaf of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _mapped(each, what) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, what) for each in value])
    return what(value)


def _like(mine: Any, theirs: Any) -> Any:
    """Their state, with DTensors where this rank's has some."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return {key: _like(mine.get(key), each) for key, each in theirs.items()}
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
        return type(theirs)([_like(a, b) for a, b in zip(mine, theirs, strict=True)])
    return _sharded_as(mine, theirs)


def _params(optimizer: Optimizer) -> list[Any]:
    """Its parameters, in the order in which its state names them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "_local_tensor")


def _sharded_as(param: Any, value: Any) -> Any:
    """A tensor of this rank's shard as a DTensor like the parameter; other values as they are."""
    if not (_is_sharded(param) and isinstance(value, torch.Tensor)):
        return value
    local = param._local_tensor
    if value.shape != local.shape or not value.dim():  # such as the number of steps
        return value
    mesh, placements = param.device_mesh, param.placements
    return type(param).from_local(
        value.to(local.device), mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
