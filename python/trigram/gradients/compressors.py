"""Gradient compressors: codecs, PowerSGD, momentum, robust aggregation; they choose the average of a
bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram.algorithms.options import AlgorithmOptions
from trigram.algorithms.robust import RobustAggregation
from trigram.algorithms.trigram import Algorithm
from trigram.averaging.average import Average, padded
from trigram.averaging.coded import CodedAverage
from trigram.averaging.full import FullAverage
from trigram.averaging.gradient_average import GradientAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.held_residual import positions
from trigram.averaging.hierarchical import HierarchicalAverage, HostLevels
from trigram.averaging.lossless import LosslessAverage
from trigram.averaging.powersgd import PowerAverage
from trigram.averaging.robust import robust_average
from trigram.codecs import Codec, find
from trigram.errors import MisuseError
from trigram.gpu import device
from trigram.gradients.buckets import Bucket
from trigram.optimizers.qadam import QAdam
from trigram.runtime import logs

NEEDS_FEEDBACK = ("sign", "topk", "randomk")
"""Codecs that need error feedback, because their error is large."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GradientCompressor:
    """Chooses how the gradients of a bucket are averaged, and changes them before that; this one sends them
    in full.

    There is one per model; it may keep state for each bucket.

    Attributes:
        once: It replaces gradients by something else, so that a second pass before the update cannot add to
            what the first has left in them; None, or what they hold then.
        compresses: The dtypes of gradients that it sends with fewer bytes; others are sent in full.
    """

    once: str | None = None
    compresses: tuple[torch.dtype, ...] = ()
    _told: frozenset[torch.dtype] = frozenset()

    def begin(self, ranks: int) -> None:
        """All buckets are about to be made, for this number of ranks."""

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """The function from the number of gradient values to the length of a bucket.

        None: the bucket is sent in full and ends with one flag per parameter. ``like`` is one of the
        parameters of the bucket, for its dtype and device."""
        return None

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """The average that a bucket uses in all steps."""
        return FullAverage(bucket.memory, groups)

    def bucket(self, indices: Sequence[int], params: Sequence[torch.Tensor], groups: ModelGroups) -> Bucket:
        """A bucket of some parameters, by their indices, with its average; ``params``: all parameters."""
        layout = self.layout(params[indices[0]], groups)
        if layout is None:
            self._tell_full(params[indices[0]].dtype, groups)
        made = Bucket(indices, params, layout)
        made.average = FullAverage(made.memory, groups) if layout is None else self.average(made, groups)
        return made

    def _tell_full(self, dtype: torch.dtype, groups: ModelGroups) -> None:
        """Says once of each dtype that it is sent in full, where somebody may count on fewer bytes."""
        if self.compresses and dtype not in (*self.compresses, *self._told) and groups.rank == 0:
            self._told |= {dtype}
            names = [str(each).removeprefix("torch.") for each in (dtype, *self.compresses)]
            logs.warning(
                f"gradients of {names[0]} are sent in full: the algorithm compresses {', '.join(names[1:])}"
            )

    def end(self) -> None:
        """It averages no more gradients."""

    def before_send(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Called when all gradients are in the bucket, before they are sent; may change them in place."""

    def after_send(self, bucket: Bucket) -> None:
        """Called after the gradients were encoded and sent."""

    def parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """The state of each parameter in a bucket, by name; it moves when buckets are rebuilt."""
        return [{} for _ in bucket.params]


class CodecCompressor(GradientCompressor):
    """Gradients through a codec.

    Args:
        codec: The codec of the first phase.
        second: The codec of the second phase.
        feedback: For each phase, whether its encoding error is added in the next step (error feedback).
    """

    compresses = _FLOATS

    def __init__(self, codec: Codec, second: Codec, feedback: tuple[bool, bool]) -> None:
        self.codec, self.second, self.feedback = codec, second, feedback

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Pads to whole shards; float64 is sent in full."""
        if like.dtype not in _FLOATS:
            return None
        levels = self._levels(groups, like)
        return levels.length if levels is not None else lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """In two phases; only between hosts if the GPUs take the hierarchical route."""
        levels = self._levels(groups, bucket.memory)
        if levels is None:
            return self._coded(bucket.memory, groups)
        return HierarchicalAverage(bucket.memory, levels, self._coded)

    def _levels(self, groups: ModelGroups, like: torch.Tensor) -> HostLevels | None:
        return HostLevels.of(groups, like)

    def _coded(self, memory: torch.Tensor, groups: ModelGroups) -> Average:
        return CodedAverage(memory, groups, self.codec, self.second, self.feedback)


class LosslessCompressor(GradientCompressor):
    """Gradients as exact codes: the bits of the default with fewer bytes. What is not float32 on the CPU is
    sent in full."""

    is_told = False
    compresses = (torch.float32,)

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Pads to whole shards."""
        on_gpu = device.handles(like) or not like.is_cpu
        if on_gpu and not self.is_told and groups.rank == 0:
            self.is_told = True
            logs.warning(f"lossless: gradients on {like.device} are sent in full; it codes on CPUs only")
        if like.dtype != torch.float32 or on_gpu:
            return None
        return lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """See :class:`GradientCompressor`."""
        return LosslessAverage(bucket.memory, groups)


class MomentumCorrectedCompressor(CodecCompressor):
    """Top-k of a momentum instead of the gradient: DGC's momentum correction (arXiv 1712.01887).

    Args:
        codec: Top-k.
        momentum: m in ``u = m u + g``; the values of u that were sent become 0.
    """

    def __init__(self, codec: Codec, momentum: float) -> None:
        super().__init__(codec, codec, (True, True))
        self.momentum = momentum
        self.velocity: weakref.WeakKeyDictionary[Bucket, torch.Tensor] = weakref.WeakKeyDictionary()
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _levels(self, groups: ModelGroups, like: torch.Tensor) -> HostLevels | None:
        """None: :meth:`after_send` needs this rank's residual of all gradients, which two levels do not
        have."""
        return None

    def _of(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self.velocity:
            self.velocity[bucket] = torch.zeros(
                bucket.memory.numel(), dtype=torch.float32, device=bucket.memory.device
            )
        return self.velocity[bucket]

    def before_send(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Replaces the gradients by the velocity, which stays as it is where this rank has no gradient."""
        u = self._of(bucket)
        unused = [positions([bucket.views[k]], bucket.memory)[0] for k in bucket.held]
        self.kept = [(u[span], u[span].clone()) for span in unused]
        u.mul_(self.momentum).add_(bucket.memory)
        bucket.memory.copy_(u)
        for span in unused:
            bucket.memory[span] = 0

    def after_send(self, bucket: Bucket) -> None:
        """Sets the velocity of the values that were sent to 0: those whose residual is 0."""
        average = bucket.average
        assert isinstance(average, CodedAverage) and average.residual is not None
        self._of(bucket).masked_fill_(average.residual == 0, 0.0)
        for velocity, before in self.kept:
            velocity.copy_(before)

    def parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """The velocity of each parameter."""
        u, base = self._of(bucket), bucket.memory.storage_offset()
        at = [v.storage_offset() - base for v in bucket.views]
        return [{"velocity": u[a : a + v.numel()]} for a, v in zip(at, bucket.views, strict=True)]


class PowerSGDCompressor(GradientCompressor):
    """PowerSGD with matrices of ``rank`` columns."""

    compresses = _FLOATS

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """No padding; float64 is sent in full."""
        return (lambda total: total) if like.dtype in _FLOATS else None

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """PowerSGD over the bucket."""
        return PowerAverage(bucket.memory, bucket.views, groups, self.rank)


class MomentumCompressor(CodecCompressor):
    """Sends Adam's first moments instead of gradients: 1-bit Adam (arXiv 2102.02888), also with 8 bits, where
    the variance need not be frozen.

    Args:
        optimizer: The optimizer; it is switched to moments here.
        bits: 8 or 1.
        block: Values per block; None: the default of the codec.
    """

    once = "Adam's first moments"

    def __init__(self, optimizer: QAdam, bits: int, block: int | None) -> None:
        codec = find("int8" if bits == 8 else "sign", block)
        super().__init__(codec, codec, (bits == 1, bits == 1))
        self.optimizer = optimizer
        optimizer.freeze(self, follows=bits == 8)

    def end(self) -> None:
        """The optimizer gets gradients again."""
        self.optimizer.thaw(self)

    def before_send(self, bucket: Bucket, params: Sequence[torch.Tensor]) -> None:
        """Replaces each gradient by the first moment that Adam would compute from it."""
        for i, view in zip(bucket.params, bucket.views, strict=True):
            self.optimizer.to_momentum(params[i], view)


class RobustCompressor(GradientCompressor):
    """Gradients with a robust aggregation instead of the mean, in full or through codecs.

    Args:
        rule: The robust aggregation.
        codecs: Of the first and second phase; None: uncompressed. float64 is always uncompressed.
        feedback: For each phase, whether its encoding error is added in the next step.
    """

    def __init__(
        self,
        rule: RobustAggregation,
        codecs: tuple[Codec, Codec] | None = None,
        feedback: tuple[bool, bool] = (False, False),
    ) -> None:
        self.aggregation, self.codecs, self.feedback = rule, codecs, feedback

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Pads to whole shards."""
        return lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """In two phases, never in two levels: a sum over a host would hide which rank is wrong."""
        if self.codecs is None or bucket.memory.dtype not in _FLOATS:
            return robust_average(bucket.memory, groups, self.aggregation)
        return robust_average(bucket.memory, groups, self.aggregation, self.codecs, self.feedback)


class RegisteredCompressor(GradientCompressor):
    """Gradients averaged by a class of the script's.

    Args:
        kind: The class, a :class:`GradientAverage`.
        arguments: Its options.
    """

    def __init__(self, kind: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.kind, self.arguments = kind, arguments

    def layout(self, like: torch.Tensor, groups: ModelGroups) -> Callable[[int], int] | None:
        """Pads to whole shards."""
        return lambda total: padded(total, groups.size)

    def average(self, bucket: Bucket, groups: ModelGroups) -> Average:
        """One of the class."""
        made = self.kind(bucket.memory, bucket.views, groups, **self.arguments)
        if not isinstance(made, GradientAverage):
            raise MisuseError(
                f"register: average={getattr(self.kind, '__name__', self.kind)} has made a "
                f"{type(made).__name__}, but a trigram.averaging.GradientAverage is expected"
            )
        made.is_made = True
        return made


def of(algorithm: Algorithm, optimizer: Any) -> GradientCompressor:
    """The compressor of an algorithm that averages gradients.

    Args:
        algorithm: The algorithm.
        optimizer: The optimizer, for algorithms that use it.
    """
    if algorithm.average is not None:
        return RegisteredCompressor(algorithm.average, algorithm.arguments)
    options = algorithm.options
    if algorithm.value.carry == "momentum":
        return MomentumCompressor(optimizer, options.bits, options.block)
    return make(algorithm.value.what, options, algorithm.aggregation)


def make(what: str, options: AlgorithmOptions, rule: RobustAggregation | None = None) -> GradientCompressor:
    """Makes the gradient compressor of a trigram's WHAT.

    Args:
        what: ``full``, ``lossless``, ``powersgd:RANK`` or the name of a codec.
        options: The algorithm's options; ``momentum`` is used with top-k.
        rule: The robust aggregation that replaces the mean; None: the mean.
    """
    kind, _, parameter = what.partition(":")
    if kind == "full":
        return GradientCompressor() if rule is None else RobustCompressor(rule)
    if kind == "powersgd":
        return PowerSGDCompressor(int(parameter))
    if kind == "lossless":
        return LosslessCompressor()
    codec = find(what, options.block)
    if options.momentum:
        return MomentumCorrectedCompressor(codec, options.momentum)
    feeds_back = kind in NEEDS_FEEDBACK
    second = find("int8") if kind == "sign" else codec
    feedback = (feeds_back, feeds_back and kind != "sign")
    return (
        CodecCompressor(codec, second, feedback)
        if rule is None
        else RobustCompressor(rule, (codec, second), feedback)
    )
