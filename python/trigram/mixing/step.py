"""The base class of averaging steps of weights.

An :class:`AveragingStep` copies the weights of this rank into one coalesced tensor (``inp``), communicates,
and writes the averaged weights into another (``out``). The training layer decides when a step runs, and
whether ``out`` is assigned to the weights or the difference ``out - inp`` is added to weights that have
changed since.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.averaging.exchange import Exchange, Phases
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.runtime.serving import Pending


class AveragingStep(Exchange):
    """Averages the weights of one model. A new algorithm is a subclass with :meth:`phases`; or with
    ``start``, ``wait`` and, unless it always waits, ``ready``. See docs/extending.md.

    Args:
        tensors: The parameters, or pieces of them; all of one dtype, unless ``dtype`` is given.
        groups: The model's process groups.
        dtype: The dtype of ``inp`` and ``out``; None: that of the parameters.
        length: From the number of values of the parameters to the length of ``inp`` and ``out``, for padding;
            None: no padding.

    Attributes:
        inp: The weights at the last :meth:`take`, one-dimensional.
        out: The averaged weights after :meth:`wait`, one-dimensional.
        sent: Bytes that this rank has sent so far.
        exact: Whether ``out`` may be assigned if the weights are still ``inp``.
        heals: Whether ``out`` replaces this rank's weights if they contain NaN or infinity: adding a
            difference to them cannot repair them.
        takes_pieces: Whether an object of this class may have some rows of a parameter, so that fragments are
            of equal size.
        agreed_on: Whether ``consensus`` has given all ranks the same weights since the last step.
    """

    exact = False
    heals = False
    takes_pieces = False
    agreed_on = False
    is_awaited = True

    def __init__(
        self,
        tensors: Sequence[coalesced.Part],
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

    @property
    def channels(self) -> ModelGroups:
        """The old name of ``groups``."""
        warnings.warn("channels of an averaging step is now groups", DeprecationWarning, stacklevel=2)
        return self.groups

    # The weights.

    def take(self) -> None:
        """Copies the weights into ``inp``."""
        self.given.pack()

    @torch.no_grad()
    def apply(self, moved: bool) -> None:
        """Moves the result into the weights; ``moved``: the weights have changed since :meth:`take`."""
        if (self.exact and not moved) or (self.heals and not bool(self.inp.isfinite().all())):
            self.taken.unpack()
            return
        self.out -= self.inp
        self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Adds ``out`` to the weights: it is what they change by."""
        parts = self.taken.views
        tensors = self.taken.tensors
        if tensors[0].dtype != self.out.dtype or any(t.dtype != tensors[0].dtype for t in tensors):
            parts = [v.to(t.dtype) for v, t in zip(parts, tensors, strict=True)]
        torch._foreach_add_(tensors, parts)

    # The averaging step.

    def phases(self, step: int) -> Phases:
        """Averaging step number ``step`` (0, 1, ...), which fills ``out``: see :class:`Exchange`. ``inp``
        does not change meanwhile."""
        return super().phases(step)

    @property
    def has_program(self) -> bool:
        """Whether its :meth:`phases` run; else it defines ``start``."""
        return self._program is not None

    @property
    def is_over(self) -> bool:
        """Whether no call is left to start."""
        return not self.has_program or super().is_over

    def advance(self) -> bool:
        """Goes on without waiting; True once no call is left to start: then averaging steps that were started
        after it start theirs."""
        return super().advance() if self.has_program else self.ready()

    def ready(self) -> bool:
        """Goes on without waiting; True if :meth:`wait` would return at once."""
        return not self.has_program or super().ready()

    def wait_for(self, pending: Pending) -> None:
        """Waits for the call under way. A neighbour may wait for all ranks of an elastic job to regroup
        instead of sending."""
        if isinstance(pending, collectives.Work) and pending.is_message:
            self.groups.wait(pending)
        else:
            pending.wait()

    # State between averaging steps.

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: tensors and numbers by name."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
