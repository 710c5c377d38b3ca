"""``trigram run --nnodes``: the launchers of several machines find each other, as torchrun's do.

The first launcher at the endpoint serves a store, and goes on serving it until all have ended. Their ranks
use the same store, so it outlives rank 0. With ``--nnodes MIN:MAX`` the job begins when MIN launchers have
met; the ranks of those that come later join the elastic job while it runs.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist
import typer

from trigram.cli import job_store
from trigram.cli.node_counts import Nodes
from trigram.errors import TimeoutError, TrigramError
from trigram.runtime.answers import AnsweringStore, NoAnswerError, answered
from trigram.runtime.launch import END_SECONDS, Elsewhere, Part

_OPEN, _COUNT, _RANKS = "launchers/open", "launchers/count", "launchers/{}/ranks"
_ASKED = "launchers/asked"
"""The options that the first launcher was given: all need the same."""
_PLACE = "launchers/place/{}"
_WORLD, _LATER = "launchers/world", "launchers/later"
"""Ranks of the launchers that began the job, and of those that have come later."""
_LEFT = "launchers/{}/left"
"""How many ranks a launcher has left, a count that grows while it runs, and a digit: 1 if it is over, 2 if
ranks have failed."""
_POLL = 0.05
_CONNECT_SECONDS = 5.0
_SERVE_SECONDS = 3 * END_SECONDS
"""How long the store is served after the ranks here have ended: as long as others may take to end theirs."""
_BEAT = 1.0
_SILENT = 60
"""Looks at a launcher without a beat after which it counts as lost, with its ranks. Not seconds: who was
stopped itself, or could not reach the store, has not looked."""
_GONE_SECONDS = 15.0
"""The same, for a launcher that would come in its place."""
_ANSWER = 5.0


@dataclass
class _Other:
    """Another launcher, as it is known here."""

    text: bytes = b""
    looks: int = 0
    left: int = 0
    over: bool = False
    failed: bool = False

    def is_silent(self) -> bool:
        return not self.over and self.looks > _SILENT


class Tally(Elsewhere):
    """How many ranks are left on all machines: each launcher writes how many it has, and reads the others'.

    Args:
        store: The launchers' store.
        number: Of this launcher.
        others: The ranks of those that have met, by their numbers.
        mine: The ranks here.
        endpoint: Where the store is, for messages.
    """

    def __init__(
        self, store: dist.Store, number: int, others: dict[int, int], mine: int, endpoint: str
    ) -> None:
        self._store, self._number, self._mine, self._endpoint = store, number, mine, endpoint
        self._others = {k: _Other(left=left) for k, left in others.items()}
        self._beats, self._over, self._failed = 0, False, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trigram-launchers", daemon=True)
        self._tell()
        with suppress(dist.DistError, RuntimeError):
            answered(self.look, _ANSWER)  # one that comes later knows of nobody yet
        self._thread.start()

    def __call__(self, mine: int) -> int:
        """Tells how many ranks are left here; returns how many are left on other machines."""
        self._mine = mine
        return sum(other.left for other in list(self._others.values()) if not other.is_silent())

    def fail(self) -> None:
        """Tells that ranks here have failed, and the others are ended."""
        self._mine, self._failed = 0, True

    def has_failed(self) -> bool:
        """Whether ranks of another machine have failed."""
        return any(other.failed for other in list(self._others.values()))

    def awaited(self) -> bool:
        """Whether other launchers still run."""
        return any(not other.over and not other.is_silent() for other in list(self._others.values()))

    def end(self) -> None:
        """Tells that the ranks here have ended."""
        self._over = True
        ended = self._stop.is_set()  # the store's connection has
        self._stop.set()
        self._thread.join(_ANSWER)
        if not ended:
            with suppress(dist.DistError, RuntimeError):
                answered(self._tell, _ANSWER)

    def look(self) -> None:
        """Reads how the others are."""
        for k in range(int(self._store.add(_COUNT, 0))):
            key, other = _LEFT.format(k), self._others.get(k, _Other())
            if k == self._number or other.over or not self._store.check([key]):
                continue
            text = bytes(self._store.get(key))
            other.looks += 1
            if text != other.text:
                found = re.fullmatch(rb"(\d{1,6}) (\d{1,12}) ([012])", text)
                if found is None:
                    continue  # any process may write to the store
                other.text, other.looks = text, 0
                other.left, other.over = int(found[1]), found[3] != b"0"
                other.failed = found[3] == b"2"
            self._others[k] = other

    def _tell(self) -> None:
        self._beats += 1
        state = 2 if self._failed else int(self._over)
        self._store.set(_LEFT.format(self._number), f"{self._mine} {self._beats} {state}")

    def _run(self) -> None:
        while not self._stop.wait(_BEAT):
            try:
                answered(self._tell, _ANSWER)
                answered(self.look, _ANSWER)
            except NoAnswerError:
                continue  # it may be stopped for a while
            except (dist.DistError, RuntimeError):
                # A connection of a TCPStore is not made again, and each try prints a page of C++.
                self._stop.set()
                typer.echo(
                    f"trigram: the launcher at {self._endpoint}, which serves the job's store, is gone: the "
                    "ranks of this machine go on, and no rank can join",
                    err=True,
                )


@dataclass(frozen=True)
class Meeting:
    """Launchers that have met.

    Attributes:
        part: The ranks of this machine.
        environment: Variables that they need.
        tally: How many ranks are left on all machines.
    """

    part: Part
    environment: dict[str, str] = field(repr=False)
    tally: Tally


@contextmanager
def met(
    endpoint: str, nodes: Nodes, ranks: int, seconds: float, least: int | None = None
) -> Iterator[Meeting]:
    """A block in which the launchers of all machines have met.

    Args:
        endpoint: ``HOST:PORT``; HOST is one of the machines, as the others reach it.
        nodes: How many machines take part.
        ranks: On this one.
        seconds: How long to wait for the others.
        least: Ranks of all machines with which the job goes on; None: with all.

    Raises:
        TimeoutError: Others have not come.
        typer.BadParameter: Others were started with other options.
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
    store = AnsweringStore(served, end)
    try:
        if not serves and nodes.place is None:  # the ranks of the one that serves are the first
            _await(store, _OPEN, nodes, endpoint, end)
        _compare(store, nodes, least, endpoint)
        number = _numbered(store, nodes, endpoint)
        if serves:
            store.set(_OPEN, "yes")
        late = number >= nodes.least
        first, world, others = (_later if late else _met)(store, number, nodes, ranks, endpoint, end)
    except TrigramError:
        raise
    except dist.DistError as error:
        raise TimeoutError(
            f"run: the launcher at {endpoint} has ended while this one waited for others ({error})"
        ) from error
    tally = Tally(served, number, others, ranks, endpoint)
    try:
        variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": str(number)}
        yield Meeting(Part(first, world, host, port), variables, tally)
    finally:
        tally.end()
        until = time.monotonic() + _SERVE_SECONDS
        while serves and tally.awaited() and time.monotonic() < until:
            time.sleep(_POLL)
            with suppress(dist.DistError, RuntimeError):
                answered(tally.look, _ANSWER)


def _compare(store: AnsweringStore, nodes: Nodes, least: int | None, endpoint: str) -> None:
    """Raises if another launcher was given other options: they would wait for each other, or judge a failed
    machine differently."""
    mine = f"--nnodes {nodes}" + (f" --min {least}" if least is not None else "")
    theirs = bytes(store.compare_set(_ASKED, "", mine)).decode(errors="replace")
    if theirs != mine:
        raise typer.BadParameter(
            f"this launcher has {mine}, and another at {endpoint} has {theirs}; give all launchers of a job "
            "the same"
        )


def _numbered(store: AnsweringStore, nodes: Nodes, endpoint: str) -> int:
    """The number of this launcher; raises if it is one too many."""
    if nodes.place is not None:
        if int(store.add(_PLACE.format(nodes.place), 1)) > 1:
            raise typer.BadParameter(
                f"another launcher has come to {endpoint} with --node-rank {nodes.place}; if it has ended "
                "since, end all and start again"
            )
        store.add(_COUNT, 1)
        return nodes.place
    number = int(store.add(_COUNT, 1)) - 1
    if number < nodes.least:
        return number
    if nodes.least == nodes.most:
        raise typer.BadParameter(
            f"{nodes.most} launchers have come to {endpoint} already (--nnodes {nodes}); if some of them "
            "have ended since, end all and start again"
        )
    # Of several that come at the same time, the first take the places that are left.
    if _running(store, number, nodes.most) >= nodes.most:
        store.set(_LEFT.format(number), "0 0 1")
        raise typer.BadParameter(
            f"{nodes.most} launchers run at {endpoint} already (--nnodes {nodes}); another may come when one "
            "of them has ended"
        )
    return number


def _is_over(text: bytes) -> bool:
    return text.endswith((b" 1", b" 2"))


def _running(store: AnsweringStore, number: int, enough: int) -> int:
    """How many of the launchers before this one run: those that write while this one looks."""
    keys = [_LEFT.format(k) for k in range(number)]

    def texts() -> list[bytes]:
        return [bytes(store.get(key)) if store.check([key]) else b"" for key in keys]

    before, end = texts(), time.monotonic() + _GONE_SECONDS
    while True:
        now = texts()
        silent = [old == new and not _is_over(new) for old, new in zip(before, now, strict=True)]
        running = sum(old != new and not _is_over(new) for old, new in zip(before, now, strict=True))
        if running >= enough or running + sum(silent) < enough or time.monotonic() > end:
            return running
        time.sleep(_BEAT / 4)


def _met(
    store: AnsweringStore, number: int, nodes: Nodes, ranks: int, endpoint: str, end: float
) -> tuple[int, int, dict[int, int]]:
    """One of those that begin the job: its first rank, their ranks, and those of each other launcher."""
    store.set(_RANKS.format(number), str(ranks))
    keys = [_RANKS.format(k) for k in range(nodes.least)]
    for key in keys:
        _await(store, key, nodes, endpoint, end)
    counts = [int(store.get(key)) for key in keys]
    store.set(_WORLD, str(sum(counts)))
    return sum(counts[:number]), sum(counts), {k: n for k, n in enumerate(counts) if k != number}


def _later(
    store: AnsweringStore, number: int, nodes: Nodes, ranks: int, endpoint: str, end: float
) -> tuple[int, int, dict[int, int]]:
    """One that comes when the job has begun: its ranks come after all others."""
    _await(store, _WORLD, nodes, endpoint, end)
    typer.echo("trigram: the job has begun; the ranks of this machine join it, if it is elastic", err=True)
    after = int(store.get(_WORLD)) + int(store.add(_LATER, ranks))
    return after - ranks, after, {}


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


def _connected(host: str, port: int, nodes: Nodes, end: float) -> dist.Store:
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


def _await(store: AnsweringStore, key: str, nodes: Nodes, endpoint: str, end: float) -> None:
    """Waits until another launcher has set a key."""
    while not store.check([key]):
        if time.monotonic() > end:
            raise TimeoutError(
                f"run: {int(store.add(_COUNT, 0))} of {nodes.least} launchers have come to {endpoint}; start "
                f"trigram run --nnodes {nodes} --rdzv-endpoint {endpoint} on the other machines"
            )
        time.sleep(_POLL)
