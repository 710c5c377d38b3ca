"""Inside one host: means of gradients, the update and the new weights of all ranks in one pass over memory.

With ``fused=True`` no gradients are averaged then. When all ranks have the gradients of a bucket, each rank
reads its part of them from all ranks' memory, updates its weights and state with their mean, and writes the
weights into the memory of all ranks, a few thousand values at a time, which stay in its cache. See
docs/adr/0032.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import tell_all
from trigram.collectives.updates import Piece, update
from trigram.gradients.buckets import Bucket
from trigram.sharded import rules
from trigram.sharded.weights.optimizer import ShardedOptimizer
from trigram.sharded.weights.weight_buckets import WeightBucket


class Flags(Average):
    """In place of a bucket's average: tells all ranks which of its parameters any rank has used.

    Attributes:
        replaced: The average, with its number of calls.
    """

    name = "flags"

    def __init__(self, bucket: Bucket, groups: ModelGroups) -> None:
        assert bucket.flags is not None
        self.memory, self.groups = bucket.flags, groups
        self.sent = (groups.size - 1) * bucket.nbytes // groups.size
        self.replaced = bucket.average, bucket.calls

    def phases(self, step: int) -> Phases:
        """See :class:`trigram.averaging.exchange.Exchange`."""
        yield collectives.all_reduce(self.memory, "max", None, self.groups.main, async_op=True)


class OnePass:
    """Which passes of a model are updated at once, and how.

    Args:
        optimizer: The script's optimizer.
        groups: The model's process groups.

    Attributes:
        updates: How many buckets were updated at once.
    """

    def __init__(self, optimizer: Optimizer, groups: ModelGroups) -> None:
        self.optimizer, self.groups = optimizer, groups
        self.updates = 0
        self._roundings: dict[tuple[Any, ...], rules.Rounding | None] = {}  # the same on all ranks
        self._matched: tuple[list[Bucket], list[WeightBucket], list[int | None] | None] = [], [], None
        self._options: dict[int, tuple[Mapping[str, Any], rules.Rounding]] = {}
        self._places: list[int | None] = []
        self._rules: dict[tuple[int, float, bool], Any] = {}

    def agree(self) -> None:
        """Finds for which of the optimizer's groups the engine gives torch's bits on all ranks, which all
        call it."""
        optimizer = self.optimizer
        found = {rules.kind(optimizer, g): rules.rounding(optimizer, g) for g in optimizer.param_groups}
        mine = [rules.ROUNDINGS.index(how) if how is not None else -1 for how in found.values()]
        everywhere = tell_all(mine, self.groups.main)
        for key, *codes in zip(found, *everywhere, strict=True):
            alike = codes[0] >= 0 and len(set(codes)) == 1
            self._roundings[key] = rules.ROUNDINGS[codes[0]] if alike else None

    def begin(self, buckets: Sequence[Bucket], shards: ShardedOptimizer, fuses: bool) -> bool:
        """Whether the pass that begins is updated at once; its buckets then have flags instead of averages.

        Args:
            buckets: The buckets of gradients.
            shards: The optimizer with its buckets of weights.
            fuses: Whether the pass may update weights.
        """
        self._rules = {}
        places = self._usable(buckets, shards) if fuses else None
        self._places = places or []
        for bucket in buckets:
            own = isinstance(bucket.average, Flags)
            if places is not None and not own:
                bucket.average, bucket.calls = Flags(bucket, self.groups), 1
            elif places is None and own:
                bucket.average, bucket.calls = cast(Flags, bucket.average).replaced
        return places is not None

    def _usable(self, buckets: Sequence[Bucket], shards: ShardedOptimizer) -> list[int | None] | None:
        """For each bucket of gradients that of its weights, None if it has no values; None if not all match,
        or a group cannot be updated at once."""
        if shards.whole or self.groups.size == 1 or len(self.groups.main.core.hosts) > 1:
            return None
        self._options = {}
        for group in self.optimizer.param_groups:
            how = self._roundings.get(rules.kind(self.optimizer, group))
            if how is None or not rules.has_rule(self.optimizer, group):
                return None
            self._options |= {id(p): (group, how) for p in group["params"]}
        if len({how.fused for _, how in self._options.values()}) > 1:
            return None
        if any(id(p) not in self._options for bucket in shards.buckets for p in bucket.params):
            return None  # one has left the optimizer's groups
        known, weights, places = self._matched
        if [*map(id, known)] != [*map(id, buckets)] or [*map(id, weights)] != [*map(id, shards.buckets)]:
            places = _matching(buckets, shards.buckets)
            self._matched = list(buckets), list(shards.buckets), places
        return places

    def start(
        self, k: int, bucket: Bucket, shards: ShardedOptimizer
    ) -> tuple[WeightBucket, collectives.Work] | None:
        """Starts the update of the k-th bucket of gradients, whose flags are there; all ranks call it.

        Returns:
            The bucket of weights, and the call; None: the bucket has no values.
        """
        place = self._places[k]
        if place is None:
            return None
        weights = shards.buckets[place]
        layout, fused = weights.layout, True
        pieces: list[Piece] = []
        for param, at in zip(weights.params, layout.offsets, strict=True):
            group, how = self._options[id(param)]
            fused = how.fused
            if param.grad is None:
                continue
            increment_version(param)  # autograd does not see what other ranks write
            part = shards.slices.get(id(param))
            if part is None:
                continue
            state = self.optimizer.state[part.value] if rules.states(self.optimizer, group) else {}
            first = rules.begin(self.optimizer, group, part.value, state)
            held = []
            for name in rules.states(self.optimizer, group):
                if not state[name].is_contiguous():
                    state[name] = state[name].contiguous()
                held.append(state[name])
            rule = self._rule(group, float(state["step"]) if "step" in state else 1.0, first)
            flipped = how.flipped_from(param.numel())
            flipped += at if flipped < param.numel() else 0
            pieces.append(Piece(at + part.start, at + part.stop, flipped, rule, held))
        pieces.sort(key=lambda piece: piece.start)
        last = max(a + shape.numel() for a, shape in zip(layout.offsets, layout.shapes, strict=True))
        ends = [min(bound, last) for bound in layout.bounds]
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        work = update(bucket.memory, weights.memory, lengths, pieces, fused, self.groups.second_phase)
        self.updates += 1
        return weights, work

    def _rule(self, group: Mapping[str, Any], step: float, first: bool) -> Any:
        key = id(group), step, first
        if key not in self._rules:
            self._rules[key] = rules.rule(self.optimizer, group, step, first)
        return self._rules[key]


def _matching(buckets: Sequence[Bucket], weights: Sequence[WeightBucket]) -> list[int | None] | None:
    """See :meth:`OnePass._usable`."""
    known = {
        _filled(w.layout.indices, w.layout.offsets, w.layout.shapes, w.layout.strides): k
        for k, w in enumerate(weights)
    }
    places: list[int | None] = []
    for bucket in buckets:
        if type(bucket.average) not in (FullAverage, Flags) or bucket.flags is None:
            return None  # a codec, a robust average, or gradients of which each rank keeps a part
        if bucket.memory.dtype != torch.float32 or not bucket.memory.is_cpu:
            return None
        shapes, strides = [v.shape for v in bucket.views], [v.stride() for v in bucket.views]
        key = _filled(bucket.params, coalesced.offsets(bucket.views)[0], shapes, strides)
        if key and key not in known:
            return None
        places.append(known[key] if key else None)
    return places if {*places} - {None} == {k for key, k in known.items() if key} else None


def _filled(
    indices: Sequence[int],
    offsets: Sequence[int],
    shapes: Sequence[torch.Size],
    strides: Sequence[tuple[int, ...]],
) -> tuple[Any, ...]:
    """Where the parameters that have values lie in a bucket."""
    places = zip(indices, offsets, shapes, strides, strict=True)
    return tuple((i, at, stride) for i, at, shape, stride in places if shape.numel())
