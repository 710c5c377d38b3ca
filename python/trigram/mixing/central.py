"""Averaging steps in which all ranks take part: the mean of weights, or of their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.average import padded
from trigram.averaging.coded import CodedAverage
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.powersgd import PowerAverage
from trigram.averaging.robust import RobustAverage
from trigram.codecs import Codec, find
from trigram.mixing.step import AveragingStep


class Mean(AveragingStep):
    """``out`` is the mean of all ``inp``, or what a robust rule makes of them; the same bits on all ranks."""

    exact = True

    def __init__(
        self, tensors: Sequence[torch.Tensor], groups: ModelGroups, rule: RobustAggregation | None = None
    ) -> None:
        n = groups.size
        super().__init__(tensors, groups, None, None if rule is None else lambda total: padded(total, n))
        self.heals = rule is not None
        self.average: FullAverage | RobustAverage
        if rule is None:
            self.average = FullAverage(self.out, groups)
        else:
            self.take()
            self.average = RobustAverage(self.out, groups, rule, centre=self.inp)

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        self.out.copy_(self.inp)
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.weigh(self.out)
        self.average.start(round)
        self.sent += self.average.sent

    def ready(self) -> bool:
        """See :class:`AveragingStep`."""
        return self.average.ready()

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.average.wait()
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.normalize(self.out)

    def state(self) -> dict[str, Any]:
        """What a robust rule remembers."""
        return {"average": self.average.state()} if self.heals else {}

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        if self.heals:
            self.average.load(state["average"])


@dataclass(frozen=True)
class Outer:
    """The optimizer of the agreed weights: DiLoCo's (arXiv 2311.08105). (1, 0) only averages."""

    lr: float = 1.0
    momentum: float = 0.0


class Differences(AveragingStep):
    """Differences to the last agreed weights r: coded, given to an outer optimizer, or both.

    ``q = Q(inp - r)``; the mean of all q is r's step (or the outer optimizer's gradient). What Q
    dropped stays in the weights: ``out = r + (inp - r - q)``; with ``r - inp`` in its place it would
    be lost. Where the mean is coded again, its owner keeps a residual.

    Args:
        tensors: The parameters.
        groups: Where to talk.
        outer: The outer optimizer.
        codec: None: differences travel full.
        power: Columns of PowerSGD's matrices, in a codec's place; it feeds back what it dropped itself,
            and all ranks get the same weights.
        rule: What stands in the place of the mean; None: nothing.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        groups: ModelGroups,
        outer: Outer,
        codec: Codec | None = None,
        power: int | None = None,
        rule: RobustAggregation | None = None,
    ) -> None:
        n = groups.size
        length = (lambda total: padded(total, n)) if codec is not None or rule is not None else None
        super().__init__(tensors, groups, torch.float32, length)
        self.outer = outer
        self.heals = rule is not None or groups.sample_weight is not None
        self.take()
        self.agreed = self.inp.clone()
        self.dropped: torch.Tensor | None = None
        self.velocity = torch.zeros_like(self.agreed) if outer.momentum else None
        self.average: Any
        if codec is not None:
            self.dropped = torch.zeros_like(self.agreed)
            # A sign of a mean would be a second guess on top of the first.
            second = find("int8") if codec.name == "sign" else codec
            kept = ((False, True), self.dropped)
            if rule is None:
                self.average = CodedAverage(self.out, groups, codec, second, *kept)
            else:
                self.average = RobustAverage(self.out, groups, rule, (codec, second), *kept)
        elif power is not None:
            self.average = PowerAverage(self.out, self.taken.views, groups, power)
        elif rule is not None:
            self.average = RobustAverage(self.out, groups, rule)
        else:
            self.average = FullAverage(self.out, groups)
        # All ranks get the same weights, unless they keep what a codec dropped.
        self.exact = codec is None and all(t.dtype == torch.float32 for t in tensors)

    def start(self, round: int) -> None:
        """See :class:`AveragingStep`."""
        torch.sub(self.inp, self.agreed, out=self.out)
        self.out[self.given.total :].zero_()  # a sign of nothing is not nothing
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.weigh(self.out)
        self.average.start(round)
        self.sent += self.average.sent

    def ready(self) -> bool:
        """See :class:`AveragingStep`."""
        ready: bool = self.average.ready()
        return ready

    def wait(self) -> None:
        """See :class:`AveragingStep`."""
        self.average.wait()
        step = self.out
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.normalize(step)
        if self.velocity is not None:
            self.velocity.mul_(self.outer.momentum).add_(step)
            step.add_(self.velocity, alpha=self.outer.momentum)
        self.agreed.add_(step, alpha=self.outer.lr)
        self.out.copy_(self.agreed)
        if self.dropped is not None:
            self._keep_dropped(self.dropped)

    def _keep_dropped(self, dropped: torch.Tensor) -> None:
        """What the codec dropped stays in the weights; it was made of weighed differences."""
        share = self.groups.sample_weight
        if share is not None:
            dropped.mul_(1 / share.mine if share.mine else 0.0)
        if self.heals:
            dropped.nan_to_num_(0.0, 0.0, 0.0)
        self.out += dropped

    def state(self) -> dict[str, Any]:
        """The agreed weights, the outer momentum, the owner's residual."""
        kept = {"agreed": self.agreed.clone(), "average": self.average.state()}
        if self.velocity is not None:
            kept["velocity"] = self.velocity.clone()
        return kept

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.agreed.copy_(state["agreed"])
        self.average.load(state["average"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
