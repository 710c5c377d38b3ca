"""Operators of compiled graphs whose C++ does not reach a process group that is written in Python."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

_library: Any = None


def reach_out_variants() -> None:
    """Makes ``_c10d_functional::all_gather_into_tensor_out`` call the process group through Python.

    Up to torch 2.13 its C++ does not reach a process group that is written in Python. The operator means the
    same for every backend as before.
    """
    global _library
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if _library is not None or (major, minor) >= (2, 14):
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        _library.impl("all_gather_into_tensor_out", _all_gather_out, key)


def _all_gather_out(given: torch.Tensor, size: int, name: str, *, out: torch.Tensor) -> torch.Tensor:
    group: Any = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    work = group._allgather_base(out, given)
    torch._C._distributed_c10d._register_work(out, work)
    return out
