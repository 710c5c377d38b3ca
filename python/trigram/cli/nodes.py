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

_OPEN, _COUNT, _RANKS, _OVER = "launchers/open", "launchers/count", "launchers/{}/ranks", "launchers/over"
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
    serves = served is not None
    served = served or _connected(host, port, nodes, end)
    try:
        number, counts = _met(AnsweringStore(served, end), serves, nodes, ranks, endpoint, end)
    except TrigramError:
        raise
    except dist.DistError as error:
        raise TimeoutError(
            f"run: the launcher at {endpoint} has ended while this one waited for others ({error})"
        ) from error
    try:
        part = Part(sum(counts[:number]), sum(counts), host, port)
        yield part, {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": str(number)}
    finally:
        _leave(served, serves, nodes)


def _met(
    store: AnsweringStore, serves: bool, nodes: int, ranks: int, endpoint: str, end: float
) -> tuple[int, list[int]]:
    """The number of this launcher, and how many ranks each starts."""
    if not serves:  # the ranks of the one that serves are the first
        _await(store, _OPEN, nodes, endpoint, end)
    number = int(store.add(_COUNT, 1)) - 1
    if serves:
        store.set(_OPEN, "yes")
    if number >= nodes:
        raise typer.BadParameter(
            f"{nodes} launchers have come to {endpoint} already (--nnodes {nodes}); if some of them have "
            "ended since, end all and start again"
        )
    store.set(_RANKS.format(number), str(ranks))
    keys = [_RANKS.format(k) for k in range(nodes)]
    for key in keys:
        _await(store, key, nodes, endpoint, end)
    return number, [int(store.get(key)) for key in keys]


def _served(host: str, port: int) -> dist.Store | None:
    """The store, if this is the first launcher of the machine whose address ``host`` is."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise typer.BadParameter(f"--rdzv-endpoint: there is no host {host!r} ({error})") from error
    with socket.socket(family, kind) as probe, suppress(OSError):
        probe.bind((address[0], 0))  # only this machine's addresses can be bound
        with suppress(dist.DistError, RuntimeError):  # another launcher of this machine has come first
            return dist.TCPStore(host, port, None, True, wait_for_workers=False)
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


def _await(store: AnsweringStore, key: str, nodes: int, endpoint: str, end: float) -> None:
    """Waits until another launcher has set a key."""
    while not store.check([key]):
        if time.monotonic() > end:
            raise TimeoutError(
                f"run: {int(store.add(_COUNT, 0))} of {nodes} launchers have come to {endpoint}; start "
                f"trigram run --nnodes {nodes} --rdzv-endpoint {endpoint} on the other machines"
            )
        time.sleep(_POLL)


def _leave(served: dist.Store, serves: bool, nodes: int) -> None:
    """The ranks here have ended; who serves the store ends last."""
    end = time.monotonic() + _SERVE_SECONDS
    store = AnsweringStore(served, end)
    with suppress(dist.DistError, TrigramError):
        store.add(_OVER, 1)
        while serves and int(store.add(_OVER, 0)) < nodes and time.monotonic() < end:
            time.sleep(_POLL)
