"""The mean of any tensors in one blocking call: consensus weights, buffers, an optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.average import padded
from trigram.averaging.groups import ModelGroups
from trigram.averaging.robust import robust_average
from trigram.averaging.sample_weight import SampleWeight
from trigram.collectives import coalesced
from trigram.runtime.engine_codes import AVERAGED

CHUNK = 4 << 20
"""Bytes that are averaged at a time, so that the memory needed does not grow with the model."""


def mean_of(
    tensors: Sequence[torch.Tensor], groups: ModelGroups, sample_weight: SampleWeight | None = None
) -> None:
    """Replaces each tensor by its mean over the ranks; returns when the means are there. All ranks call it.

    Args:
        tensors: The same shapes and dtypes on all ranks. Floating-point and complex tensors are averaged; the
            others are copied from the group's first rank.
        groups: The model's process groups. If ``groups.aggregation`` is set, it takes the place of the mean.
        sample_weight: This rank's weight in the mean; None: all ranks weigh the same.
    """
    rule, n = groups.aggregation, groups.size
    control, silent = groups.control, set(groups.silent())
    tensors = [coalesced.as_real(t) for t in tensors]
    floats = [t for t in tensors if _is_averaged(t) and t.numel()]
    for chunk in (c for alike in coalesced.alike(floats) for c in coalesced.chunks(alike, CHUNK)):
        dtype = chunk[0].dtype
        coalesced_tensor = coalesced.Coalesced(
            chunk,
            dtype if dtype in AVERAGED else torch.float32,
            None if rule is None else lambda total: padded(total, n),
        )
        coalesced_tensor.pack()
        if rule is not None:
            average = robust_average(coalesced_tensor.memory, groups, rule.without_history())
            average.start(-1)
            try:
                average.wait()
            except BaseException:
                groups.line.remove(average)
                raise
        else:
            if sample_weight is not None:
                sample_weight.weigh(coalesced_tensor.memory)
            if control.rank in silent:
                coalesced_tensor.memory.zero_()
            collectives.all_reduce(coalesced_tensor.memory, "avg", None, control)
            if silent and sample_weight is None:
                coalesced_tensor.memory.mul_(n / (n - len(silent)))
            if sample_weight is not None:
                sample_weight.normalize(coalesced_tensor.memory)
        coalesced_tensor.unpack()
    others = [t for t in tensors if not _is_averaged(t) and t.numel()]
    coalesced.broadcast(others, groups.source(), control, CHUNK)


def _is_averaged(t: torch.Tensor) -> bool:
    """Whether a tensor is of floating point; 8-bit floats too, but not pairs of 4-bit floats."""
    return t.is_floating_point() and "float4" not in str(t.dtype)
