"""Messages that travel for random times between ranks in virtual time, each pair's in their order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

M = TypeVar("M")


class Channels(Generic[M]):
    """What is on its way.

    Args:
        source: Of randomness.
        now: The time.
    """

    def __init__(self, source: random.Random, now: Callable[[], float]) -> None:
        self.random, self.now = source, now
        self.under_way: dict[tuple[int, int], deque[tuple[float, M]]] = {}

    def of(self, sender: int) -> Callable[[int, M], None]:
        """A function with which this rank sends a message to another."""

        def tell(to: int, message: M) -> None:
            channel = self.under_way.setdefault((sender, to), deque())
            arrives = self.now() + self.random.choice([0.0, 0.001, 0.1])
            channel.append((max([arrives, *(at for at, _ in channel)]), message))

        return tell

    def take(self, rank: int) -> Iterator[tuple[int, M]]:
        """What has arrived at this rank, each with its sender."""
        for (sender, to), channel in list(self.under_way.items()):
            while to == rank and channel and channel[0][0] <= self.now():
                yield sender, channel.popleft()[1]
