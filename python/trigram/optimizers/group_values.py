"""The options of an optimizer's groups, as they are at one time.

A fused pass steps several times, and what is counted there is counted once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

KERNELS = "capturable", "foreach", "fused", "differentiable"
"""Options that choose a kernel, and not what is computed; torch.compile sets some, on the ranks where it
compiles."""


class GroupValues:
    """The options of an optimizer's groups, among them what some count there: steps, sums of weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.kept: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k != "params"}
            self.kept.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()})

    def put_back(self) -> None:
        """Makes them what they were."""
        for group, kept in zip(self.optimizer.param_groups, self.kept, strict=True):
            for name in [k for k in group if k != "params" and k not in kept]:
                del group[name]
            for name, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)  # a compiled step may hold it
                else:
                    group[name] = value

    def same(self) -> bool:
        """Whether they are what they were."""
        return GroupValues(self.optimizer).plain() == self.plain()

    def plain(self) -> list[dict[str, Any]]:
        """Them without tensors, to compare."""
        return [
            {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in o.items()} for o in self.kept
        ]
