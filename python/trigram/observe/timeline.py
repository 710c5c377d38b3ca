"""A timeline: what a rank does, as a file of the Chrome trace format that Perfetto shows.

A thread takes the engine's records and the spans of Python every quarter of a second and appends them to the
rank's file, so a job that is killed leaves one too. ``merge`` makes one file of those of all ranks.

A file is a list of events, one per line. ``pid`` is the rank; Python's tracks come first, and calls that are
under way at the same time are in lanes of their own, since overlapping events of one lane are not drawn
right. ``ts`` counts microseconds from the beginning of the day (UTC), so that doubles count single
nanoseconds.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trigram import _core
from trigram.errors import ConfigError, MisuseError
from trigram.observe import spans
from trigram.observe.calls import Calls
from trigram.runtime import job, logs, world
from trigram.runtime.job import Part

_DAY = 86_400_000_000_000
FIRST_LANE = 100
"""The ``tid`` of the first lane of calls."""
_PERIOD = 0.25
_MOST_NAMES = 100_000
_UNMATCHED = (1 << 32) - 1
"""The number of a receive that has failed before it was known which message it takes."""


def wall_offset() -> int:
    """Nanoseconds from ``time.monotonic_ns`` to ``time.time_ns``: of a few tries the one that took least."""
    tries = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


class Recorder:
    """Writes one rank's timeline.

    Args:
        path: The file.
        rank: This rank.
        since: Nothing that began before is in it, in nanoseconds of ``time.monotonic_ns``.
    """

    def __init__(self, path: Path, rank: int, since: int) -> None:
        self.path, self.rank, self._process = path, rank, os.getpid()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: io.TextIOBase | None = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        base = time.time_ns() // _DAY * _DAY
        self._offset = wall_offset() - base
        self._calls, self._listeners = Calls(), job.here().part(spans.Listeners)
        self._spans: collections.deque[tuple[str, str, int, int]] = collections.deque()
        self._names: dict[tuple[int, int], str] = {}
        self._tracks: dict[str, int] = {}
        self._lanes: list[int] = []
        self._since = since
        self._stop = threading.Event()
        self._lock = threading.Lock()
        host = socket.gethostname()
        self._meta("process_name", 0, name=f"rank {rank} on {host}")
        self._meta("process_sort_index", 0, sort_index=rank)
        about: dict[str, Any] = {"job": world.current().name, "began_ns": time.time_ns(), "pid": os.getpid()}
        self._meta("trigram", 0, False, rank=rank, host=host, base_ns=base, **about)
        try:
            self._file.flush()  # a rank that is killed at once leaves a file that says whose it is
            self._listeners.add(self)
        except OSError as e:
            self._give_up(e)
        self._thread = threading.Thread(target=self._serve, name="trigram-timeline", daemon=True)
        self._thread.start()

    # What spans tells, in the training thread.

    def span(self, track: str, name: str, began: int, ended: int) -> None:
        """See :class:`trigram.observe.spans.Listener`."""
        self._spans.append((track, name, began, ended))

    def name_calls(self, group: int, first: int, until: int, name: str) -> None:
        """See :class:`trigram.observe.spans.Listener`."""
        if len(self._names) < _MOST_NAMES:
            for sequence in range(first, until):
                self._names[group, sequence] = name

    # The file.

    def close(self) -> None:
        """Writes what is left, and ends the file."""
        if self._process != os.getpid():
            return  # a forked child: the file is its parent's
        self._listeners.remove(self)
        self._stop.set()
        self._thread.join(10.0)
        with self._lock:
            if self._file is None:
                return
            if self._calls.lost:
                logs.warning(
                    f"timeline {self.path}: {self._calls.lost} calls are missing, because more calls were "
                    "made than the engine keeps records of"
                )
            try:
                self._drain()
                self._meta("trigram_end", 0, lost=self._calls.lost, last=True)
                self._file.write("]\n")
                self._file.close()
                self._file = None
            except OSError as e:
                self._give_up(e)

    def _serve(self) -> None:
        while not self._stop.wait(_PERIOD):
            with self._lock:
                if self._file is None:
                    return
                try:
                    self._drain()
                    self._file.flush()
                except Exception as e:  # nobody takes the spans any more
                    self._listeners.remove(self)
                    self._give_up(e)

    def _give_up(self, error: Exception) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            assert file is not None
            file.close()  # it tries to write what it holds
        logs.warning(f"timeline {self.path}: {error}; it ends here")

    def _drain(self) -> None:
        for event in self._calls.read():
            if event.ended is not None and event.made >= self._since:
                self._call(event)
        while self._spans:
            track, name, began, ended = self._spans.popleft()
            if began >= self._since:
                self._slice(self._track(track), name, began, ended, {})

    def _track(self, name: str) -> int:
        tid = self._tracks.get(name)
        if tid is None:
            tid = self._tracks[name] = 1 + len(self._tracks)
            self._meta("thread_name", tid, name=name)
            self._meta("thread_sort_index", tid, sort_index=tid)
        return tid

    def _lane(self, began: int, ended: int) -> int:
        """The lane for a call: of those that are free, the one whose last call ended latest."""
        free = [(end, lane) for lane, end in enumerate(self._lanes) if end <= began]
        if free:
            lane = max(free)[1]
            self._lanes[lane] = ended
        else:
            lane = len(self._lanes)
            self._lanes.append(ended)
            self._meta("thread_name", FIRST_LANE + lane, name=f"calls {lane + 1}")
            self._meta("thread_sort_index", FIRST_LANE + lane, sort_index=FIRST_LANE + lane)
        return FIRST_LANE + lane

    def _call(self, event: _core.Event) -> None:
        assert event.ended is not None
        group = self._calls.group(event.group)
        label = self._names.pop((event.group, event.sequence), None) if event.tag is None else None
        args: dict[str, Any] = {"group": group.name, "bytes": event.nbytes, "dtype": event.dtype}
        call = f"{event.group:016x}/{event.sequence}"
        if event.tag is None:
            args["call"] = call
            args |= {"ranks": list(group.ranks)} if group.ranks else {}
        elif event.peer is not None and event.sequence != _UNMATCHED:
            pair = (self.rank, event.peer) if event.kind == "send" else (event.peer, self.rank)
            args["call"] = f"{call}/{event.tag}/{pair[0]}-{pair[1]}"
            args["ranks"] = list(pair)
        if event.waited:
            args |= {"waited_for": event.peer, "waited_us": event.waited / 1000}
        if event.failed:
            args["failed"] = True
        if event.on_gpu:
            args["on_gpu"] = "only its check is recorded"
        name = f"{label} {event.kind}" if label else event.kind
        tid = self._lane(event.made, event.ended)
        self._slice(tid, name, event.made, event.ended, args)
        if event.started is not None and event.first_byte is not None:
            if event.first_byte > event.started:
                self._slice(tid, "waits for the others", event.started, event.first_byte, {})
            self._slice(tid, "moves data", max(event.started, event.first_byte), event.ended, {})

    def _slice(self, tid: int, name: str, began: int, ended: int, args: dict[str, Any]) -> None:
        event = {
            "ph": "X",
            "name": name,
            "pid": self.rank,
            "tid": tid,
            "ts": (began + self._offset) / 1000,
            "dur": (ended - began) / 1000,
        }
        self._write({**event, "args": args} if args else event)

    def _meta(self, kind: str, tid: int, last: bool = False, **args: Any) -> None:
        self._write({"ph": "M", "name": kind, "pid": self.rank, "tid": tid, "args": args}, last)

    def _write(self, event: dict[str, Any], last: bool = False) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + ("\n" if last else ",\n"))


def file_of(path: Path, rank: int) -> Path:
    """The file of a rank: ``trace.json`` becomes ``trace-rank0.json``."""
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix or '.json'}")


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records a timeline of this rank while the block runs.

    Args:
        path: The file of the Chrome trace format to write, whose name gets the rank: ``trace.json`` becomes
            ``trace-rank0.json``. Open it in https://ui.perfetto.dev, or first make one file of all ranks with
            ``trigram timeline``.

    Raises:
        MisuseError: A timeline is being recorded already, or the name ends in ``.gz``.
        OSError: The file cannot be written.
    """
    if Path(path).suffix == ".gz":
        raise MisuseError(
            f"timeline: {path} would not be compressed; name it .json, and compress with trigram timeline DIR"
        )
    mine = job.here().part(_Recorded)
    mine.record(file_of(Path(path), world.current().rank), time.monotonic_ns())
    try:
        yield
    finally:
        mine.finish()


@job.told
class _Recorded(Part):
    """The timeline of this rank that is being recorded, if one is."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def record(self, path: Path, since: int) -> None:
        """Starts one, see :class:`Recorder`.

        Raises:
            MisuseError: One is being recorded.
        """
        if self.recorder is not None:
            raise MisuseError(
                f"timeline: {self.recorder.path} is being recorded already, by TRIGRAM_TIMELINE or another "
                "block; record one at a time"
            )
        self.recorder = Recorder(path, world.current().rank, since)

    def begin(self) -> None:
        """Starts one, if ``TRIGRAM_TIMELINE`` asks for it."""
        folder = os.environ.get("TRIGRAM_TIMELINE")
        if not folder or self.recorder is not None:
            return
        try:
            # With the calls of init: short ones in which all ranks meet, so clocks of hosts are aligned.
            self.record(file_of(Path(folder) / "trace.json", world.current().rank), 0)
        except OSError as e:
            raise ConfigError(
                f"TRIGRAM_TIMELINE={folder!r}: {e}; name a folder that can be written to"
            ) from e

    def finish(self) -> None:
        """Ends it."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()
