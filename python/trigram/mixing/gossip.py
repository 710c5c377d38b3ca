"""Averaging steps with the neighbours in a graph; all ranks make the same step at a time.

In full (D-PSGD, arXiv 1705.09056), with compressed differences on a fixed graph (CHOCO, arXiv 1902.00340),
with compressed differences on a graph that changes, and with push-sum on directed edges (SGP, arXiv
1811.10792).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.graphs import Graph
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.collectives.coalesced import Part
from trigram.gpu import device, routes
from trigram.mixing.step import AveragingStep
from trigram.runtime.memory import empty

_TAG = 1


class Messages:
    """The messages of one averaging step. On the CPU each starts at once; on a GPU all start together in
    :meth:`flush`, because NCCL needs them in one group call."""

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self.works: list[collectives.Work] = []
        self.pending: list[tuple[bool, int, torch.Tensor]] = []
        self.buffers: list[torch.Tensor] = []

    def buffer(self, k: int, like: torch.Tensor) -> torch.Tensor:
        """The k-th buffer, with the size, dtype and device of ``like``; reused in later steps."""
        while len(self.buffers) <= k:
            self.buffers.append(empty(like.numel(), dtype=like.dtype, device=like.device))
        return self.buffers[k]

    def send(self, t: torch.Tensor, group_rank: int) -> int:
        """Sends ``t`` to group rank ``group_rank``; returns its bytes."""
        self._begin(True, t, group_rank)
        return t.nbytes

    def receive(self, t: torch.Tensor, group_rank: int) -> torch.Tensor:
        """Receives into ``t`` from group rank ``group_rank``; returns ``t``."""
        self._begin(False, t, group_rank)
        return t

    def _begin(self, sends: bool, t: torch.Tensor, group_rank: int) -> None:
        if device.handles(t):
            return self.pending.append((sends, group_rank, t))
        call, group = collectives.send if sends else collectives.recv, self.groups.main
        work = call(t, group.ranks[group_rank], _TAG, group, async_op=True)
        assert work is not None
        self.works.append(work)

    def flush(self) -> None:
        """Starts the messages that were not started yet; called after the last send or receive of a step."""
        pending, self.pending = self.pending, []
        if pending:
            self.works.append(collectives.batch_send_recv(pending, self.groups.main))

    def is_completed(self) -> bool:
        """Whether all messages have ended."""
        return all(w.is_completed() for w in self.works)

    def wait(self) -> None:
        """Waits for all messages, then raises the first error if there was one."""
        error: Exception | None = None
        for work in self.works:
            try:
                self.groups.wait(work)
            except Exception as e:
                error = error or e
        if error is not None:
            raise error
        self.works = []


class Neighbours:
    """The neighbours of this rank in a graph, and the messages of an averaging step with them.

    Args:
        graph: The neighbours of each rank, by step.
        groups: The model's process groups.
        like: A tensor on the device of what is sent.
    """

    def __init__(self, graph: Graph, groups: ModelGroups, like: torch.Tensor) -> None:
        self.graph, self.rank = graph, groups.rank
        self.messages = Messages(groups)
        if device.handles(like):
            # All ranks agree on the route here, because a rank may have no neighbour in a later step.
            routes.route(groups.main, like.device)

    def receive(self, step: int, like: torch.Tensor) -> list[tuple[torch.Tensor, int, float]]:
        """Begins to receive from each that sends to this rank, into buffers of the size and dtype of
        ``like``: the buffer, the group rank, and its weight in the graph."""
        _, senders = self.graph.neighbours(self.rank, step)
        return [
            (self.messages.receive(self.messages.buffer(k, like), j), j, weight)
            for k, (j, weight) in enumerate(senders)
        ]

    def receivers(self, step: int) -> Sequence[int]:
        """The group ranks to which this rank sends."""
        return self.graph.neighbours(self.rank, step)[0]

    def send(self, step: int, t: torch.Tensor) -> int:
        """Sends ``t`` to all of them, and starts all messages of the step; returns the bytes sent."""
        sent = sum(self.messages.send(t, j) for j in self.receivers(step))
        self.messages.flush()
        return sent


class Mix(AveragingStep):
    """``out = sum_j W_ij inp_j`` with the weights W of the graph (D-PSGD).

    Args:
        tensors: The parameters, or pieces of them, of one dtype.
        groups: The model's process groups.
        graph: The neighbours of each rank, by step.
    """

    exact = True

    def __init__(self, tensors: Sequence[Part], groups: ModelGroups, graph: Graph) -> None:
        super().__init__(tensors, groups)
        self.neighbours = Neighbours(graph, groups, self.inp)

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        incoming = self.neighbours.receive(step, self.inp)
        self.sent += self.neighbours.send(step, self.inp)
        yield self.neighbours.messages
        half = self.inp.dtype in (torch.float16, torch.bfloat16)
        mixed = self.inp.float() if half else self.out
        self_weight = 1 - sum(weight for _, _, weight in incoming)
        torch.mul(mixed if half else self.inp, self_weight, out=mixed)
        for theirs, _, weight in incoming:
            mixed.add_(theirs, alpha=weight)
        if half:
            self.out.copy_(mixed)


class Choco(AveragingStep):
    """Compressed differences on a fixed graph (CHOCO-SGD).

    Each rank i has an estimate xhat_i of its weights that its neighbours hold too. It sends
    ``q = Q(inp - xhat_i)``; it and its neighbours add q to xhat_i; and
    ``out = inp + gamma sum_j W_ij (xhat_j - xhat_i)``. Of the neighbours' estimates only the weighted sum is
    needed, so two tensors are kept, whatever the number of neighbours.

    Args:
        tensors: The parameters, or pieces of them.
        groups: The model's process groups.
        graph: Undirected, the same in all steps.
        codec: Q.
        gamma: The consensus step size; with a coarse codec a large one diverges.

    Attributes:
        replica: xhat_i, float32.
        theirs: ``sum_j W_ij xhat_j`` over the neighbours j, float32.
    """

    def __init__(
        self, tensors: Sequence[Part], groups: ModelGroups, graph: Graph, codec: Codec, gamma: float
    ) -> None:
        super().__init__(tensors, groups, torch.float32)
        self.neighbours = Neighbours(graph, groups, self.inp)
        self.codec, self.gamma = codec, gamma
        self.weight = sum(w for _, w in graph.neighbours(groups.rank)[1])
        self.take()
        # All ranks start with the same weights.
        self.replica = self.inp.clone()
        self.theirs = self.inp * self.weight
        size = codec.size(self.inp.numel())
        self.code = empty(size, dtype=torch.uint8, device=self.inp.device)

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        incoming = self.neighbours.receive(0, self.code)  # the graph is the same in all steps
        torch.sub(self.inp, self.replica, out=self.out)
        self.codec.encode(self.out, self.code, seed=seed(step, self.groups.rank))
        self.sent += self.neighbours.send(0, self.code)
        self.codec.decode(self.code, self.replica, 1.0)
        yield self.neighbours.messages
        for code, j, weight in incoming:
            self.codec.decode(code, self.theirs, weight, self.groups.main.ranks[j])
        torch.sub(self.theirs, self.replica, alpha=self.weight, out=self.out)
        self.out.mul_(self.gamma).add_(self.inp)

    def state(self) -> dict[str, Any]:
        """The estimate of this rank, and the weighted sum of the neighbours'."""
        return {"replica": self.replica.clone(), "theirs": self.theirs.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.replica.copy_(state["replica"])
        self.theirs.copy_(state["theirs"])


class References:
    """One reference per edge, for compressed differences when the neighbours change.

    Both ends of an edge hold the same reference. Each sends its encoded difference to the reference, and both
    move the reference to the mean of the two decoded values.

    Args:
        start: The weights, the same on all ranks, at which references start; one-dimensional.
        codec: Compresses the differences; None: weights are sent in full, without references.
        groups: The model's process groups.
    """

    def __init__(self, start: torch.Tensor, codec: Codec | None, groups: ModelGroups) -> None:
        self.codec, self.groups = codec, groups
        self.start = start.clone() if codec is not None else start
        self.edges: dict[int, torch.Tensor] = {}
        self.code = start
        if codec is not None:
            self.code = torch.empty(codec.size(start.numel()), dtype=torch.uint8, device=start.device)

    def _edge(self, j: int) -> torch.Tensor:
        if j not in self.edges:
            self.edges[j] = self.start.clone()
        return self.edges[j]

    def encode(self, j: int, values: torch.Tensor, out: torch.Tensor, seed: int) -> None:
        """Writes into ``out`` the message that tells group rank ``j`` these values."""
        if self.codec is None:
            out.copy_(values)
        else:
            self.codec.encode(values - self._edge(j), out, seed=seed)

    def apply(
        self, j: int, mine: torch.Tensor, theirs: torch.Tensor, out: torch.Tensor, weight: float
    ) -> None:
        """Adds ``weight`` times the difference (theirs - mine) to ``out``, and moves the reference."""
        if self.codec is None:
            out.add_(theirs, alpha=weight).sub_(mine, alpha=weight)
            return
        edge, sender = self._edge(j), self.groups.main.ranks[j]
        # In the same order at both ends, so that their references stay the same bits.
        pair = [(theirs, weight), (mine, -weight)]
        for code, w in pair if j < self.groups.rank else pair[::-1]:
            self.codec.decode(code, out, w, sender)
            self.codec.decode(code, edge, 0.5, sender)

    def state(self) -> dict[str, Any]:
        """The references by group rank, and the weights at which new ones start."""
        if self.codec is None:
            return {}
        return {"start": self.start.clone(), "edges": {j: e.clone() for j, e in self.edges.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        if state:
            self.start.copy_(state["start"])
            self.edges = {j: e.clone() for j, e in state["edges"].items()}


class Edges(AveragingStep):
    """Compressed differences on a graph that changes: see :class:`References`.

    The arguments are those of :class:`Choco`.
    """

    def __init__(
        self, tensors: Sequence[Part], groups: ModelGroups, graph: Graph, codec: Codec, gamma: float
    ) -> None:
        super().__init__(tensors, groups, torch.float32)
        self.neighbours = Neighbours(graph, groups, self.inp)
        self.gamma = gamma
        self.take()
        self.references = References(self.inp, codec, groups)
        self.outgoing = Messages(groups)

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        code, messages = self.references.code, self.neighbours.messages
        incoming, outgoing = self.neighbours.receive(step, code), []
        for k, (_, j, _) in enumerate(incoming):  # edges are undirected: who sends receives
            mine = self.outgoing.buffer(k, code)
            self.references.encode(j, self.inp, mine, seed(step, self.groups.rank))
            outgoing.append(mine)
            self.sent += messages.send(mine, j)
        messages.flush()
        yield messages
        self.out.copy_(self.inp)
        for (theirs, j, weight), mine in zip(incoming, outgoing, strict=True):
            self.references.apply(j, mine, theirs, self.out, self.gamma * weight)

    def state(self) -> dict[str, Any]:
        """The references."""
        return self.references.state()

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.references.load(state)


class PushSum(AveragingStep):
    """Push-sum on directed edges (SGP): converges to the mean also where ranks receive from unequal numbers
    of senders, which mixing with a directed graph does not.

    Each rank has a numerator and a scalar denominator, which starts at 1 and is the last value of the tensor.
    It splits both into equal parts, keeps one, and sends the others to its receivers; its weights are the
    ratio. The change that the optimizer made to the weights is added to the numerator; changing the ratio
    instead would bias the result at any learning rate.

    Attributes:
        numerator: The numerator and, as the last value, the denominator; float32.
        part: The part that this rank sends in a step.
        previous: The weights after the last step, to find the optimizer's change.
    """

    exact = True

    def __init__(self, tensors: Sequence[Part], groups: ModelGroups, graph: Graph) -> None:
        # One more value: the denominator.
        super().__init__(tensors, groups, torch.float32, lambda total: total + 1)
        self.neighbours = Neighbours(graph, groups, self.inp)
        self.exact = all(t.dtype == torch.float32 for t in tensors)
        self.take()
        self.part = empty(self.inp.numel(), dtype=torch.float32, device=self.inp.device)
        self.numerator = self.inp.clone()
        self.numerator[-1] = 1.0
        self.previous = self.inp.clone()

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        incoming = self.neighbours.receive(step, self.part)
        if self.agreed_on:
            self._begin_again()
        self.inp[-1] = self.previous[-1] = 0.0
        self.numerator += torch.sub(self.inp, self.previous, out=self.out)
        self.numerator /= 1 + len(self.neighbours.receivers(step))
        self.part.copy_(self.numerator)
        self.sent += self.neighbours.send(step, self.part)
        yield self.neighbours.messages
        for theirs, _, _ in incoming:
            self.numerator += theirs
        torch.div(self.numerator, self.numerator[-1], out=self.out)
        self.previous.copy_(self.out)

    def _begin_again(self) -> None:
        """Begins as at first, on all ranks: they hold their mean, and a denominator would magnify the way of
        each rank to it like a step of its optimizer."""
        self.numerator.copy_(self.inp)
        self.numerator[-1] = 1.0
        self.previous.copy_(self.inp)
        self.agreed_on = False

    def state(self) -> dict[str, Any]:
        """The numerator with the denominator, and the weights after the last step."""
        if self.agreed_on:
            self.take()
            self._begin_again()
        return {"numerator": self.numerator.clone(), "left": self.previous.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.numerator.copy_(state["numerator"])
        self.previous.copy_(state["left"])
        self.agreed_on = False


def seed(number: int, group_rank: int) -> int:
    """A different seed for each step and group rank, for codecs with random rounding or selection."""
    return (number << 20 | group_rank) * 0x9E3779B97F4A7C15
