"""Divides the weights of a model into fragments of equal size, which are averaged one after the other.

A language model's embedding is larger than a fragment, so parameters are divided too: into pieces, each some
rows. What an averaging step does to a value does not depend on the others of its parameter, or as in PowerSGD
holds for rows as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from trigram.collectives.coalesced import Part, Piece, alike, as_real
from trigram.errors import MisuseError
from trigram.training.pace import default_fragments

_SMALL = 16
"""Parameters of up to so manieth a fragment are not divided: fragments differ by no more than that."""

_PROPOSED = 1000
"""The most fragments that an error proposes."""

Fragment = list[list[Part]]
"""Parts of the parameters, a list for each dtype."""


def of_model(parameters: Sequence[torch.Tensor]) -> Fragment:
    """All weights as one fragment: complex parameters as pieces, which are real."""
    return alike([_real(p) for p in parameters])


def divide(weights: Fragment, asked: int | None, every: int = 0, pieces: bool = True) -> list[Fragment]:
    """The weights in fragments, in the model's order, the same on all ranks.

    Args:
        weights: The whole weights.
        asked: How many; None: as many as their size asks for, and the parameters allow.
        every: Training steps that their number must divide; 0: any number will do.
        pieces: Whether parameters may be divided.

    Raises:
        MisuseError: So many fragments cannot all have weights.
    """
    total = sum(p.numel() if pieces else 1 for same in weights for p in same)
    if asked is None:
        count = default_fragments(sum(p.numel() * p.dtype.itemsize for same in weights for p in same))
    else:
        count = asked
    if count == 1:
        return [weights]
    fragments = _divided(weights, count, pieces) if count <= total or asked is None else [[]]
    if asked is None:
        return [fragment for fragment in fragments if fragment]
    if not all(fragments):
        fewer = range(min(count - 1, total, _PROPOSED), 0, -1)
        most = next(few for few in fewer if every % few == 0 and all(_divided(weights, few, pieces)))
        whole = (
            "parameters are not divided (a registered class has takes_pieces = False, or a state of an "
            "earlier version was loaded), and some are large"
        )
        why = "the model has too few" if pieces else whole
        raise MisuseError(
            f"with_bagua: fragments={asked} leaves fragments without weights, because {why}; use "
            f"fragments={most}"
        )
    return fragments


def _real(p: torch.Tensor) -> Part:
    lazy = p.is_conj() or p.is_neg()  # such a view cannot be seen as pairs
    return Piece(p, 0, 0, as_real(p).shape[0]) if p.is_complex() and not lazy else p


def _divided(weights: Fragment, count: int, pieces: bool) -> list[Fragment]:
    """The weights in so many fragments, of which some may be empty."""
    fragments: list[Fragment] = [[] for _ in range(count)]
    for same in weights:
        parts: list[list[Part]] = [[] for _ in range(count)]
        size, before = max(1, sum(p.numel() for p in same)) / count, 0
        for p in same:
            after = before + p.numel()
            if pieces and p.numel() * _SMALL > size:
                cuts = [size * k - before for k in range(math.floor(before / size), count + 1)]
                for k, piece in _pieces(p, size, cuts):
                    parts[min(count - 1, math.floor(before / size) + k)].append(piece)
            else:
                parts[min(count - 1, int((before + after) / 2 / size))].append(p)
            before = after
        for fragment, part in zip(fragments, parts, strict=True):
            if part:
                fragment.append(part)
    return fragments


def _pieces(part: Part, size: float, cuts: Sequence[float]) -> list[tuple[int, Part]]:
    """A parameter in pieces between the cuts, each with the number of the cut before it.

    Args:
        part: The parameter.
        size: Values in a fragment.
        cuts: Where fragments begin, in values from the parameter's first on; ascending.
    """
    of = part.of if isinstance(part, Piece) else part
    shape = as_real(of).shape
    fine = (d for d, n in enumerate(shape) if part.numel() <= size / _SMALL * n)
    dim = next(fine, max(range(len(shape)), key=lambda d: shape[d])) if shape else 0
    rows = shape[dim] if shape else 1
    at = [min(rows, max(0, round(cut * rows / part.numel()))) for cut in cuts]
    at[-1] = rows  # what rounding leaves
    found: list[tuple[int, Part]] = []
    for k, (a, b) in enumerate(itertools.pairwise(at)):
        if b - a == rows:
            found.append((k, part))
        elif b > a:
            found.append((k, Piece(of, dim, a, b - a)))
    return found
