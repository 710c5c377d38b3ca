"""An algorithm on gradients that a script registers, as docs/extending.md has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import trigram
from trigram.averaging import GradientAverage


class Ternary(GradientAverage):
    """The mean of values that each rank rounds to -s, 0 or s; s is the largest of the rank."""

    def __init__(
        self, memory: torch.Tensor, views: Sequence[torch.Tensor], groups: Any, threshold: float
    ) -> None:
        super().__init__(memory, views, groups)
        self.threshold, self.error = threshold, self.keep("error")

    def phases(self, step: int) -> Any:
        """See :class:`GradientAverage`."""
        self.error += self.memory
        self.memory.copy_(rounded(self.error, self.threshold))
        self.error -= self.memory
        yield trigram.all_reduce(self.memory, "avg", group=self.groups.main, async_op=True)


def rounded(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """What a rank sends of these values."""
    largest = values.abs().max()
    return values.sign() * largest * (values.abs() > threshold * largest)


def register() -> None:
    """Registers it as ``ternary``, once in a process."""
    if "ternary" not in [entry["name"] for entry in trigram.algorithms()]:
        trigram.register("ternary", trigram.Trigram(), average=Ternary, threshold=0.5)
