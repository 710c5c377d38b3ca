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

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import serialization
from trigram.collectives.consistency import tell_all
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.optimizers import optimizer_hooks
from trigram.runtime.records import broadcast_bytes
from trigram.sharded.agreement import explained, plain_options
from trigram.sharded.elastic.moving import Cut, NextCut, collect_weights, move_state
from trigram.sharded.recovery import Recovery
from trigram.sharded.weights.divided_weights import DividedWeights, Parts
from trigram.sharded.weights.weight_buckets import Layout
from trigram.steps.step_recovery import Arrival, Stateful


class CopiedParts(Recovery):
    """The recovery of an elastic job.

    Args:
        groups: The model's process groups.
        copies: How many ranks hold each part.

    Attributes:
        cut: Among whom the state is divided.
        version: Updates that this rank has made to its slices.
        ended: Updates after which it has left the gather: the script goes on.
        has_weights: Whether it has all weights of its last update.
        state_dicts: Calls of ``state_dict`` that are over.
        has_state: Whether it has all results of the one under way.
    """

    def __init__(self, groups: ModelGroups, copies: int) -> None:
        self.copies, self.groups = copies, groups
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

    @property
    def weights(self) -> DividedWeights:
        """The weights, with this rank's slices."""
        return self.state.weights

    @property
    def moved(self) -> bool:
        """Whether the ranks have changed, and the state has not followed yet."""
        return self.cut.owners != tuple(self.groups.main.ranks)

    # Buckets of weights.

    def check_options(self) -> None:
        """See :meth:`fingerprint`: a call here could not be repeated."""

    def agree(self, wanted: Sequence[Layout]) -> None:
        """See :class:`Recovery`; that all ranks divide alike was found when the pass was counted."""

    def parts(self) -> Parts:
        """See :class:`Recovery`."""
        own, *copies = self.cut.parts(self._rank)
        return Parts(len(self.cut.owners), own, copies)

    @property
    def _rank(self) -> int:
        """This rank's number in the job."""
        main = self.groups.main
        return int(main.ranks[main.rank])

    def most_leaving(self) -> int:
        """See :class:`SharedState`: of each part a copy is left, if all copies are where they belong."""
        settled = self.next_cut is None and set(self.cut.owners) == set(self.groups.main.ranks)
        return self.copies - 1 if settled else 0

    def fingerprint(self) -> int:
        """The optimizer's options, now and then, and how parameters will be divided that are not yet."""
        text = ""
        optimizer = self.state.optimizer
        if (self.state.count + 1).bit_count() == 1:
            text = plain_options(optimizer)
        if missing := self.weights.lay_out_missing(
            optimizer_hooks.parameters_of(optimizer), list(self.weights.loads)
        ):
            text += f"{missing}{self.weights.shards.outline()}"
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

    def gather(self, updated: set[int]) -> None:
        """Collects the weights of an update; if a rank is lost, the others take its parts from the copies."""
        self.version += 1
        self.has_weights = False
        try:
            if not self.moved:
                self.state.gather(updated)
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
        if not all(any(b.part(q).numel() for b in self.weights.shards.buckets) for q in ranks):
            collectives.barrier(self.groups.main)

    def _regroup(self, error: TrigramError) -> None:
        """Regroups after the loss of a rank; raises any other error."""
        if not self.state.sync.elastic.is_loss(error):
            raise error
        self.state.sync.elastic.regroup(boundary=False)

    def check_lending(self) -> None:
        """See :class:`Recovery`."""
        raise UnsupportedError(
            f"{self.groups.name}: local_shards of a model with elastic=True: parts move between ranks"
        )

    # Changes of the membership.

    def follow(self, part: Arrival) -> None:
        """See :class:`Recovery`; moves the state, if all ranks have made the same updates."""
        self.weights.gathers.end()
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
            counters = [self.version, self.ended, self.state_dicts, self.state.count]
            value = [list(self.cut.owners), indices, counters]
            record = serialization.pack(value, "elastic").numpy().tobytes()
        data = broadcast_bytes(group, record, group.ranks.index(source))
        if self.cut.number < 0:
            owners, self._composition, counters = serialization.unpack(
                torch.frombuffer(bytearray(data), dtype=torch.uint8), source
            )
            self.version, self.ended, self.state_dicts, self.state.count = counters
            self.cut = Cut(-1, tuple(owners), self.copies)

    def _indices(self) -> list[list[int]]:
        """The parameters in each bucket of weights."""
        places = {id(p): i for i, p in enumerate(self.state.sync.params)}
        if any(id(p) not in places for b in self.weights.shards.buckets for p in b.params):
            raise UnsupportedError(
                f"{self.groups.name}: elastic: a parameter that was divided among the ranks is no longer in "
                "the model, so the state cannot move; restart the job from a checkpoint, and replace "
                "parameters before with_bagua"
            )
        return [[places[id(p)] for p in b.params] for b in self.weights.shards.buckets]

    def _collect(self, holders: set[int]) -> None:
        """Collects all weights from the ranks that remain; all of them call it."""
        collect_weights(self.weights.shards.buckets, self.cut.sources(holders), self.groups.main)
        self.has_weights = True

    def _move(self, holders: set[int]) -> None:
        """Moves the state to the ranks of the present epoch, which all call it."""
        group = self.groups.main
        if not self.moved and holders == set(group.ranks):
            return
        has_part = self.cut.number >= 0
        if has_part:
            self.weights.prepare()
        composition, loads = self._indices() if has_part else self._composition, [0] * group.size
        cut = Cut(self._newest + 1, tuple(group.ranks), self.copies)
        following = NextCut(cut, self.weights.lay_out(composition, loads), loads)
        shards, params = self.weights.shards, self.state.sync.params
        whole = move_state(shards, params, self.cut, holders, following, group)
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
        self.weights.shards.clear()
        self.cut, self.weights.loads = following.cut, following.loads
        self._newest, self._holders = following.cut.number, set(following.cut.owners)
        for layout in following.layouts:
            self.weights.add(layout, self.parts())
        state = self.state.optimizer.state
        for p, _, _ in self.weights.shards.places.values():
            state.pop(p, None)
        slices = {
            (key, s.part): s
            for key, (p, _, _) in self.weights.shards.places.items()
            for s in self.weights.shards.held(p)
        }
        for (b, part, k), values in following.states.items():
            state[slices[id(self.weights.shards.buckets[b].params[k]), part].value] = values
        if self.weights.shards.places:
            self.weights.shards.cut()

    # The optimizer's state.

    def state_sources(self, states: Sequence[Stateful]) -> list[Stateful]:
        """See :class:`Recovery`; a joining rank gets the state of slices from those that hold them."""
        return [_Shared(self) if s is self.state.optimizer else s for s in states]

    def shared_state(self) -> dict[str, Any]:
        """The optimizer's state that all ranks have: its groups, and parameters that are not divided."""
        kept, self._shared_only = self.weights.shards.forget(), True
        try:
            found: dict[str, Any] = self.state.optimizer.state_dict()
        finally:
            self._shared_only = False
            self.state.optimizer.state.update(kept)
        return found

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`shared_state` returned; slices keep their state."""
        kept, self._shared_only = self.weights.shards.forget(), True
        try:
            self.state.optimizer.load_state_dict(state)
        finally:
            self._shared_only = False
            self.state.optimizer.state.update(kept)
            if self.weights.shards.places:
                self.weights.shards.cut()

    def whole_state(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """See :class:`Recovery`. If a rank is lost, the others repeat it, unless one of them has left it:
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
                    whole = self.weights.shards.gathered(self.groups.main)
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
        return whole

    def gives_whole_state(self) -> bool:
        """See :class:`Recovery`."""
        return not self._shared_only

    def before_load(self) -> None:
        """See :class:`Recovery`."""
        if self._shared_only:
            return
        if not self.state.sync.elastic.newcomer:
            raise UnsupportedError(
                f"{self.groups.name}: load_state_dict of a sharded optimizer after the first step is not "
                "supported with elastic=True, where ranks may be lost before all have loaded; load before "
                "the first step"
            )
        self._replaced = self.weights.shards.forget()

    def after_load(self) -> None:
        """See :class:`Recovery`."""
        kept, self._replaced = self._replaced, None
        if kept is not None:  # this rank has joined, and has the job's state already
            self.state.optimizer.state.clear()
            self.state.optimizer.state.update(kept)
            self.weights.shards.cut()

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        copied = sum(s.stop - s.start for pieces in self.weights.shards.copies.values() for s in pieces)
        return {"copied_values": copied}


class _Shared:
    """What of a divided optimizer's state all ranks have, for ranks that join."""

    def __init__(self, recovery: CopiedParts) -> None:
        self.recovery = recovery

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return self.recovery.shared_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the class."""
        self.recovery.load_shared_state(state)
