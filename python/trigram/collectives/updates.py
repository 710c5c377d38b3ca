"""An all-reduce inside one host whose means are not kept: each rank updates its part of the weights with
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trigram.collectives.work import Work
from trigram.errors import MisuseError
from trigram.runtime.group import Group

Rule = tuple[str, list[float]]
"""``sgd`` or ``adam``, and the numbers of its arithmetic, see ``rust/core/src/update.rs``."""


@dataclass
class Piece:
    """Values that are updated alike.

    Attributes:
        start, stop: Their place in the bucket.
        flipped_from: The first of the values at the end of their parameter that round otherwise.
        rule: The arithmetic.
        states: The state of the values, float32, one-dimensional, contiguous.
    """

    start: int
    stop: int
    flipped_from: int
    rule: Rule
    states: Sequence[torch.Tensor]


def update(
    gradients: torch.Tensor,
    weights: torch.Tensor,
    lengths: Sequence[int],
    pieces: Sequence[Piece],
    fused: bool,
    group: Group,
) -> Work:
    """Starts an update: this rank computes the mean of its part of all ranks' gradients, updates its weights
    and state with it, and writes the weights into those of all ranks.

    All ranks of the group are on one host, and both tensors are registered memory.

    Args:
        gradients: One-dimensional, float32.
        weights: One-dimensional, float32, at least as long as all parts.
        lengths: The lengths of the ranks' parts, from the beginning of both tensors.
        pieces: Those of this rank's part that are updated, in their order.
        fused: Whether products and sums are fused multiply-adds.
        group: The ranks.

    Raises:
        MisuseError: A tensor is of another kind, or too short.
    """
    if any(t.dtype != torch.float32 or not t.is_cpu or not t.is_contiguous() for t in (gradients, weights)):
        raise MisuseError("update: gradients and weights must be contiguous float32 tensors on the CPU")
    if sum(lengths) > min(gradients.numel(), weights.numel()):
        raise MisuseError("update: the parts are longer than the gradients or the weights")
    rules: dict[tuple[str, tuple[float, ...]], int] = {}
    places = []
    for piece in pieces:
        if any(
            s.dtype != torch.float32 or not s.is_contiguous() or s.numel() != piece.stop - piece.start
            for s in piece.states
        ):
            raise MisuseError("update: state must be contiguous, float32, and as long as its values")
        name, numbers = piece.rule
        rule = rules.setdefault((name, tuple(numbers)), len(rules))
        at = [s.data_ptr() for s in piece.states] + [0, 0]
        places.append((piece.start, piece.stop, piece.flipped_from, rule, at[0], at[1]))
    memory = gradients.data_ptr(), gradients.nbytes, weights.data_ptr(), weights.nbytes
    distinct = [(name, list(numbers)) for name, numbers in rules]
    core = group.core.start_update(memory, list(lengths), places, distinct, fused, group.timeout)
    states = [s for piece in pieces for s in piece.states]
    return Work(core, (gradients, *states, weights), "update", group.describe)
