"""Orders to leave an elastic job that come from outside of it, as ``trigram drain`` gives them: by its store.

An order names ranks and the epoch in which it was given, and holds in no other, so that nobody can give an
old one again. It is sealed with the job's secret. The leader publishes the orders with the job's status, and
each rank looks at the seal itself: any process may write to the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trigram.runtime import logs, seals
from trigram.runtime.live_store import ReconnectingStore

BY = "trigram drain"
_COUNT = "elastic/orders/{}.{}"
"""How many orders were given, by epoch and number of empty regroups; who gives one adds one."""
_ORDER = "elastic/order/{}.{}/{}"
"""Each of them, by these and its number: its seal, and JSON."""
_KIND = "drain in {}.{}"
_MOST = 16
"""The newest orders, which are looked at."""
_LONGEST = 4096
_LIFE = 600.0
"""Seconds for which an order holds at most: another job of the same secret has epochs of the same numbers."""


@dataclass(frozen=True)
class Period:
    """Between two changes of the members.

    Attributes:
        epoch: See ``membership.py``.
        empty_regroups: How often the members have met in it without a change.
    """

    epoch: int
    empty_regroups: int


def give(store: ReconnectingStore, period: Period, ranks: Sequence[int]) -> None:
    """Asks members of a job to leave it after their step."""
    at = period.epoch, period.empty_regroups
    body = json.dumps({"ranks": sorted(ranks), "at": time.time()}).encode()
    number = int(store(lambda s: s.add(_COUNT.format(*at), 1)) or 0)
    store.put(_ORDER.format(*at, number), seals.sealed(_KIND.format(*at), body, seals.secret()))


def found(store: ReconnectingStore, period: Period) -> list[str]:
    """The orders that a store has for this period; they may be anybody's."""
    at = period.epoch, period.empty_regroups
    count = int(store(lambda s: s.add(_COUNT.format(*at), 0)) or 0)
    numbers = range(max(1, count - _MOST + 1), count + 1)
    texts = [store.get(_ORDER.format(*at, number)) for number in numbers]
    return [text.decode("latin-1") for text in texts if text is not None and len(text) <= _LONGEST]


class Orders:
    """What a rank knows of orders.

    Args:
        rank: This rank.
        together: Who leaves if these ranks do: their replicas.
    """

    def __init__(self, rank: int, together: Callable[[Sequence[int]], set[int]]) -> None:
        self._rank, self._together, self._warned = rank, together, ""

    def accepted(
        self, found: list[str], period: Period, members: Sequence[int], leaving: Sequence[int]
    ) -> list[str]:
        """On the leader: the orders that it publishes. Somebody must be left when all of them are followed.

        Args:
            found: What :func:`found` has returned.
            period: The present one.
            members: All of them.
            leaving: Those that were asked to leave already.
        """
        accepted, gone = [], set(leaving)
        for text in found:
            ranks = self._ranks(text, period)
            more = gone | {r for r in members if ranks is not None and r in ranks}
            if ranks is None:
                continue
            if more.issuperset(members):
                self._warn("with those that leave already it names all members")
                continue
            gone = more
            accepted.append(text)
        return accepted

    def name_me(self, published: Any, period: Period) -> bool:
        """Whether one of the published orders asks this rank to leave.

        Args:
            published: What the leader has accepted; any process may have written it.
            period: The present one, which is that of the orders.
        """
        texts = [text for text in published if isinstance(text, str)] if isinstance(published, list) else []
        named = (self._ranks(text, period) for text in texts[:_MOST])
        return any(ranks is not None and self._rank in ranks for ranks in named)

    def _ranks(self, text: str, period: Period) -> set[int] | None:
        """Who leaves by an order; None: nobody, because it is not one to follow."""
        kind = _KIND.format(period.epoch, period.empty_regroups)
        body = seals.opened(kind, text.encode("latin-1", "replace"), seals.secret())
        if body is None:
            self._warn("it is not sealed with this job's TRIGRAM_SECRET")
            return None
        try:
            order = json.loads(body)
            ranks, at = [int(rank) for rank in order["ranks"]], float(order["at"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._warn("it is malformed")
            return None
        if not abs(time.time() - at) < _LIFE:
            self._warn("it is older than ten minutes, or clocks differ by as much")
            return None
        return self._together(ranks)

    def _warn(self, why: str) -> None:
        """Says once why an order is not followed."""
        if why != self._warned:
            self._warned = why
            logs.warning(f"{BY}: rank {self._rank} does not follow an order in the job's store: {why}")
