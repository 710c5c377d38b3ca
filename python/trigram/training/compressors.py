"""What gradients are turned into on their way: codes, thin matrices, momenta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.average import Average, padded
from trigram.averaging.coded import CodedAverage
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.hierarchical import HierarchicalAverage, HostLevels
from trigram.averaging.powersgd import PowerAverage
from trigram.averaging.robust import RobustAverage
from trigram.codecs import Codec, find
from trigram.training.buckets import Bucket
from trigram.training.qadam import QAdam

FED_BACK = ("sign", "topk", "randomk")
"""Codecs that need error feedback: what they drop is not small."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GradientCompressor:
    """What travels for a bucket, and what is done to it before and after: by default, the gradients.

    One per model; it may remember things by bucket.
    """

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """From the elements that gradients take, the bucket's length; None: gradients and flags, in full.

        ``like`` is one of the parameters."""
        return None

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """How a bucket becomes its mean."""
        return FullAverage(bucket.memory, groups)

    def prepare(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """The gradients are in the bucket, and about to leave."""

    def departed(self, bucket: Bucket) -> None:
        """They have left, encoded."""

    def parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """What it remembers of each parameter in a bucket."""
        return [{} for _ in bucket.params]


class CodecCompressor(GradientCompressor):
    """GradientSync through a codec.

    Args:
        codec: Of the first leg.
        second: Of the second leg.
        feedback: Whether what codecs drop is added the next time.
    """

    def __init__(self, codec: Codec, second: Codec, feedback: tuple[bool, bool]) -> None:
        self.codec, self.second, self.feedback = codec, second, feedback

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Whole shards; float64 travels full."""
        if like.dtype not in _FLOATS:
            return None
        levels = self._levels(groups, like)
        return levels.length if levels is not None else lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """In two legs; between hosts only, where GPUs have two levels."""
        levels = self._levels(groups, bucket.memory)
        if levels is None:
            return self._coded(bucket.memory, groups)
        return HierarchicalAverage(bucket.memory, levels, self._coded)

    def _levels(self, groups: ModelGroups, like: torch.Tensor) -> HostLevels | None:
        return HostLevels.of(groups, like)

    def _coded(self, memory: torch.Tensor, groups: ModelGroups) -> Average:
        return CodedAverage(memory, groups, self.codec, self.second, self.feedback)


class MomentumCorrectedCompressor(CodecCompressor):
    """The largest of a momentum that is kept before coding: DGC's momentum correction.

    Args:
        codec: Top-k.
        momentum: m in ``u = m u + g``; what was sent of u is 0 then.
    """

    def __init__(self, codec: Codec, momentum: float) -> None:
        super().__init__(codec, codec, (True, True))
        self.momentum = momentum
        self.velocity: dict[int, torch.Tensor] = {}

    def _levels(self, groups: ModelGroups, like: torch.Tensor) -> HostLevels | None:
        """None: what was sent is known from this rank's own residual of all gradients."""
        return None

    def _of(self, bucket: Bucket) -> torch.Tensor:
        at = bucket.memory.data_ptr()
        if at not in self.velocity:
            self.velocity[at] = torch.zeros(bucket.memory.numel(), device=bucket.memory.device)
        return self.velocity[at]

    def prepare(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """The velocity travels in the gradients' place."""
        u = self._of(bucket)
        u.mul_(self.momentum).add_(bucket.memory)
        bucket.memory.copy_(u)

    def departed(self, bucket: Bucket) -> None:
        """What was sent has no velocity left. It is where nothing remains to be sent."""
        average = bucket.average
        assert isinstance(average, CodedAverage) and average.residual is not None
        self._of(bucket).masked_fill_(average.residual == 0, 0.0)

    def parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """The velocity of each parameter."""
        u, base = self._of(bucket), bucket.memory.storage_offset()
        at = [v.storage_offset() - base for v in bucket.views]
        return [{"velocity": u[a : a + v.numel()]} for a, v in zip(at, bucket.views, strict=True)]


class PowerSGDCompressor(GradientCompressor):
    """PowerSGD of some rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """The gradients; float64 travels full."""
        return (lambda total: total) if like.dtype in _FLOATS else None

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """As products of thin matrices."""
        return PowerAverage(bucket.memory, bucket.views, groups, self.rank)


class MomentumCompressor(CodecCompressor):
    """Adam's first moments in the gradients' place, once the variance is frozen: 1-bit Adam (arXiv
    2102.02888), and the same with 8 bits.

    Args:
        optimizer: The optimizer that knows what it gets.
        bits: 8 or 1.
        block: Values per block; None: the codec's own.
    """

    def __init__(self, optimizer: QAdam, bits: int, block: int | None) -> None:
        codec = find("int8" if bits == 8 else "sign", block)
        super().__init__(codec, codec, (bits == 1, bits == 1))
        self.optimizer = optimizer
        optimizer.freeze()

    def prepare(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Each gradient becomes the first moment that it would lead to."""
        for i, view in zip(bucket.params, bucket.views, strict=True):
            self.optimizer.to_momentum(params[i], view)


class RobustCompressor(GradientCompressor):
    """GradientSync combined by a robust rule, in full or through codecs.

    Args:
        rule: What stands in the place of the mean.
        codecs: Of the two legs; None: the numbers themselves, as float64 always travels.
        feedback: Whether what codecs drop is added the next time.
    """

    def __init__(
        self,
        rule: RobustAggregation,
        codecs: tuple[Codec, Codec] | None = None,
        feedback: tuple[bool, bool] = (False, False),
    ) -> None:
        self.aggregation, self.codecs, self.feedback = rule, codecs, feedback

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Whole shards."""
        return lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """In two legs, without levels: a host's sum would hide the rank that is broken."""
        if self.codecs is None or bucket.memory.dtype not in _FLOATS:
            return RobustAverage(bucket.memory, groups, self.aggregation)
        return RobustAverage(bucket.memory, groups, self.aggregation, self.codecs, self.feedback)


def make(
    what: str, block: int | None, options: dict[str, Any], rule: RobustAggregation | None = None
) -> GradientCompressor:
    """The coding of a trigram's WHAT for gradients.

    Args:
        what: ``full``, ``powersgd:RANK`` or a codec.
        block: Values per block; None: the codec's own.
        options: ``momentum`` of top-k.
        rule: What stands in the place of the mean; None: nothing.
    """
    kind, _, parameter = what.partition(":")
    if kind == "full":
        return GradientCompressor() if rule is None else RobustCompressor(rule)
    if kind == "powersgd":
        return PowerSGDCompressor(int(parameter))
    codec = find(what, block)
    if options.get("momentum"):
        return MomentumCorrectedCompressor(codec, options["momentum"])
    fed = kind in FED_BACK
    second = find("int8") if kind == "sign" else codec
    feedback = (fed, fed and kind != "sign")
    return (
        CodecCompressor(codec, second, feedback)
        if rule is None
        else RobustCompressor(rule, (codec, second), feedback)
    )
