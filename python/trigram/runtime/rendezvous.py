"""The store through which ranks find each other.

This module polls the store instead of blocking in it: Ctrl-C works at once, and a timeout names the missing
ranks.
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

from trigram.errors import AbortedError, ConfigError, MisuseError, TimeoutError, TrigramError
from trigram.runtime.launchers import number, set_variables

_FAILED = b"failed: "
_FAILURE_SECONDS = 5.0
"""How long a rank whose init failed waits until the others have read why."""

Found = tuple[Any, int, int, str | None]
"""A store (None: a world of one), this rank, the world size, and a host name that all ranks can reach, if
known."""


def find_store(store: dist.Store | None, rank: int | None, world_size: int | None, deadline: float) -> Found:
    """The store to use: the given one, that of torch.distributed, or the one that the environment names.

    Raises:
        MisuseError: A store is given without rank or world size.
        ConfigError: The environment is incomplete, invalid or contradictory.
        TimeoutError: Nobody serves the store at ``MASTER_ADDR:MASTER_PORT``.
    """
    env = os.environ
    if store is not None:
        if rank is None or world_size is None:
            raise MisuseError("init: store is given without rank or world_size; pass all three")
        return dist.PrefixStore("trigram", store), rank, world_size, _host_of(store)
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        host = _host_of(store) or env.get("MASTER_ADDR")
        return dist.PrefixStore("trigram", store), dist.get_rank(), dist.get_world_size(), host
    job = set_variables(env, rank, world_size)
    rank = number(env, "RANK") if rank is None else rank
    world_size = number(env, "WORLD_SIZE") if world_size is None else world_size
    addressed = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if name in env]
    if (rank, world_size) == (0, 1) or (rank is None and world_size is None and not addressed):
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
    return _from_environment(rank, deadline, job), rank, world_size, env["MASTER_ADDR"]


def _host_of(store: dist.Store) -> str | None:
    """The host that serves a store, also where the store lies behind prefixes; None: not known."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else None


def _from_environment(rank: int, deadline: float, job: str) -> dist.Store:
    """torchrun's store, or one that rank 0 serves at ``MASTER_ADDR:MASTER_PORT``, under a prefix."""
    host, port = os.environ["MASTER_ADDR"], number(os.environ, "MASTER_PORT") or 0
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    if not serves:
        _await_listener(host, port, rank, deadline)
    left = timedelta(seconds=max(deadline - time.monotonic(), 1))
    try:
        store: dist.Store = dist.TCPStore(
            host, port, None, serves, timeout=left, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if not serves:
            raise
        raise ConfigError(
            f"init: rank 0 cannot serve the store at {host}:{port} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port "
            "there, the same for all ranks"
        ) from error
    # torchrun's store outlives its workers: each restart uses another prefix. A launcher's job chooses its
    # port by its name, and so may another job: its ranks must not read this one's keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore("/".join(filter(None, ("trigram", job, f"attempt_{attempt}"))), store)


def reopen(host: str, port: int) -> dist.Store:
    """A new connection to the store at this address.

    Raises:
        OSError: Nobody serves it now.
    """
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


class LateError(Exception):
    """The elastic job runs already, without this rank."""


class StoreGather:
    """Gathers byte strings of all ranks through a store. Each gather has a key; all ranks use the same
    keys."""

    def __init__(
        self, store: Any, rank: int, size: int, deadline: float, late: Callable[[], bool] | None = None
    ) -> None:
        self.store, self.rank, self.size, self.deadline, self.late = store, rank, size, deadline, late
        self.began = time.monotonic()
        # A store may serve several inits, one after another: every rank counts its own.
        self.init = str(store.add(f"inits/{rank}", 1)) if store is not None else "0"
        if late is not None:
            self.init += f"of{size}"  # a rank with another world size must not read the first ranks' keys

    def __call__(self, what: str, mine: bytes) -> list[bytes]:
        """Stores ``mine`` under the key ``what``, and returns the bytes of all ranks, in rank order.

        Raises:
            TimeoutError: Ranks are missing; the message names them.
            AbortedError: Another rank called :meth:`fail` in place of this gather.
            LateError: The job runs without this rank.
        """
        records = self._all(what, mine)
        failures = [
            f"rank {rank}: {why[len(_FAILED) :].decode(errors='replace')}"
            for rank, why in enumerate(records)
            if why.startswith(_FAILED)
        ]
        if failures and not mine.startswith(_FAILED):
            raise AbortedError(f"init: aborted because it failed on {'; '.join(failures)}")
        return records

    def fail(self, what: str, why: Exception) -> None:
        """Tells the other ranks that init failed here, and waits up to 5 s until they have read it.

        Otherwise the rank that serves the store could end before the others know why they fail too.
        """
        self.deadline = min(self.deadline, time.monotonic() + _FAILURE_SECONDS)
        with suppress(TimeoutError):
            self(what, _FAILED + str(why).encode())

    def _all(self, what: str, mine: bytes) -> list[bytes]:
        if self.store is None:
            return [mine]
        keys = [f"{self.init}/{what}/{r}" for r in range(self.size)]
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
        except TrigramError:
            raise
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
        """Takes back this rank's count of inits, so that its next init matches the other ranks' next one."""
        self.store.add(f"inits/{self.rank}", -1)
        self.close()

    def close(self) -> None:
        """Closes the connection to the store."""
        self.store = None
