"""The engine's integer codes for collectives, dtypes, operators and schedules (``rust/core/src``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trigram import _core

_COLLECTIVES = dict(_core.COLLECTIVES)
ALL_REDUCE, REDUCE, BROADCAST, BARRIER, ALL_GATHER = (
    _COLLECTIVES[name] for name in ("all_reduce", "reduce", "broadcast", "barrier", "all_gather")
)
REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL = (
    _COLLECTIVES[name] for name in ("reduce_scatter", "gather", "scatter", "all_to_all")
)

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _core.DTYPES}

AVERAGED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
"""The real dtypes whose averages the engine computes."""

OP_NAMES = tuple(name for name, _ in _core.OPS)
OPS: dict[Any, int] = dict(_core.OPS)
_TORCH_NAMES = {"prod": "PRODUCT"}
OPS |= {getattr(dist.ReduceOp, _TORCH_NAMES.get(n, n.upper())): code for n, code in _core.OPS}

VIAS: dict[str | None, int] = {(None if name == "auto" else name): code for name, code in _core.VIAS}

Asked = tuple[int, int, int, int, int, int]
"""A call as the engine takes it: the codes of collective and dtype, the count of elements, the codes of
operator and schedule, and the group rank of the root."""
Splits = tuple[list[int], list[int]] | None
"""Elements sent to and received from each rank, for all_to_all with unequal parts; None: equal parts."""
