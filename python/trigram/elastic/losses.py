"""How a rank of an elastic job notices that another is lost, and how those of its replica agree on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trigram import collectives
from trigram.elastic import membership
from trigram.elastic.membership import is_loss
from trigram.errors import AbortedError, TrigramError
from trigram.runtime import serving


@contextlib.contextmanager
def caught() -> Iterator[list[TrigramError]]:
    """A block that a loss ends; it is then in the list that the block gets."""
    lost: list[TrigramError] = []
    try:
        several = membership.replica_group() is not None
        with serving.looking(_look) if several else contextlib.nullcontext():
            yield lost
    except TrigramError as e:
        if not is_loss(e):
            raise
        lost.append(e)


def _look() -> None:
    """Ends a wait when a rank is lost. Where a rank waits for those of its place only, the loss of another
    ends no call, and what is left of that one's replica may not come for long."""
    if membership.has_lost():
        raise AbortedError(membership.why_aborted())


def agreed(lost: bool) -> bool:
    """Whether a rank of this one's replica must regroup; all of them make this call at the same places.

    The ranks of a replica wait for each other in calls of their own. If one regrouped alone, it would wait
    for all members, and the rest of its replica for it.
    """
    group = membership.replica_group()
    if group is None:
        return lost
    flag = torch.tensor([int(lost)], device="cpu")
    try:
        collectives.all_reduce(flag, "max", None, group)
    except TrigramError as e:
        if not is_loss(e):
            raise
        return True
    return bool(flag)
