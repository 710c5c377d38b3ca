"""``TRIGRAM_TOP=1``: each rank leaves a small snapshot of itself in the job's store, for ``trigram top``.

A thread writes it every two seconds (less often in jobs of more than 200 ranks), so that nothing is sent
between ranks and no port is opened. A snapshot is sealed with the job's secret (runtime/seals.py).
"""

from __future__ import annotations

import json
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trigram.errors import AuthError
from trigram.observe import steps
from trigram.runtime import job, logs, seals, world
from trigram.runtime.job import Part
from trigram.runtime.live_store import ReconnectingStore, connect_again

PERIOD = 2.0
PER_RANK = 0.01
"""Seconds between two snapshots of a rank, at least, and for each rank of the job: so many a second suit a
store."""
KEY = "top/{}"
"""Of a rank's snapshot in the store."""
_LONGEST = 8192
_TEXT = 64
_SILENT = 8
_LINKS = 8
"""Peers of which a snapshot says what they get: those that get most."""
_LINES, _LINE = 4, 200
"""How many of the last log lines it has, and letters of each."""


@dataclass
class Snapshot:
    """A rank at a moment; seconds are means over the model's steps since its last snapshot.

    Attributes:
        rank, world_size, host: Who it is.
        time: When, as ``time.time()`` of its host.
        number: Counts its snapshots.
        model: The class of the model that has stepped last; "": none is being trained.
        steps: Steps of it so far, also with earlier algorithms.
        seconds: By phase, and ``step``; empty: no step has ended since.
        sent: Bytes per second that it has sent to other ranks.
        waits_for: The rank that its calls have waited for longest, -1: none; and for how many seconds per
            second.
        waits: See ``waits_for``.
        silent: Ranks of which it hears nothing.
        links: Pairs of a peer and the bytes per second that it got from this rank.
        lines: Pairs of a time and one of the last warnings that the rank has logged.
        left: Whether it has left the job.
    """

    rank: int
    world_size: int
    host: str
    time: float
    number: int = 0
    model: str = ""
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    sent: float = 0.0
    waits_for: int = -1
    waits: float = 0.0
    silent: list[int] = field(default_factory=list)
    links: list[list[Any]] = field(default_factory=list)
    lines: list[list[Any]] = field(default_factory=list)
    left: bool = False


def seal(snapshot: Snapshot, key: bytes | None) -> bytes:
    """A snapshot as it is stored: its seal, and JSON."""
    body = json.dumps(asdict(snapshot), separators=(",", ":")).encode()
    return seals.sealed(f"snapshot {snapshot.rank}", body, key)


def unseal(value: bytes, rank: int, key: bytes | None) -> Snapshot:
    """The snapshot of a rank that a store holds. Any process may write to a store, so nothing is believed.

    Raises:
        AuthError: It is not sealed with this secret.
        ValueError: It is no snapshot of this rank.
    """
    if len(value) > _LONGEST or len(value) < seals.SEAL:
        raise ValueError(f"{len(value)} bytes are no snapshot")
    body = seals.opened(f"snapshot {rank}", value, key)
    if body is None:
        raise AuthError(
            f"the snapshot of rank {rank} is not sealed with this TRIGRAM_SECRET; give top that of the "
            "job, or none if the job has none"
        )
    try:
        given = json.loads(body)
        found = Snapshot(**given)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no snapshot: {error}") from error
    if found.rank != rank or not all(_fits(getattr(found, f.name), f.name) for f in fields(Snapshot)):
        raise ValueError("no snapshot of this rank")
    return found


def _fits(value: Any, name: str) -> bool:
    """Whether a field has a value that a rank could have written."""
    if name in ("host", "model"):
        return _is_text(value, _TEXT)
    if name == "left":
        return isinstance(value, bool)
    if name == "silent":
        return isinstance(value, list) and len(value) <= _SILENT and all(map(_whole, value))
    if name == "links":
        return _pairs(value, _LINKS) and all(_whole(rank) and _number(rate) for rank, rate in value)
    if name == "lines":
        return _pairs(value, _LINES) and all(_number(at) and _is_text(text, _LINE) for at, text in value)
    if name == "seconds":
        right = isinstance(value, dict) and set(value) in (set(), {"step", *steps.PHASES})
        return right and all(map(_number, value.values()))
    if name in ("time", "sent", "waits"):
        return _number(value)
    return _whole(value)


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest and value.isprintable()


def _pairs(value: Any, most: int) -> bool:
    right = isinstance(value, list) and len(value) <= most
    return right and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 62


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1 << 62


class Publisher:
    """Leaves this rank's snapshots in a store.

    Args:
        store: A connection of its own: it is used by another thread.
        present: The job.
    """

    def __init__(self, store: ReconnectingStore, present: job.World) -> None:
        self.store = store
        self._job = job.here()
        self.period = max(PERIOD, PER_RANK * present.size)
        self.number, self.at = 0, time.monotonic()
        self.before: weakref.WeakKeyDictionary[steps.StepTimes, Sequence[int]] = weakref.WeakKeyDictionary()
        self.sent: list[int] = []
        self.failing = False
        self.waited: list[float] = []
        self._stop = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._serve, name="trigram-top", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.wait(self.period):
            self.publish()

    def close(self) -> None:
        """Leaves a last snapshot, and ends the thread."""
        self._stop.set()
        self._thread.join(1.0)  # not longer: the network may no longer reach the store
        if not self._thread.is_alive():
            self.publish(left=True)

    def publish(self, left: bool = False) -> None:
        """Writes one snapshot."""
        present = self._job.world
        if present is None:
            return
        try:
            taken = self.take(present, left)
            self.store.put(KEY.format(taken.rank), seal(taken, seals.secret()))
            self.failing = False
        except Exception as error:  # nothing here may end a training; the next snapshot may come off
            if not self.failing:
                logs.warning(f"{world.TOP}: rank {present.rank} cannot take a snapshot: {error}")
            self.failing = True

    def take(self, present: job.World, left: bool = False) -> Snapshot:
        """This rank now."""
        now = time.monotonic()
        elapsed, self.at = max(now - self.at, 1e-3), now
        self.number += 1
        counters: dict[str, Any] = dict(present.engine.counters())
        taken = Snapshot(
            present.rank, present.size, socket.gethostname()[:_TEXT], time.time(), self.number, left=left
        )
        times = steps.latest(self._job)
        if times is not None:
            sums = times.sums
            taken.model, taken.steps = times.name[:_TEXT], times.earlier + sums[0]
            ended, *ns = (n - b for n, b in zip(sums, self.before.get(times, [0] * len(sums)), strict=True))
            if ended:
                keys = ("step", *steps.PHASES)
                taken.seconds = {key: n * 1e-9 / ended for key, n in zip(keys, ns, strict=True)}
            self.before[times] = sums
        sent, waited = list(counters["sent_bytes"]), list(counters["waited_for"])
        # An elastic job's next epoch counts from nothing.
        before = self.sent if len(self.sent) == len(sent) and sum(self.sent) <= sum(sent) else [0] * len(sent)
        rates = [max(0, n - b) / elapsed for n, b in zip(sent, before, strict=True)]
        taken.sent, self.sent = sum(rates), sent
        most = sorted((rank for rank, r in enumerate(rates) if r > 0), key=lambda rank: -rates[rank])
        taken.links = [[rank, round(rates[rank])] for rank in most[:_LINKS]]
        lines = [(at, "".join(c if c.isprintable() else " " for c in text)) for at, text in list(logs.recent)]
        taken.lines = [[round(at, 3), text[:_LINE]] for at, text in lines[-_LINES:]]
        since = [w - b for w, b in zip(waited, self.waited or [0.0] * len(waited), strict=False)]
        self.waited = waited
        if since and max(since) > 0:
            taken.waits_for, taken.waits = since.index(max(since)), max(since) / elapsed
        taken.silent = [rank for rank, s in enumerate(counters["silent_for"]) if s > 0][:_SILENT]
        return taken


@job.told
class _Published(Part):
    """The snapshots of this rank, if ``TRIGRAM_TOP`` asks for them."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None

    def begin(self) -> None:
        """See the class."""
        present = world.present()
        if present is None or not world.asks(world.TOP):
            return
        if present.store is None:
            if present.size == 1:
                logs.warning(
                    f"{world.TOP}: the only rank of a job has met nobody, so there is no store for trigram "
                    "top; TRIGRAM_METRICS shows it while it runs"
                )
            return
        store = connect_again(present.store)
        if present.rank == 0:
            at = f"--store {store.address}" if store.address else "nothing: the store has no address"
            logs.warning(f"{world.TOP}: look at this job with trigram top {at}")
        self._publisher = Publisher(store, present)

    def finish(self) -> None:
        """Leaves a last one."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
