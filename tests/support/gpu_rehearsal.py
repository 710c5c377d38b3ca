"""A rehearsal of what is meant for a GPU, on a machine without one: the tests and scripts run as they are,
with tensors of the CPU over the stand-in (`gpu_standin`) and interpreted kernels. It shows that paths,
imports, arguments and results fit together; its times mean nothing.

`TRIGRAM_REHEARSAL=1` starts one; a script asks for its device here.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

REHEARSES = os.environ.get("TRIGRAM_REHEARSAL") == "1"


class _Event:
    """A CUDA event of a device that has done everything at once."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Everything is done."""

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.at - self.at)


def device(rank: int = 0) -> torch.device:
    """This process's device, which becomes the current one: a GPU that ranks share, or the CPU in a
    rehearsal.

    NCCL takes each rank for a host of its own: it refuses two ranks of one host on one GPU. It reads the
    variable once, when it starts.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_MNNVL_ENABLE", "0")  # or the fabric would tell that the hosts are one
    if REHEARSES:
        return torch.device("cpu")
    found = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def backend() -> str:
    """Which backend of torch.distributed stands where NCCL would."""
    return "gloo" if REHEARSES else "nccl"


def use() -> None:
    """In a rehearsal: from now on, what asks torch for a GPU finds one, and CPU tensors take the way of GPU
    tensors."""
    if not REHEARSES:
        return
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.get_device_name = lambda device=None: "no GPU: a rehearsal"
    cuda.Event = _Event
    torch.accelerator.current_accelerator = lambda check_available=False: None  # Adam asks
    if "TRIGRAM_NCCL_LIB" in os.environ:
        from tests.support import gpu_standin

        gpu_standin.use()
