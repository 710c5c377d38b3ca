"""A group: ranks that communicate with each other, as this process sees them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trigram import _core
from trigram.errors import MisuseError

_HELPER_POLL = 0.02
"""Seconds between two checks of a helper whether the group still needs it."""


class Group:
    """Ranks that communicate with each other.

    Attributes:
        ranks: World ranks, by place in the group.
        rank: This rank's place, -1 if it is not in the group.
        size: Number of ranks.
        helpers: World ranks without data of their own that reduce for the group; they are not in ``ranks``.
        name: What error messages call it.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "derived",
        "helpers",
        "name",
        "ordinal",
        "rank",
        "ranks",
        "routes",
        "size",
        "timeout",
    )

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        core: _core.Group | None,
        timeout: float | None,
        helpers: Sequence[int] = (),
        ordinal: int = 0,
    ) -> None:
        self.name = name
        self.ordinal = ordinal
        self.derived = 0
        self.routes: dict[
            torch.device, object
        ] = {}  # by device, how its tensors travel: trigram/gpu/routes.py
        self.ranks = list(ranks)
        self.helpers = list(helpers)
        self.size = len(self.ranks)
        self.rank = core.rank if core is not None else -1
        self.timeout = timeout
        self._core = core

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    @property
    def core(self) -> _core.Group:
        """The engine's side; an error where this rank is not a member."""
        if self._core is None:
            raise MisuseError(
                f"this rank is not in group {self.name} (world ranks {self.ranks}); only members can call "
                "its collectives"
            )
        return self._core

    def group_rank(self, rank: int, what: str) -> int:
        """The place of a world rank, as torch's ``src`` and ``dst`` name ranks."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise MisuseError(
                f"{what}: rank {rank} is not in group {self.name}; pass one of its world ranks, {self.ranks}"
            ) from None

    def become(self, other: Group) -> None:
        """Takes the place of another group: an elastic job has made itself anew."""
        self.name, self.ordinal, self.derived, self.routes = other.name, other.ordinal, 0, {}
        self.ranks, self.size, self.rank, self._core = other.ranks, other.size, other.rank, other._core

    def help(self) -> None:
        """This rank, one of the ``helpers``, takes part in all calls of the group until a member leaves."""
        self.core.help()
        while self.core.is_helping():
            time.sleep(_HELPER_POLL)

    def hosts(self) -> list[list[int]]:
        """Places by host: those in one list share memory."""
        return self.core.hosts
