"""Looks at a model's gradients while it trains: when each is ready, and the norm of this rank's own."""

from __future__ import annotations

import time

from trigram.averaging.gradient_filter import GradientBucket, GradientFilter
from trigram.training.fidelity import square


class GradientProbe(GradientFilter):
    """What the gradients of one pass are like; :class:`trigram.training.gradient_sync.GradientSync` tells it.

    Args:
        norms: Whether the norm is wanted: it reads each gradient once more.

    Attributes:
        times: By parameter index, when backward has computed its gradient, as ``time.perf_counter`` says.
        square: The squared norm of this rank's gradients, before they are encoded and averaged.
    """

    def __init__(self, norms: bool = False) -> None:
        self.norms = norms
        self.times: dict[int, float] = {}
        self.square = 0.0

    def ready(self, i: int) -> None:
        """Parameter ``i`` has its gradient."""
        self.times[i] = time.perf_counter()

    def before(self, bucket: GradientBucket) -> None:
        """The gradients of a bucket are complete; they are of this rank only."""
        if self.norms:
            self.square += square(bucket.values)
