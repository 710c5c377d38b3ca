"""The ``Backend`` object that torch 2.14 and later look for in a process group.

A process group in Python carries its calls itself. C++ parts that ask a group for its backend, such as the
flight recorder for the group's name, need one all the same. It makes no calls.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from trigram.backend.names import DEVICES, NAME


class _StandIn(dist._Backend):  # type: ignore[misc,name-defined]
    def getBackendName(self) -> str:
        return NAME


def register(group: Any) -> None:
    """Gives a process group its backend. Before torch 2.14 nothing needs one, and Python cannot make one."""
    try:
        backend = _StandIn(group.rank(), group.size())  # type: ignore[call-arg]
    except TypeError:
        return
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for device in DEVICES:
        with contextlib.suppress(RuntimeError):  # torch without this device
            group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
