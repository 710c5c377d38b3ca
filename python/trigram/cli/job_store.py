"""Where commands find the store of a running job."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
import typer

from trigram.runtime.live_store import ReconnectingStore
from trigram.runtime.rendezvous import reopen


def address(text: str | None) -> tuple[str, int]:
    """Host and port of the store: as given, else where MASTER_ADDR and MASTER_PORT say."""
    given = text or f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '')}"
    return endpoint(
        given,
        f"--store {given!r} is no HOST:PORT; it is the job's MASTER_ADDR and MASTER_PORT, and rank 0 of a "
        "job with TRIGRAM_TOP=1 logs it",
    )


def endpoint(text: str, otherwise: str) -> tuple[str, int]:
    """What ``HOST:PORT`` names; raises ``BadParameter`` with ``otherwise`` for other text."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(otherwise)
    return host.strip("[]"), int(port)


def open_store(text: str | None) -> ReconnectingStore:
    """The store of a running job, see :func:`address`."""
    host, port = address(text)
    try:
        client = reopen(host, port)
    except (OSError, dist.DistError) as error:
        raise typer.BadParameter(
            f"no store answers at {host}:{port} ({error}); it is the job's MASTER_ADDR and MASTER_PORT, and "
            "rank 0 of a job with TRIGRAM_TOP=1 logs it"
        ) from error
    client.set_timeout(timedelta(seconds=5))
    return ReconnectingStore(client, lambda: reopen(host, port), f"{host}:{port}")
