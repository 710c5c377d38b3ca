"""Averages the optimizer's state together with the weights, for local SGD.

Between averaging steps the momenta of each rank follow the gradients of that rank; averaging them with the
weights keeps them consistent with the averaged weights. They are never reset.
"""

from __future__ import annotations

import torch

from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.collectives.coalesced import as_real
from trigram.errors import MismatchError
from trigram.mixing.step import AveragingStep
from trigram.runtime.records import all_gather_bytes


class OptimizerState(AveragingStep):
    """Averages every floating-point tensor of an optimizer's state that has the shape of its parameter.

    It runs in the averaging steps of the weights, but blocking and without coalesced tensors: an optimizer
    makes its state in its first step, so the sizes are not known before.

    Args:
        groups: The model's process groups.
        optimizer: The optimizer of the model.
    """

    def __init__(self, groups: ModelGroups, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.optimizer = groups, optimizer
        self.sent = 0

    def _state(self) -> list[torch.Tensor]:
        """The state that all ranks have: an optimizer makes that of a parameter when it first updates it, and
        a GradScaler may skip the first update on some ranks, or the ranks use different parameters."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        mine = [
            {
                name: v
                for name, v in sorted(self.optimizer.state.get(p, {}).items())
                if isinstance(v, torch.Tensor)
                and as_real(v).is_floating_point()
                and v.shape == p.shape
                and v.dim()
            }
            for p in params
        ]
        control = self.groups.control
        made = all_gather_bytes(control, "\n".join(" ".join(state) for state in mine).encode())
        if len({text.count(b"\n") for text in made}) > 1:
            raise MismatchError(
                f"{self.groups.name}: the optimizers of the ranks have different numbers of parameters "
                f"({len(params)} here), so their state cannot be averaged; build the same optimizer on all "
                "ranks"
            )
        everywhere = [
            set.intersection(*(set(line.split()) for line in lines))
            for lines in zip(*(text.decode().split("\n") for text in made), strict=True)
        ]
        return [state[name] for state, names in zip(mine, everywhere, strict=True) for name in sorted(names)]

    def take(self) -> None:
        """No snapshot: :meth:`wait` averages in place."""

    def start(self, number: int) -> None:
        """Starts nothing: :meth:`wait` does all."""

    def wait(self) -> None:
        """Averages the state in place, blocking."""
        state = self._state()
        mean_of(state, self.groups, self.groups.sample_weight)
        n = self.groups.size
        self.sent += 2 * (n - 1) * sum(t.nbytes for t in state) // n

    def apply(self, moved: bool) -> None:
        """Changes nothing: :meth:`wait` has averaged in place."""
