"""CachedDataset: one file for the processes of a host, and what it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import Ranks, await_flag, flag, run, say, scratch, until
from tests.support.marks import long
from trigram.data import CachedDataset
from trigram.data.peers import owner

pytest.importorskip("lmdb")


class Slow(Dataset[Any]):
    """Samples of several types; each load is a byte in a file, so that all processes' loads are counted."""

    def __init__(self, log: Path, count: int = 40, factor: int = 1, size: int = 100) -> None:
        self.log, self.count, self.factor, self.size = log, count, factor, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        with self.log.open("ab") as f:
            f.write(b".")
        return {"x": torch.full((self.size,), float(i * self.factor)), "name": f"n{i}", "y": (i, None)}

    def loads(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


def _check(samples: list[Any], indices: list[int], data: Slow) -> None:
    for sample, i in zip(samples, indices, strict=True):
        assert sample["name"] == f"n{i}" and sample["y"] == (i, None)
        assert torch.equal(sample["x"], torch.full((data.size,), float(i * data.factor)))


def _plain(batch: list[Any]) -> list[Any]:
    return batch


def test_samples_are_loaded_once(tmp_path: Path) -> None:
    data = Slow(tmp_path / "log")
    cached = CachedDataset(data, tmp_path / "c", memory="16MiB")
    identified = data.loads()
    for _ in range(3):
        _check([cached[i] for i in range(-40, 40)], [i % 40 for i in range(-40, 40)], data)
    assert data.loads() == identified + 40 and (cached.misses, cached.hits) == (40, 200)
    cached[3]["x"].zero_()  # a copy: the cache keeps what it has
    _check([cached[3]], [3], data)
    assert Subset(cached, [5, 6]).__getitems__([0, 1])[1]["name"] == "n6"
    with pytest.raises(IndexError):
        cached[40]
    again = CachedDataset(data, tmp_path / "c", memory="16MiB")
    _check(again.__getitems__([7, 7, 8]), [7, 7, 8], data)
    assert again.misses == 0


def test_types_come_back_as_they_were(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    samples: list[Any] = [
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 3, dtype=torch.float64),
        torch.tensor(3 + 4j),
        torch.tensor([True, False]),
        torch.randn(4, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
        (1, "a", b"b", [None, {"k": torch.ones(3, dtype=torch.uint8)}]),
        {"a": numpy.arange(5.0), "t": torch.arange(3)},
        torch.ones(3).to_sparse(),
    ]
    cached = CachedDataset(samples, tmp_path, memory="16MiB", key="types")
    for i, sample in enumerate(samples):
        cached[i]
        got = cached[i]
        assert type(got) is type(sample)
        if isinstance(sample, torch.Tensor):
            assert got.dtype == sample.dtype and got.requires_grad == sample.requires_grad
            assert got.shape == sample.shape and bool((got.to_dense() == sample.to_dense()).all())
    assert cached.hits == len(samples)
    got = cached[7]["a"]
    got += 1  # writable
    assert got.tolist() == [1, 2, 3, 4, 5] and cached[6][3][1]["k"].tolist() == [1, 1, 1]


def test_other_data_has_records_of_its_own(tmp_path: Path) -> None:
    one, two = Slow(tmp_path / "1"), Slow(tmp_path / "2", factor=2)
    for data in (one, two, one, two):
        cached = CachedDataset(data, tmp_path / "c", memory="16MiB")
        _check([cached[i] for i in range(40)], list(range(40)), data)
    assert one.loads() <= 40 + 8 and two.loads() <= 40 + 8
    three = CachedDataset(two, tmp_path / "c", memory="16MiB", key="another")
    assert three[1]["x"][0] == 2 and three.misses == 1


def test_arguments(tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(3))
    for memory in ("much", 100, "1KiB", -1):
        says(raises(trigram.MisuseError, CachedDataset, data, tmp_path, memory=memory), "memory=", "8GiB")
    says(raises(trigram.MisuseError, CachedDataset, iter([1]), tmp_path), "map-style")

    class Random(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Any:
            return torch.rand(3)

    says(raises(trigram.MisuseError, CachedDataset, Random(), tmp_path), "differs each time", "key=")
    frozen = CachedDataset(Random(), tmp_path, key="frozen", memory=1 << 20)
    assert torch.equal(frozen[1], frozen[1])
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    says(raises(trigram.MisuseError, CachedDataset, data, shared), "unpickled", "777")
    assert len(CachedDataset([], tmp_path)) == 0


def test_memory_is_the_bound(tmp_path: Path) -> None:
    data = Slow(tmp_path / "log", count=100, size=20_000)  # 8 MB
    cached = CachedDataset(data, tmp_path / "c", memory="2MiB")
    for _ in range(2):
        for start in range(0, 100, 5):
            _check(cached.__getitems__(list(range(start, start + 5))), list(range(start, start + 5)), data)
    files = [f for f in (tmp_path / "c").rglob("*.mdb") if f.name == "data.mdb"]
    assert len(files) == 1 and files[0].stat().st_size <= 2 << 20
    assert 10 <= cached.hits < 60


def test_a_sample_that_cannot_be_pickled_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached = CachedDataset([lambda: 1, 2], tmp_path, memory="1MiB", key="functions")
    assert [cached[0](), cached[0](), cached[1], cached[1]] == [1, 1, 2, 2]
    assert (cached.misses, cached.hits) == (3, 1)
    assert caplog.text.count("cannot be pickled") == 1


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_share_it(tmp_path: Path, start: str) -> None:
    """Workers that keep running, two epochs: what one has loaded, another finds."""
    data = Slow(tmp_path / "log")
    cached = CachedDataset(data, tmp_path / "c", memory="16MiB")
    cached[0]  # the parent has it open
    before = data.loads()
    loader = DataLoader(
        cached,
        batch_size=5,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start,
        collate_fn=_plain,
    )
    for _ in range(3):
        seen = [sample for batch in loader for sample in batch]
        _check(seen, [sample["y"][0] for sample in seen], data)
        assert sorted(sample["y"][0] for sample in seen) == list(range(40))
    assert data.loads() - before == 39
    _check([cached[i] for i in range(40)], list(range(40)), data)
    assert cached.misses == 1


def _write(rank: int, world: int) -> None:
    data = Slow(scratch() / "log", count=100_000, size=200)
    cached = CachedDataset(data, scratch() / "c", memory="1GiB", key="w")
    say("up")
    for i in range(rank, 100_000, world):
        cached[i]


@pytest.mark.waits
def test_writers_that_are_killed_or_stopped() -> None:
    """Each record is whole or not there; who comes later writes on, and a stopped one holds up nobody."""
    with Ranks(3, _write) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "up")
        data = Slow(ranks.dir / "mine", count=100_000, size=200)
        cached = CachedDataset(data, ranks.dir / "c", memory="1GiB", key="w")
        for rank in range(3):
            time.sleep(0.2)
            ranks.signal(rank, signal.SIGKILL if rank < 2 else signal.SIGSTOP)
            found, began = cached.hits, time.monotonic()
            _check(cached.__getitems__(list(range(600))), list(range(600)), data)
            assert cached.hits > found and time.monotonic() - began < patience.seconds(20)
        ranks.signal(2, signal.SIGKILL)
        ranks.ranks[2].process.join(10)
        time.sleep(1.1)
        before = cached.misses
        for _ in range(2):
            _check(cached.__getitems__([99_000, 99_001]), [99_000, 99_001], data)
        assert cached.misses == before + 2


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a small tmpfs, full from the start or in the middle: samples come, with one warning."""
    for kept in (0, 3 << 20):
        disk = tmp_path / f"disk{kept}"
        disk.mkdir(mode=0o700)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=5m,mode=700", "none", str(disk)],
            check=False,
            capture_output=True,
        )
        if mounted.returncode:
            pytest.skip("only root may mount a tmpfs")
        try:
            caplog.clear()
            (disk / "ballast").write_bytes(bytes((5 << 20) - kept))
            data = Slow(tmp_path / "log", count=100, size=20_000)
            cached = CachedDataset(data, disk / "c" if kept else disk, memory="1GiB", key="d")
            for _ in range(2):
                _check([cached[i] for i in range(100)], list(range(100)), data)
            assert (cached.hits > 10) == bool(kept)
            assert caplog.text.count("goes on without it") == 1, caplog.text
            del cached
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_from_before_a_reboot_is_removed(tmp_path: Path) -> None:
    data = Slow(tmp_path / "log")
    cached = CachedDataset(data, tmp_path / "c", memory="1MiB", key="k")
    cached[1]
    del cached
    (mark,) = (tmp_path / "c").rglob("boot")
    mark.write_text("another")
    cached = CachedDataset(data, tmp_path / "c", memory="1MiB", key="k")
    cached[1]
    assert cached.misses == 1


def _peers(rank: int, world: int, dies: bool) -> tuple[int, int]:
    """Each rank is a host of its own: with its own folder, and TCP between them."""
    trigram.init()
    data = Slow(scratch() / f"log{rank}", count=60)
    cached = CachedDataset(data, scratch() / f"c{rank}", memory="16MiB", peers=True)
    mine = list(range(rank, 60, world))
    _check(cached.__getitems__(mine), mine, data)
    trigram.barrier()
    keys = [cached._identity + i.to_bytes(8, "big") for i in range(60)]
    mine = [key for key in keys if owner(key, world) == rank]
    until(lambda: None not in cached._opened().get(mine), 10, "the samples that are given to this host")
    trigram.barrier()
    before = data.loads()
    loader = DataLoader(
        cached, batch_size=7, num_workers=2, multiprocessing_context="fork", collate_fn=_plain
    )
    seen = [sample for batch in loader for sample in batch]
    _check(seen, list(range(60)), data)
    assert data.loads() == before, "a sample was loaded again"
    _check(cached.__getitems__(list(range(60))), list(range(60)), data)
    assert cached.from_peers == 60 - len(mine)
    trigram.barrier()  # a rank that has left answers nobody
    if dies:
        if rank == 1:
            flag("dies")
            os._exit(9)
        await_flag("dies")
        time.sleep(0.3)
        began = time.monotonic()
        for _ in range(3):
            _check(cached.__getitems__(list(range(60))), list(range(60)), data)
        assert time.monotonic() - began < patience.seconds(12)
    return data.loads(), cached.from_peers


@pytest.mark.waits
@pytest.mark.parametrize("dies", [True, long(False)])
def test_peers(dies: bool) -> None:
    run(2, _peers, dies, transport="tcp", timeout=60, dies=[1] if dies else [])
