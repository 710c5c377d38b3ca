"""How often asynchronous ranks average each weight, and a line in the log when they do so rarely.

An asynchronous rank does not wait, so nothing else shows that the network, or a slower rank, leaves its
weights without averages: the training goes on as fast as before, and its loss is worse. On a GPT between two
hosts averages of each weight every 4 training steps cost 0.5 % of the loss and every 20 more than 2 %
(docs/adr/0038). The more ranks there are, the more does a rank's update miss what the others have found:
between four hosts every fourth step costs 2 % (docs/adr/0040).
"""

from __future__ import annotations

from trigram.averaging.groups import ModelGroups
from trigram.runtime import logs

RANK_STEPS = 8
"""Training steps of all ranks together between two averages of a weight, on a network that is fast enough."""
STEPS = 100
"""Training steps after which averages are counted."""
OFTEN_ENOUGH = 10
"""Averages of each weight in so many training steps; fewer are reported."""


def most(fragments: int, ranks: int, steps: float = 1.0) -> int:
    """How many fragments of the weights to average in so many training steps, at most.

    Each fragment has an average every 4 steps of two ranks, 2 of four, and in each step of eight or more.
    Averages that are in time need not be more frequent, and cost time on the processor.
    """
    interval = max(1.0, RANK_STEPS / ranks)
    return min(fragments, max(1, round(fragments * steps / interval)))


class RareAverages:
    """Counts the averages of one model on one rank, and reports once that they are rare.

    Args:
        groups: The model's process groups.
        fragments: How many fragments the weights have.
    """

    def __init__(self, groups: ModelGroups, fragments: int) -> None:
        self.groups, self.fragments = groups, fragments
        self.boundaries = self.averaged = 0
        self.reported = False

    def count(self) -> None:
        """A fragment has been averaged."""
        self.averaged += 1

    def boundary(self) -> None:
        """A training step has ended."""
        self.boundaries += 1
        if self.boundaries < STEPS or self.groups.size == 1:
            return
        times = self.averaged / self.fragments
        self.boundaries = self.averaged = 0
        if times < OFTEN_ENOUGH and not self.reported:
            self.reported = True
            logs.warning(self._line(times))

    def _line(self, times: float) -> str:
        return (
            f"{self.groups.name} averaged each weight {times:.2g} times in its last {STEPS} training steps, "
            "because averages take long on the network, or another rank is slower or has stopped; with fewer "
            f"than {OFTEN_ENOUGH} the loss is usually higher than with all_reduce. On a slow network use a "
            "codec (async_low_precision, async_low_precision_decentralized) or larger batches; staleness=8 "
            "waits for averages"
        )
