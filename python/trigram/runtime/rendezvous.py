"""The store through which ranks find each other.

This module polls the store instead of blocking in it: Ctrl-C works at once, and a timeout names the missing
ranks.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from trigram.errors import AbortedError, ConfigError, MisuseError, TimeoutError, TrigramError
from trigram.runtime import logs
from trigram.runtime.answers import AnsweringStore, NoAnswerError, answered
from trigram.runtime.launchers import number, set_variables

_NAME, _ENDPOINT = "name/{}", "endpoint/{}"
_FAILED, _OVER, _FAILURES, _RAISED = "failed/{}", "over/{}", "failures", "raised"
_NAME_LENGTH = 16
_FAILURE_SECONDS = 5.0
"""How long a rank whose init failed waits until the others have read why, and others for the next init of one
that failed before they came."""
_ASK_SECONDS = 1.0
_LOOK_SECONDS = 0.2
"""Between two looks of a rank that waits at what else lies in the store."""
_POLL = 0.02
"""The same, of a rank whose init has failed."""
_ANSWER_SECONDS = 5.0
"""How long the store's server may take to greet a connection before this module tries again."""
_CONNECT_SECONDS = 2.0
"""How long torch may try to connect to the store before this module tries again."""

Found = tuple[Any, int, int, str | None]
"""A store (None: a world of one), this rank, the world size, and a host name that all ranks can reach, if
known."""


def find_store(
    store: dist.Store | None, rank: int | None, world_size: int | None, deadline: float, grows: bool = False
) -> Found:
    """The store to use: the given one, that of torch.distributed, or the one that the environment names.

    Args:
        store: The given one.
        rank: This rank; None: as the environment says. Likewise ``world_size``.
        world_size: See ``rank``.
        deadline: Until when to try, as a time of ``time.monotonic``.
        grows: Ranks may join the job later, also if it has one rank now.

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
    alone = (rank, world_size) == (0, 1) and not (grows and _can_be_met(env))
    if alone or (rank is None and world_size is None and not addressed):
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


def _can_be_met(env: Mapping[str, str]) -> bool:
    """Whether the only rank of a job has a store that others could join it by: a launcher's, or its own."""
    host = env.get("MASTER_ADDR")
    if not host or "MASTER_PORT" not in env:
        return False
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return True
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))  # only this machine's addresses can be bound
            return True
    logs.warning(f"init: nobody can join this rank: MASTER_ADDR={host} is no address of this machine")
    return False


def _host_of(store: dist.Store) -> str | None:
    """The host that serves a store, also where the store lies behind prefixes; None: not known."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else None


def _from_environment(rank: int, deadline: float, job: str) -> dist.Store:
    """torchrun's store, or one that rank 0 serves at ``MASTER_ADDR:MASTER_PORT``, under a prefix."""
    host, port = os.environ["MASTER_ADDR"], number(os.environ, "MASTER_PORT") or 0
    if not 0 < port < 1 << 16:
        raise ConfigError(
            f"init: MASTER_PORT={port} is not a port; set the same on all ranks, from 1 to 65535"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    if agent:
        advice = (
            "torchrun serves it at the address that it gives its ranks: leave MASTER_ADDR and MASTER_PORT as "
            "they are, or remove TORCHELASTIC_USE_AGENT_STORE too"
        )
        store = _connect(host, port, rank, "the store", advice, deadline)
    elif not serves:
        advice = "check that rank 0 is running and reachable"
        store = _connect(host, port, rank, "the store of rank 0", advice, deadline)
    else:
        store = _serve(host, port, deadline)
    # A launcher's job chooses its port by its name, and so may another job: its ranks must not read this
    # one's keys.
    return dist.PrefixStore("/".join(filter(None, ("trigram", job))), store)


def _serve(host: str, port: int, deadline: float) -> dist.Store:
    """The store, served by this rank."""
    try:
        return answered(
            lambda: dist.TCPStore(
                host, port, None, True, timeout=_left(deadline), wait_for_workers=False, multi_tenant=True
            ),
            _left(deadline).total_seconds(),
        )
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"init: rank 0 cannot serve the store at {host}:{port} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port "
            "there, the same for all ranks"
        ) from error


def _connect(host: str, port: int, rank: int, what: str, advice: str, deadline: float) -> dist.Store:
    """A connection to the store.

    The server may be that of a job that ends just now, and reset the connection. torch would try again by
    itself, but after pauses that grow to a minute; so each attempt here is short.
    """
    began, patience = time.monotonic(), _ANSWER_SECONDS
    while True:
        _await_listener(host, port, rank, what, advice, deadline)
        attempt = min(_left(deadline), timedelta(seconds=_CONNECT_SECONDS))
        try:
            store = answered(
                partial(_client, host, port, attempt), min(_left(deadline).total_seconds(), patience)
            )
        except dist.DistError as error:
            if time.monotonic() > deadline:
                raise _unreached(began, rank, what, host, port, str(error).splitlines()[0], advice) from error
            if isinstance(error, NoAnswerError):
                patience *= 2  # each attempt leaves a thread
            time.sleep(_POLL)
        else:
            store.set_timeout(_left(deadline))
            return store


def _client(host: str, port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 1))


def reopen(host: str, port: int) -> dist.Store:
    """A new connection to the store at this address.

    Raises:
        OSError: Nobody serves it now.
        NoAnswerError: Its server does not answer.
    """
    with socket.create_connection((host, port), timeout=1):
        pass
    limit = timedelta(seconds=_ANSWER_SECONDS)
    store = answered(
        lambda: dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False), _ANSWER_SECONDS
    )
    return dist.PrefixStore("trigram", store)


def _await_listener(host: str, port: int, rank: int, what: str, advice: str, deadline: float) -> None:
    began, pause = time.monotonic(), 0.001
    while True:
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError as e:
            if time.monotonic() > deadline:
                raise _unreached(began, rank, what, host, port, str(e), advice) from e
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _unreached(
    began: float, rank: int, what: str, host: str, port: int, why: str, advice: str
) -> TimeoutError:
    return TimeoutError(
        f"init: rank {rank} waited {time.monotonic() - began:.1f} s for {what} at {host}:{port} "
        f"(MASTER_ADDR:MASTER_PORT): {why}; {advice}"
    )


class LateError(Exception):
    """The elastic job runs already, without this rank."""


class AgainError(Exception):
    """A rank of this meeting has called ``init`` again, so the others meet it again too."""


class StoreGather:
    """Brings the ranks of one ``init`` together through a store, and gathers byte strings of all of them.

    A store outlives processes: what lies in it may be of ranks that have ended, or whose ``init`` raised. So
    every ``init`` has a fresh name, which it puts into the store, in place of that of the same rank before.
    The names of all ranks together are a *meeting*. A rank enters a meeting when it has read the names; who
    has ended cannot have read the fresh name of another. So the ranks of a meeting that all have entered are
    alive, and its keys are theirs alone, however often each of them has started before.

    The keys, under the world size: ``name/RANK`` (the name, and then why this ``init`` failed, if it has) and
    ``endpoint/RANK`` (the name, and then the endpoint record) of a rank's newest ``init``; ``failed/NAME``:
    why another rank's failed, for the ``init`` of this name to read; ``over/NAME``: this one knows that it
    fails, and then that it has raised, and as which; ``raised``: how many have; ``failures``: there is one;
    ``MEETING/...``: what the ranks of a meeting gather.

    Args:
        store: The store; None in a world of one rank.
        rank: This rank.
        size: The number of ranks.
        deadline: The time of ``time.monotonic`` until which ranks are waited for.
        late: Whether the elastic job runs already, without this rank.
    """

    def __init__(
        self, store: Any, rank: int, size: int, deadline: float, late: Callable[[], bool] | None = None
    ) -> None:
        self.store: Any = None
        if store is not None:
            self.store = AnsweringStore(dist.PrefixStore(f"of{size}", store), deadline)
        self.rank, self.size, self.deadline, self.late = rank, size, deadline, late
        self.began = self.looked = time.monotonic()
        self.absent = [r for r in range(size) if r != rank]
        self.meeting = ""
        self.ended = False
        with self._connected():
            self.new = self.store is None or not self.store.check([_NAME.format(rank)])
        self.begin()

    def begin(self) -> None:
        """Registers this rank under a fresh name."""
        self.names: list[bytes] = []
        self.name = os.urandom(_NAME_LENGTH // 2).hex().encode()
        self.raised = 0
        if self.store is not None:
            with self._connected():
                self.raised = self.store.add(_RAISED, 0)
                self.store.set(_NAME.format(self.rank), self.name)

    def all_gather(self, record: bytes) -> list[bytes]:
        """Gives the other ranks this rank's endpoint record; returns those of all ranks, in rank order.

        Raises:
            TimeoutError: Ranks are missing; the message names them.
            AbortedError: ``init`` failed on another rank.
            ConfigError: Another process has registered as this rank.
            LateError: The job runs without this rank.
        """
        if self.store is None:
            return [record]
        keys = [_ENDPOINT.format(r) for r in range(self.size)]
        with self._connected():
            self.store.set(keys[self.rank], self.name + record)
            while True:
                self.names = []
                self._await(keys)
                values = self._read(keys)
                self.names = self._names(values)
                self.meeting = hashlib.sha256(b"".join(self.names)).hexdigest()[:32]
                entered = [f"{self.meeting}/entered/{r}" for r in range(self.size)]
                self.store.set(entered[self.rank], b"yes")
                with suppress(AgainError):
                    self._await(entered)
                    return [value[_NAME_LENGTH:] for value in values]

    def __call__(self, what: str, mine: bytes) -> list[bytes]:
        """Stores ``mine`` under the key ``what``, and returns the bytes of all ranks of the meeting, in rank
        order.

        Raises:
            TimeoutError: Ranks are missing; the message names them.
            AbortedError: ``init`` failed on another rank.
            AgainError: A rank of the meeting has called ``init`` again.
        """
        if self.store is None:
            return [mine]
        keys = [f"{self.meeting}/{what}/{r}" for r in range(self.size)]
        with self._connected():
            self.store.set(keys[self.rank], mine)
            self._await(keys)
            return self._read(keys)

    def look(self) -> str | None:
        """Raises if ``init`` has failed on another rank, or a rank of the meeting has called it again.

        For callers that wait for the other ranks elsewhere, as often as they like: it looks five times a
        second. Returns why nobody will come, if the store is lost: the rank that served it has given up, and
        what the caller waits for says more about the cause than that.
        """
        now = time.monotonic()
        if self.store is not None and now - self.looked > _LOOK_SECONDS:
            self.looked = now
            try:
                with self._connected():
                    self._look()
            except TimeoutError as lost:
                return str(lost)
        return None

    def fail(self, why: Exception) -> None:
        """Tells the other ranks that init failed here, and waits up to 5 s until they have read it.

        Otherwise the rank that serves the store could end before the others know why they fail too. Does
        nothing after an error of this object itself: the other ranks see that for themselves.
        """
        if self.store is None or self.ended:
            return
        text = f"rank {self.rank}: {why}".encode()
        deadline = time.monotonic() + _FAILURE_SECONDS
        untold, told = set(range(self.size)) - {self.rank}, dict[int, bytes]()
        with suppress(dist.DistError):
            self.store.set(_NAME.format(self.rank), self.name + text)
            self.store.set(_FAILURES, b"yes")
            self.store.set(_key(_OVER, self.name), b"failing")
            while untold and time.monotonic() < deadline:
                for other in list(untold):
                    value = self._peek(_NAME.format(other))
                    name, failed = value[:_NAME_LENGTH], len(value) > _NAME_LENGTH
                    over = self._peek(_key(_OVER, name))
                    if over.isdigit() and int(over) <= self.raised:
                        continue  # before this one began: its next is to know it, and may only just begin
                    if failed or (other in told and self.store.check([_key(_OVER, told[other])])):
                        untold.remove(other)
                    elif name and told.get(other) != name:
                        told[other] = name
                        self.store.set(_key(_FAILED, name), text)
                time.sleep(_POLL)
            self._note_raised()

    def ask_lost(self) -> None:
        """Raises AbortedError if a rank whose connection is lost says within a second why its init failed."""
        end = time.monotonic() + _ASK_SECONDS
        with suppress(dist.DistError, AgainError):
            while self.store is not None and time.monotonic() < end:
                self._look()
                time.sleep(_POLL)

    def close(self) -> None:
        """Closes the connection to the store."""
        self.store = None

    def _await(self, keys: list[str]) -> None:
        """Waits until all ranks have set their key."""
        pause = 0.0005
        while not self.store.check(keys):
            now = time.monotonic()
            if self.late is not None and self.late():
                raise LateError
            if now - self.looked > _LOOK_SECONDS or now > self.deadline:
                self.looked = now
                self._look()
                self.absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
                if now > self.deadline and self.absent:
                    why = _text(self._earlier())
                    raise self._missing(f"; before that, it failed on {why}" if why else "")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _look(self) -> None:
        told = self._peek(_key(_FAILED, self.name))
        if not told and self.new and time.monotonic() - self.began > _FAILURE_SECONDS:
            told = self._earlier()  # before this rank came; the other has not called it again meanwhile
        if told:
            self._note_raised()
            raise AbortedError(f"init: aborted because it failed on {_text(told)}")
        if self.names:
            names = self._names(self._read([_ENDPOINT.format(r) for r in range(self.size)]))
            if names != self.names:
                raise AgainError

    def _names(self, endpoints: list[bytes]) -> list[bytes]:
        """The names of all ranks' newest ``init``; that of this rank must be this one."""
        names = [value[:_NAME_LENGTH] for value in endpoints]
        if names[self.rank] != self.name:
            raise ConfigError(
                f"init: another process has registered as rank {self.rank} of {self.size} after this; give "
                "each process a rank of its own"
            )
        return names

    def _note_raised(self) -> None:
        """This init is over; numbered, so that others know which were before they began."""
        self.store.set(_key(_OVER, self.name), b"%d" % self.store.add(_RAISED, 1))

    def _earlier(self) -> bytes:
        """Why ``init`` failed on a rank that is absent and has not called it again since; empty: no such
        rank."""
        ranks = self.absent if self.store.check([_FAILURES]) else []
        return next(filter(None, (self._peek(_NAME.format(r))[_NAME_LENGTH:] for r in ranks)), b"")

    def _peek(self, key: str) -> bytes:
        """The value of a key; empty if the key does not exist."""
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def _read(self, keys: list[str]) -> list[bytes]:
        """The values of keys that exist."""
        if self.store.has_extended_api():
            return [bytes(value) for value in self.store.multi_get(keys)]
        return [bytes(self.store.get(key)) for key in keys]

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Says what a lost connection to the store means; notes that an error was this object's."""
        try:
            yield
        except TrigramError:
            self.ended = True
            raise
        except dist.DistError as e:
            self.ended = True
            lost = f" and lost the connection to the store ({str(e).splitlines()[0]})"
            raise self._missing(lost) from e

    def _missing(self, more: str = "") -> TimeoutError:
        names = ", ".join(map(str, self.absent))
        return TimeoutError(
            f"init: rank {self.rank} waited {time.monotonic() - self.began:.1f} s for rank(s) {names} of "
            f"{self.size}{more}; check that all ranks run with the same MASTER_ADDR, MASTER_PORT and "
            "WORLD_SIZE"
        )


def _key(what: str, name: bytes) -> str:
    return what.format(_text(name))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
