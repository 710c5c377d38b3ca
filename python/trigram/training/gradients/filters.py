"""What gradients pass on their way to the other ranks.

Their order is in ``GradientPass._ordered_filters`` (``gradient_pass.py``), with the reasons. On the way
back, with the averages, it is the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from trigram.averaging.gradient_filter import GradientBucket, GradientFilter
from trigram.averaging.non_finite import NonFiniteCheck
from trigram.averaging.sample_weight import SampleWeight
from trigram.training.elasticity import Elasticity
from trigram.training.fidelity import Fidelity
from trigram.training.gradients.buckets import Bucket


class Compared(GradientFilter):
    """Compares what this rank computed with the averages."""

    def __init__(self, fidelity: Fidelity) -> None:
        self.fidelity = fidelity

    def before(self, bucket: GradientBucket) -> None:
        """This rank's own gradients."""
        self.fidelity.own(bucket.values)

    def after(self, bucket: GradientBucket) -> None:
        """The averages, or this rank's part of them."""
        self.fidelity.mean(bucket.mean, bucket.mean is not bucket.values)

    def pass_ends(self) -> None:
        """Ranks tell each other."""
        self.fidelity.end()


class Joining(GradientFilter):
    """Ranks that join contribute nothing to the step under way, and the mean is over the others."""

    def __init__(self, elastic: Elasticity, ranks: int, weighted: bool) -> None:
        self.elastic, self.ranks, self.weighted = elastic, ranks, weighted

    def before(self, bucket: GradientBucket) -> None:
        """This rank has no gradients."""
        if self.elastic.newcomer:
            mine = cast(Bucket, bucket)
            mine.memory.zero_()
            mine.unused = list(range(len(mine.params)))

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """With sample weights, these ranks weigh nothing."""
        if self.elastic.newcomers and not self.weighted:
            for bucket in buckets:
                cast(Bucket, bucket).memory.mul_(self.ranks / (self.ranks - len(self.elastic.newcomers)))


class Repeated(GradientFilter):
    """A filter of the script, in a pass that is repeated: its gradients have gone through it.

    Args:
        once: The filter.
    """

    def __init__(self, once: GradientFilter) -> None:
        self.once = once

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """The averages are there."""
        self.once.averaged(buckets)

    def after(self, bucket: GradientBucket) -> None:
        """The parameters of a bucket have them."""
        self.once.after(bucket)

    def pass_ends(self) -> None:
        """The pass has ended."""
        self.once.pass_ends()


class Silent(GradientFilter):
    """A rank of weight 0 contributes nothing, whatever its gradients are."""

    def __init__(self, weight: SampleWeight) -> None:
        self.weight = weight

    def before(self, bucket: GradientBucket) -> None:
        """NaN times 0 were NaN."""
        if self.weight.mine == 0.0:
            bucket.values.zero_()


class Finite(GradientFilter):
    """``check_finite``.

    Args:
        check: Looks at values.
        sparse: Parameters whose gradients are in no bucket.
        weight: How much this rank counts; None: as much as the others.
    """

    def __init__(
        self, check: NonFiniteCheck, sparse: Sequence[torch.Tensor], weight: SampleWeight | None
    ) -> None:
        self.check, self.sparse, self.weight = check, sparse, weight

    def pass_begins(self) -> None:
        """Nothing was found."""
        self.check.begin()

    def before(self, bucket: GradientBucket) -> None:
        """Looks."""
        self.check.check(bucket.values)

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """Raises on all ranks if one has found something."""
        for param in self.sparse if self.weight is None or self.weight.mine else ():
            if param.grad is not None and param.grad.is_sparse:
                self.check.check(param.grad._values())
        self.check.raise_if_any()


class Weighed(GradientFilter):
    """``sample_weight``."""

    def __init__(self, weight: SampleWeight) -> None:
        self.weight = weight

    def before(self, bucket: GradientBucket) -> None:
        """Multiplies by this rank's weight."""
        self.weight.weigh(bucket.values)

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """Makes weighted means of the means."""
        for bucket in buckets:
            self.weight.normalize(bucket.mean)
        self.weight.factor()  # of a pass without buckets too: it may raise


class Through(GradientFilter):
    """Gradients go through a function.

    Args:
        change: Called with each bucket.
        arrived: Called when the averages are there; None: nothing is.
    """

    def __init__(
        self, change: Callable[[Bucket], object], arrived: Callable[[], object] | None = None
    ) -> None:
        self.change, self.arrived = change, arrived

    def before(self, bucket: GradientBucket) -> None:
        """Calls it."""
        self.change(cast(Bucket, bucket))

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """Calls the other."""
        if self.arrived is not None:
            self.arrived()
