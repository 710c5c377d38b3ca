"""The script's calls of a sharded optimizer outside of its step: ``state_dict``, ``load_state_dict``, and
``train`` and ``eval`` of schedule-free ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.training.group_values import GroupValues
from trigram.training.sharded.agreement import StayCheck, agree
from trigram.training.sharded.divided_weights import DividedWeights


class OptimizerCalls(DividedWeights):
    """Divided weights whose optimizer gives, and takes, the state of whole parameters.

    Attributes:
        stay: In the job whose ranks hold the other parts of the state.
    """

    stay: StayCheck

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self.shards.places:
            self.stay.check("optimizer.state_dict()")
            self._between_steps("state_dict()")
            self.shards.cut()
            self._join()

    def _after_state_dict(self, *_: Any) -> None:
        self.shards.separate()

    def _before_load_optimizer(self, *_: Any) -> None:
        if self.shards.places:
            self.stay.check("optimizer.load_state_dict()")
            self._between_steps("load_state_dict()")

    def _after_load_optimizer(self, *_: Any) -> None:
        if self.shards.places:
            agree(self.groups, "optimizer.load_state_dict()", self.shards.outline(loaded=True))
            self.shards.cut()

    @torch.no_grad()
    def swap(self, call: str, method: Callable[[], Any]) -> Any:
        """A method of the optimizer that may exchange the weights: it sees this rank's slices."""
        if not self.shards.places or self.shards.entered:
            return method()
        self.stay.check(call)
        self._between_steps(call)
        self._prepare()
        before = GroupValues(self.optimizer)
        self.shards.enter(lambda p: True, gradients=False)
        try:
            found = method()
        finally:
            self.shards.leave()
        notes_it = all("train_mode" in g for g in self.optimizer.param_groups)
        if not (notes_it and before.same()):  # the weights may be others
            self.collect()
        return found
