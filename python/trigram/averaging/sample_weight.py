"""``sample_weight``: how much this rank counts in an average, as where batches are unequal.

What a rank sends is multiplied by its weight, and what comes back by n over the sum of all: it is
``sum(w_i g_i) / sum(w_i)``. The weights travel in a small message of their own, begun with the pass
and awaited after its averages, so nobody waits for it in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from trigram import collectives
from trigram.errors import MisuseError
from trigram.runtime.group import Group
from trigram.runtime.world import internal_group


class SampleWeight:
    """The weight of this rank, step by step.

    A step's weight is taken by :meth:`step`; a round of several steps weighs what they weigh
    together. A round without a step, as of a rank that has no inputs left, weighs nothing.

    Args:
        given: The weight, or what is called for it once per step.
        group: The ranks of the model.

    Attributes:
        mine: This rank's weight in the round that :meth:`open` began.
        pending: Of the steps since then.
    """

    def __init__(self, given: float | Callable[[], float], group: Group) -> None:
        self.given = given
        self.mine = self.pending = 0.0
        self.backup = torch.zeros(1, dtype=torch.float64)
        self.work: collectives.Work | None = None
        self.renew(group)

    def renew(self, group: Group) -> None:
        """These are the ranks from now on."""
        self.group = internal_group(group, "sample weights")
        self.work = None
        self.everyone = torch.zeros(group.size, dtype=torch.float64)
        self.through = 0

    def step(self) -> None:
        """A backward pass begins: its weight counts in the next round."""
        self.pending += float(self.given() if callable(self.given) else self.given)

    def open(self) -> None:
        """A round begins. A weight that is none counts nothing here; :meth:`factor` tells all ranks."""
        self.backup[0], self.pending = self.pending, 0.0
        weight = float(self.backup[0])
        self.mine = weight if 0 < weight < math.inf else 0.0
        self.work = collectives.all_gather(self.everyone, self.backup, self.group, async_op=True)

    def weigh(self, values: torch.Tensor) -> None:
        """Multiplies what is sent; of a rank that weighs nothing it is 0, were it NaN before."""
        if self.mine == 0.0:
            values.zero_()
        elif self.mine != 1.0:
            values.mul_(self.mine)

    def factor(self) -> float:
        """What a mean of weighed values is multiplied with, once all weights are here.

        Raises:
            MisuseError: A weight is negative or not finite, or all are 0; on all ranks.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        weights = self.everyone.tolist()
        for rank, weight in zip(self.group.ranks, weights, strict=True):
            if not 0 <= weight < math.inf:
                raise MisuseError(
                    f"sample_weight of rank {rank} is {weight} in this averaging step; it must be 0 or a "
                    "positive number, not NaN or infinite"
                )
        if not any(weights):
            raise MisuseError(
                f"sample_weight is 0 on all ranks ({', '.join(map(str, self.group.ranks))}) in this "
                "averaging step, so there is nothing to average; skip such a step on all ranks"
            )
        return self.group.size / math.fsum(weights)

    def settle(self, values: torch.Tensor) -> None:
        """Turns a mean of weighed values into the weighted mean."""
        factor = self.factor()
        if factor != 1.0:
            values.mul_(factor)

    def begin(self, idle: bool, again: bool = False) -> None:
        """A pass that is a round of its own; ``idle``: of a rank without inputs; ``again``: the last one's
        weight counts once more."""
        self.pending = float(self.backup[0]) if again else 0.0
        self.through = self.group.core.next() + 1
        if not idle and not again:
            self.step()
        self.open()

    def abort(self, why: str) -> None:
        """The pass has failed: its weights are nobody's any more. All ranks count alike afterwards."""
        self.group.core.abort(self.through, why)

    def await_end(self) -> None:
        """Waits for the end of what is under way."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
