"""How many averaging steps of fragments an asynchronous rank has under way at a time.

Two limits: as many as arrive within about one training step, so that averages are not late, and a fragment
not more often than every few steps of the fastest rank (``most`` of ``mixing/rare_averages.py``), because
averages that are in time need not be more frequent, and cost time on the processor (docs/adr/0038 and 0040
have the figures).

A rank that trains slower than others sees how long the network takes, since the others have their snapshots
ready; a faster one sees how long it waits for the slow one. So ranks tell each other, once for all fragments,
how many they have found, and the largest number counts for all.
"""

from __future__ import annotations

import math
import time

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.mixing.rare_averages import most

MOST, LEAST_BYTES = 8, 1 << 20
"""Fragments that the weights have by default, and bytes of each: many enough that one is averaged in a
training step on a slow link, few enough that small models do not pay for the calls."""


def default_fragments(nbytes: int) -> int:
    """How many fragments weights of so many bytes have by default."""
    return max(1, min(MOST, nbytes // LEAST_BYTES))


class Pace:
    """The two limits on one rank.

    Args:
        fragments: How many fragments the weights have.
        groups: The model's process groups.

    Attributes:
        window: Averaging steps under way at a time, as this rank has found.
        others: The largest that a rank has told.
        burst: Averaging steps that start at a boundary, at most.
    """

    def __init__(self, fragments: int, groups: ModelGroups) -> None:
        self.fragments, self.groups = fragments, groups
        self.window = self.others = 1
        self.burst = most(fragments, groups.size)
        self.late = self.limited = False
        self.started_here = 0  # averaging steps, at the last boundary
        self.boundaries, self.since = 0, time.perf_counter()
        self.mine = 0.0  # seconds of a training step of this rank
        self.told = torch.zeros(2, dtype=torch.float64, device="cpu")
        self.work: collectives.Work | None = None

    def boundary(self, oldest: int | None, waited: bool) -> None:
        """A training step has ended; averaging steps that have arrived were applied.

        Args:
            oldest: Training steps since the first averaging step under way was started; None: there is none.
            waited: This rank has waited for one.
        """
        self.boundaries += 1
        self._listen()
        if oldest is not None and oldest > 1:
            self.window = max(1, self.window - 1)
        elif oldest is None and self.limited and not self.late and not waited:
            self.window = min(self.fragments, self.window + 1)
        self.late = self.limited = False
        self.started_here = 0

    def allows(self, under_way: int) -> bool:
        """Whether another averaging step may start at this boundary."""
        if self.started_here >= self.burst:
            return False
        self.limited = under_way >= max(self.window, self.others)
        return not self.limited

    def started(self) -> None:
        """An averaging step was started."""
        self.started_here += 1

    def ended(self, after: int) -> None:
        """An averaging step has ended, so many training steps after its start."""
        self.late |= after > 1

    def tell(self) -> None:
        """Tells the other ranks; all ranks call it before the same averaging steps."""
        if self.fragments == 1:
            return
        if self.work is not None:  # the ranks have exchanged averages since, so it has ended
            self.work.wait()
            self._listen()
        now = time.perf_counter()
        if self.boundaries:
            self.mine = (now - self.since) / self.boundaries
        self.boundaries, self.since = 0, now
        self.told[0], self.told[1] = self.window, -self.mine if self.mine else -math.inf
        self.work = collectives.all_reduce(self.told, "max", None, self.groups.main, async_op=True)

    def _listen(self) -> None:
        """Takes what the ranks have told, if all have."""
        if self.work is None or not self.work.is_completed():
            return
        work, self.work = self.work, None
        work.wait()
        self.others, fastest = int(self.told[0]), -float(self.told[1])
        slower = self.mine / fastest if 0 < fastest < math.inf else 1.0
        self.burst = most(self.fragments, self.groups.size, slower)
