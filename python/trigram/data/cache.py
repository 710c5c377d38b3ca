"""``CachedDataset``: samples that are loaded once per host, or once per job."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trigram.data import encoding
from trigram.data.peers import Client, start
from trigram.data.store import Store, store
from trigram.errors import MisuseError
from trigram.runtime import logs
from trigram.runtime.world import AnyGroup

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LEAST = 1 << 20


class CachedDataset(Dataset[Any]):
    """The samples of a data set, each loaded once per host and kept for its ranks, workers and later jobs.

    The samples are in one LMDB file, which all processes of the host read without copies of their own. What a
    data set computes once and for all belongs below it; random augmentation belongs above it, since a sample
    is the same each time. It needs ``pip install 'trigram[data]'``.

    Samples are pickled, tensors and arrays without a copy. A cache never makes a data set fail: where memory,
    disk or peers fail, samples come from ``dataset``, and a line in the log says so once per process.

    Args:
        dataset: It has a length, and integers as indices.
        path: A folder of this user on a disk of this host, or on ``/dev/shm``. None: one on ``/dev/shm``. It
            is not removed; a reboot empties it.
        memory: The most that the file takes: bytes, or a string such as "8GiB". With ``path=None`` also
            no more than half of what is free there. Once it is full, no sample is added.
        peers: Samples are shared out to hosts, so that the job loads each once and the hosts' memory adds up:
            a sample that belongs to another host is asked of it, over the job's connections. All ranks of the
            group then construct it together, before workers are started.
        key: Names the data, with all that went into it. None: a hash of the type, the length and three
            samples, which are loaded, the first of them twice. Data sets of other keys have records of their
            own in the same file.
        group: With ``peers``, the ranks that share; None: all.

    Attributes:
        dataset: As given.
        hits: Samples that this process has found in its host's file; ``misses``: those that it has loaded;
            ``from_peers``: those that came from another host. Workers count by themselves.

    Raises:
        MisuseError: An argument is wrong; the first sample differs from itself; or ``path`` belongs to
            another user.
        MismatchError: With ``peers``: ranks have other data. All ranks raise it.
        UnsupportedError: LMDB is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        memory: int | str = "8GiB",
        peers: bool = False,
        key: str | None = None,
        group: AnyGroup = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise MisuseError(
                f"CachedDataset: {type(dataset).__name__} has no length or no indices; pass a "
                "map-style data set"
            )
        self.dataset = dataset
        self.hits = self.misses = self.from_peers = 0
        self._memory = _bytes(memory)
        if path is None:
            path = _default_path()
            self._memory = max(_LEAST, min(self._memory, shutil.disk_usage(path).free // 2))
        self._path = Path(path)
        self._length = len(dataset)
        self._identity = _identity(dataset, key)
        self._warned = False
        self._store: Store | None = self._opened()
        self._peers: Client | None = start(self._opened, self._identity, group) if peers else None

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file: a process opens it itself."""
        return {**self.__dict__, "_store": None}

    def _opened(self) -> Store:
        """This process's store."""
        kept: Store | None = self.__dict__.get("_store")
        if kept is None or kept.pid != os.getpid():
            self._store = kept = store(self._path, self._memory)
        return kept

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Several samples, as a ``DataLoader`` asks for a batch."""
        at = [self._checked(i) for i in indices]
        keys = [self._identity + i.to_bytes(8, "big") for i in at]
        opened = self._opened()
        found: list[Any] = opened.get(keys)
        left = [n for n, record in enumerate(found) if record is None]
        if self._peers is not None and left:
            for n, record in zip(left, self._peers.ask([keys[n] for n in left]), strict=True):
                found[n] = record
        samples = [self._decoded(record) for record in found]
        decoded = [n for n, sample in enumerate(samples) if sample is not None]
        self.from_peers += len(set(decoded) & set(left))
        self.hits += len(set(decoded) - set(left))
        left = sorted(set(range(len(at))) - set(decoded))
        self.misses += len(left)
        fresh: dict[bytes, Any] = {}
        for n, sample in zip(left, self._load([at[n] for n in left]), strict=True):
            samples[n] = [sample]
            fresh[keys[n]] = sample
        self._keep(opened, fresh)
        return [sample[0] for sample in samples if sample is not None]

    def _decoded(self, record: bytearray | None) -> list[Any] | None:
        """The sample of a record, in a list; None: there is none, or it cannot be read, and is loaded."""
        try:
            return None if record is None else [encoding.decode(record)]
        except Exception as e:  # such as a class that has another name now
            self._warn("a record cannot be read, and the sample is loaded", e)
            return None

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logs.logger.warning("CachedDataset: %s: %s: %s", what, type(error).__name__, error)

    def _checked(self, index: Any) -> int:
        i = operator.index(index)
        if not -self._length <= i < self._length:
            raise IndexError(f"CachedDataset: index {i} is out of range for {self._length} samples")
        return i % self._length

    def _load(self, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None and len(indices) > 1:
            return list(many(indices))
        return [self.dataset[i] for i in indices]

    def _keep(self, opened: Store, samples: dict[bytes, Any]) -> None:
        """Stores samples that were loaded, here or on the host that owns them."""
        records = {}
        for key, sample in samples.items():
            try:
                records[key] = encoding.encode(sample)
            except Exception as e:  # whatever a sample's own pickling raises
                self._warn(f"a sample of {type(self.dataset).__name__} cannot be pickled, and is not kept", e)
        if self._peers is not None:
            records = self._peers.give(records)
        opened.put(records)


def _bytes(memory: int | str) -> int:
    """A number of bytes, from a number or text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(memory).strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < _LEAST:
        raise MisuseError(
            f"CachedDataset: memory={memory!r} is invalid; pass at least 1 MiB, as bytes or such as '8GiB'"
        )
    return size


def _default_path() -> Path:
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    path = base / f"trigram-cache-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _identity(dataset: Any, key: str | None) -> bytes:
    """16 bytes that tell data sets apart."""
    whole = hashlib.blake2b(digest_size=16)
    count = len(dataset)
    whole.update(f"{type(dataset).__module__}.{type(dataset).__qualname__} {count} {key}".encode())
    if key is None and count:
        prints = []
        for i in (0, 0, count // 2, count - 1):
            one = hashlib.blake2b(digest_size=16)
            encoding.update(one.update, dataset[i])
            prints.append(one.digest())
        if prints[0] != prints[1]:
            raise MisuseError(
                f"CachedDataset: sample 0 of {type(dataset).__name__} differs each time it is loaded, and "
                "only one of them would be kept; put random transforms above the cache, or pass key= if it "
                "is meant"
            )
        whole.update(b"".join(prints))
    return whole.digest()
