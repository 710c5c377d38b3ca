"""The state of an optimizer whose parameters are sharded (DTensors): what this rank holds of it, to be sent
to a rank that holds the same shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def of(state: Any) -> Any:
    """What gives the state of an object as plain tensors: usually the object itself."""
    if isinstance(state, Optimizer) and any(_is_sharded(p) for p in _params(state)):
        return LocalState(state)
    return state


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
