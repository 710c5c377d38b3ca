"""What gradients pass on their way to the other ranks.

Their order is in ``GradientPass._ordered_filters`` (``gradient_pass.py``), with the reasons. On the way
back, with the averages, it is the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch

from trigram.averaging.gradient_filter import GradientBucket, GradientFilter, Views
from trigram.averaging.non_finite import NonFiniteCheck
from trigram.averaging.sample_weight import SampleWeight
from trigram.errors import MisuseError
from trigram.gradients.buckets import Bucket
from trigram.steps.fidelity import Fidelity


class BucketOfFilter:
    """A bucket as a script's filter sees it: what it would replace there would not be averaged.

    Args:
        bucket: The bucket.
        name: Of the filter, for errors.
    """

    __slots__ = ("_bucket", "_name")

    _bucket: GradientBucket
    _name: str

    def __init__(self, bucket: GradientBucket, name: str) -> None:
        object.__setattr__(self, "_bucket", bucket)
        object.__setattr__(self, "_name", name)

    def __setattr__(self, attribute: str, value: object) -> None:
        if getattr(self, attribute, None) is value:
            return  # ``bucket.values *= 2``
        raise MisuseError(
            f"filter {self._name}: bucket.{attribute} cannot be replaced, for another tensor would not be "
            "averaged; change the values in place, as in bucket.values.clamp_(-1, 1)"
        )

    @property
    def values(self) -> torch.Tensor:
        """See :class:`GradientBucket`."""
        return self._bucket.values

    @property
    def views(self) -> Views:
        """See :class:`GradientBucket`."""
        return Views(self._bucket.views)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See :class:`GradientBucket`."""
        return self._bucket.tensors

    @property
    def mean(self) -> torch.Tensor:
        """See :class:`GradientBucket`."""
        return self._bucket.mean


class OfScript(GradientFilter):
    """A filter of the script.

    Args:
        own: The filter.
        redoing: The pass is made again: its gradients have gone through the filter.
    """

    def __init__(self, own: GradientFilter, redoing: bool) -> None:
        self.own, self.redoing = own, redoing
        self.name = type(own).__name__

    def pass_begins(self) -> None:
        """A pass begins; one that is made again has begun."""
        if not self.redoing:
            self.own.pass_begins()

    def before(self, bucket: GradientBucket) -> None:
        """Calls it, and raises if it has given parameters other gradients."""
        if self.redoing:
            return
        held = [p.grad for p in bucket.tensors]
        returned: object = self.own.before(BucketOfFilter(bucket, self.name))  # type: ignore[func-returns-value]
        if returned is not None:
            raise MisuseError(
                f"filter {self.name}: before() has returned {type(returned).__name__}, which is not "
                "averaged; change bucket.values or bucket.views[k] in place, and return nothing"
            )
        if any(p.grad is not grad for p, grad in zip(bucket.tensors, held, strict=True)):
            raise MisuseError(
                f"filter {self.name}: before() has set the gradient of a parameter (p.grad = ...), which is "
                "not averaged; change bucket.values or bucket.views[k] in place"
            )

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """Calls it."""
        self.own.averaged([BucketOfFilter(bucket, self.name) for bucket in buckets])

    def after(self, bucket: GradientBucket) -> None:
        """Calls it."""
        self.own.after(BucketOfFilter(bucket, self.name))

    def pass_ends(self) -> None:
        """Calls it."""
        self.own.pass_ends()


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


class Nothing(GradientFilter):
    """This rank contributes nothing to the step under way: it joins, or is a spare.

    Args:
        params: All parameters of the model.
        earlier: By index, the gradients before the pass that all ranks have, as averages of earlier passes;
            None: what the pass makes of it.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        earlier: Mapping[int, torch.Tensor | None] = MappingProxyType({}),
    ) -> None:
        self.params, self.earlier = params, earlier

    def before(self, bucket: GradientBucket) -> None:
        """It has no gradients."""
        mine = cast(Bucket, bucket)
        mine.memory.zero_()
        mine.unused = list(range(len(mine.params)))

    def after(self, bucket: GradientBucket) -> None:
        """What only this rank has used has the gradient that others have, which is none as a rule: an
        optimizer would update it here, and nowhere else, by its decay and momentum."""
        mine = cast(Bucket, bucket)
        for k in mine.by_nobody:
            i = mine.params[k]
            p, average = self.params[i], mine.views[k]
            if i not in self.earlier or p.grad is None:
                p.grad = None
                continue
            before = self.earlier[i]
            p.grad.copy_(average if before is None else before)  # in place: it is no gradient of the script


class Counted(GradientFilter):
    """The mean is over the ranks that contribute.

    Args:
        ranks: All of them.
        silent: How many contribute nothing.
    """

    def __init__(self, ranks: int, silent: int) -> None:
        self.factor = ranks / (ranks - silent)

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """The mean is over all; a robust average has left these ranks out."""
        for bucket in buckets:
            if not cast(Bucket, bucket).average.leaves_out_silent:
                cast(Bucket, bucket).memory.mul_(self.factor)


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
        idle: It is a spare, and does not count in this pass.
    """

    def __init__(
        self,
        check: NonFiniteCheck,
        sparse: Sequence[torch.Tensor],
        weight: SampleWeight | None,
        idle: bool = False,
    ) -> None:
        self.check, self.sparse, self.weight, self.idle = check, sparse, weight, idle

    def pass_begins(self) -> None:
        """Nothing was found."""
        self.check.begin()

    def before(self, bucket: GradientBucket) -> None:
        """Looks."""
        if not self.idle:
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
