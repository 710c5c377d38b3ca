"""torch's FSDP2 (``fully_shard``) with Trigram's collectives: on registered memory, with a codec if asked.

FSDP2 keeps its loop, its state and its checkpoints; only ``all_gather`` and ``reduce_scatter`` change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from trigram import codecs, collectives
from trigram.codecs import Codec
from trigram.errors import MisuseError, UnsupportedError
from trigram.runtime.memory import empty
from trigram.runtime.world import resolve

__all__ = ["use"]

_CODED = (torch.float32, torch.float16, torch.bfloat16)


def use(model: nn.Module, codec: str | None = None, weights: str | None = None) -> None:
    """Lets FSDP2 communicate through Trigram; call it after ``fully_shard``, on all ranks.

    Args:
        model: A module of which some submodules, or it itself, were given to ``fully_shard``.
        codec: The codec of gradients, such as ``int8``, ``fp8`` or ``bf16``, with error feedback; None: in
            full, with the bits of torch's own collectives up to the order of sums.
        weights: The codec of weights on their way to the ranks that compute with them; None: in full.

    Raises:
        MisuseError: No module was given to ``fully_shard``.
        UnsupportedError: A codec is unknown, or sends a part of the values only.
    """
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise MisuseError("fsdp.use: no module of the model was given to fully_shard; call it first")
    for name in (codec, weights):
        if name is not None:
            _find(name)
    for module in sharded:
        module.set_custom_all_gather(_Gather(weights))
        module.set_custom_reduce_scatter(_Scatter(codec))


def _find(name: str) -> Codec:
    if name.partition(":")[0] in ("topk", "randomk", "chunktopk", "sign"):
        raise UnsupportedError(
            f"fsdp.use: {name} keeps too little of each value for one phase; use int8, int4, fp8, bf16 or f16"
        )
    return codecs.find(name)


class _Memory:
    """Where FSDP2 puts what it sends and receives."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new tensor in registered memory."""
        return empty([int(n) for n in size], dtype=dtype, device=device)


class _Gather(_Memory, AllGather):
    """``all_gather`` of weights; returns when all are there."""

    def __init__(self, codec: str | None) -> None:
        self.codec = None if codec is None else _find(codec)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See :class:`AllGather`."""
        if self.codec is None or input_tensor.dtype not in _CODED:
            collectives.all_gather(output_tensor, input_tensor, group)
            return None
        size = self.codec.size(input_tensor.numel())
        n = resolve(group).size
        coded = empty(n * size, dtype=torch.uint8, device=input_tensor.device)
        mine = coded[resolve(group).rank * size :][:size]
        self.codec.encode(input_tensor, mine)
        collectives.all_gather(coded, mine, group)
        for rank, (code, part) in enumerate(zip(coded.split(size), output_tensor.chunk(n), strict=True)):
            self.codec.decode(code, part, sender=resolve(group).ranks[rank])
        return None


class _Scatter(_Memory, ReduceScatter):
    """``reduce_scatter`` of gradients; returns when the sum is there."""

    def __init__(self, codec: str | None) -> None:
        self.codec = None if codec is None else _find(codec)
        self.residual: torch.Tensor | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See :class:`ReduceScatter`."""
        if self.codec is None or input_tensor.dtype not in _CODED:
            collectives.reduce_scatter(output_tensor, input_tensor, op, group)
            return None
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UnsupportedError(
                f"fsdp.use: gradients cannot be reduced by {op} through a codec; leave the divide factor of "
                "fully_shard as it is, or pass codec=None"
            )
        g, codec = resolve(group), self.codec
        if self.residual is None or self.residual.numel() != input_tensor.numel():
            self.residual = torch.zeros_like(input_tensor, dtype=torch.float32)
        size = codec.size(output_tensor.numel())
        coded = empty(g.size * size, dtype=torch.uint8, device=input_tensor.device)
        received = torch.empty_like(coded)
        parts = zip(input_tensor.chunk(g.size), self.residual.chunk(g.size), coded.split(size), strict=True)
        for values, residual, code in parts:
            codec.encode(values, code, residual)
        collectives.all_to_all(received, coded, group=group)
        total = torch.zeros_like(output_tensor, dtype=torch.float32)
        weight = 1 / g.size if op == dist.ReduceOp.AVG else 1.0
        for rank, code in enumerate(received.split(size)):
            codec.decode(code, total, weight, g.ranks[rank])
        output_tensor.copy_(total)
        return None
