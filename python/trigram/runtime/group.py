"""A group of ranks that communicate with each other, as this process sees it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch

from trigram import _core
from trigram.errors import MisuseError
from trigram.runtime.weak import copied

_HELPER_POLL = 0.02
"""Seconds between two checks by a helper whether the group still exists."""


class _Route(Protocol):
    """The route of GPU tensors, as far as a group knows it."""

    def abort(self, why: str) -> None:
        """Aborts the calls in flight."""


class _NoMember:
    """In place of the engine's group on ranks that are not in it: whatever they ask of it is an error."""

    __slots__ = ("_error",)

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise MisuseError(self._error)


_all: weakref.WeakSet[Group] = weakref.WeakSet()


def all_groups() -> list[Group]:
    """The groups of this process that still exist."""
    return copied(_all.__iter__)


class Group:
    """Ranks that communicate with each other.

    Attributes:
        core: The engine's group; whatever ranks that are not members ask of it raises MisuseError.
        ranks: World ranks; the index of a rank in this list is its group rank.
        rank: The group rank of this process, -1 if it is not a member.
        size: Number of ranks.
        helpers: World ranks that have no data, but reduce data of the group; they are not in ``ranks``.
        name: The group's name in error messages.
        timeout: Seconds that a collective may take; None: no limit.
        describe: Says what the group's calls belong to, for log lines, such as a model and its step; None:
            nothing.
    """

    __slots__ = (
        "__weakref__",
        "core",
        "derived",
        "describe",
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
        ] = {}  # by device, the route of its tensors: trigram/gpu/routes.py
        self.ranks = list(ranks)
        self.helpers = list(helpers)
        self.size = len(self.ranks)
        self.rank = core.rank if core is not None else -1
        self.timeout = timeout
        self.describe: Callable[[], str] | None = None
        _all.add(self)
        # An attribute and not a property: every call reads it.
        self.core: _core.Group = core or cast(
            _core.Group,
            _NoMember(
                f"this rank is not in group {name} (world ranks {self.ranks}); only members can call its "
                "collectives"
            ),
        )

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    def group_rank(self, rank: int, what: str) -> int:
        """The group rank of a world rank; ``what`` names the call in the error.

        Raises:
            MisuseError: The rank is not a member.
        """
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise MisuseError(
                f"{what}: rank {rank} is not in group {self.name}; pass one of its world ranks, {self.ranks}"
            ) from None

    def become(self, other: Group) -> None:
        """Takes over the members of another group, because an elastic job has changed its membership."""
        self.name, self.ordinal, self.derived, self.routes = other.name, other.ordinal, 0, {}
        self.ranks, self.size, self.rank, self.core = other.ranks, other.size, other.rank, other.core

    def abort(self, why: str = "") -> None:
        """Aborts the group on all ranks: its calls and messages under way and all later ones raise
        ``AbortedError``. Other groups go on.

        Returns at once, also if other ranks are stuck in a call; one member is enough to call it.

        Args:
            why: For the error message.

        Raises:
            MisuseError: This rank is not a member.
        """
        self.core.abort_all(why)
        for route in self.routes.values():
            cast(_Route, route).abort(why or "the group was aborted")

    def help(self) -> None:
        """Takes part in all calls of the group as one of its ``helpers``; returns when a member has left."""
        self.core.help()
        while self.core.is_helping():
            time.sleep(_HELPER_POLL)

    def hosts(self) -> list[list[int]]:
        """Group ranks by host: the ranks of each inner list share memory."""
        return self.core.hosts
