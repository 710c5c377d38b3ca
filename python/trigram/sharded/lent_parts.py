"""Averages between replicas, each of which is sharded: an algorithm averages this rank's parts of the weights
with the same parts of other replicas, and the ranks of a replica collect the weights afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.errors import MisuseError, UnsupportedError
from trigram.gradients.updating.fused_updates import FusedUpdates
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.runtime.weak_hook import WeakHook
from trigram.sharded.state import ShardedState


class LentParts(GradientPart):
    """This rank's parts of the weights, which may be lent.

    Attributes:
        active: Whether an algorithm averages them between replicas.
    """

    active = False

    def __init__(self, state: ShardedState) -> None:
        self.state = state

    def check_fused(self) -> None:
        """Raises if weights are updated in backward."""
        if isinstance(self.state.fused_updates, FusedUpdates):
            raise UnsupportedError(
                f"{self.sync.groups.name}: local_shards of a model with fused=True: its weights are "
                "collected in backward, before they could be averaged; remove fused=True"
            )

    def lend(self) -> list[torch.Tensor]:
        """The parts of the weights that train, which are divided; all ranks call it."""
        sync, weights = self.sync, self.state.weights
        for name, p in zip(sync.parameters.names, sync.params, strict=True):
            if p.requires_grad and p.numel() and id(p) not in weights.shards.places:
                raise UnsupportedError(
                    f"{sync.groups.name}: local_shards: parameter {name} trains, and the optimizer= of "
                    "with_bagua does not update it; add it to that optimizer, or set requires_grad=False"
                )
        model = sync.model()
        assert model is not None
        self.active = True
        sync.watch(model)
        return [part for b in weights.shards.buckets if (part := b.part(sync.groups.rank)).numel()]

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks the model where weights are read that may have to be collected first."""
        if not self.active:
            return []
        return [
            model.register_forward_pre_hook(WeakHook(self, "check_collected"), prepend=True),
            model.register_state_dict_pre_hook(WeakHook(self, "check_collected")),
        ]

    def check_collected(self, *_: Any) -> None:
        """Raises if weights are about to be read that the ranks have not collected."""
        if self.state.owed:
            raise MisuseError(
                f"{self.sync.groups.name}: optimizer.step() has updated this rank's part of the weights, and "
                "the other ranks have not got it; call trigram.step(shards) after each update, on all ranks, "
                "with what trigram.local_shards has returned"
            )

    def check_moving(self) -> None:
        """Raises if parameters are about to move: the parts that were lent would no longer be the weights."""
        if self.active:
            raise MisuseError(
                f"{self.sync.groups.name}: the parameters that train, or the order in which they lie in "
                "memory, have changed since trigram.local_shards(model); call trigram.unwrap on the shards "
                "and the model, and wrap both again"
            )
