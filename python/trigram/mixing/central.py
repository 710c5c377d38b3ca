"""Averaging steps in which all ranks take part: the mean of weights, or of their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.average import Average, padded
from trigram.averaging.coded import CodedAverage
from trigram.averaging.exchange import Phases
from trigram.averaging.full import FullAverage
from trigram.averaging.gathered import GatheredAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.powersgd import PowerAverage
from trigram.averaging.robust import robust_average
from trigram.codecs import Codec, find
from trigram.collectives.coalesced import Part
from trigram.mixing.step import AveragingStep


def weighted_mean(of: AveragingStep, average: Average, number: int) -> Phases:
    """Averaging step ``number``: ``of.out`` becomes the mean of all ranks' ``of.inp``, with the ranks' sample
    weights if there are any.

    Args:
        of: The averaging step.
        average: Of ``of.out``.
        number: Of the averaging step, from 0 on.
    """
    weight = of.groups.sample_weight
    of.out.copy_(of.inp)
    if weight is not None:
        weight.weigh(of.out)
    of.sent += average.sent
    yield from average.phases(number)
    if weight is not None:
        weight.normalize(of.out)


class Mean(AveragingStep):
    """``out`` is the mean of all ranks' ``inp``, or a robust aggregation of them; the same bits on all
    ranks."""

    exact = True

    def __init__(
        self, tensors: Sequence[Part], groups: ModelGroups, rule: RobustAggregation | None = None
    ) -> None:
        n = groups.size
        super().__init__(tensors, groups, None, None if rule is None else lambda total: padded(total, n))
        self.heals = rule is not None
        self.average: Average
        if rule is None:
            self.average = FullAverage(self.out, groups)
        else:
            self.take()
            self.average = robust_average(self.out, groups, rule, centre=self.inp)
        self.calls = self.average.calls

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        yield from weighted_mean(self, self.average, step)

    def state(self) -> dict[str, Any]:
        """The state of a robust aggregation."""
        return {"average": self.average.state()} if self.heals else {}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        if self.heals:
            self.average.load(state["average"])


@dataclass(frozen=True)
class Outer:
    """The outer optimizer of DiLoCo (arXiv 2311.08105): SGD with Nesterov momentum on the agreed weights.
    With ``lr=1`` and ``momentum=0`` the agreed weights are the mean."""

    lr: float = 1.0
    momentum: float = 0.0


class Differences(AveragingStep):
    """Averages the differences to the last agreed weights r: compressed, given to an outer optimizer, or
    both.

    ``q = Q(inp - r)``, with the codec Q. The mean of all q is added to r, or given to the outer optimizer as
    its gradient. The encoding error stays in this rank's weights, ``out = r + (inp - r - q)``, so that it is
    part of the next difference. If the mean is encoded again, its owner keeps a residual.

    With ``feedback=b`` the error stays in a buffer e instead, and decays: ``e = b e + inp - r``,
    ``q = Q(e)``, ``e -= q``, and all ranks go on from r (SparseLoCo, arXiv 2508.15706).

    Args:
        tensors: The parameters, or pieces of them.
        groups: The model's process groups.
        outer: The outer optimizer.
        codec: Compresses the differences; None: they are sent in full (float32).
        power: Columns of PowerSGD's matrices, instead of a codec. PowerSGD keeps a residual, and all ranks
            get the same weights.
        rule: The robust aggregation that replaces the mean; None: the mean.
        feedback: b, from 0 to 1; None: the error stays in the weights. Only with a codec.

    Attributes:
        agreed: r, float32, one-dimensional; the same bits on all ranks.
        dropped: The encoding error of this rank's last difference, or e; None without a codec.
    """

    def __init__(
        self,
        tensors: Sequence[Part],
        groups: ModelGroups,
        outer: Outer,
        codec: Codec | None = None,
        power: int | None = None,
        rule: RobustAggregation | None = None,
        feedback: float | None = None,
    ) -> None:
        n = groups.size
        self.feedback = feedback
        self.unsent: torch.Tensor | None = None  # e, of a rank that weighs 0 in this averaging step
        length = (lambda total: padded(total, n)) if codec is not None or rule is not None else None
        super().__init__(tensors, groups, torch.float32, length)
        self.outer = outer
        self.heals = rule is not None or groups.sample_weight is not None
        self.take()
        self.agreed = self.inp.clone()
        self.dropped: torch.Tensor | None = None
        self.velocity = torch.zeros_like(self.agreed) if outer.momentum else None
        self.average: Average
        if codec is not None:
            self.dropped = torch.zeros_like(self.agreed)
            # The sign of a mean would lose its magnitude: the second phase uses 8 bits.
            second = find("int8") if codec.name == "sign" else codec
            kept = ((False, True), self.dropped)
            if codec.name.startswith("chunktopk:"):
                self.average = GatheredAverage(self.out, groups, codec, self.dropped)
            elif rule is None:
                self.average = CodedAverage(self.out, groups, codec, second, *kept)
            else:
                self.average = robust_average(self.out, groups, rule, (codec, second), *kept)
        elif power is not None:
            self.average = PowerAverage(self.out, self.taken.views, groups, power)
        elif rule is not None:
            self.average = robust_average(self.out, groups, rule)
        else:
            self.average = FullAverage(self.out, groups)
        self.calls = self.average.calls
        # All ranks get the same weights, unless each keeps the error of a codec in them.
        self.exact = (codec is None or feedback is not None) and not any(
            t.dtype == torch.float64 for t in tensors
        )

    def phases(self, step: int) -> Phases:
        """See :class:`AveragingStep`."""
        weight, change = self.groups.sample_weight, self.out
        self.contribute()
        # The padding: a nonzero value in it would change the scale of a codec's block.
        change[self.given.total :].zero_()
        if self.feedback is not None and self.dropped is not None:
            change.add_(self.dropped.mul_(self.feedback))
            self.unsent = self.dropped.clone() if weight is not None and weight.mine == 0.0 else None
        if weight is not None:
            weight.weigh(change)
        self.sent += self.average.sent
        yield from self.average.phases(step)
        if weight is not None:
            weight.normalize(change)
        self._agree()
        if self.dropped is not None:
            self._keep_dropped(self.dropped)
        if self.dropped is None or self.feedback is not None:
            self.out.copy_(self.agreed)
        else:
            torch.add(self.agreed, self.dropped, out=self.out)

    def _agree(self) -> None:
        """The outer step: ``out`` is the mean of the differences."""
        change = self.out
        if self.velocity is not None:
            self.velocity.mul_(self.outer.momentum).add_(change)
            change.add_(self.velocity, alpha=self.outer.momentum)
        self.agreed.add_(change, alpha=self.outer.lr)

    # Without a codec, of some of the ranks: see :class:`trigram.mixing.quorum.average.Rule`.

    def contribute(self) -> None:
        """``out`` becomes the difference of this rank's weights to those that it agreed on last."""
        torch.sub(self.inp, self.agreed, out=self.out)

    def agreement(self) -> list[torch.Tensor]:
        """The agreed weights and the outer momentum."""
        return [self.agreed] if self.velocity is None else [self.agreed, self.velocity]

    def conclude(self) -> None:
        """``out`` is the mean of the differences, and becomes the agreed weights."""
        self._agree()
        self.out.copy_(self.agreed)

    def rejoin(self) -> None:
        """``out`` is this rank's difference to weights that it agreed on earlier: it becomes one to those
        agreed on now."""
        self.out.add_(self.agreed)

    def _keep_dropped(self, dropped: torch.Tensor) -> None:
        """Makes the encoding error that of this rank's weights: a sample weight has scaled it."""
        sample_weight = self.groups.sample_weight
        if sample_weight is not None:
            dropped.mul_(1 / sample_weight.mine if sample_weight.mine else 0.0)
            if self.unsent is not None:
                dropped.copy_(self.unsent)
                self.unsent = None
        if self.heals:
            dropped.nan_to_num_(0.0, 0.0, 0.0)

    def state(self) -> dict[str, Any]:
        """The agreed weights, the outer momentum and the state of the average."""
        kept = {"agreed": self.agreed.clone(), "average": self.average.state()}
        if self.velocity is not None:
            kept["velocity"] = self.velocity.clone()
        if self.feedback is not None and self.dropped is not None:
            kept["error"] = self.dropped.clone()
        return kept

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.agreed.copy_(state["agreed"])
        self.average.load(state["average"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
        if self.feedback is not None and self.dropped is not None:
            self.dropped.copy_(state["error"])
