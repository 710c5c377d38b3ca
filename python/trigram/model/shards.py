"""The local shards of a model whose parameters are DTensors, as a module of plain parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.errors import MisuseError


class LocalShards(nn.Module):
    """The shards that this rank holds; its parameters share the memory of the model's.

    It has no forward pass: the model is trained as it is, and :func:`trigram.step` is called with the shards
    after each update.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shards = nn.ParameterList()
        for name, p in model.named_parameters():
            local: Any = getattr(p, "_local_tensor", None)
            local = p.detach() if local is None else local.detach()
            if p.is_meta:
                raise MisuseError(f"local_shards: the parameter {name} is on the meta device; materialize it")
            self.shards.append(nn.Parameter(local, requires_grad=p.requires_grad))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raises: the model has the forward pass."""
        raise MisuseError("local_shards: call the model itself; the shards only hold its weights")


def local_shards(model: nn.Module) -> LocalShards:
    """The shards of a model's parameters on this rank, to average them between replicas.

    In hybrid sharding (HSDP), the rows of a mesh shard the model with ``fully_shard``, and each row trains a
    replica. An algorithm that averages weights then works between the ranks that hold the same shard::

        fully_shard(model, mesh=mesh["shard"])
        shards = trigram.with_bagua(trigram.local_shards(model), "diloco", group=mesh["replicate"])
        ...
        optimizer.step()
        trigram.step(shards)      # after each update

    Args:
        model: A module with DTensor parameters, such as one of ``fully_shard``; plain parameters are taken
            whole. Load checkpoints into the model before this call, or in place.

    Raises:
        MisuseError: A parameter is on the meta device.
    """
    return LocalShards(model)
