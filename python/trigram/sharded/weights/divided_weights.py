"""The weights that an optimizer updates, in buckets of which each rank has a part: how they are divided and
followed when a script changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from trigram.errors import MisuseError
from trigram.gradients.buckets import assign
from trigram.gradients.updating.gradient_part import GradientPart
from trigram.runtime.group import Group
from trigram.sharded.weights.gathers import Gathers
from trigram.sharded.weights.gradient_buckets import layouts
from trigram.sharded.weights.optimizer import ShardedOptimizer
from trigram.sharded.weights.weight_buckets import Layout, WeightBucket, allot, divide


@dataclass(frozen=True)
class Parts:
    """Which parts of each bucket a rank holds.

    Attributes:
        ranks: How many parts there are.
        own: This rank's.
        copies: Those of others that it updates too, so that it can take their place.
    """

    ranks: int
    own: int
    copies: Sequence[int] = ()


class DividedWeights(GradientPart):
    """The weights of one model.

    Args:
        optimizer: The script's optimizer.
        whole: Whether it needs whole parameters.
        divides_gradients: Whether each rank keeps a part of the gradients.
        ranks: How many share the work.

    Attributes:
        divides_gradients: Whether each rank keeps a part of the gradients.
        shards: The optimizer with its buckets of weights, none before the first update.
        gathers: The gathers under way.
        loads: Values that each rank has in buckets of whole parameters.
    """

    def __init__(self, optimizer: Optimizer, whole: bool, divides_gradients: bool, ranks: int) -> None:
        self.divides_gradients = divides_gradients
        self.shards = ShardedOptimizer(optimizer, whole)
        self.gathers = Gathers()
        self.loads = [0] * ranks

    def begin_anew(self) -> None:
        """Nothing is divided any more: the optimizer has the state of whole parameters."""
        self.shards = ShardedOptimizer(self.shards.optimizer, self.shards.whole)

    def prepare(self) -> None:
        """Takes back what a script, or a call that has raised an exception, has put elsewhere: state and
        values of parameters that are divided."""
        self.shards.separate()
        if self.shards.places:
            self.shards.cut()
        self.shards.hold(self.sync.parameters.names_by_id())

    def lacks(self, own: set[int]) -> bool:
        """Whether parameters of the optimizer, with these ``id()``, are not divided yet, or as the buckets of
        gradients were before."""
        if not self.divides_gradients:
            return bool(self.missing(own))
        sync, places = self.sync, self.shards.places
        return layouts(sync.buckets) != [b.layout for b in self.shards.buckets] or any(
            id(sync.params[i]) not in places for i in sync.buckets.place
        )

    def missing(self, own: set[int]) -> list[int]:
        """The parameters of the optimizer, by index, that are in no bucket of weights."""
        params, places = self.sync.params, self.shards.places
        return [
            i
            for bucket in self.sync.buckets
            for i in bucket.params
            if id(params[i]) in own and id(params[i]) not in places and params[i].numel()
        ]

    def check_all_updated(self, own: set[int]) -> None:
        """Raises if the optimizer, of the parameters with these ``id()``, lacks one whose gradient is
        divided."""
        sync = self.sync
        for i in sync.buckets.place:
            if id(sync.params[i]) not in own and sync.params[i].numel():
                name = sync.parameters.names[i]
                raise MisuseError(
                    f"sharded: parameter {name} trains, and the optimizer= of with_bagua does not "
                    "update it; with gradients='shards' no rank has its whole gradient: add it to the "
                    "optimizer, set requires_grad=False, or use gradients='full'"
                )

    def lay_out_missing(self, own: set[int], loads: list[int]) -> list[Layout]:
        """How parameters that are not divided yet will be; ``loads``: see :func:`allot`."""
        return self.lay_out(
            assign(self.sync.params, self.missing(own), self.sync.buckets.bucket_bytes), loads
        )

    def lay_out(self, buckets: Sequence[Sequence[int]], loads: list[int]) -> list[Layout]:
        """How buckets of these parameters are divided; ``loads``: see :func:`allot`."""
        params = self.sync.params
        return [
            allot(params, indices, loads) if self.shards.whole else divide(params, indices, len(loads))
            for indices in buckets
        ]

    def add(self, layout: Layout, parts: Parts) -> None:
        """Moves the parameters of a bucket there."""
        self.shards.add(WeightBucket(self.sync.params, layout, parts.ranks), parts.own, parts.copies)

    # All ranks get all weights.

    def count_gathers(self, updated: set[int]) -> int:
        """The calls of :meth:`gather`."""
        return sum(_is_left(bucket, updated) for bucket in self.shards.buckets)

    def gather(self, updated: set[int]) -> None:
        """Starts to collect the buckets of weights, but for those of which all parameters are in
        ``updated``."""
        for k, bucket in enumerate(self.shards.buckets):
            if _is_left(bucket, updated):
                self.gather_bucket(k, self.sync.groups.main)

    def gather_bucket(self, k: int, group: Group) -> None:
        """Starts to collect a bucket of weights."""
        self.gathers.start(k, self.shards.buckets[k], group)

    def own_values(self) -> int:
        """How many values this rank updates for all."""
        return sum(s.stop - s.start for s in self.shards.slices.values())


def _is_left(bucket: WeightBucket, updated: set[int]) -> bool:
    """Whether a step updates some of a bucket's parameters that backward has not."""
    return any(id(p) not in updated for p in bucket.params)
