"""``sample_weight``: how much a rank counts in an average, for example because batches are unequal.

Each rank multiplies its values by its weight before the average over n ranks, and the mean by
``n / sum(w_i)`` after it; the result is ``sum(w_i g_i) / sum(w_i)``. A separate small all-gather exchanges
the weights. It starts with the backward pass and is awaited after the averages, so it adds no waiting time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from trigram import collectives
from trigram.errors import MisuseError
from trigram.runtime.group import Group
from trigram.runtime.world import internal_group


class SampleWeight:
    """The weight of this rank, step by step.

    :meth:`add_backward` adds the weight of one backward pass; an averaging step after several backward passes
    uses the sum of their weights. An averaging step without a backward pass, as on a rank that has no inputs
    left, has weight 0.

    Args:
        given: The weight, or a callable that returns it and is called once per backward pass.
        group: The ranks that train the model.

    Attributes:
        mine: This rank's weight in the averaging step that :meth:`start_averaging` started.
        pending: For each fragment of what is averaged, the sum of the weights of the backward passes since
            its last averaging step.
    """

    def __init__(self, given: float | Callable[[], float], group: Group) -> None:
        self.given = given
        self.mine = self._own = 0.0
        self.pending = [0.0]
        self.local = torch.zeros(1, dtype=torch.float64, device="cpu")
        self.work: collectives.Work | None = None
        self.renew(group)

    def renew(self, group: Group) -> None:
        """Sets the ranks; an elastic job calls it again when they change."""
        self.group = internal_group(group, "sample weights")
        self.work = None
        self.weights = torch.zeros(group.size, dtype=torch.float64, device="cpu")
        self.last_call = 0

    def add_backward(self) -> None:
        """Adds the weight of a backward pass that begins; it counts in the next averaging step."""
        weight = float(self.given() if callable(self.given) else self.given)
        self.pending = [before + weight for before in self.pending]

    def divide(self, fragments: int) -> None:
        """From now on so many fragments are averaged, one after the other."""
        if len(self.pending) != fragments:
            self.pending = [self.pending[0]] * fragments

    def begin_again(self) -> None:
        """All ranks have the same weights now, whatever backward passes were before."""
        self.pending = [0.0] * len(self.pending)

    def start_averaging(self, fragment: int = 0) -> None:
        """Starts an averaging step of a fragment. An invalid weight counts as 0 here; :meth:`factor` raises
        on all ranks."""
        self.local[0], self.pending[fragment] = self.pending[fragment], 0.0
        weight = float(self.local[0])
        self.mine = weight if 0 < weight < math.inf else 0.0
        self.work = collectives.all_gather(self.weights, self.local, self.group, async_op=True)

    def weigh(self, values: torch.Tensor) -> None:
        """Multiplies values by this rank's weight before they are sent; a weight of 0 gives 0 also for
        NaN."""
        if self.mine == 0.0:
            values.zero_()
        elif self.mine != 1.0:
            values.mul_(self.mine)

    def factor(self) -> float:
        """The factor ``n / sum(w_i)`` for a mean of weighted values; waits for the weights of all ranks.

        Raises:
            MisuseError: A weight is negative, NaN or infinite, or all are 0. All ranks raise it.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        weights = self.weights.tolist()
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

    def normalize(self, values: torch.Tensor) -> None:
        """Turns the mean of weighted values into the weighted mean, in place."""
        factor = self.factor()
        if factor != 1.0:
            values.mul_(factor)

    def begin_backward(self, idle: bool, again: bool = False, counts: bool = True) -> None:
        """Starts the averaging step of one backward pass.

        Args:
            idle: This rank has no inputs left: its weight is 0.
            again: The pass is repeated after a rank was lost: its weight is that of the last pass.
            counts: False: it weighs 0, and again its weight if it counts then: it is a spare.
        """
        self.pending = [self._own if again else 0.0]
        self.last_call = self.group.core.next() + 1
        if not idle and not again:
            self.add_backward()
        self._own = self.pending[0]
        if not counts:
            self.pending = [0.0]
        self.start_averaging()

    def load(self, pending: float | Sequence[float]) -> None:
        """Restores ``pending``; a number is that of one fragment, in checkpoints of releases before."""
        self.pending = [float(p) for p in (pending if isinstance(pending, Sequence) else [pending])]

    def abort(self, why: str) -> None:
        """Aborts the exchange of weights after a failed pass; all ranks count the same calls afterwards."""
        self.group.core.abort(self.last_call, why)

    def await_end(self) -> None:
        """Waits until the exchange of weights has ended, if one is under way."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
