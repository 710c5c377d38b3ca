"""After a failure: the last calls of this rank, in the format of torch's flight recorder.

``TRIGRAM_DUMP=DIR`` makes each rank write ``DIR/rank0`` and so on when a call has failed, when a
collective has been under way for longer than ``TRIGRAM_DUMP_AFTER`` seconds, and on SIGUSR2 if the process
has no handler of its own. A rank that dumps because it waits asks the others for theirs, through the folder.
``torchfrtrace DIR`` and ``trigram postmortem DIR`` read the files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trigram import _core
from trigram.errors import ConfigError
from trigram.observe.calls import Calls, engine_of
from trigram.observe.timeline import wall_offset
from trigram.runtime import job, logs, world
from trigram.runtime.job import Part

PREFIX = "rank"
"""Of a dump's name; the rank follows."""
_REQUEST = "request"
_VERSION = "2.10"
_PERIOD = 1.0
_BETWEEN = 5.0
"""Seconds between two dumps for failures."""
DUMP_AFTER = 60.0
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Dumper:
    """Writes the dumps of this rank.

    Args:
        folder: Where they go.
        rank: This rank.
        after: Seconds that a call may be under way.
    """

    def __init__(self, folder: Path, rank: int, after: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.after, self.job = folder, rank, after, world.current().name
        self._job = job.here()
        # The thread that trains: where it is, is part of a dump.
        is_process = self._job is job.of_process
        self._of_rank = (threading.main_thread().ident or 0) if is_process else threading.get_ident()
        self._calls = Calls()
        self._failures: list[tuple[int, int | None, str]] = []
        self._stop = False
        self._lock = threading.Lock()
        self._asked = self._request_time()
        self._said_stuck: set[tuple[int, int]] = set()
        self._failed_at = 0.0
        self._owed = False
        self._asked_by_signal = (
            False  # no threading.Event: its lock may be held by what the signal interrupts
        )
        self._thread = threading.Thread(target=self._serve, name="trigram-dump", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; writes the dump of a failure that has none yet."""
        self._stop = True
        self._note_failures(0.0)
        with self._lock:  # the thread may be writing
            owed = self._owed
        if owed:
            self.write("a call failed")

    def ask(self, *_: Any) -> None:
        """For a signal's handler: the thread dumps soon."""
        self._asked_by_signal = True

    def write(self, why: str) -> None:
        """Writes this rank's dump; it replaces an earlier one."""
        path = self.folder / f"{PREFIX}{self.rank}"
        try:
            with self._lock:
                self._owed = False
                unfinished = path.with_name(f".{path.name}-{os.getpid()}")
                try:
                    unfinished.write_bytes(pickle.dumps(self._contents(why)))
                    unfinished.replace(path)
                except OSError:
                    unfinished.unlink(missing_ok=True)
                    raise
        except OSError as e:
            logs.warning(f"TRIGRAM_DUMP: rank {self.rank} cannot write {path}: {e}")
            return
        logs.warning(f"rank {self.rank} has written its last calls to {path}, because {why}")

    # When.

    def _serve(self) -> None:
        while not self._stop:
            self._note_failures(_PERIOD)
            if self._stop:
                return
            if self._asked_by_signal:
                self._asked_by_signal = False
                self.write("it was asked to by SIGUSR2")
                self._request()
            if self._owed and time.monotonic() - self._failed_at > _BETWEEN:
                self._failed_at = time.monotonic()
                self.write("a call failed")
            asked = self._request_time()
            if asked != self._asked:
                self._asked = asked
                self.write("another rank has asked for it")
            self._look_for_stuck()

    def _note_failures(self, seconds: float) -> None:
        found = self._calls.wait_for_failure(seconds)
        if found is None:
            time.sleep(seconds)
            return
        count, failures = found
        with self._lock:
            if count > self._calls.failures and failures and failures[-1:] != self._failures[-1:]:
                self._owed = True
            self._calls.failures = count
            self._failures = failures or self._failures

    def _look_for_stuck(self) -> None:
        now = time.monotonic_ns()
        for event in self._calls.all(under_way=True):
            place = event.group, event.number
            # A receive in the background may wait as long as it likes.
            if event.tag is None and now - event.made > self.after * 1e9 and place not in self._said_stuck:
                self._said_stuck.add(place)
                self.write(f"a call has been under way for {(now - event.made) / 1e9:.0f} s")
                self._request()
                return

    def _request(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / _REQUEST).touch()
            os.utime(self.folder / _REQUEST)
        self._asked = self._request_time()

    def _request_time(self) -> int:
        try:
            return (self.folder / _REQUEST).stat().st_mtime_ns
        except OSError:
            return 0

    # What.

    def _contents(self, why: str) -> dict[str, Any]:
        events, offset = self._calls.all(), wall_offset()
        present = self._job.world
        engine = engine_of(present) if present is not None else None
        losses = engine.losses() if engine is not None else []
        groups = {e.group: self._calls.group(e.group) for e in events}
        config = {
            f"{number:016x}": {"name": f"{number:016x}", "desc": name.name, "ranks": str(list(name.ranks))}
            for number, name in groups.items()
        }
        return {
            "version": _VERSION,
            "pg_config": config,
            "pg_status": {},
            "entries": [self._entry(e, groups[e.group], offset) for e in events],
            "trigram": {
                "rank": self.rank,
                "job": self.job,
                "host": socket.gethostname(),
                "why": why,
                "time_ns": time.time_ns(),
                "losses": losses,
                "stack": _stack(self._of_rank),
                "failures": [(f"{group:016x}", sequence, text) for group, sequence, text in self._failures],
            },
        }

    def _entry(self, event: _core.Event, group: Any, offset: int) -> dict[str, Any]:
        n, ranks = event.nbytes // _WIDTHS.get(event.dtype, 1), max(1, len(group.ranks))
        sent, received = n, n
        if event.uneven:
            pass  # its own
        elif event.kind in ("all_gather", "gather"):
            received = n * ranks
        elif event.kind in ("reduce_scatter", "scatter", "all_to_all"):
            sent = n * ranks
            received = n if event.kind != "all_to_all" else n * ranks
        is_message = event.tag is not None
        name = event.kind
        if is_message:
            me = group.ranks.index(self.rank) if self.rank in group.ranks else 0
            peer = group.ranks.index(event.peer) if event.peer in group.ranks else me
            name = f"send {me}->{peer}" if event.kind == "send" else f"recv {me}<-{peer}"
        ended = event.ended is not None and not event.failed
        at = None if event.ended is None else event.ended + offset
        return {
            "record_id": event.number,
            "pg_id": 0,
            "process_group": (f"{event.group:016x}", group.name),
            "collective_seq_id": 0 if is_message else event.sequence + 1,
            "p2p_seq_id": event.sequence + 1 if is_message else 0,
            "op_id": event.number + 1,
            # Today's analyser of torch knows only some names of backends.
            "profiling_name": f"gloo:{name}",
            "time_created_ns": event.made + offset,
            "time_discovered_started_ns": None if event.started is None else event.started + offset,
            "time_discovered_completed_ns": at if ended else None,
            "duration_ms": (event.ended - event.made) / 1e6 if event.ended is not None else None,
            "input_sizes": [[sent]],
            "input_dtypes": [event.dtype],
            "output_sizes": [[received]],
            "output_dtypes": [event.dtype],
            "state": "completed" if ended else "scheduled" if event.started is None else "started",
            "is_p2p": is_message,
            "retired": ended,
            "timeout_ms": 0,
            "frames": [],
            "trigram": {
                "failed": event.failed,
                "waited_for": event.peer,
                "waited_ns": event.waited,
                "on_gpu": event.on_gpu,
                "uneven": event.uneven,
            },
        }


_WIDTHS = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
}
"""Bytes of an element; of all other types, one."""

_FRAMES = 32
"""The innermost frames of a stack that a dump keeps."""


def _stack(thread: int) -> list[str]:
    """Where a thread is now, the innermost frame first: ``function at file:line``. Frames of this package are
    left out: a call says more of itself."""
    frame = sys._current_frames().get(thread)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            found.append(f"{code.co_name} at {code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


@job.told
class Dumps(Part):
    """The dumps of this rank, if ``TRIGRAM_DUMP`` asks for them.

    Attributes:
        dumper: None: nobody asks.
    """

    def __init__(self) -> None:
        self.dumper: Dumper | None = None

    def begin(self) -> None:
        """See the class."""
        folder = os.environ.get("TRIGRAM_DUMP")
        if not folder or self.dumper is not None:
            return
        text = os.environ.get("TRIGRAM_DUMP_AFTER", str(DUMP_AFTER))
        try:
            after = float(text)
        except ValueError:
            after = 0.0
        if not after > 0:
            raise ConfigError(
                f"TRIGRAM_DUMP_AFTER={text!r} is invalid; set it to a number of seconds above 0"
            )
        try:
            self.dumper = Dumper(Path(folder), world.current().rank, after)
        except OSError as e:
            raise ConfigError(f"TRIGRAM_DUMP={folder!r}: {e}; name a folder that can be written to") from e
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR2, self.dumper.ask)

    def finish(self) -> None:
        """Writes a last dump if one is owed."""
        dumper, self.dumper = self.dumper, None
        if dumper is not None:
            dumper.close()
            if signal.getsignal(signal.SIGUSR2) == dumper.ask and (
                threading.current_thread() is threading.main_thread()
            ):
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one that comes late must not end the process
