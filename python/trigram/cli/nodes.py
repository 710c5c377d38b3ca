"""``trigram run --nnodes``: the launchers of several machines find each other, as torchrun's do.

The first launcher at the endpoint serves a store, and goes on serving it until all have ended. Their ranks
use the same store, so it outlives rank 0.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist
import typer

from trigram.cli import job_store
from trigram.errors import TimeoutError, TrigramError
from trigram.runtime.answers import AnsweringStore, answered
from trigram.runtime.launch import END_SECONDS, Part

_COUNT, _RANKS, _OVER = "launchers/count", "launchers/{}/ranks", "launchers/over"
_POLL = 0.05
_CONNECT_SECONDS = 5.0
_SERVE_SECONDS = 3 * END_SECONDS
"""How long the store is served after the ranks here have ended: as long as others may take to end theirs."""


@contextmanager
def met(endpoint: str, nodes: int, ranks: int, seconds: float) -> Iterator[tuple[Part, dict[str, str]]]:
    """A block in which the launchers of all machines have met.

    Args:
        endpoint: ``HOST:PORT``; HOST is one of the machines, as the others reach it.
        nodes: How many machines take part.
        ranks: On this one.
        seconds: How long to wait for the others.

    Yields:
        The ranks of this machine, and variables that they need.

    Raises:
        TimeoutError: Others have not come.
    """
    host, port = job_store.endpoint(
        endpoint,
        f"--rdzv-endpoint {endpoint!r} is no HOST:PORT; it is one of the machines and a free port there, the "
        "same for all launchers",
    )
    end = time.monotonic() + seconds
    served = _served(host, port)
    number = 0
    if served is None:
        served = _connected(host, port, nodes, end)
        number = int(AnsweringStore(served, end).add(_COUNT, 1)) - 1
    store = AnsweringStore(served, end)
    if number >= nodes:
        raise typer.BadParameter(
            f"{nodes} launchers have come to {endpoint} already (--nnodes {nodes}); if some of them have "
            "ended since, end all and start again"
        )
    store.set(_RANKS.format(number), str(ranks))
    counts = [_awaited(store, k, nodes, endpoint, end) for k in range(nodes)]
    try:
        part = Part(sum(counts[:number]), sum(counts), host, port)
        yield part, {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": str(number)}
    finally:
        _leave(served, number, nodes)


def _served(host: str, port: int) -> dist.Store | None:
    """The store, if this is the first launcher of the machine whose address ``host`` is."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise typer.BadParameter(f"--rdzv-endpoint: there is no host {host!r} ({error})") from error
    with socket.socket(family, kind) as probe, suppress(OSError):
        probe.bind((address[0], 0))  # only this machine's addresses can be bound
        with suppress(dist.DistError, RuntimeError):  # another launcher of this machine has come first
            store = dist.TCPStore(host, port, None, True, wait_for_workers=False)
            store.add(_COUNT, 1)  # it is number 0, however soon others come
            return store
    return None


def _connected(host: str, port: int, nodes: int, end: float) -> dist.Store:
    """The store that another launcher serves."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=1):
                pass
            return answered(partial(_client, host, port), _CONNECT_SECONDS)
        except (OSError, dist.DistError) as error:
            if time.monotonic() > end:
                why = str(error).splitlines()[0]
                raise TimeoutError(
                    f"run: no launcher answers at {host}:{port} ({why}); start trigram run --nnodes {nodes} "
                    f"--rdzv-endpoint {host}:{port} on {host} too, and let that port through"
                ) from error
        time.sleep(_POLL)


def _client(host: str, port: int) -> dist.Store:
    limit = timedelta(seconds=_CONNECT_SECONDS)
    return dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)


def _awaited(store: AnsweringStore, other: int, nodes: int, endpoint: str, end: float) -> int:
    """How many ranks another launcher starts."""
    key = _RANKS.format(other)
    try:
        while not store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"run: {int(store.add(_COUNT, 0))} of {nodes} launchers have come to {endpoint}; start "
                    f"trigram run --nnodes {nodes} --rdzv-endpoint {endpoint} on the other machines"
                )
            time.sleep(_POLL)
        return int(store.get(key))
    except TrigramError:
        raise
    except dist.DistError as error:
        raise TimeoutError(
            f"run: the launcher at {endpoint} has ended while this one waited for others ({error})"
        ) from error


def _leave(served: dist.Store, number: int, nodes: int) -> None:
    """The ranks here have ended; who serves the store ends last."""
    end = time.monotonic() + _SERVE_SECONDS
    store = AnsweringStore(served, end)
    with suppress(dist.DistError, TrigramError):
        store.add(_OVER, 1)
        while number == 0 and int(store.add(_OVER, 0)) < int(store.add(_COUNT, 0)) and time.monotonic() < end:
            time.sleep(_POLL)
