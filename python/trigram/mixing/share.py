"""The mean of a share of the weights, another one in each averaging step.

A value is averaged once in 1/share steps, so that little is sent in each of them, and replicas are never far
apart (SPARTA, Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter
Averaging", 2025). In between it is trained by each rank on its own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch

from trigram.averaging.exchange import Phases
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.coalesced import Part
from trigram.mixing.central import weighted_mean
from trigram.mixing.step import AveragingStep
from trigram.runtime.memory import empty


class Share(AveragingStep):
    """The values of all tensors, one after the other, form one sequence; every ``stride``-th of them is
    averaged, beginning with another one in each step. ``stride`` steps, in an order drawn for each such
    round, average all of them.

    Args:
        tensors: The parameters, or pieces of them, of one dtype.
        groups: The model's process groups.
        share: The share of the values that one step averages, above 0 and up to 1; the stride is the integer
            next to its inverse.

    Attributes:
        inp: The values that this step averages, one-dimensional; zeros after the last.
        out: Their means.
    """

    exact = True

    def __init__(self, tensors: Sequence[Part], groups: ModelGroups, share: float) -> None:
        self.groups = groups
        self.tensors = list(tensors)
        self.stride = max(1, round(1 / share))
        self.first = 0
        self.total = sum(t.numel() for t in tensors)
        like = self.tensors[0]
        self.out = empty(-(-self.total // self.stride), dtype=like.dtype, device=like.device)
        self.out.zero_()
        self.inp = torch.zeros_like(self.out)
        self.sent = 0
        self.average = FullAverage(self.out, groups)

    def take(self) -> None:
        """Nothing: :meth:`phases` knows which values it takes."""

    def phases(self, step: int) -> Phases:
        """See :class:`trigram.mixing.AveragingStep`."""
        self.first = first(step, self.stride)
        with torch.no_grad():
            self.inp.zero_()
            for t, at, count, into in self._places():
                self.inp[into : into + count] = _taken(t, at, self.stride)
        yield from weighted_mean(self, self.average, step)

    @torch.no_grad()
    def apply(self, moved: bool) -> None:
        """See :class:`trigram.mixing.AveragingStep`."""
        if moved:
            self.out -= self.inp
        for t, at, count, into in self._places():
            _put(t, at, self.stride, self.out[into : into + count], adds=moved)

    def _places(self) -> list[tuple[torch.Tensor, int, int, int]]:
        """Of each tensor with values in this step: it, the first of them, how many, and where they go."""
        found, before, into = [], 0, 0
        for t in coalesced.now(self.tensors):
            at = (self.first - before) % self.stride
            count = len(range(at, t.numel(), self.stride))
            if count:
                found.append((t, at, count, into))
            before, into = before + t.numel(), into + count
        return found


def first(number: int, stride: int) -> int:
    """The first value of an averaging step; the same on all ranks.

    Args:
        number: Of the averaging step, from 0 on.
        stride: From one value to the next.
    """
    turn, place = divmod(number, stride)
    return _order(turn, stride)[place]


@functools.lru_cache(maxsize=8)  # drawn once in a round, and not in each of its steps
def _order(turn: int, stride: int) -> list[int]:
    return random.Random(turn).sample(range(stride), stride)


def _in_memory(t: torch.Tensor) -> torch.Tensor | None:
    """A one-dimensional view of the values in the order in which collectives send them; None: there is
    none."""
    if coalesced.is_channels_last(t):
        t = t.permute(0, 2, 3, 1)
    return t.view(-1) if t.is_contiguous() else None


def _taken(t: torch.Tensor, at: int, stride: int) -> torch.Tensor:
    flat = _in_memory(t)
    return (t.flatten() if flat is None else flat)[at::stride]


def _put(t: torch.Tensor, at: int, stride: int, values: torch.Tensor, adds: bool) -> None:
    flat = _in_memory(t)
    if flat is None:  # not ``put_``, which deterministic algorithms refuse
        copy = t.contiguous().view(-1)
        _put(copy, at, stride, values, adds)
        t.copy_(copy.view(t.shape))
    elif adds:
        flat[at::stride] += values
    else:
        flat[at::stride] = values
