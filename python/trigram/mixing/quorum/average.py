"""The average of those that take part in an averaging step with a quorum, in messages between two ranks.

The engine's collectives need all members of a group. Here each member sums a shard of the weights, which all
others send it, and sends the mean to them. Meanwhile members that have agreed on something earlier than the
others are sent the present agreement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trigram import collectives
from trigram.averaging.exchange import Exchange, Phases, Together
from trigram.averaging.groups import ModelGroups
from trigram.collectives.coalesced import Part
from trigram.errors import MisuseError, TimeoutError
from trigram.mixing.quorum.protocol import BEHIND, IN
from trigram.mixing.step import AveragingStep
from trigram.runtime import serving
from trigram.runtime.serving import Pending

_PART, _MEAN, _AGREEMENT = 6, 7, 8
"""Tags of messages; :mod:`trigram.mixing.quorum.mail` has those before."""


class Rule(Protocol):
    """What the members of an averaging step do with a fragment of the weights.

    Attributes:
        inp: The weights at the last :meth:`take`, one-dimensional.
        out: What is averaged, and the result.
    """

    inp: torch.Tensor
    out: torch.Tensor

    def take(self) -> None:
        """Copies the weights into ``inp``."""

    def contribute(self) -> None:
        """``out`` becomes what this rank has to average."""

    def agreement(self) -> list[torch.Tensor]:
        """What all members have alike after an averaging step, beside the weights."""

    def conclude(self) -> None:
        """``out`` is the average, and becomes the new weights."""

    def rejoin(self) -> None:
        """``out`` is what this rank has to average, and becomes the weights of a rank that has trained as
        much, and has the present agreement."""

    def apply(self, moved: bool) -> None:
        """``out`` becomes the weights."""

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; empty: there is none."""

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""


class MeanOfWeights(AveragingStep):
    """The members of an averaging step take the mean of their weights."""

    def __init__(self, tensors: Sequence[Part], groups: ModelGroups) -> None:
        super().__init__(tensors, groups, torch.float32)
        self.exact = not any(t.dtype == torch.float64 for t in tensors)
        self.heals = groups.sample_weight is not None

    def contribute(self) -> None:
        """See :class:`Rule`."""
        self.out.copy_(self.inp)

    def agreement(self) -> list[torch.Tensor]:
        """Nothing: the mean depends on no earlier one."""
        return []

    def conclude(self) -> None:
        """Nothing to do: the average is the new weights."""

    def rejoin(self) -> None:
        """Nothing to do: there is no agreement."""


@dataclass(frozen=True)
class _Members:
    """What an average is of.

    Attributes:
        weights: The fragment.
        flags: How each rank takes part: not (0), or having agreed on what the leader has or on something
            earlier.
        mine: What this rank weighs.
    """

    weights: Rule
    flags: Sequence[int]
    mine: float

    def places(self, *how: int) -> list[int]:
        """Who takes part so."""
        return [j for j, flag in enumerate(self.flags) if flag in how]


class QuorumAverage(Exchange):
    """The weighted mean of a fragment over the members of one averaging step after the other.

    Args:
        groups: The model's process groups.

    Attributes:
        sent: Bytes of weights that this rank has sent.
    """

    calls = 1
    is_awaited = True

    def __init__(self, groups: ModelGroups) -> None:
        self.groups, self.rank, self.sent = groups, groups.rank, 0
        self._of: _Members | None = None
        self._awaited: dict[int, Any] = {}  # by member, what is received from it

    def begin(self, weights: Rule, flags: Sequence[int], mine: float, number: int) -> None:
        """Takes a snapshot of a fragment and starts to average it, without waiting.

        Args:
            weights: The fragment; when :meth:`wait` has returned, ``weights.out`` is the mean.
            flags: How each rank takes part.
            mine: What this rank weighs.
            number: Averaging steps before.
        """
        self._of = _Members(weights, flags, mine)
        weights.take()
        weights.contribute()
        self.start(number)

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        assert self._of is not None
        weights, members = self._of.weights, self._of.places(IN, BEHIND)
        values, place = weights.out, members.index(self.rank)
        shards = list(values.tensor_split(len(members)))
        others = [k for k, j in enumerate(members) if j != self.rank]
        agreement, renewed, works = self._catch_up(weights.agreement())
        weight = torch.tensor([self._of.mine], dtype=values.dtype, device="cpu")
        # A part of each rank: its values of the receiver's shard, and its weight.
        parts = {k: torch.empty(shards[place].numel() + 1, dtype=values.dtype, device="cpu") for k in others}
        received = self._await({members[k]: (parts[k], _PART) for k in others})
        sent = [self._send(torch.cat([shards[k].cpu(), weight]), members[k], _PART) for k in others]
        yield Together([*received, *sent])
        parts[place] = torch.cat([shards[place].cpu(), weight])
        ranked = [parts[k] for k in range(len(members))]  # in rank order, as all sums
        factors = self._factors([float(part[-1]) for part in ranked], members)
        mean = torch.zeros_like(ranked[0][:-1])
        for part, factor in zip(ranked, factors, strict=True):
            if factor:  # a rank that weighs nothing may hold NaN
                mean.add_(part[:-1], alpha=factor)
        into = {k: torch.empty(shards[k].numel(), dtype=values.dtype, device="cpu") for k in others}
        received = self._await({members[k]: (into[k], _MEAN) for k in others})
        sent = [self._send(mean, members[k], _MEAN) for k in others]
        yield Together([*received, *sent, *works])
        shards[place].copy_(mean)
        for k in others:
            shards[k].copy_(into[k])
        for old, new in zip(agreement, renewed, strict=True):
            old.copy_(new)

    def wait_for(self, pending: Pending) -> None:
        """Waits for the messages under way.

        Raises:
            AbortedError: The members of an elastic job change.
            TimeoutError: A member has sent nothing for as long as a call of the script may last.
        """
        since, limit, ranks = time.perf_counter(), self.groups.group.timeout, self.groups.group.ranks

        def look() -> None:
            self.groups.check_interrupted()
            if limit is not None and time.perf_counter() - since > limit:
                missing = [str(ranks[j]) for j, work in self._awaited.items() if not work.is_completed()]
                missing = missing or [str(ranks[j]) for j in self._awaited]  # who has not received
                raise TimeoutError(
                    f"quorum: rank {ranks[self.rank]} has waited {limit:g} s for rank {', '.join(missing)} "
                    "in an averaging step that it takes part in; it may be stuck, or need more than the "
                    "op_timeout of trigram.init"
                )

        with serving.looking(look):
            pending.wait()

    def _await(self, wanted: dict[int, tuple[torch.Tensor, int]]) -> list[Any]:
        """Starts to receive from members, into these tensors, messages with these tags."""
        self._awaited = {j: self._receive(into, j, tag) for j, (into, tag) in wanted.items()}
        return list(self._awaited.values())

    def _catch_up(
        self, agreement: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        """Begins to give the agreement to the members that are behind, each from another of those that are
        not. Returns what this rank has, if it is behind; what it receives in its place; and the messages."""
        assert self._of is not None
        having, behind = self._of.places(IN), self._of.places(BEHIND)
        if self.rank in having:
            mine = [j for i, j in enumerate(behind) if having[i % len(having)] == self.rank]
            return [], [], [self._send(t.cpu(), j, _AGREEMENT) for j in mine for t in agreement]
        source = having[behind.index(self.rank) % len(having)]
        into = [torch.empty_like(t, device="cpu") for t in agreement]
        return list(agreement), into, [self._receive(t, source, _AGREEMENT) for t in into]

    def _factors(self, weights: Sequence[float], members: Sequence[int]) -> list[float]:
        """The weights, with a sum of 1; all members raise if one is not a weight, or all are 0."""
        for j, weight in zip(members, weights, strict=True):
            if not 0 <= weight < math.inf:
                raise MisuseError(
                    f"sample_weight of rank {self.groups.main.ranks[j]} is {weight} in this averaging "
                    "step; it must be 0 or a positive number, not NaN or infinite"
                )
        total = math.fsum(weights)
        if not total:
            raise MisuseError(
                f"sample_weight is 0 on all {len(members)} ranks of this averaging step, so there is "
                "nothing to average; skip such a step on all ranks"
            )
        return [weight / total for weight in weights]

    def _receive(self, into: torch.Tensor, j: int, tag: int) -> Any:
        group = self.groups.main
        return collectives.recv(into, group.ranks[j], tag, group, async_op=True)

    def _send(self, values: torch.Tensor, j: int, tag: int) -> Any:
        group = self.groups.main
        self.sent += values.nbytes
        return collectives.send(values, group.ranks[j], tag, group, async_op=True)
