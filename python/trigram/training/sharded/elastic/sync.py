"""A sharded optimizer in an elastic job: ranks that are lost leave copies of their parts, and parts move when
the ranks change.

Each rank updates its own part and copies of others, from the same mean gradients; so a copy is always of the
same step, and costs no message. After a change of the membership the ranks tell each other how
many updates they have made. If all have made the same number, the state moves to the new owners at once. Else
some ranks wait in a step's gather for others that have yet to make that step: these make it in the old
cut, and the state moves at its end. See docs/adr/0034.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import serialization
from trigram.collectives.consistency import tell_all
from trigram.elastic.recovery import ElasticModel, Stateful
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.runtime.records import broadcast_bytes
from trigram.training import optimizer_hooks
from trigram.training.buckets import assign
from trigram.training.compressors import GradientCompressor
from trigram.training.sharded.agreement import explained, plain_options
from trigram.training.sharded.elastic.moving import Cut, NextCut, collect_weights, move_state
from trigram.training.sharded.sync import ShardedSync
from trigram.training.sharded.weight_buckets import Layout, WeightBucket


class ElasticShardedSync(ShardedSync):
    """The hooks of :class:`ShardedSync` in an elastic job.

    Args:
        model, groups, bucket_bytes, compressor, optimizer, whole: See :class:`ShardedSync`.
        copies: How many ranks hold each part.

    Attributes:
        cut: Among whom the state is divided.
        version: Updates that this rank has made to its slices.
        ended: Updates after which it has left the gather: the script goes on.
        has_weights: Whether it has all weights of its last update.
        state_dicts: Calls of ``state_dict`` that are over.
        has_state: Whether it has all results of the one under way.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        compressor: GradientCompressor,
        optimizer: Optimizer,
        whole: bool,
        copies: int,
    ) -> None:
        self.copies = copies
        owners = () if groups.joining else tuple(groups.group.ranks)
        self.cut = Cut(-1 if groups.joining else 0, owners, copies)
        self.next_cut: NextCut | None = None
        self.version = self.ended = self.state_dicts = 0
        self.has_weights, self.has_state = True, False
        self._counts = self._shared_only = False
        self._composition: list[list[int]] = []
        self._newest = 0
        self._holders: set[int] = set()
        self._replaced: list[tuple[torch.Tensor, Any]] | None = None
        super().__init__(model, groups, bucket_bytes, compressor, optimizer, whole)

    @property
    def moved(self) -> bool:
        """Whether the ranks have changed, and the state has not followed yet."""
        return self.cut.owners != tuple(self.groups.main.ranks)

    # Buckets of weights.

    def _check_options(self) -> None:
        """See :meth:`fingerprint`: a call here could not be repeated."""

    def _divide(self, wanted: Sequence[Layout]) -> None:
        """See :class:`ShardedSync`; that all ranks divide alike was found when the pass was counted."""
        for layout in wanted:
            self._add(layout)
        self.shards.cut()

    def _add(self, layout: Layout) -> None:
        own, *copies = self.cut.parts(self._rank)
        self.shards.add(WeightBucket(self.params, layout, len(self.cut.owners)), own, copies)

    @property
    def _rank(self) -> int:
        """This rank's number in the job."""
        main = self.groups.main
        return int(main.ranks[main.rank])

    def fingerprint(self) -> int:
        """The optimizer's options, now and then, and how parameters will be divided that are not yet."""
        text = ""
        if (self.updates + 1).bit_count() == 1:
            text = plain_options(self.optimizer)
        if missing := self._missing(optimizer_hooks.parameters_of(self.optimizer)):
            buckets = assign(self.params, missing, self.buckets.bucket_bytes)
            text += f"{self._lay_out(buckets, list(self.loads))}{self.shards.outline()}"
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") if text else 0

    def fingerprints_differ(self) -> TrigramError:
        """See :meth:`fingerprint`."""
        return MismatchError(
            f"{self.groups.name}: the ranks have other options in the optimizer's groups (lr, ...), another "
            "optimizer state, or other parameters in the optimizer; load the same checkpoint, make the same "
            "changes and give schedulers the same values on all ranks"
        )

    # Updates.

    def _gather_all(self, updated: set[int]) -> None:
        """Collects the weights of an update; if a rank is lost, the others take its parts from the copies."""
        self.version += 1
        self.has_weights = False
        try:
            if not self.moved:
                super()._gather_all(updated)
                self._await_ranks_without_part()
        except TrigramError as e:
            self._regroup(e)
        while self.moved:  # others had yet to make this update when the ranks changed
            try:
                self._collect(self._holders)
                self._move(self._holders)
            except TrigramError as e:
                self._regroup(e)
        self.has_weights = True
        self.ended += 1

    def _await_ranks_without_part(self) -> None:
        """No rank may be a step ahead of one that has yet to make this update: the gather sees to that, but
        for a rank that has no parameter."""
        ranks = range(len(self.cut.owners))
        if not all(any(b.part(q).numel() for b in self.shards.buckets) for q in ranks):
            collectives.barrier(self.groups.main)

    def _regroup(self, error: TrigramError) -> None:
        """Regroups after the loss of a rank; raises any other error."""
        if not self.elastic.is_loss(error):
            raise error
        self.elastic.regroup(boundary=False)

    def lend(self) -> list[torch.Tensor]:
        """See :class:`ShardedSync`."""
        raise UnsupportedError(
            f"{self.groups.name}: local_shards of a model with elastic=True: parts move between ranks"
        )

    # Changes of the membership.

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """See :class:`StepHooks`; moves the state, if all ranks have made the same updates."""
        super().follow(meta, part)
        self.gathers.end()
        group, indices = self.groups.main, self._indices()
        following = -1 if self.next_cut is None else self.next_cut.cut.number
        counters = [self.version, self.ended, self.state_dicts]
        flags = [int(self.has_weights), int(self.has_state)]
        rows = tell_all([self.cut.number, following, *counters, *flags], group)
        self._newest = max(row[0] for row in rows)
        if following == self._newest:  # a rank uses it already, so all have all of it
            self._use_next()
        self.next_cut = None
        holders = {r: row for r, row in zip(group.ranks, rows, strict=True) if self._newest in row[:2]}
        self._holders = set(holders)
        self._take_over(min(holders), indices)
        version, ended, state_dicts, has_weights, has_state = zip(
            *(row[2:] for row in holders.values()), strict=True
        )
        self._counts = min(n + has for n, has in zip(state_dicts, has_state, strict=True)) > self.state_dicts
        part.behind = part.behind or len(set(ended)) > 1 or len(set(state_dicts)) > 1
        self.cut.sources(holders)  # raises, on all ranks, if all copies of a part are lost
        if len(set(version)) == 1:
            if not all(has_weights):
                self._collect(self._holders)
            self._move(self._holders)

    def _take_over(self, source: int, indices: list[list[int]]) -> None:
        """Tells ranks that have just joined what all others know.

        Args:
            source: The rank that tells it.
            indices: The parameters in each bucket of weights.
        """
        group = self.groups.main
        record = b""
        if self._rank == source:
            counters = [self.version, self.ended, self.state_dicts, self.updates]
            value = [list(self.cut.owners), indices, counters]
            record = serialization.pack(value, "elastic").numpy().tobytes()
        data = broadcast_bytes(group, record, group.ranks.index(source))
        if self.cut.number < 0:
            owners, self._composition, counters = serialization.unpack(
                torch.frombuffer(bytearray(data), dtype=torch.uint8), source
            )
            self.version, self.ended, self.state_dicts, self.updates = counters
            self.cut = Cut(-1, tuple(owners), self.copies)

    def _indices(self) -> list[list[int]]:
        """The parameters in each bucket of weights."""
        places = {id(p): i for i, p in enumerate(self.params)}
        if any(id(p) not in places for b in self.shards.buckets for p in b.params):
            raise UnsupportedError(
                f"{self.groups.name}: elastic: a parameter that was divided among the ranks is no longer in "
                "the model, so the state cannot move; restart the job from a checkpoint, and replace "
                "parameters before with_bagua"
            )
        return [[places[id(p)] for p in b.params] for b in self.shards.buckets]

    def _collect(self, holders: set[int]) -> None:
        """Collects all weights from the ranks that remain; all of them call it."""
        collect_weights(self.shards.buckets, self.cut.sources(holders), self.groups.main)
        self.has_weights = True

    def _move(self, holders: set[int]) -> None:
        """Moves the state to the ranks of the present epoch, which all call it."""
        group = self.groups.main
        if not self.moved and holders == set(group.ranks):
            return
        has_part = self.cut.number >= 0
        if has_part:
            self._prepare()
        composition, loads = self._indices() if has_part else self._composition, [0] * group.size
        cut = Cut(self._newest + 1, tuple(group.ranks), self.copies)
        following = NextCut(cut, self._lay_out(composition, loads), loads)
        whole = move_state(self.shards, self.params, self.cut, holders, following, group)
        self.next_cut = following
        complete = torch.tensor([int(whole)], device="cpu")
        # It ends on no rank before all ranks have what they will hold.
        collectives.all_reduce(complete, "min", None, group)
        if not complete:
            raise MismatchError(
                f"{self.groups.name}: elastic: some ranks have state of a parameter and others have none, so "
                "it cannot move; load the same checkpoint on all ranks"
            )
        self._use_next()

    def _use_next(self) -> None:
        """The parts that have arrived take the place of those that this rank has had."""
        following, self.next_cut = self.next_cut, None
        assert following is not None
        self.shards.clear()
        self.cut, self.loads = following.cut, following.loads
        self._newest, self._holders = following.cut.number, set(following.cut.owners)
        for layout in following.layouts:
            self._add(layout)
        state = self.optimizer.state
        for p, _, _ in self.shards.places.values():
            state.pop(p, None)
        slices = {
            (key, s.part): s for key, (p, _, _) in self.shards.places.items() for s in self.shards.held(p)
        }
        for (b, part, k), values in following.states.items():
            state[slices[id(self.shards.buckets[b].params[k]), part].value] = values
        if self.shards.places:
            self.shards.cut()

    # The optimizer's state.

    def state_sources(self, states: Sequence[Stateful]) -> list[Stateful]:
        """See :class:`StepHooks`; a joining rank gets the state of slices from those that hold them."""
        return [_Shared(self) if s is self.optimizer else s for s in states]

    def shared_state(self) -> dict[str, Any]:
        """The optimizer's state that all ranks have: its groups, and parameters that are not divided."""
        kept, self._shared_only = self.shards.forget(), True
        try:
            found: dict[str, Any] = self.optimizer.state_dict()
        finally:
            self._shared_only = False
            self.optimizer.state.update(kept)
        return found

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`shared_state` returned; slices keep their state."""
        kept, self._shared_only = self.shards.forget(), True
        try:
            self.optimizer.load_state_dict(state)
        finally:
            self._shared_only = False
            self.optimizer.state.update(kept)
            if self.shards.places:
                self.shards.cut()

    def _join(self) -> None:
        """See :class:`ShardedSync`. If a rank is lost, the others repeat it, unless one of them has left it:
        then all have everything."""
        if self.moved:
            raise MisuseError(
                f"{self.groups.name}: state_dict() of a sharded optimizer between backward and step, while a "
                "rank was lost; call it after the step"
            )
        whole: list[tuple[torch.Tensor, dict[str, Any]]] = []
        while True:
            try:
                if not self.has_state:
                    whole = self.shards.gathered(self.groups.main)
                    self.has_state = True
                collectives.barrier(self.groups.main)
                break
            except TrigramError as e:
                self._regroup(explained(e, self.groups.name, "optimizer.state_dict()"))
                if self.has_state and self._counts:
                    break
                self.has_state = False
        self.has_state = False
        self.state_dicts += 1
        self.shards.join(whole)

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if not self._shared_only:
            super()._before_state_dict(optimizer)

    def _before_load_optimizer(self, *args: Any) -> None:
        if self._shared_only or not self.shards.places:
            return
        if not self.elastic.newcomer:
            raise UnsupportedError(
                f"{self.groups.name}: load_state_dict of a sharded optimizer after the first step is not "
                "supported with elastic=True, where ranks may be lost before all have loaded; load before "
                "the first step"
            )
        self._replaced = self.shards.forget()

    def _after_load_optimizer(self, *_: Any) -> None:
        kept, self._replaced = self._replaced, None
        if kept is not None:  # this rank has joined, and has the job's state already
            self.optimizer.state.clear()
            self.optimizer.state.update(kept)
            self.shards.cut()

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        copied = sum(s.stop - s.start for pieces in self.shards.copies.values() for s in pieces)
        return {**super().stats(), "copied_values": copied}


class _Shared:
    """What of a divided optimizer's state all ranks have, for ranks that join."""

    def __init__(self, sync: ElasticShardedSync) -> None:
        self.sync = sync

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return self.sync.shared_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the class."""
        self.sync.load_shared_state(state)
