"""Residuals of parameters that a backward pass did not use.

An average is applied only to parameters that some rank used. If an average also sent the residual of the
others, that part of the gradients would be lost, and with top-k it would take the place of values that count.
So a residual is held back where this rank has nothing else to send. If the values are not zero (a codec that
decodes zeros to something else, a momentum), the residual changes; it is restored when all ranks know that
nobody used the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


def positions(views: Sequence[torch.Tensor], shard: torch.Tensor) -> list[slice]:
    """The part of each view that lies in ``shard``, as positions in it; empty if there is none.

    Args:
        views: Each of adjacent values, in any shape, in the same storage as ``shard``.
        shard: One-dimensional, contiguous.
    """
    start = int(shard.storage_offset())
    ends = [(int(v.storage_offset()) - start, int(v.storage_offset()) - start + v.numel()) for v in views]
    clip = lambda at: min(max(at, 0), shard.numel())  # noqa: E731
    return [slice(clip(a), clip(b)) for a, b in ends]


class HeldResidual:
    """The residual of one encoding, parts of which are held back in a step.

    Args:
        residual: One-dimensional, float32; None: the encoding has none, and nothing is held.
    """

    def __init__(self, residual: torch.Tensor | None) -> None:
        self.residual = residual
        self.parts: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []
        self.spans: list[slice] = []

    def hold(self, spans: Sequence[slice]) -> None:
        """Names the parts of parameters that this rank did not use, for the next encoding."""
        self.before = []
        self.spans = [] if self.residual is None else list(spans)
        self.parts = [] if self.residual is None else [self.residual[span] for span in spans]

    @contextlib.contextmanager
    def held_back(self, values: torch.Tensor) -> Iterator[None]:
        """A block that encodes ``values``: parts are held back where all values of the parameter are 0."""
        self.before = [part.clone() for part in self.parts]
        back = []
        for span, part, before in zip(self.spans, self.parts, self.before, strict=True):
            # Without a condition in Python, which would wait for a GPU.
            held = torch.where(values[span].any(), torch.zeros_like(before), before)
            part.sub_(held)
            back.append(held)
        try:
            yield
        finally:
            for part, held in zip(self.parts, back, strict=True):
                part.add_(held)

    def settle(self, unused: Sequence[bool]) -> None:
        """After the step: restores the parts that no rank used.

        Args:
            unused: For each part given to :meth:`hold`, whether no rank used the parameter.
        """
        if self.before:
            for part, before, nobody in zip(self.parts, self.before, unused, strict=True):
                if nobody:
                    part.copy_(before)
        self.hold(())
