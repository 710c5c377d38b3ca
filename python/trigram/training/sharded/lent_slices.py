"""Averages between replicas, each of which is sharded: an algorithm averages this rank's parts of the weights
with the same parts of other replicas, and the ranks of a replica collect the weights afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.errors import MisuseError, UnsupportedError
from trigram.runtime.weak_hook import WeakHook
from trigram.training import optimizer_hooks
from trigram.training.sharded.divided_weights import DividedWeights


class LentSlices(DividedWeights):
    """Divided weights whose parts may be lent.

    Attributes:
        lent: Whether an algorithm averages this rank's parts of the weights between replicas.
        owed: Whether parts that were lent have been updated, and not collected since.
    """

    lent = owed = False

    @torch.no_grad()
    def lend(self) -> list[torch.Tensor]:
        """This rank's parts of the weights that train, for an algorithm that averages them between replicas.

        From now on the weights are collected by :meth:`collect`, after such an average, and not in ``step``.
        All ranks call it, between steps.
        """
        if self.fused is not None:
            raise UnsupportedError(
                f"{self.groups.name}: local_shards of a model with fused=True: its weights are collected in "
                "backward, before they could be averaged; remove fused=True"
            )
        self._between_steps("local_shards")
        self._follow(optimizer_hooks.parameters_of(self.optimizer))
        for name, p in zip(self.names, self.params, strict=True):
            if p.requires_grad and p.numel() and id(p) not in self.shards.places:
                raise UnsupportedError(
                    f"{self.groups.name}: local_shards: parameter {name} trains, and the optimizer= of "
                    "with_bagua does not update it; add it to that optimizer, or set requires_grad=False"
                )
        model = self.model()
        assert model is not None
        self.lent = True
        self.watch(model)
        return [part for b in self.shards.buckets if (part := b.part(self.groups.rank)).numel()]

    def watch(self, model: nn.Module) -> None:
        """Hooks the model; also where weights are read that may have to be collected first."""
        super().watch(model)
        if self.lent:
            self.handles += [
                model.register_forward_pre_hook(WeakHook(self, "_check_collected"), prepend=True),
                model.register_state_dict_pre_hook(WeakHook(self, "_check_collected")),
            ]

    def collect(self) -> None:
        """Collects the weights from the parts that were lent; all ranks call it."""
        self.owed = False
        super().collect()

    def _check_collected(self, *_: Any) -> None:
        if self.owed:
            raise MisuseError(
                f"{self.groups.name}: optimizer.step() has updated this rank's part of the weights, and the "
                "other ranks have not got it; call trigram.step(shards) after each update, on all ranks, "
                "with what trigram.local_shards has returned"
            )

    def _before_moving(self) -> None:
        """See :class:`DividedWeights`: the parts that were lent would no longer be the weights."""
        if self.lent:
            raise MisuseError(
                f"{self.groups.name}: the parameters that train, or the order in which they lie in memory, "
                "have changed since trigram.local_shards(model); call trigram.unwrap on the shards and the "
                "model, and wrap both again"
            )
