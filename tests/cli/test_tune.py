"""`trigram bench all_reduce --tune`: what it measures is kept, and later jobs take other schedules for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import run
from tests.support.marks import long
from trigram.cli import tune


def _bench(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trigram", "bench", *argv],
        capture_output=True,
        text=True,
        timeout=patience.seconds(200),
        check=False,
        env={**os.environ, **env},
    )


def test_measures_and_keeps(tmp_path: Path) -> None:
    """Ranks that reach each other by TCP only count as hosts of their own. Other lines of the file stay."""
    file = tmp_path / "cache" / "tuning.txt"
    file.parent.mkdir()
    file.write_text("# a comment\n2 1 -\n16 65536 1048576\n")
    done = _bench("all_reduce", "--tune", "--transport", "tcp", TRIGRAM_TUNING=str(file))
    assert done.returncode == 0, done.stderr
    assert "recursive doubling up to" in done.stdout
    two, sixteen = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert sixteen == "16 65536 1048576"
    ranks, doubling, ring = two.split()
    # Between two ranks a ring is scatter-gather. Which sizes win is a matter of this machine's load.
    assert (ranks, ring) == ("2", "-") and int(doubling) in (0, *tune.SMALL)


@pytest.mark.parametrize("before", [long(None), "2 lots -\n3 lots -\n4 - -\n1 5 -\n"])
def test_a_file_that_is_not_there_or_is_wrong_is_made(tmp_path: Path, before: str | None) -> None:
    """As the errors about such a file advise."""
    file = tmp_path / "tuning.txt"
    if before is not None:
        file.write_text(before)
    done = _bench("all_reduce", "--tune", "--transport", "tcp", TRIGRAM_TUNING=str(file))
    assert done.returncode == 0, done.stderr
    done = _bench("all_reduce", "--sizes", "4", "--transport", "tcp", TRIGRAM_TUNING=str(file))
    assert done.returncode == 0, done.stderr


def test_ranks_of_one_host_have_nothing_to_tune(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    done = _bench("all_reduce", "--tune", "--transport", "shm", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode != 0 and "one rank on each of at least two hosts" in done.stderr, done.stderr
    assert not file.exists()
    done = _bench("broadcast", "--tune")
    assert done.returncode == 2 and "only all_reduce" in done.stderr


SIZE = 64 * tune.KIB
WORLD = 4


def _sent(rank: int, world: int, first: str, others: str) -> float:
    """Of an all_reduce of SIZE: bytes that this rank sends for each byte of the tensor."""
    os.environ["TRIGRAM_TUNING"] = first if rank == 0 else others
    trigram.init()
    t = torch.ones(SIZE // 4)
    before = sum(trigram.stats()["sent_bytes"])
    trigram.all_reduce(t)
    sent = sum(trigram.stats()["sent_bytes"]) - before
    assert bool((t == world).all())
    return float(sent / SIZE)


def test_the_first_ranks_file_holds_for_all(tmp_path: Path) -> None:
    """Of four ranks each sends the tensor twice by recursive doubling, and 1.5 times by scatter-gather."""
    doubling, scattering = tmp_path / "doubling.txt", tmp_path / "scattering.txt"
    doubling.write_text(f"{WORLD} {SIZE} -\n")
    scattering.write_text(f"{WORLD} {SIZE - 1} -\n")
    for first, others, want in [
        (str(doubling), str(scattering), 2.0),
        (str(scattering), str(doubling), 1.5),
        (str(doubling), "off", 2.0),
        ("off", str(doubling), 1.5),
    ]:
        assert run(WORLD, _sent, first, others, transport="tcp") == [want] * WORLD, (first, others)


def _refused(rank: int, world: int, file: str) -> str:
    os.environ["TRIGRAM_TUNING"] = file
    return raises(trigram.TrigramError, trigram.init)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    file.write_text("2 lots -\n")
    for said in run(2, _refused, str(file), transport="tcp"):
        says(said, str(file), "line 1", "--tune")
    file.unlink()
    for said in run(2, _refused, str(file), transport="tcp"):
        says(said, str(file), "No such file")


@pytest.mark.parametrize(
    ("times", "change"),
    [
        ([(1, 2), (1, 2)], 2),
        ([(2, 1), (2, 1)], 0),
        ([(1, 2), (2, 1)], 1),
        ([(1, 2), (1.01, 1), (1, 2), (2, 1)], 3),
        ([(2, 1), (0.99, 1), (2, 1)], 0),
    ],
)
def test_one_noisy_size_does_not_decide(times: list[tuple[float, float]], change: int) -> None:
    assert tune.best_change(times) == change


def test_a_ring_need_not_win_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds that four hosts at 1 Gbit have measured: a ring wins at the sizes of buckets."""
    small = [
        (152, 269),
        (219, 300),
        (345, 333),
        (609, 395),
        (1304, 995),
        (2552, 1987),
        (4883, 3833),
        (9937, 8101),
    ]
    large = [(16015, 14041), (29488, 27188), (57088, 53807), (112781, 108578)]
    large += [(224053, 241257), (446877, 463925), (887975, 907939)]
    monkeypatch.setattr(trigram, "world_size", lambda: 4)
    monkeypatch.setattr(tune, "_compared", lambda sizes, *_: small if sizes == tune.SMALL else large)
    assert tune.measure(print) == (8 * tune.KIB, tune.MIB)
