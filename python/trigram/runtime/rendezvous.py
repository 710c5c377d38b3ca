"""The store through which ranks find each other.

Every wait here is a short look repeated, so that Ctrl-C ends it at once and a missing rank is
named, where waiting inside of the store would do neither.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trigram.errors import AbortedError, ConfigError, MisuseError, TimeoutError

_REFUSED = b"refused: "
_REFUSAL_SECONDS = 5.0

Found = tuple[Any, int, int, str | None]
"""A store, this rank, the world's size, and a host that all ranks can reach, if one is known."""


def find_store(store: dist.Store | None, rank: int | None, world_size: int | None, deadline: float) -> Found:
    """The store to use: the one given, torch's, or the one that the environment names."""
    env = os.environ
    if store is not None:
        if rank is None or world_size is None:
            raise MisuseError("init: store is given without rank or world_size; pass all three")
        return dist.PrefixStore("trigram", store), rank, world_size, getattr(store, "host", None)
    if dist.is_available() and dist.is_initialized():
        lent = dist.PrefixStore("trigram", dist.distributed_c10d._get_default_store())
        return lent, dist.get_rank(), dist.get_world_size(), env.get("MASTER_ADDR")
    rank = _number("RANK") if rank is None and "RANK" in env else rank
    world_size = _number("WORLD_SIZE") if world_size is None and "WORLD_SIZE" in env else world_size
    if (rank, world_size) in ((None, None), (0, 1)):
        return None, 0, 1, "127.0.0.1"
    absent = [n for n, v in (("RANK", rank), ("WORLD_SIZE", world_size)) if v is None]
    absent += [v for v in ("MASTER_ADDR", "MASTER_PORT") if v not in env]
    if rank is None or world_size is None or absent:
        raise ConfigError(
            f"init: {', '.join(absent)} not set; start the ranks with torchrun, or pass store, rank and "
            "world_size"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"init: RANK={rank} is invalid with WORLD_SIZE={world_size}; it must be from 0 to "
            f"{world_size - 1}"
        )
    return _from_environment(rank, deadline), rank, world_size, env["MASTER_ADDR"]


def _from_environment(rank: int, deadline: float) -> dist.Store:
    """torchrun's store, or one that rank 0 offers at ``MASTER_ADDR:MASTER_PORT``, with keys of its own."""
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    offers = rank == 0 and not agent
    if not offers:
        _await_listener(host, port, rank, deadline)
    left = timedelta(seconds=max(deadline - time.monotonic(), 1))
    store: dist.Store = dist.TCPStore(
        host, port, None, offers, timeout=left, wait_for_workers=False, multi_tenant=True
    )
    # torchrun's store outlives its workers: each attempt has keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"trigram/attempt_{attempt}", store)


def reopen(host: str, port: int) -> dist.Store:
    """Another way to the store at this address, if somebody offers it now."""
    with socket.create_connection((host, port), timeout=1):
        pass
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False)
    return dist.PrefixStore("trigram", store)


def _await_listener(host: str, port: int, rank: int, deadline: float) -> None:
    began, pause = time.monotonic(), 0.001
    while True:
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError as e:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"init: rank {rank} waited {time.monotonic() - began:.1f} s for the store of rank 0 at "
                    f"{host}:{port} (MASTER_ADDR:MASTER_PORT): {e}; check that rank 0 is running and "
                    "reachable"
                ) from e
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        raise ConfigError(
            f"init: {variable}={os.environ[variable]!r} is not an integer; correct it"
        ) from None


class LateError(Exception):
    """The job has begun without this rank."""


class StoreGather:
    """Every rank's bytes to every rank, through a store."""

    def __init__(
        self, store: Any, rank: int, size: int, deadline: float, late: Callable[[], bool] | None = None
    ) -> None:
        self.store, self.rank, self.size, self.deadline, self.late = store, rank, size, deadline, late
        self.began = time.monotonic()
        # A store may serve several inits, one after another: ranks count them alike.
        self.round = str(store.add(f"inits/{rank}", 1)) if store is not None else "0"
        if late is not None:
            self.round += f"of{size}"  # one more than there were must not find the others of the beginning

    def __call__(self, what: str, mine: bytes) -> list[bytes]:
        """Gives ``mine`` to all, and returns the bytes of all ranks.

        Raises:
            TimeoutError: Ranks are missing; the message names them.
            AbortedError: A rank has given up, see `refuse`.
        """
        said = self._all(what, mine)
        refusals = [
            f"rank {rank}: {why[len(_REFUSED) :].decode(errors='replace')}"
            for rank, why in enumerate(said)
            if why.startswith(_REFUSED)
        ]
        if refusals and not mine.startswith(_REFUSED):
            raise AbortedError(f"init: aborted because it failed on {'; '.join(refusals)}")
        return said

    def refuse(self, what: str, why: Exception) -> None:
        """Says that this rank gives up, and waits a little until all ranks have come as far.

        Else the rank that offers the store could end it before the others have read why they fail too.
        """
        self.deadline = min(self.deadline, time.monotonic() + _REFUSAL_SECONDS)
        with suppress(TimeoutError):
            self(what, _REFUSED + str(why).encode())

    def _all(self, what: str, mine: bytes) -> list[bytes]:
        if self.store is None:
            return [mine]
        keys = [f"{self.round}/{what}/{r}" for r in range(self.size)]
        absent = [r for r in range(self.size) if r != self.rank]
        pause, looked = 0.0005, 0.0
        try:
            self.store.set(keys[self.rank], mine)
            while not self.store.check(keys):
                now = time.monotonic()
                if self.late is not None and self.late():
                    raise LateError
                if now - looked > 0.2 or now > self.deadline:
                    absent, looked = [r for r in absent if not self.store.check([keys[r]])], now
                if now > self.deadline and absent:
                    raise self._missing(absent)
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            return [self.store.get(key) for key in keys]
        except dist.DistError as e:
            raise self._missing(
                absent, f" and lost the connection to the store ({str(e).splitlines()[0]})"
            ) from e

    def _missing(self, absent: list[int], more: str = "") -> TimeoutError:
        names = ", ".join(map(str, absent))
        return TimeoutError(
            f"init: rank {self.rank} waited {time.monotonic() - self.began:.1f} s for rank(s) {names} of "
            f"{self.size}{more}; check that all ranks run with the same MASTER_ADDR, MASTER_PORT and "
            "WORLD_SIZE"
        )

    def abort(self) -> None:
        """This rank did not take part after all: its next init is in the round of the others' next."""
        self.store.add(f"inits/{self.rank}", -1)
        self.close()

    def close(self) -> None:
        """Lets the store go."""
        self.store = None
