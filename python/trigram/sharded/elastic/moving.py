"""Who holds which part of a divided optimizer, and how parts move when the ranks of an elastic job change.

A *cut* is one division among the ranks: part q belongs to one rank, and others hold copies of it, which
they update as their own. Nothing is sent for that, for all ranks have the mean of all gradients. The ranks
that hold a part are as far apart as they can be: usually on several hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import serialization
from trigram.collectives.consistency import listed, tell_all
from trigram.elastic.membership import StateLostError
from trigram.runtime.group import Group
from trigram.sharded.weights.optimizer import ShardedOptimizer, Slice, as_here, is_cut
from trigram.sharded.weights.weight_buckets import Layout, WeightBucket

Place = tuple[int, int, int]
"""A slice: its bucket, its part, and the position of its parameter in the bucket."""


@dataclass(frozen=True)
class Cut:
    """Among whom the optimizer's state is divided.

    Attributes:
        number: The cuts before this one; -1 on a rank that has joined and has no part yet.
        owners: World ranks; part q belongs to ``owners[q]``.
        copies: How many ranks hold each part, its owner among them; with fewer ranks, all of them.
    """

    number: int
    owners: tuple[int, ...]
    copies: int

    def parts(self, rank: int) -> list[int]:
        """The parts that a rank holds, its own first."""
        at = self.owners.index(rank)
        return [(at - distance) % len(self.owners) for distance in self._distances()]

    def holders(self, part: int) -> list[int]:
        """The ranks that hold a part, its owner first."""
        return [self.owners[(part + distance) % len(self.owners)] for distance in self._distances()]

    def _distances(self) -> range:
        n, copies = len(self.owners), min(self.copies, len(self.owners))
        return range(0, copies * (n // copies), n // copies)

    def sources(self, present: Collection[int]) -> list[int]:
        """For each part, the rank from which the others take it.

        Args:
            present: The ranks that hold their parts of this cut and remain.

        Raises:
            StateLostError: No rank holds a part.
        """
        remaining = [[r for r in self.holders(q) if r in present] for q in range(len(self.owners))]
        lost = [self.holders(q) for q, ranks in enumerate(remaining) if not ranks]
        if lost:
            raise StateLostError(
                f"elastic: ranks {listed(lost[0])} were lost together, and with them all "
                f"{len(lost[0])} copies of their part of the optimizer's state; restart the job from a "
                "checkpoint. copies= of with_bagua makes more copies",
                lost[0][0],
            )
        return [ranks[0] for ranks in remaining]


@dataclass
class NextCut:
    """A cut that this rank has all of, and may not use before all ranks have theirs.

    Attributes:
        cut: The cut.
        layouts: How the buckets are divided.
        loads: See :func:`~trigram.sharded.weights.weight_buckets.allot`.
        states: The optimizer's state of each slice that this rank will hold and that has one.
    """

    cut: Cut
    layouts: list[Layout]
    loads: list[int]
    states: dict[Place, dict[str, Any]] = field(default_factory=dict)


def collect_weights(buckets: Sequence[WeightBucket], sources: Sequence[int], group: Group) -> None:
    """Collects all weights, each part from the rank that counts for it; all ranks of the group call it."""
    for bucket in buckets:
        of = {r: [q for q, s in enumerate(sources) if s == r] for r in group.ranks}
        lengths = [sum(bucket.part(q).numel() for q in of[r]) for r in group.ranks]
        mine = [bucket.part(q) for q in of[group.ranks[group.rank]]]
        everything = torch.empty(sum(lengths), dtype=bucket.memory.dtype, device=bucket.memory.device)
        collectives.all_gather(everything, torch.cat([*mine, everything[:0]]), group, splits=lengths)
        parts = everything.split([bucket.part(q).numel() for r in group.ranks for q in of[r]])
        for q, part in zip([q for r in group.ranks for q in of[r]], parts, strict=True):
            bucket.part(q).copy_(part)


def move_state(
    shards: ShardedOptimizer,
    params: Sequence[torch.Tensor],
    old: Cut,
    present: Collection[int],
    new: NextCut,
    group: Group,
) -> bool:
    """Brings the optimizer's state to the ranks that hold it in another cut; all ranks of the group call it.

    Nothing changes in the optimizer. Buckets move one after the other, so what is under way stays small.

    Args:
        shards: This rank's slices, none on a rank that has joined.
        params: All parameters of the model, as the layouts number them.
        old: The cut of the slices.
        present: The ranks that hold their parts of it.
        new: Where the state goes; ``states`` is filled.
        group: The owners of the new cut.

    Returns:
        Whether this rank has the whole state of each slice.
    """
    sources, me = old.sources(present), group.ranks[group.rank]

    def sends(part: int, to: int) -> bool:
        """Whether this rank is the one from which another gets an old part; none sends what that one has."""
        mine = [r for r in old.holders(part) if r in present]
        return me == (to if to in mine else sources[part])

    whole = True
    for b, layout in enumerate(new.layouts):
        held = [shards.held(params[i]) for i in layout.indices]
        outgoing = [
            [
                _piece(shards, piece, part, k, max(start, piece.start), min(stop, piece.stop))
                for part in new.cut.parts(rank)
                for k, start, stop in layout.pieces(part)
                for piece in held[k]
                if piece.start < stop
                and start < piece.stop
                and sends(piece.part, rank)
                and shards.optimizer.state.get(piece.value)
            ]
            for rank in group.ranks
        ]
        arrived = _Arrived(layout, params, new.cut.parts(me))
        for pieces in _exchange(outgoing, group):
            arrived.add(pieces)
        whole = whole and arrived.complete()
        new.states.update({(b, part, k): state for (part, k), state in arrived.states.items()})
    return whole


def _piece(shards: ShardedOptimizer, piece: Slice, part: int, k: int, start: int, stop: int) -> list[Any]:
    """What is sent of a slice: to which part and position it goes, its values, what of the state has one for
    each value, what is not on the CPU, and the state."""
    state = shards.optimizer.state[piece.value]
    cut = [n for n, v in state.items() if not piece.whole and is_cut(n, v, piece.value)]
    elsewhere = [n for n, v in state.items() if isinstance(v, torch.Tensor) and not v.is_cpu]
    values = {n: v[start - piece.start : stop - piece.start] if n in cut else v for n, v in state.items()}
    return [part, k, start, stop, cut, elsewhere, values]


def _exchange(outgoing: list[list[list[Any]]], group: Group) -> Iterator[list[list[Any]]]:
    """Sends each rank its pieces, and yields those that came from each."""
    packs = [
        serialization.pack(pieces if place != group.rank else [], "elastic: the optimizer's state")
        for place, pieces in enumerate(outgoing)
    ]
    sizes = tell_all([p.numel() for p in packs], group)
    lengths = [of[group.rank] for of in sizes]
    data = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
    collectives.all_to_all(data, torch.cat(packs), lengths, [p.numel() for p in packs], group)
    for place, (part, rank) in enumerate(zip(data.split(lengths), group.ranks, strict=True)):
        yield serialization.unpack(part, rank) if place != group.rank else outgoing[place]


class _Arrived:
    """The state of the slices of one bucket, put together from pieces."""

    def __init__(self, layout: Layout, params: Sequence[torch.Tensor], parts: Sequence[int]) -> None:
        self.params = [params[i] for i in layout.indices]
        self.bounds = {(q, k): (start, stop) for q in parts for k, start, stop in layout.pieces(q)}
        self.states: dict[tuple[int, int], dict[str, Any]] = {}
        self.have: dict[tuple[int, int], int] = {}

    def add(self, pieces: list[list[Any]]) -> None:
        """Adds pieces, as :func:`_piece` describes them."""
        for part, k, start, stop, cut, elsewhere, values in pieces:
            first, last = self.bounds[part, k]
            param, state = self.params[k], self.states.setdefault((part, k), {})
            self.have[part, k] = self.have.get((part, k), 0) + stop - start
            for name, value in values.items():
                if name in cut:
                    if name not in state:
                        state[name] = torch.zeros(last - first, dtype=value.dtype, device=param.device)
                    state[name][start - first : stop - first] = value
                elif name not in state:
                    here = param if name in elsewhere else None
                    kept = as_here(value, here, param)
                    state[name] = kept.clone() if isinstance(kept, torch.Tensor) else kept

    def complete(self) -> bool:
        """Whether each slice with state has all of it."""
        return all(n == self.bounds[at][1] - self.bounds[at][0] for at, n in self.have.items())
