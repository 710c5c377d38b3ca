"""An averaging step of weights: what a rank gives, and what it takes back.

An :class:`AveragingStep` has the weights of a rank in one flat tensor (``inp``), communicates, and leaves in
another (``out``) what the weights should be. The training layer decides when, and whether ``out`` is assigned
or its difference to ``inp`` is added to weights that have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced


class AveragingStep:
    """StepSchedule of one flat tensor. A new algorithm is a subclass with ``start``, ``wait`` and, unless
    it always waits, ``ready``.

    Args:
        tensors: What is exchanged: the parameters, of one dtype unless ``dtype`` says otherwise.
        groups: Where to talk.
        dtype: Of the flat tensors.
        length: Of the flat tensors, from what the parameters take.

    Attributes:
        inp: The weights given, coalesced.
        out: What they should be, flat, after :meth:`wait`.
        sent: Bytes sent so far.
        exact: Whether ``out`` may be assigned where the weights are still ``inp``.
        heals: Whether ``out`` replaces weights of this rank that were not finite: a difference to
            them would leave them so.
    """

    exact = False
    heals = False

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        groups: ModelGroups,
        dtype: torch.dtype | None = None,
        length: Callable[[int], int] | None = None,
    ) -> None:
        self.groups = groups
        self.given = coalesced.Coalesced(tensors, dtype, length)
        self.taken = coalesced.Coalesced(tensors, dtype, length)
        self.inp = self.given.memory
        self.out = self.taken.memory
        self.sent = 0

    # The weights.

    def take(self) -> None:
        """A snapshot of the weights."""
        self.given.pack()

    @torch.no_grad()
    def apply(self, moved: bool) -> None:
        """Gives the weights what they should be; ``moved``: they are no longer the snapshot."""
        if (self.exact and not moved) or (self.heals and not bool(self.inp.isfinite().all())):
            self.taken.unpack()
            return
        self.out -= self.inp
        parts = self.taken.views
        tensors = self.taken.tensors
        if tensors[0].dtype != self.out.dtype or any(t.dtype != tensors[0].dtype for t in tensors):
            parts = [v.to(t.dtype) for v, t in zip(parts, tensors, strict=True)]
        torch._foreach_add_(tensors, parts)

    # The round.

    def start(self, round: int) -> None:
        """Begins a round; ``inp`` must stay as it is until it has ended."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether :meth:`wait` would not wait. Moves on what can be."""
        return True

    def wait(self) -> None:
        """Ends the round."""
        raise NotImplementedError

    # What is remembered between rounds.

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave."""
