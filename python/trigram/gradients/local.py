"""Finds gradients that no backward pass has averaged: an update with them would be of one rank only.

Scripts assign gradients, write into them, or accumulate them in ``no_sync`` and then update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.gradients.in_parts import ShardedGradient
from trigram.steps.update_watch import GradientsSnapshot, UsedGradients


class Buckets(Protocol):
    """What :meth:`LocalGradients.moving` needs of the buckets.

    Attributes:
        params: All parameters of the model.
    """

    params: Sequence[torch.Tensor]

    def placed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of a bucket, with the view into the bucket that its gradient should be."""


class LocalGradients:
    """Which gradients of a model are this rank's own.

    Args:
        params: All parameters. Gradients that they have already may be used, and written again.

    Attributes:
        accumulated: ``id()`` of the parameters that got gradients inside ``no_sync``, or by hand, since the
            last pass.
        averaged: Whether a pass has averaged gradients since the last update.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.accumulated: set[int] = set()
        self.averaged = False
        self._assigned: GradientsSnapshot | None = None
        self._found = {id(p) for p in params if p.grad is not None}  # perhaps written by hand
        self._used = UsedGradients()
        self._used.keep(params, {id(p) for p in params})

    def pass_ended(self) -> None:
        """All gradients have been averaged."""
        self.accumulated, self.averaged, self._found = set(), True, set()
        self._used.clear()

    def averages_are(self, params: Sequence[torch.Tensor]) -> None:
        """The parameters' gradients are averages, in memory outside of the buckets."""
        self._assigned = GradientsSnapshot(params)

    @contextmanager
    def moving(self, buckets: Buckets) -> Iterator[None]:
        """A block that may move the gradients of all parameters to other buckets: those that are this rank's
        own are so there too."""
        params = buckets.params
        self.accumulated |= {id(p) for p in self.find(buckets.placed(), params, {id(p) for p in params})}
        yield
        self._used.follow(buckets.params)

    def is_average(self, param: torch.Tensor, index: int, view: torch.Tensor) -> bool:
        """Whether a parameter that this pass has not reached has the gradient of an earlier one, averaged.

        Args:
            param: The parameter.
            index: Its index.
            view: The view into a bucket that its gradient should be.
        """
        grad = param.grad
        if grad is None or id(param) in self.accumulated | self._found or isinstance(grad, ShardedGradient):
            return False
        return not self._used.rewritten([param], {id(param)}) and self.has_average(grad, index, view)

    def has_average(self, grad: torch.Tensor, index: int, view: torch.Tensor) -> bool:
        """Whether a gradient is the memory of an earlier average, to which this rank may have added since."""
        kept = self._assigned is not None and self._assigned.has(index, grad)
        return grad.data_ptr() == view.data_ptr() or kept

    def updated(self, params: Sequence[torch.Tensor], mine: set[int]) -> None:
        """Optimizers have updated the parameters with these ``id()``."""
        self.averaged = False
        self._used.keep(params, mine)

    def average_changed(self, buckets: Buckets, mine: set[int], groups: ModelGroups) -> None:
        """Averages gradients that a script has replaced after a backward pass averaged them, in full: if it
        computed the new ones from the averages (to clip or scale them), they are the same on all ranks and
        stay so, and a codec would lose part of them once more."""
        changed = self.find(buckets.placed(), buckets.params, mine)
        mean_of([p.grad for p in changed if p.grad is not None], groups)
        self.averages_are(buckets.params)

    def any(
        self,
        placed: Iterable[tuple[torch.Tensor, torch.Tensor]],
        params: Sequence[torch.Tensor],
        mine: set[int],
    ) -> bool:
        """Whether there are any; see :meth:`find`."""
        if self.accumulated and any(p.grad is not None for p in params if id(p) in mine):
            return True
        return bool(self.find(placed, params, mine))

    def find(
        self,
        placed: Iterable[tuple[torch.Tensor, torch.Tensor]],
        params: Sequence[torch.Tensor],
        mine: set[int],
    ) -> list[torch.Tensor]:
        """The parameters whose gradients are not those that a pass has averaged.

        Args:
            placed: Each parameter of a bucket, with the view into the bucket that its gradient should be.
            params: All parameters of the model.
            mine: ``id()`` of the parameters that matter.
        """
        found: list[torch.Tensor] = []
        for p, view in placed:
            grad = p.grad
            if grad is None or id(p) not in mine:
                continue
            if isinstance(grad, ShardedGradient):
                if grad.added is not None:
                    found.append(p)
            elif grad.data_ptr() != view.data_ptr():
                found.append(p)
        if found and self._assigned is not None:
            found = self._assigned.foreign(params, {id(p) for p in found})
        # The next gradients may be written into the memory of averages that an update has used.
        rewritten = self._used.rewritten(params, mine) - {id(p) for p in found}
        again = [p for p in params if id(p) in rewritten]
        return found + [p for p in again if not isinstance(p.grad, ShardedGradient)]
