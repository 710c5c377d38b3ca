"""The two groups of a rank with experts: those that share out the experts, and those that have the same."""

from __future__ import annotations

from trigram.errors import MisuseError
from trigram.runtime.group import Group
from trigram.runtime.world import current, new_group


def groups(size: int | None = None) -> tuple[Group, Group]:
    """Divides the ranks into sets of ``size`` neighbours; each set has all experts once. All ranks call it.

    Args:
        size: Ranks that share out the experts; None: all. It divides the number of ranks.

    Returns:
        The group for :func:`dispatch`: this rank's set. And the group of the ranks that have the same experts
        as this one, one of each set, over which the parameters of experts are averaged:
        ``with_bagua(experts, group=replicas)``.

    Raises:
        MisuseError: ``size`` does not divide the number of ranks.
    """
    ranks = current().group.ranks
    size = len(ranks) if size is None else size
    if size < 1 or len(ranks) % size:
        raise MisuseError(
            f"moe.groups: size={size} does not divide the {len(ranks)} ranks; pass a divisor of their number"
        )
    here = ranks.index(current().rank)
    sharing = [new_group(ranks[at : at + size]) for at in range(0, len(ranks), size)]
    replicas = [new_group(ranks[at::size]) for at in range(size)]
    return sharing[here // size], replicas[here % size]
