"""Rounds of weights: what a rank gives, and what it takes back.

An :class:`Exchange` has the weights of a rank in one flat tensor (``inp``), talks to others, and
leaves in another (``out``) what the weights should be. The carrier decides when, and whether
``out`` is assigned or its difference to ``inp`` added to weights that have moved on. Here are those
in which all ranks take part; those among neighbours are in ``trigram/gossip.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigram.algorithms.robust import Rule
from trigram.averaging.average import CodedAverage, FullAverage, padded
from trigram.averaging.powersgd import PowerAverage
from trigram.averaging.robust import RobustAverage
from trigram.averaging.sample_weight import Share
from trigram.codecs.codec import Codec, find
from trigram.collectives import calls as collectives
from trigram.collectives import coalesced as flat
from trigram.training.step_hooks import Channels


class Exchange:
    """Rounds of one flat tensor. A new algorithm is a subclass with ``start``, ``wait`` and, unless
    it always waits, ``ready``.

    Args:
        tensors: What is exchanged: the parameters, of one dtype unless ``dtype`` says otherwise.
        channels: Where to talk.
        dtype: Of the flat tensors.
        length: Of the flat tensors, from what the parameters take.

    Attributes:
        inp: The weights given, flat.
        out: What they should be, flat, after :meth:`wait`.
        sent: Bytes sent so far.
        exact: Whether ``out`` may be assigned where the weights are still ``inp``.
        heals: Whether ``out`` replaces weights of this rank that were not finite: a difference to
            them would leave them so.
    """

    exact = False
    heals = False

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        channels: Channels,
        dtype: torch.dtype | None = None,
        length: Callable[[int], int] | None = None,
    ) -> None:
        self.channels = channels
        self.given = flat.Flat(tensors, dtype, length)
        self.taken = flat.Flat(tensors, dtype, length)
        self.inp = self.given.memory
        self.out = self.taken.memory
        self.sent = 0

    # The weights.

    def take(self) -> None:
        """A snapshot of the weights."""
        self.given.pack()

    @torch.no_grad()
    def apply(self, moved: bool) -> None:
        """Gives the weights what they should be; ``moved``: they are no longer the snapshot."""
        if (self.exact and not moved) or (self.heals and not bool(self.inp.isfinite().all())):
            self.taken.unpack()
            return
        self.out -= self.inp
        parts = self.taken.views
        tensors = self.taken.tensors
        if tensors[0].dtype != self.out.dtype or any(t.dtype != tensors[0].dtype for t in tensors):
            parts = [v.to(t.dtype) for v, t in zip(parts, tensors, strict=True)]
        torch._foreach_add_(tensors, parts)

    # The round.

    def start(self, round: int) -> None:
        """Begins a round; ``inp`` must stay as it is until it has ended."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether :meth:`wait` would not wait. Moves on what can be."""
        return True

    def wait(self) -> None:
        """Ends the round."""
        raise NotImplementedError

    # What is remembered between rounds.

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave."""


class Mean(Exchange):
    """``out`` is the mean of all ``inp``, or what a robust rule makes of them; the same bits on all ranks."""

    exact = True

    def __init__(self, tensors: Sequence[torch.Tensor], channels: Channels, rule: Rule | None = None) -> None:
        n = channels.size
        super().__init__(tensors, channels, None, None if rule is None else lambda total: padded(total, n))
        self.heals = rule is not None
        self.average: FullAverage | RobustAverage
        if rule is None:
            self.average = FullAverage(self.out, channels)
        else:
            self.take()
            self.average = RobustAverage(self.out, channels, rule, centre=self.inp)

    def start(self, round: int) -> None:
        """See :class:`Exchange`."""
        self.out.copy_(self.inp)
        if self.channels.share is not None:
            self.channels.share.weigh(self.out)
        self.average.start(round)
        self.sent += self.average.sent

    def ready(self) -> bool:
        """See :class:`Exchange`."""
        return self.average.ready()

    def wait(self) -> None:
        """See :class:`Exchange`."""
        self.average.wait()
        if self.channels.share is not None:
            self.channels.share.settle(self.out)

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


class Differences(Exchange):
    """Differences to the last agreed weights r: coded, given to an outer optimizer, or both.

    ``q = Q(inp - r)``; the mean of all q is r's step (or the outer optimizer's gradient). What Q
    dropped stays in the weights: ``out = r + (inp - r - q)``; with ``r - inp`` in its place it would
    be lost. Where the mean is coded again, its owner keeps a residual.

    Args:
        tensors: The parameters.
        channels: Where to talk.
        outer: The outer optimizer.
        codec: None: differences travel full.
        power: Columns of PowerSGD's matrices, in a codec's place; it feeds back what it dropped itself,
            and all ranks get the same weights.
        rule: What stands in the place of the mean; None: nothing.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        channels: Channels,
        outer: Outer,
        codec: Codec | None = None,
        power: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        n = channels.size
        length = (lambda total: padded(total, n)) if codec is not None or rule is not None else None
        super().__init__(tensors, channels, torch.float32, length)
        self.outer = outer
        self.heals = rule is not None or channels.share is not None
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
                self.average = CodedAverage(self.out, channels, codec, second, *kept)
            else:
                self.average = RobustAverage(self.out, channels, rule, (codec, second), *kept)
        elif power is not None:
            self.average = PowerAverage(self.out, self.taken.views, channels, power)
        elif rule is not None:
            self.average = RobustAverage(self.out, channels, rule)
        else:
            self.average = FullAverage(self.out, channels)
        # All ranks get the same weights, unless they keep what a codec dropped.
        self.exact = codec is None and all(t.dtype == torch.float32 for t in tensors)

    def start(self, round: int) -> None:
        """See :class:`Exchange`."""
        torch.sub(self.inp, self.agreed, out=self.out)
        self.out[self.given.total :].zero_()  # a sign of nothing is not nothing
        if self.channels.share is not None:
            self.channels.share.weigh(self.out)
        self.average.start(round)
        self.sent += self.average.sent

    def ready(self) -> bool:
        """See :class:`Exchange`."""
        ready: bool = self.average.ready()
        return ready

    def wait(self) -> None:
        """See :class:`Exchange`."""
        self.average.wait()
        step = self.out
        if self.channels.share is not None:
            self.channels.share.settle(step)
        if self.velocity is not None:
            self.velocity.mul_(self.outer.momentum).add_(step)
            step.add_(self.velocity, alpha=self.outer.momentum)
        self.agreed.add_(step, alpha=self.outer.lr)
        self.out.copy_(self.agreed)
        if self.dropped is not None:
            self._keep_dropped(self.dropped)

    def _keep_dropped(self, dropped: torch.Tensor) -> None:
        """What the codec dropped stays in the weights; it was made of weighed differences."""
        share = self.channels.share
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


def mean_of(tensors: Sequence[torch.Tensor], channels: Channels, share: Share | None = None) -> None:
    """Gives all ranks the mean of each tensor, now. Integers: those of the group's first rank.

    Where averages follow a robust rule, so do these. With a share they are weighted means.
    """
    rule, n = channels.rule, channels.size
    side = channels.side
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    for same in flat.alike(floats):
        both = flat.Flat(same, None, None if rule is None else lambda total: padded(total, n))
        both.pack()
        if rule is not None:
            now = RobustAverage(both.memory, channels, rule.alone())
            now.start(-1)
            now.wait()
        else:
            if share is not None:
                share.weigh(both.memory)
            collectives.all_reduce(both.memory, "avg", None, side)
            if share is not None:
                share.settle(both.memory)
        both.unpack()
    others = [t for t in tensors if not t.is_floating_point() and t.numel()]
    flat.broadcast(others, 0, side)


def same_everywhere(tensors: Sequence[torch.Tensor], channels: Channels) -> bool:
    """Whether all ranks hold the same bits, as far as two sums of 64 bits tell."""
    sums = torch.zeros(2, dtype=torch.int64)
    for k, t in enumerate(tensors):
        bits = t.contiguous().flatten().view(torch.uint8).to(torch.int64)
        sums[0] += bits.sum().cpu() * (2 * k + 1)
        sums[1] += (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum().cpu()
    everyone = torch.empty(channels.size, 2, dtype=torch.int64)
    collectives.all_gather(everyone, sums, channels.side)
    return bool((everyone == everyone[0]).all())
