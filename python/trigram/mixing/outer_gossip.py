"""An outer step on each rank, averaged with its neighbours (NoLoCo, arXiv 2506.10911).

As DiLoCo, but no call needs all ranks: between outer steps each rank trains alone, and an outer step averages
with the neighbours in a graph, in the paper with one other rank, drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram.algorithms.graphs import Graph
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.collectives.coalesced import Part
from trigram.mixing.central import Outer
from trigram.mixing.gossip import Neighbours
from trigram.mixing.step import AveragingStep
from trigram.runtime.memory import empty


class OuterGossip(AveragingStep):
    """``s_i <- s_i + v_i``, with ``v_i <- momentum v_i + sum_j W_ij (s_j + lr (inp_j - s_j)) - s_i``.

    s_i are the slow weights of rank i, from which it trains until the next averaging step, and v_i is its
    outer momentum. It is the paper's update with gamma = 1, so that one tensor is sent: the slow weights
    after this rank's own step. With ``lr=1`` and ``momentum=0`` it is :class:`trigram.mixing.gossip.Mix`.

    Args:
        tensors: The parameters, or pieces of them.
        groups: The model's process groups.
        graph: The neighbours of each rank, by averaging step.
        outer: The outer step's learning rate and momentum.

    Attributes:
        slow: s_i, float32, one-dimensional.
        velocity: v_i; None without momentum.
        part: What this rank sends in a step.
    """

    def __init__(self, tensors: Sequence[Part], groups: ModelGroups, graph: Graph, outer: Outer) -> None:
        super().__init__(tensors, groups, torch.float32)
        self.neighbours = Neighbours(graph, groups, self.inp)
        self.exact = not any(t.dtype == torch.float64 for t in tensors)
        self.outer = outer
        self.take()
        self.slow = self.inp.clone()
        self.velocity = torch.zeros_like(self.slow) if outer.momentum else None
        self.part = empty(self.inp.numel(), dtype=torch.float32, device=self.inp.device)

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        incoming = self.neighbours.receive(step, self.part)
        if self.agreed_on:
            self._begin_again()
        torch.sub(self.inp, self.slow, out=self.part)
        self.part.mul_(self.outer.lr).add_(self.slow)
        self.sent += self.neighbours.send(step, self.part)
        yield self.neighbours.messages
        move = torch.mul(self.part, 1 - sum(weight for _, _, weight in incoming), out=self.out)
        for theirs, _, weight in incoming:
            move.add_(theirs, alpha=weight)
        move.sub_(self.slow)
        if self.velocity is not None:
            self.velocity.mul_(self.outer.momentum).add_(move)
            move.copy_(self.velocity)
        self.slow.add_(move)
        self.out.copy_(self.slow)

    def _begin_again(self) -> None:
        """Begins as at first, on all ranks: they hold their mean, which no rank's outer step may undo."""
        self.slow.copy_(self.inp)
        if self.velocity is not None:
            self.velocity.zero_()
        self.agreed_on = False

    def state(self) -> dict[str, Any]:
        """The slow weights and the outer momentum of this rank."""
        if self.agreed_on:
            self.take()
            self._begin_again()
        kept = {"slow": self.slow.clone()}
        if self.velocity is not None:
            kept["velocity"] = self.velocity.clone()
        return kept

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.slow.copy_(state["slow"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
        self.agreed_on = False
