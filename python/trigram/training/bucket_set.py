"""The buckets of one model: which parameter's gradient lies where, and the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.averaging.held_residual import positions
from trigram.runtime.memory import kept_tensors
from trigram.training.buckets import Bucket, assign
from trigram.training.compressors import GradientCompressor
from trigram.training.sharded_gradient import ShardedGradient


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
        two_phase: Those whose averages have a second phase.
        copies: Parameters keep the memory that autograd has allocated, and get copies of the averages.
        flags: For each parameter of buckets without flags, whether this rank has used it; None: there is no
            such bucket.
        owed: By index of a parameter, what averages of before have held back and the next gradients make up
            for: one-dimensional, float32, this rank's own.
    """

    def __init__(self, groups: ModelGroups, bucket_bytes: int, compressor: GradientCompressor) -> None:
        self.groups = groups
        self.bucket_bytes = bucket_bytes
        self.compressor = compressor
        self.params: Sequence[torch.Tensor] = []
        self.copies = False
        self.place: dict[int, tuple[Bucket, int]] = {}
        self.two_phase: list[Bucket] = []
        self.flags: torch.Tensor | None = None
        self.owed: dict[int, torch.Tensor] = {}
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
    def order(self) -> list[int]:
        """The indices of the parameters, in the order in which they are sent."""
        return [i for bucket in self._all for i in bucket.params]

    def begin_anew(self, params: Sequence[torch.Tensor], order: Sequence[int]) -> None:
        """Makes buckets for other parameters, without residuals.

        Args:
            params: All parameters of the model.
            order: The indices of those that are averaged.
        """
        self.params = params
        self.build(order, keep_residuals=False)

    @kept_tensors()
    def build(self, order: Sequence[int], keep_residuals: bool = True) -> None:
        """Builds the buckets; gradients and, if asked, residuals move with their parameters. Averages without
        residuals make up for those of averages with them: see ``owed``.

        Args:
            order: The indices of the parameters, in the order in which backward computes their gradients.
            keep_residuals: Whether what averages have held back so far is kept.
        """
        kept: dict[int, dict[str, torch.Tensor]] = {}
        if keep_residuals:
            for bucket in self._all:
                bucket.average.fold()
            kept = {i: parts for b in self._all for i, parts in self._parts(b)}
        else:
            self.owed = {}
        self._all = []
        self.compressor.begin(self.groups.size)
        for indices in assign(self.params, order, self.bucket_bytes):
            bucket = self.compressor.bucket(indices, self.params, self.groups)
            bucket.ready()
            for i, parts in self._parts(bucket):
                before, residual = kept.get(i, {}), parts.get("residual")
                for name in parts.keys() & before.keys():
                    parts[name].copy_(before[name])
                if residual is not None and i in self.owed:
                    residual.view(-1).add_(self.owed.pop(i))
                elif residual is None and "residual" in before:
                    held = before["residual"].flatten().nan_to_num(0.0, 0.0, 0.0)
                    self.owed[i] = held + self.owed.get(i, 0.0)
            self._all.append(bucket)
        self.place = {i: (b, k) for b in self._all for k, i in enumerate(b.params)}
        for i, (bucket, k) in self.place.items():
            old = self.params[i].grad
            if old is not None and not old.is_sparse and not self.copies and bucket.keeps_gradients:
                bucket.views[k].copy_(old.of_this_rank() if isinstance(old, ShardedGradient) else old)
                self.params[i].grad = bucket.views[k]
        count = sum(len(b.params) for b in self._all if b.flags is None)
        self.flags = torch.zeros(count, dtype=torch.uint8, device="cpu") if count else None
        self.two_phase = [b for b in self._all if b.average.calls]

    def _parts(self, bucket: Bucket) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The state of each parameter in a bucket, which moves with it to another bucket."""
        of_average, of_compressor = bucket.average.parts(bucket.views), self._compressor_parts(bucket)
        for i, a, b in zip(bucket.params, of_average, of_compressor, strict=True):
            yield i, {**a, **b}

    def _compressor_parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        return self.compressor.parts(bucket) if bucket.flags is None else [{} for _ in bucket.params]

    # What a pass asks for.

    def repay(self, bucket: Bucket) -> None:
        """Adds what is owed to the gradients that this rank has, before they are averaged."""
        for k, i in enumerate(bucket.params) if self.owed else ():
            if i in self.owed and k not in bucket.unused:
                [at] = positions([bucket.views[k]], bucket.memory)
                bucket.memory[at] += self.owed[i]

    def repaid(self) -> None:
        """The pass has ended well: only what this rank had no gradient for is still owed."""
        for i in list(self.owed):
            bucket, k = self.place[i]
            if k not in bucket.unused:
                del self.owed[i]

    def placed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of a bucket, with the view into the bucket that its gradient should be."""
        return ((self.params[i], bucket.views[k]) for i, (bucket, k) in self.place.items())

    def calls(self) -> tuple[int, int]:
        """The number of collectives of a pass in the groups ``main`` and ``second_phase``."""
        first = sum(b.calls for b in self._all) + (self.flags is not None)
        return first, sum(b.average.calls for b in self.two_phase)

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
