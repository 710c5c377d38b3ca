"""With which members of an elastic job a rank trains a model: with all, or, where replicas have several
ranks, with those that have its place in theirs."""

from __future__ import annotations

from collections.abc import Sequence

from trigram.elastic.membership import current
from trigram.runtime.group import Group
from trigram.runtime.world import REPLICA_ORDINALS


def first(ranks: Sequence[int]) -> int:
    """Of these ranks, that whose state and buffers count: the lowest that was not started as a spare. A spare
    has the weights of all, and buffers of its own inputs."""
    spares = current()[1].spares.ranks
    return min(ranks, key=lambda r: (r in spares, r))


def training_group() -> Group:
    """The group of the ranks that train a model together: all members, or those with this rank's place in
    their replicas. All of them call it."""
    now, mine = current()
    if mine.replicas.size == 1:
        return now.group
    return now.new_group(row(now.group), "places", REPLICA_ORDINALS)


def row(group: Group) -> list[int]:
    """Those ranks of a group of this rank that have its place in their replicas."""
    return current()[1].replicas.row(group.ranks[group.rank], group.ranks)


def first_place() -> int:
    """The place of that rank in the group that trains a model."""
    ranks = row(current()[0].group)
    return ranks.index(first(ranks))


def is_newcomer() -> bool:
    """Whether this rank has joined and not taken part in a step yet."""
    return current()[1].newcomer


def has_spares() -> bool:
    """Whether a rank of the job, as far as this one knows, was started as a spare."""
    return bool(current()[1].spares.ranks)


def replica_size() -> int:
    """How many ranks make up a replica."""
    return current()[1].replicas.size


def counting() -> int:
    """How many ranks of the group that trains a model count: all but spares."""
    _, mine = current()
    return len(mine.training()) // mine.replicas.size


def among(group: Group) -> Group:
    """Those of a group that have this rank's place in their replicas, in the present epoch. All its ranks
    call it."""
    now, mine = current()
    if mine.replicas.size == 1:
        return group
    known = tuple(group.ranks)
    if known not in mine.places:
        mine.places[known] = now.among(group, "places", row(group))
    return mine.places[known]
