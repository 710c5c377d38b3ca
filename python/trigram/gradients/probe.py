"""Looks at a model's gradients while it trains: when each is ready, the norm of this rank's own, and a sample
of them and of their means."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trigram.averaging.gradient_filter import GradientBucket, GradientFilter
from trigram.steps.fidelity import square

PART, PARTS = 4096, 4
"""Values that stand together in a sample, and how many such parts each bucket gives."""


def sample(values: torch.Tensor) -> list[torch.Tensor]:
    """Copies of some parts of a one-dimensional tensor."""
    starts = range(0, max(1, len(values) - PART), max(1, len(values) // PARTS))
    return [values[at : at + PART].clone() for at in starts]


class GradientProbe(GradientFilter):
    """What the gradients of a pass are like; :class:`trigram.gradients.gradient_sync.GradientSync` tells it.

    Args:
        norms: Whether the norm is wanted: it reads each gradient once more.
        samples: Whether samples are wanted.

    Attributes:
        times: By parameter index, when backward has computed its gradient, as ``time.perf_counter`` says.
        square: The squared norm of this rank's gradients, before they are encoded and averaged.
        own: Samples of this rank's gradients.
        means: The same of the means.
    """

    def __init__(self, norms: bool = False, samples: bool = False) -> None:
        self.norms, self.samples = norms, samples
        self.own: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []
        self.times: dict[int, float] = {}
        self.square = 0.0

    def ready(self, i: int) -> None:
        """Parameter ``i`` has its gradient."""
        self.times[i] = time.perf_counter()

    def before(self, bucket: GradientBucket) -> None:
        """The gradients of a bucket are complete; they are of this rank only."""
        if self.norms:
            self.square += square(bucket.values)
        if self.samples:
            self.own += sample(bucket.values)

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """The means are there."""
        for bucket in buckets if self.samples else ():
            self.means += sample(bucket.mean)
