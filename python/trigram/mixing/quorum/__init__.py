"""Averaging steps that go on when enough ranks are there (Decoupled DiLoCo, arXiv 2604.21428).

The engine's collectives need all members of a group, so these averaging steps use messages between two ranks.
The first rank of the group, the *leader*, decides who takes part: at its averaging step it waits for a
quorum, then for a grace window, and tells all ranks who is in. Those average their weights, weighted by the
training steps (or samples) that each has made since its last average. A rank that comes too late does not
wait: it trains on, and is in the leader's next averaging step, where it counts for all that it has trained.

With an outer optimizer they average the differences of their weights to those that they agreed on last. Such
a rank agreed on them earlier than the others. What it has trained since counts, whatever it began from; and
one of the others gives it the agreed weights and the outer momentum, so that its outer step is theirs.

With several fragments an averaging step is of one of them, which the leader names; a rank that comes too
late for one is in that of the next.

What lives here: who says what to whom (``protocol``, without input and output), the messages (``mail``), what
a rank counts (``counts``), the average itself (``average``), and the schedule that joins them (``steps``).
"""

from trigram.mixing.quorum.steps import QuorumSteps

__all__ = ["QuorumSteps"]
