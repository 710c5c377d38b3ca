"""The name ``trigram`` among the backends of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from trigram.backend.names import DEVICES, NAME


def register() -> None:
    """Registers the backend; ``import trigram`` calls it, and torch through its entry points. Calling it
    again does nothing."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(asked: Any, options: Any = None) -> dist.ProcessGroup:
    """Makes the process group that ``init_process_group`` or ``new_group`` asks for.

    Args:
        asked: ``torch._C._distributed_c10d._DistributedBackendOptions``.
        options: The ``pg_options`` of the call; Trigram has none, and keeps what is given.

    Raises:
        UnsupportedError: The default group of torch has another backend, and this one is not all of its
            ranks.
        TrigramError: The errors of :func:`trigram.init`.
    """
    # Here and not at the top: a script that never makes a process group should not pay for it.
    from trigram.backend import process_group

    return process_group.create(asked, options)
