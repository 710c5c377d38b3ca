"""The weights of asynchronous gossip under way between two ranks, fragment by fragment."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.errors import MisuseError
from trigram.mixing.async_gossip.offers import Agreed
from trigram.mixing.gossip import References, seed
from trigram.mixing.rare_averages import RareAverages
from trigram.mixing.step import AveragingStep
from trigram.observe import spans
from trigram.runtime.memory import empty

_TAG = 3


@dataclass
class _Fragment:
    """A fragment of the weights, and what its averaging steps need.

    Attributes:
        weights: The snapshot of its parameters, and the result of a step.
        arrived: What the weights change by, of averaging steps that ended where they could not.
        references: The references of a codec.
        mine: The last message sent.
        theirs: Receives the partner's.
        averaged: When it was averaged last, in averaging steps.
    """

    weights: AveragingStep
    references: References
    mine: torch.Tensor
    theirs: torch.Tensor
    arrived: torch.Tensor | None = None
    averaged: int = 0

    def take(self) -> None:
        """Takes the snapshot: the weights as they are, with what has arrived."""
        self.weights.take()
        if self.arrived is not None:
            self.weights.inp += self.arrived

    def average(self, partner: int) -> torch.Tensor:
        """What the weights change by, now that the partner's message is there: ``weights.out``."""
        out = self.weights.out.copy_(self.weights.inp)
        self.references.apply(partner, self.mine, self.theirs, out, 0.5)
        out -= self.weights.inp
        return out

    def keep(self, change: torch.Tensor) -> None:
        """Keeps it until weights may change."""
        self.arrived = change.clone() if self.arrived is None else self.arrived.add_(change)

    def apply(self) -> bool:
        """Changes the weights by what has arrived; whether there was something."""
        if self.arrived is None:
            return False
        self.weights.out.copy_(self.arrived)
        self.weights.add()
        self.arrived = None
        return True

    @classmethod
    def make(cls, weights: AveragingStep, codec: Codec | None, groups: ModelGroups) -> _Fragment:
        """The fragment of these weights."""
        weights.take()
        references = References(weights.inp, codec, groups)
        like = references.code
        mine, theirs = (empty(like.numel(), dtype=like.dtype, device=like.device) for _ in range(2))
        return cls(weights, references, mine, theirs)


class Transfers:
    """One averaging step with a neighbour after the other.

    Args:
        weights: By fragment, the snapshot of its parameters, and the result of a step.
        groups: The model's process groups.
        codec: Compresses the differences to a reference; None: weights are sent in full.

    Attributes:
        partner: The neighbour of the averaging step under way.
        steps_done: Averaging steps that have ended.
        waited: Seconds that this rank waited for weights.
        sent: Bytes of weights sent.
    """

    def __init__(self, weights: Sequence[AveragingStep], groups: ModelGroups, codec: Codec | None) -> None:
        self.groups, self.fragments = groups, [_Fragment.make(each, codec, groups) for each in weights]
        self.rare = RareAverages(groups, len(self.fragments))
        self.partner: int | None = None
        self.under_way: deque[tuple[_Fragment, list[Any]]] = deque()
        self.steps_done = self.sent = 0
        self.waited = 0.0
        self._span: spans.Span | None = None  # of the step under way, if anybody looks

    def oldest(self) -> int:
        """The fragment whose last average is longest ago."""
        return min(range(len(self.fragments)), key=lambda k: self.fragments[k].averaged)

    def start(self, agreed: Agreed) -> None:
        """Takes snapshots, and starts to exchange them."""
        j, group, of, n = agreed.neighbour, self.groups.main, len(self.fragments), self.steps_done
        self.partner = j
        self._span = spans.begin("rounds", lambda: f"round {n} with rank {group.ranks[j]}")
        for k in range(agreed.first, agreed.first + agreed.number):
            part = self.fragments[k % of]
            part.averaged = n + 1
            part.take()
            part.references.encode(j, part.weights.inp, part.mine, seed(n * of + k % of, self.groups.rank))
            works = [
                collectives.recv(part.theirs, group.ranks[j], _TAG, group, async_op=True),
                collectives.send(part.mine, group.ranks[j], _TAG, group, async_op=True),
            ]
            for work in works:
                assert work is not None
                work.serve_when_done()
            self.under_way.append((part, works))
            self.sent += part.mine.nbytes

    def take_arrived(self, apply: bool) -> bool:
        """Takes the fragments that have arrived; True if no other is under way of an averaging step.

        Args:
            apply: Weights may change here; else what has arrived is kept.
        """
        while self.under_way and all(work.is_completed() for work in self.under_way[0][1]):
            self._take_next(apply)
        return self.partner is not None and not self.under_way

    def _take_next(self, apply: bool) -> None:
        assert self.partner is not None
        since = time.perf_counter()
        part, works = self.under_way[0]
        for work in works:
            self.groups.wait(work)
        self.waited += time.perf_counter() - since
        change = part.average(self.partner)
        if apply:
            part.weights.add()
        else:
            part.keep(change)
        self.under_way.popleft()  # only now: what fails in a wait elsewhere fails again at the next boundary
        self.rare.count()

    def apply_kept(self) -> bool:
        """Applies what has arrived where weights could not change; whether there was something."""
        return sum(part.apply() for part in self.fragments) > 0

    def end(self) -> None:
        """Ends the averaging step under way; waits for what has not arrived."""
        while self.under_way:
            self._take_next(apply=True)
        self.partner = None
        span, self._span = self._span, None
        spans.end(span)
        self.steps_done += 1

    def state(self) -> dict[str, Any]:
        """The number of averaging steps, and the references."""
        return {"rounds": self.steps_done, "references": [part.references.state() for part in self.fragments]}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.steps_done = state["rounds"]
        saved = state["references"]
        saved = [saved] if isinstance(saved, dict) else saved  # of a version without fragments
        if len(saved) != len(self.fragments):
            raise MisuseError(
                f"the state has the weights in {len(saved)} fragments, not in {len(self.fragments)}; "
                f"pass fragments={len(saved)}"
            )
        for part, kept in zip(self.fragments, saved, strict=True):
            part.references.load(kept)


class OfTransfers:
    """What a schedule says of its transfers, see :class:`trigram.training.schedule.StepSchedule`."""

    transfers: Transfers
    assigns = False

    @property
    def fragments(self) -> Sequence[Any]:
        """Those of the weights."""
        return self.transfers.fragments

    @property
    def steps_done(self) -> int:
        """Averaging steps that have ended."""
        return self.transfers.steps_done

    @property
    def waited(self) -> float:
        """Seconds that this rank waited for averaging steps."""
        return self.transfers.waited

    def sent(self) -> int:
        """Bytes of weights sent."""
        return self.transfers.sent
