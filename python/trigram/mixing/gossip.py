"""StepSchedule of weights among neighbours of a graph, all ranks in step.

Full weights (D-PSGD, arXiv 1705.09056), coded differences on a fixed graph (CHOCO, 1902.00340),
coded differences over edges that come and go, and shares pushed along directed edges (SGP,
1811.10792).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.algorithms.graphs import Graph
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.gpu import device, routes
from trigram.mixing.step import AveragingStep
from trigram.runtime.memory import empty

_TAG = 1


class Messages:
    """What a round sends and awaits. On the CPU each message begins at once; on a GPU all begin
    together when :meth:`go` is called, as NCCL wants it."""

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self.works: list[collectives.Work] = []
        self.parcels: list[tuple[bool, int, torch.Tensor]] = []
        self.buffers: list[torch.Tensor] = []

    def buffer(self, k: int, like: torch.Tensor) -> torch.Tensor:
        """The k-th buffer; kept from round to round."""
        while len(self.buffers) <= k:
            self.buffers.append(empty(like.numel(), dtype=like.dtype, device=like.device))
        return self.buffers[k]

    def send(self, t: torch.Tensor, place: int) -> int:
        """Sends; the bytes."""
        self._begin(True, t, place)
        return t.nbytes

    def receive(self, t: torch.Tensor, place: int) -> torch.Tensor:
        """Receives into ``t``."""
        self._begin(False, t, place)
        return t

    def _begin(self, sends: bool, t: torch.Tensor, place: int) -> None:
        if device.handles(t):
            return self.parcels.append((sends, place, t))
        move, group = collectives.send if sends else collectives.recv, self.groups.main
        work = move(t, group.ranks[place], _TAG, group, async_op=True)
        assert work is not None
        self.works.append(work)

    def go(self) -> None:
        """All messages of the round have been named."""
        parcels, self.parcels = self.parcels, []
        if parcels:
            self.works.append(collectives.batch_send_recv(parcels, self.groups.main))

    def ready(self) -> bool:
        """Whether all have ended."""
        return all(w.is_completed() for w in self.works)

    def wait(self) -> None:
        """Waits for all; the first error is raised when all have ended, or the ranks come together."""
        works, self.works = self.works, []
        error: Exception | None = None
        for work in works:
            try:
                self.groups.wait(work)
            except Exception as e:
                error = error or e
        if error is not None:
            raise error


class Gossip(AveragingStep):
    """What the rounds of neighbours have in common.

    Args:
        tensors: The parameters.
        groups: Where to talk.
        graph: Who talks to whom.
        dtype: Of what travels.
        length: See :class:`AveragingStep`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        groups: ModelGroups,
        graph: Graph,
        dtype: torch.dtype | None = None,
        length: Any = None,
    ) -> None:
        super().__init__(tensors, groups, dtype, length)
        self.graph = graph
        self.place = groups.rank
        self.messages = Messages(groups)
        if device.handles(self.inp):
            # All agree on a way now: in a round a rank may have nothing to say.
            routes.route(groups.main, self.inp.device)

    def ready(self) -> bool:
        """See :class:`AveragingStep`."""
        return self.messages.ready()


class Mix(Gossip):
    """``out = sum_j W_ij inp_j``."""

    exact = True

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        to, received = self.graph.neighbours(self.place, round)
        self.heard = [
            (self.messages.receive(self.messages.buffer(k, self.inp), j), weight)
            for k, (j, weight) in enumerate(received)
        ]
        for j in to:
            self.sent += self.messages.send(self.inp, j)
        self.messages.go()

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.messages.wait()
        half = self.inp.dtype in (torch.float16, torch.bfloat16)
        mixed = self.inp.float() if half else self.out
        own = 1 - sum(weight for _, weight in self.heard)
        torch.mul(mixed if half else self.inp, own, out=mixed)
        for theirs, weight in self.heard:
            mixed.add_(theirs, alpha=weight)
        if half:
            self.out.copy_(mixed)


class Choco(Gossip):
    """CodecCompressor differences on a fixed graph, to replicas that every neighbour holds alike.

    ``q = Q(inp - xhat)``, everybody adds it to its copy of this rank's xhat, and
    ``out = inp + gamma sum_j W_ij (xhat_j - xhat_i)``. Of the neighbours' replicas only the weighted
    sum is needed, so two tensors are kept, whatever the degree.

    Args:
        tensors: The parameters.
        groups: Where to talk.
        graph: Undirected, always the same.
        codec: Of the differences.
        gamma: How much of the difference is taken; too much for a coarse codec diverges.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], groups: ModelGroups, graph: Graph, codec: Codec, gamma: float
    ) -> None:
        super().__init__(tensors, groups, graph, torch.float32)
        self.codec, self.gamma = codec, gamma
        self.weight = sum(w for _, w in graph.neighbours(self.place)[1])
        self.take()
        # All ranks start with the same weights.
        self.replica = self.inp.clone()
        self.theirs = self.inp * self.weight
        size = codec.size(self.inp.numel())
        self.code = empty(size, dtype=torch.uint8, device=self.inp.device)

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        to, received = self.graph.neighbours(self.place)
        self.heard = [
            (self.messages.receive(self.messages.buffer(k, self.code), j), j, weight)
            for k, (j, weight) in enumerate(received)
        ]
        torch.sub(self.inp, self.replica, out=self.out)
        self.codec.encode(self.out, self.code, seed=seed(round, self.place))
        for j in to:
            self.sent += self.messages.send(self.code, j)
        self.messages.go()
        self.codec.decode(self.code, self.replica, 1.0)

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.messages.wait()
        for code, j, weight in self.heard:
            self.codec.decode(code, self.theirs, weight, self.groups.main.ranks[j])
        torch.sub(self.theirs, self.replica, alpha=self.weight, out=self.out)
        self.out.mul_(self.gamma).add_(self.inp)

    def state(self) -> dict[str, Any]:
        """The replicas."""
        return {"replica": self.replica.clone(), "theirs": self.theirs.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.replica.copy_(state["replica"])
        self.theirs.copy_(state["theirs"])


class References:
    """One reference per edge, which both ends hold alike and both move to the middle of what they
    told each other: half the memory of replicas, and it forgives coarse codecs.

    Args:
        start: The weights that all ranks have; references begin there.
        codec: None: full; no reference is needed.
        groups: Where to talk.
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

    def tell(self, j: int, values: torch.Tensor, out: torch.Tensor, seed: int) -> None:
        """Writes to ``out`` what place j is told of these values."""
        if self.codec is None:
            out.copy_(values)
        else:
            self.codec.encode(values - self._edge(j), out, seed=seed)

    def meet(
        self, j: int, mine: torch.Tensor, theirs: torch.Tensor, out: torch.Tensor, weight: float
    ) -> None:
        """Adds ``weight`` times the difference to ``out``, and moves the reference."""
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
        """The references by place, and where new ones begin."""
        if self.codec is None:
            return {}
        return {"start": self.start.clone(), "edges": {j: e.clone() for j, e in self.edges.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        if state:
            self.start.copy_(state["start"])
            self.edges = {j: e.clone() for j, e in state["edges"].items()}


class Edges(Gossip):
    """CodecCompressor differences on a graph that changes: :class:`References`.

    Args: see :class:`Choco`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], groups: ModelGroups, graph: Graph, codec: Codec, gamma: float
    ) -> None:
        super().__init__(tensors, groups, graph, torch.float32)
        self.gamma = gamma
        self.take()
        self.references = References(self.inp, codec, groups)
        self.told = Messages(groups)

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        _, received = self.graph.neighbours(self.place, round)
        code = self.references.code
        self.heard = []
        for k, (j, weight) in enumerate(received):
            theirs = self.messages.receive(self.messages.buffer(k, code), j)
            mine = self.told.buffer(k, code)
            self.references.tell(j, self.inp, mine, seed(round, self.place))
            self.heard.append((j, mine, theirs, weight))
            self.sent += self.messages.send(mine, j)
        self.messages.go()

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.messages.wait()
        self.out.copy_(self.inp)
        for j, mine, theirs, weight in self.heard:
            self.references.meet(j, mine, theirs, self.out, self.gamma * weight)

    def state(self) -> dict[str, Any]:
        """The references."""
        return self.references.state()

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.references.load(state)


class PushSum(Gossip):
    """Shares of weights and of a weight's weight along directed edges: right where senders outnumber
    receivers somewhere, which plain mixing is not.

    The numerator takes what the optimizer did to the weights; stepping the ratio instead would bias
    the result at any learning rate.
    """

    exact = True

    def __init__(self, tensors: Sequence[torch.Tensor], groups: ModelGroups, graph: Graph) -> None:
        # One more value: the weight of the weights.
        super().__init__(tensors, groups, graph, torch.float32, lambda total: total + 1)
        self.exact = all(t.dtype == torch.float32 for t in tensors)
        self.take()
        self.sample_weight = empty(self.inp.numel(), dtype=torch.float32, device=self.inp.device)
        self.numerator = self.inp.clone()
        self.numerator[-1] = 1.0
        self.left = self.inp.clone()

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        to, received = self.graph.neighbours(self.place, round)
        self.heard = [
            self.messages.receive(self.messages.buffer(k, self.sample_weight), j)
            for k, (j, _) in enumerate(received)
        ]
        self.inp[-1] = self.left[-1] = 0.0
        self.numerator += torch.sub(self.inp, self.left, out=self.out)
        self.numerator /= 1 + len(to)
        self.sample_weight.copy_(self.numerator)
        for j in to:
            self.sent += self.messages.send(self.sample_weight, j)
        self.messages.go()

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.messages.wait()
        for theirs in self.heard:
            self.numerator += theirs
        torch.div(self.numerator, self.numerator[-1], out=self.out)
        self.left.copy_(self.out)

    def state(self) -> dict[str, Any]:
        """The numerator with its weight, and what the last round left."""
        return {"numerator": self.numerator.clone(), "left": self.left.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.numerator.copy_(state["numerator"])
        self.left.copy_(state["left"])


def seed(round: int, place: int) -> int:
    """A number of its own for each round and place, for codecs that draw."""
    return (round << 20 | place) * 0x9E3779B97F4A7C15
