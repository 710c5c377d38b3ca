"""What local SGD shares beside weights: the optimizer's state.

Between averages each rank's momenta follow its own gradients; averaging them with the weights
keeps them pointing where the averaged weights go. They are never reset.
"""

from __future__ import annotations

import torch

from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.mixing.step import AveragingStep


class OptimizerState(AveragingStep):
    """Averages every tensor of an optimizer's state that is shaped as its parameter.

    It goes with the rounds of weights, but has no flat tensors and is over at once: optimizers make
    their state in their first step, so there is no place for it before.
    """

    def __init__(self, groups: ModelGroups, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.optimizer = groups, optimizer
        self.sent = 0

    def _state(self) -> list[torch.Tensor]:
        return [
            v
            for group in self.optimizer.param_groups
            for p in group["params"]
            for _, v in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(v, torch.Tensor) and v.is_floating_point() and v.shape == p.shape and v.dim()
        ]

    def take(self) -> None:
        """Nothing."""

    def start(self, round: int) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Averages the state."""
        state = self._state()
        mean_of(state, self.groups, self.groups.sample_weight)
        n = self.groups.size
        self.sent += 2 * (n - 1) * sum(t.nbytes for t in state) // n

    def apply(self, moved: bool) -> None:
        """Done already."""
