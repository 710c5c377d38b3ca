"""How the samples of an epoch are dealt to the ranks of an elastic job: each is used once, whoever is lost.

A pure function of what all ranks know: who got samples for a step, and whose gradients counted in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Dealing:
    """The samples of one epoch, and how far they are used.

    Attributes:
        samples: How many the dataset has.
        batch: Samples of one share: of a rank, or of a replica.
        seed: Of the order; None: the dataset's own.
        epoch: The number of this epoch, from 0.
        position: So many samples of the order have been dealt.
        returned: Samples that were dealt to who was lost before they counted; they are dealt again.
        holders: Who got the shares of the step under way, in their order; empty: there is none.
        share: Samples of each of these shares.
    """

    samples: int
    batch: int
    seed: int | None
    epoch: int = 0
    position: int = 0
    returned: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    share: int = 0
    _order: tuple[int, list[int]] | None = None

    def order(self) -> list[int]:
        """All samples, in the order of this epoch."""
        if self._order is None or self._order[0] != self.epoch:
            order = list(range(self.samples))
            if self.seed is not None:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
                order = torch.randperm(self.samples, generator=generator, device="cpu").tolist()
            self._order = self.epoch, order
        return self._order[1]

    @property
    def left(self) -> int:
        """How many samples have not been used, with those of the step under way."""
        return self.samples - self.position + len(self.returned)

    def steps(self, count: int) -> int:
        """Steps until the end of the epoch, that under way included, if each has ``count`` shares."""
        whole, rest = divmod(self.left, self.batch * count)
        return whole + (rest >= count)

    def deal(self, holders: Sequence[int]) -> bool:
        """Deals the shares of the next step; False: fewer samples are left than there are holders."""
        self.share = min(self.batch, self.left // len(holders))
        self.holders = list(holders) if self.share else []
        return bool(self.holders)

    def of(self, holder: int) -> list[int]:
        """The samples of a holder in the step under way; of the first share if it has none of its own."""
        place = self.holders.index(holder) if holder in self.holders else 0
        return self._next(self.share * len(self.holders))[self.share * place : self.share * (place + 1)]

    def settle(self, counted: Collection[int]) -> None:
        """The step under way is over; only the samples of ``counted`` are used. One of them that had no share
        of its own, a spare that took a place in the step, had the first."""
        size = self.share * len(self.holders)
        dealt = self._next(size)
        fresh = min(size, self.samples - self.position)
        self.position += fresh
        del self.returned[: size - fresh]
        for place, holder in enumerate(self.holders):
            stood_in = place == 0 and not set(counted) <= set(self.holders)
            if holder not in counted and not stood_in:
                self.returned += dealt[self.share * place : self.share * (place + 1)]
        self.holders, self.share = [], 0

    def begin(self, epoch: int) -> None:
        """Begins an epoch."""
        self.epoch, self.position, self.returned, self.holders, self.share = epoch, 0, [], [], 0

    def _next(self, count: int) -> list[int]:
        """The next samples: those of the order, then those that came back."""
        fresh = self.order()[self.position : self.position + count]
        return fresh + self.returned[: count - len(fresh)]

    def state(self) -> dict[str, Any]:
        """What changes, for a checkpoint and for ranks that join."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "returned": list(self.returned),
            "holders": list(self.holders),
            "share": self.share,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` gave."""
        self.epoch, self.position, self.share = (
            int(state["epoch"]),
            int(state["position"]),
            int(state["share"]),
        )
        self.returned, self.holders = list(state["returned"]), list(state["holders"])
