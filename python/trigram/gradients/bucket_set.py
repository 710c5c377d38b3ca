"""The buckets of one model: which parameter's gradient lies where, and the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.averaging.held_residual import positions
from trigram.collectives import coalesced
from trigram.gradients.buckets import Bucket, assign
from trigram.gradients.compressors import GradientCompressor
from trigram.gradients.in_parts import ShardedGradient
from trigram.runtime.inference_mode import kept_tensors


@dataclass(frozen=True)
class _Parts:
    """The state of one parameter: what its average and the compressor keep of it, by name.

    Attributes:
        layout: Dtype, shape and strides of its place in the bucket: the order of the values.
    """

    layout: tuple[torch.dtype, torch.Size, tuple[int, ...]]
    named: dict[str, torch.Tensor]

    def copy(self) -> _Parts:
        """The same in memory of its own."""
        return _Parts(self.layout, {name: part.clone() for name, part in self.named.items()})


class BucketSet(Sequence[Bucket]):
    """The buckets, in the order in which they are sent.

    Args:
        groups: The model's process groups.
        bucket_bytes: The size of a bucket in bytes.
        compressor: Chooses how gradients are averaged.

    Attributes:
        bucket_bytes: As above; :meth:`build` follows it.
        compressor: As above.
        place: By index of a parameter, its bucket and its position there.
        are_on_cpu: Whether the gradients are in the CPU's memory.
        have_phases: Whether an average has calls that follow its first.
        flags: For each parameter of buckets without flags, whether this rank has used it; None: there is no
            such bucket.
        owed: By parameter, what averages of before have held back and the next gradients make up for:
            one-dimensional, float32, this rank's own.
        resting: By parameter, the state of those that have no bucket now.
        spare: Buckets of frozen parameters, by their parameters: they are used again as they are.
    """

    def __init__(self, groups: ModelGroups, bucket_bytes: int, compressor: GradientCompressor) -> None:
        self.groups = groups
        self.bucket_bytes = bucket_bytes
        self.compressor = compressor
        self.params: Sequence[torch.Tensor] = []
        self.place: dict[int, tuple[Bucket, int]] = {}
        self.have_phases = False
        self.are_on_cpu = True
        self.flags: torch.Tensor | None = None
        self.owed: dict[torch.Tensor, torch.Tensor] = {}
        self.resting: dict[torch.Tensor, _Parts] = {}
        self.spare: dict[tuple[torch.Tensor, ...], Bucket] = {}
        self._made_by = compressor
        self._all: list[Bucket] = []

    @overload
    def __getitem__(self, k: int) -> Bucket: ...
    @overload
    def __getitem__(self, k: slice) -> list[Bucket]: ...
    def __getitem__(self, k: int | slice) -> Bucket | list[Bucket]:
        """The `k`-th bucket, or some of them."""
        return self._all[k]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    @property
    def copies(self) -> bool:
        """Whether parameters keep the gradients that a script holds, and get copies of the averages."""
        return self.groups.copies_gradients

    def keep_for_script(self) -> None:
        """From now on gradients are copied, if the script holds some: they are to stay what it holds, also
        when other buckets take the place of these."""
        if not self.copies:
            self.groups.copies_gradients = any(bucket.is_held_by_script() for bucket in self._all)

    @property
    def order(self) -> list[int]:
        """The indices of the parameters, in the order in which they are sent."""
        return [i for bucket in self._all for i in bucket.params]

    def begin_anew(self, params: Sequence[torch.Tensor], order: Sequence[int]) -> None:
        """Makes buckets for other parameters. Those that have some no more keep what they are owed.

        Args:
            params: All parameters of the model.
            order: The indices of those that are averaged.
        """
        there = set(params)
        self.keep_for_script()
        self._spare_all()
        gone = [of for of in self.spare if not there.issuperset(of)]
        self._rest([self.spare.pop(of) for of in gone])
        self.resting = {p: kept for p, kept in self.resting.items() if p in there}
        self.owed = {p: owed for p, owed in self.owed.items() if p in there}
        self.params = params
        self.build(order)

    def _spare_all(self) -> None:
        self.spare |= {bucket.tensors: bucket for bucket in self._all}
        self._all = []

    def _rest(self, buckets: Sequence[Bucket]) -> None:
        """The parameters of buckets that are used no more rest, with their state."""
        for bucket in buckets:
            bucket.average.fold()
            self.resting |= self._parts(bucket)

    @kept_tensors()
    def build(self, order: Sequence[int], keep_residuals: bool = True) -> None:
        """Builds the buckets; gradients and, if asked, residuals move with their parameters. Averages without
        residuals make up for those of averages with them: see ``owed``.

        Args:
            order: The indices of the parameters, in the order in which backward computes their gradients.
            keep_residuals: Whether what averages have held back so far is kept.
        """
        self.keep_for_script()
        self._spare_all()
        if not keep_residuals:
            self.owed, self.resting, self.spare = {}, {}, {}
        self.compressor.begin(self.groups.size)
        wanted = assign(self.params, order, self.bucket_bytes)
        again = self._used_again(wanted)
        for indices in wanted:
            bucket = again.get(tuple(self.params[i] for i in indices))
            if bucket is None:
                bucket = self.compressor.bucket(indices, self.params, self.groups)
                bucket.ready()
                for p, parts in self._parts(bucket).items():
                    self._resume(p, parts)
            else:
                bucket.params = list(indices)  # the model may have other parameters beside them now
            self._all.append(bucket)
        # In memory of their own: what they were parts of may be large.
        self.resting = {p: parts.copy() for p, parts in self.resting.items()}
        self.place = {i: (b, k) for b in self._all for k, i in enumerate(b.params)}
        for i, (bucket, k) in self.place.items():
            old = self.params[i].grad
            if old is not None and not old.is_sparse and not self.copies and bucket.keeps_gradients:
                bucket.views[k].copy_(old.of_this_rank() if isinstance(old, ShardedGradient) else old)
                self.params[i].grad = bucket.grad(k)
        count = sum(len(b.params) for b in self._all if b.flags is None)
        self.flags = torch.zeros(count, dtype=torch.uint8, device="cpu") if count else None
        self.have_phases = any(b.average.calls for b in self._all)
        self.are_on_cpu = all(b.memory.is_cpu for b in self._all)

    def _used_again(self, wanted: Sequence[Sequence[int]]) -> dict[tuple[torch.Tensor, ...], Bucket]:
        """Spare buckets that are just what is wanted; those that only share parameters with it are dissolved.

        Parts of a model that are frozen in turn each find their buckets as they were. That matters for the
        second phase's residual, which belongs to a part of a bucket and not to a parameter: folded into this
        rank's own in each turn, it would have to pass both phases at once to be sent.
        """
        keys = {tuple(self.params[i] for i in indices) for indices in wanted}
        trained = {p for key in keys for p in key}
        again = {of: b for of, b in self.spare.items() if of in keys and self._fits(b)}
        rest = [of for of, b in self.spare.items() if of not in again and not self._may_stay(b, trained)]
        self._rest([self.spare.pop(of) for of in rest])
        self._made_by = self.compressor
        for of in again:
            del self.spare[of]
        return again

    def _fits(self, bucket: Bucket) -> bool:
        """Whether the bucket is what the compressor would make now, and of no interest to a script."""
        mine = self._made_by is self.compressor and bucket.keeps_gradients and not bucket.is_held_by_script()
        return mine and all(
            (p.dtype, p.shape, p.device, coalesced.is_channels_last(p))
            == (view.dtype, view.shape, view.device, coalesced.is_channels_last(view))
            for p, view in zip(bucket.tensors, bucket.views, strict=True)
        )

    def _may_stay(self, bucket: Bucket, trained: set[torch.Tensor]) -> bool:
        """Whether a bucket is kept for the turn of its parameters: it has state, and none of them trains."""
        has_state = any(bucket.average.parts(bucket.views))
        return has_state and self._fits(bucket) and trained.isdisjoint(bucket.tensors)

    def _resume(self, param: torch.Tensor, parts: _Parts) -> None:
        """The parameter has a place in a new bucket, with the state ``parts`` there: it gets its own."""
        before = self.resting.pop(param, _Parts(parts.layout, {}))
        if before.layout != parts.layout:  # another shape, or another order in memory
            before = _Parts(parts.layout, {})
        residual, held = parts.named.get("residual"), before.named.get("residual")
        for name in parts.named.keys() & before.named.keys():
            parts.named[name].copy_(before.named[name])
        if residual is not None and param in self.owed:
            residual.view(-1).add_(self.owed.pop(param))
        elif residual is None and held is not None:
            self.owed[param] = held.flatten().nan_to_num(0.0, 0.0, 0.0) + self.owed.get(param, 0.0)

    def _parts(self, bucket: Bucket) -> dict[torch.Tensor, _Parts]:
        """The state of each parameter in a bucket, which moves with it to another bucket."""
        of_average, of_compressor = bucket.average.parts(bucket.views), self._compressor_parts(bucket)
        return {
            p: _Parts((view.dtype, view.shape, view.stride()), {**a, **b})
            for p, view, a, b in zip(bucket.tensors, bucket.views, of_average, of_compressor, strict=True)
        }

    def _compressor_parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        return self.compressor.parts(bucket) if bucket.flags is None else [{} for _ in bucket.params]

    # What a pass asks for.

    def repay(self, bucket: Bucket) -> None:
        """Adds what is owed to the gradients that this rank has, before they are averaged."""
        for k, i in enumerate(bucket.params) if self.owed else ():
            owed = self.owed.get(self.params[i])
            if owed is not None and k not in bucket.unused:
                [at] = positions([bucket.views[k]], bucket.memory)
                bucket.memory[at] += owed

    def repaid(self) -> None:
        """The pass has ended well: only what this rank had no gradient for is still owed."""
        for i, (bucket, k) in self.place.items() if self.owed else ():
            if k not in bucket.unused:
                self.owed.pop(self.params[i], None)

    def owed_by_index(self) -> dict[int, torch.Tensor]:
        """A copy of what is owed, by index of a parameter, for a checkpoint."""
        return {i: self.owed[p].clone() for i, p in enumerate(self.params) if p in self.owed}

    def load_owed(self, owed: dict[int, torch.Tensor]) -> None:
        """Restores what :meth:`owed_by_index` returned."""
        self.owed = {self.params[i]: values.clone() for i, values in owed.items()}

    def placed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of a bucket, with the view into the bucket that its gradient should be."""
        return ((self.params[i], bucket.views[k]) for i, (bucket, k) in self.place.items())

    def calls(self) -> tuple[int, int]:
        """The number of collectives of a pass in the groups ``main`` and ``second_phase``."""
        first = sum(b.calls for b in self._all) + (self.flags is not None)
        return first, sum(b.average.calls for b in self._all)

    def reduce_flags(self) -> collectives.Work | None:
        """Starts the all_reduce of the flags of buckets without flags; None if there is no such bucket."""
        if self.flags is None:
            return None
        self.flags.fill_(1)
        at = 0
        for bucket in self._all:
            if bucket.flags is None:
                for k in bucket.unused:
                    self.flags[at + k] = 0
                at += len(bucket.params)
        return collectives.all_reduce(self.flags, "max", None, self.groups.main, async_op=True)

    def with_flags(self) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        """Each bucket with its part of ``flags``; None: it has flags of its own."""
        at = 0
        for bucket in self._all:
            if bucket.flags is not None:
                yield bucket, None
                continue
            assert self.flags is not None
            yield bucket, self.flags[at : at + len(bucket.params)]
            at += len(bucket.params)

    # State.

    def state(self) -> list[Any]:
        """The residuals and the compressor's state of each bucket, for a checkpoint."""
        return [(b.average.state(), self._compressor_parts(b)) for b in self._all]

    def load(self, saved: Sequence[Any]) -> None:
        """Restores what :meth:`state` returned; the order is the same."""
        for bucket, (average, parts) in zip(self._all, saved, strict=True):
            bucket.average.load(average)
            for mine, old in zip(self._compressor_parts(bucket), parts, strict=True):
                for name, part in mine.items():
                    part.copy_(old[name])
