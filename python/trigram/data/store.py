"""Records in one LMDB file, which the processes of a host share.

A process opens the file itself, once: LMDB allows neither a second time nor the parent's after a fork.
Writers take a lock on a file before LMDB's own, because that one has no deadline; who does not get it in time
leaves its records out. Nothing is flushed to the disk, which makes writing fast and is safe against the death
of processes, but not of the host: so a file from before a reboot is removed.
Where the disk is full, or anything else fails, records are left out, with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trigram.errors import MisuseError, UnsupportedError
from trigram.runtime import logs

_READERS = 4096
"""Processes and threads that may read at once."""
_LOCK_BYTES = 64 * (_READERS + 16)
_OPEN_SECONDS = 10.0
_WRITE_SECONDS = 0.05
_FORK_SECONDS = 1.0
_POLL_SECONDS = 0.001
_PAUSE_SECONDS = 1.0
"""How long a process writes nothing after it has not got the lock: its holder may be stopped."""

_open: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()
"""The stores of this process, by folder."""
_opening = threading.Lock()
_at_fork: list[Store] = []
"""While the process forks: the stores, of which no thread is inside."""


def _before_fork() -> None:
    _opening.acquire()
    _at_fork.extend(_open.values())
    for each in _at_fork:
        each.before_fork()


def _after_fork(in_child: bool) -> None:
    for each in _at_fork:
        each.after_fork(in_child)
    _at_fork.clear()
    if in_child:
        _open.clear()
    _opening.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)


def store(folder: Path, memory: int) -> Store:
    """This process's store in a folder.

    Raises:
        MisuseError: The folder belongs to another user, or others may write to it.
        UnsupportedError: LMDB is not installed.
    """
    path = folder.resolve()
    with _opening:
        found = _open.get(str(path))
        if found is None:
            found = _open[str(path)] = Store(path, memory)
        return found


class Store:
    """See :func:`store`; threads may share it.

    Attributes:
        pid: The process that opened it.
        full: Whether a record did not fit into ``memory`` any more.
        broken: Why nothing is stored any more; "": it is.
    """

    def __init__(self, path: Path, memory: int) -> None:
        self.pid = os.getpid()
        self.full = False
        self.broken = ""
        self._write_from = 0.0
        self._lock = threading.Lock()
        self._held = False
        self._env: Any = None
        self._lmdb = _import()
        self._path, self._writer = path / socket.gethostname(), -1
        try:
            _private(path)
            self._path.mkdir(mode=0o700, exist_ok=True)
            self._writer = os.open(self._path / "writer", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, _close, self._writer, self.pid)
            with self._exclusive(_OPEN_SECONDS) as mine:
                if not mine:
                    raise OSError(f"another process holds its lock for {_OPEN_SECONDS:g} s")
                self._prepare()
                self._env = self._lmdb.open(
                    str(self._path),
                    map_size=memory,
                    sync=False,
                    metasync=False,
                    max_readers=_READERS,
                    mode=0o600,
                )
                self._env.reader_check()
        except (OSError, self._lmdb.Error) as e:
            self._fail("cannot be opened", e)

    def _prepare(self) -> None:
        """Removes a file from before a reboot, and has the lock file's memory, which LMDB maps."""
        boot, mark = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), self._path / "boot"
        known = mark.read_text() if mark.exists() else ""
        if known != boot:
            for name in ("data.mdb", "lock.mdb"):
                (self._path / name).unlink(missing_ok=True)
            mark.write_text(boot)
        file = os.open(self._path / "lock.mdb", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _LOCK_BYTES)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _exclusive(self, seconds: float) -> Iterator[bool]:
        """The lock of writers; False if another process has it all the time."""
        end, mine = time.monotonic() + seconds, False
        while not mine:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            if not mine:
                if time.monotonic() > end:
                    break
                time.sleep(_POLL_SECONDS)
        try:
            yield mine
        finally:
            if mine:
                fcntl.flock(self._writer, fcntl.LOCK_UN)

    def _fail(self, what: str, error: BaseException) -> None:
        """Warns, once, and stores nothing any more."""
        if not self.broken:
            self.broken = f"{what}: {error}"
            logs.logger.warning(
                "the data cache in %s %s (%s); this process goes on without it", self._path, what, error
            )

    def before_fork(self) -> None:
        """Waits until no thread is inside of a transaction."""
        self._held = self._lock.acquire(timeout=_FORK_SECONDS)

    def after_fork(self, in_child: bool) -> None:
        """In the child: closes what it has inherited. It must neither use it nor hold the writers' lock after
        the parent's death."""
        if in_child:
            if self._env is not None and self._held:
                self._env.close()
            with contextlib.suppress(OSError):
                os.close(self._writer)
        if self._held:
            self._lock.release()

    def get(self, keys: Sequence[bytes]) -> list[bytearray | None]:
        """The records of some keys; None where there is none."""
        if self._env is None:
            return [None] * len(keys)
        try:
            with self._lock:
                try:
                    return self._read(keys)
                except self._lmdb.MapResizedError:  # a process with more memory= has written
                    self._env.set_mapsize(0)
                    return self._read(keys)
        except (OSError, self._lmdb.Error) as e:
            self._fail("cannot be read", e)
            return [None] * len(keys)

    def _read(self, keys: Sequence[bytes]) -> list[bytearray | None]:
        with self._env.begin(buffers=True) as txn:
            found = [txn.get(key) for key in keys]
            return [None if value is None else bytearray(value) for value in found]

    def put(self, records: Mapping[bytes, bytes]) -> bool:
        """Stores records; False if they are left out, for lack of memory, space or time."""
        if (
            self._env is None
            or self.full
            or self.broken
            or not records
            or time.monotonic() < self._write_from
        ):
            return False
        try:
            with self._lock, self._exclusive(_WRITE_SECONDS) as mine:
                if not mine:
                    self._write_from = time.monotonic() + _PAUSE_SECONDS
                    return False
                try:
                    self._write(records)
                except self._lmdb.MapResizedError:
                    self._env.set_mapsize(0)
                    self._write(records)
            return True
        except self._lmdb.MapFullError:
            self.full = True
        except (OSError, self._lmdb.Error) as e:
            self._fail("cannot be written to", e)
        return False

    def _write(self, records: Mapping[bytes, bytes]) -> None:
        with self._env.begin(write=True) as txn:
            for key, record in records.items():
                txn.put(key, record, overwrite=False)


def _import() -> Any:
    try:
        import lmdb
    except ImportError as e:
        raise UnsupportedError("CachedDataset: LMDB is not installed: pip install 'trigram[data]'") from e
    return lmdb


def _private(path: Path) -> None:
    """Makes the folder, or checks that nobody else may write to it: what is read from it is unpickled."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise MisuseError(
            f"CachedDataset: {path} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}; "
            "its records are unpickled, so pass a folder of your own to which nobody else may write"
        )


def _close(file: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(file)
