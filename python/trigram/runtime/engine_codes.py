"""The engine's integer codes for collectives, dtypes, operators and schedules (``rust/core/src``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ALL_REDUCE, REDUCE, BROADCAST, BARRIER, ALL_GATHER = 1, 2, 3, 4, 5
REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL = 6, 7, 8, 9

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}

OP_NAMES = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
OPS: dict[Any, int] = {name: code for code, name in enumerate(OP_NAMES)}
_TORCH_NAMES = {"prod": "PRODUCT"}
OPS |= {getattr(dist.ReduceOp, _TORCH_NAMES.get(n, n.upper())): code for n, code in tuple(OPS.items())}

VIAS = {
    name: code
    for code, name in enumerate((None, "shared", "ring", "tree", "recursive_doubling", "scatter_gather"))
}

Asked = tuple[int, int, int, int, int, int]
"""A call as the engine takes it: the codes of collective and dtype, the count of elements, the codes of
operator and schedule, and the group rank of the root."""
Splits = tuple[list[int], list[int]] | None
"""Elements sent to and received from each rank, for all_to_all with unequal parts; None: equal parts."""
