"""Orders to leave an elastic job that come from outside of it, by its store: ``trigram drain`` and ``evict``.

An order names ranks and the epoch in which it was given, and holds in no other, so that nobody can give an
old one again. It is sealed with the job's secret. The leader publishes the orders with the job's status, and
each rank looks at the seal itself: any process may write to the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True)
class Order:
    """An order that may be followed.

    Attributes:
        ranks: Whom it names.
        evicts: They are to be taken out at once; otherwise they leave when their step is over.
    """

    ranks: frozenset[int]
    evicts: bool


def give(store: ReconnectingStore, period: Period, ranks: Sequence[int], evicts: bool = False) -> None:
    """Has members leave a job, after their step or at once; see :class:`Order`."""
    at = period.epoch, period.empty_regroups
    body = json.dumps({"ranks": sorted(ranks), "at": time.time(), "evicts": evicts}).encode()
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

    def __init__(self, rank: int, together: Callable[[Iterable[int]], set[int]]) -> None:
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
            order = self._read(text, period)
            if order is None:
                continue
            more = gone | (self._together(order.ranks) & set(members))
            if more.issuperset(members):
                self._warn("with those that leave already it names all members")
                continue
            gone = more
            accepted.append(text)
        return accepted

    def name_me(self, published: Any, period: Period) -> bool:
        """Whether one of the published orders asks this rank to leave after its step.

        Args:
            published: What the leader has accepted; any process may have written it.
            period: The present one, which is that of the orders.
        """
        orders = self._published(published, period)
        return any(self._rank in self._together(order.ranks) for order in orders if not order.evicts)

    def evicted(self, published: Any, period: Period) -> set[int]:
        """The ranks that published orders take out at once; of their replicas the others leave by themselves.
        The arguments are those of :meth:`name_me`."""
        orders = self._published(published, period)
        return {rank for order in orders if order.evicts for rank in order.ranks}

    def _published(self, published: Any, period: Period) -> list[Order]:
        texts = [text for text in published if isinstance(text, str)] if isinstance(published, list) else []
        read = (self._read(text, period) for text in texts[:_MOST])
        return [order for order in read if order is not None]

    def _read(self, text: str, period: Period) -> Order | None:
        """An order; None if it is not one to follow."""
        kind = _KIND.format(period.epoch, period.empty_regroups)
        body = seals.opened(kind, text.encode("latin-1", "replace"), seals.secret())
        if body is None:
            self._warn("it is not sealed with this job's TRIGRAM_SECRET")
            return None
        try:
            order = json.loads(body)
            ranks, at = frozenset(int(rank) for rank in order["ranks"]), float(order["at"])
            read = Order(ranks, order.get("evicts") is True)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            self._warn("it is malformed")
            return None
        if not abs(time.time() - at) < _LIFE:
            self._warn("it is older than ten minutes, or clocks differ by as much")
            return None
        return read

    def _warn(self, why: str) -> None:
        """Says once why an order is not followed."""
        if why != self._warned:
            self._warned = why
            logs.warning(
                f"trigram drain, evict: rank {self._rank} does not follow an order in the job's store: {why}"
            )
