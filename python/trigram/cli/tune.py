"""`trigram bench all_reduce --tune`: at which sizes the schedule of an all_reduce should change here.

Measures schedules in turns, and keeps the sizes in a file that later jobs read when they start: those of
rank 0 hold for all ranks. Ranks must have a host each; inside a host nothing depends on it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import trigram
from trigram.runtime.world import current

KIB, MIB = 1 << 10, 1 << 20
SMALL = [4 * KIB << k for k in range(8)]
"""Sizes in bytes at which recursive doubling is compared with scatter-gather: 4 to 512 KiB."""
LARGE = [MIB << k for k in range(7)]
"""Sizes at which a ring is: 1 to 64 MiB."""
SECONDS = 0.25
"""How long a size is measured."""
LEAST, MOST = 5, 200
"""Turns at each size."""

Say = Callable[..., object]

HEAD = """\
# What trigram bench all_reduce --tune has measured among ranks with a host each, for later jobs.
# ranks, most bytes by recursive doubling, least bytes by a ring (-: it was never faster)
"""


def usual_path() -> Path:
    """The file: ``TRIGRAM_TUNING``, or in the user's folder of caches (rust/engine/.../tuning_file.rs)."""
    named = os.environ.get("TRIGRAM_TUNING")
    if named and named != "off":
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "trigram" / "tuning.txt"


def measure(say: Say) -> tuple[int, int | None]:
    """Compares the schedules; all ranks call it.

    Args:
        say: Prints a line, on rank 0.

    Returns:
        The most bytes by recursive doubling and the least by a ring, the same on all ranks.
    """
    say(f"# {trigram.world_size()} ranks; microseconds of the slowest rank, medians; schedules take turns")
    first = best_change(_compared(SMALL, "recursive_doubling", "scatter_gather", say))
    doubling = SMALL[first - 1] if first else 0
    if trigram.world_size() == 2:  # between two ranks a ring is scatter-gather
        return doubling, None
    last = best_change(_compared(LARGE, "scatter_gather", "ring", say))
    return doubling, LARGE[last] if last < len(LARGE) else None


def best_change(times: Sequence[tuple[float, float]]) -> int:
    """Where to change from the first schedule to the second, so that all sizes together are the fastest.

    One size that is noisy does not decide it, as the first at which the second is faster would.

    Args:
        times: Of each size, in order, by the first schedule and by the second.

    Returns:
        How many of the sizes take the first.
    """
    gains = [math.log(second / first) for first, second in times]  # of the first
    sums = [sum(gains[:k]) for k in range(len(gains) + 1)]
    return sums.index(max(sums))


def _compared(sizes: Sequence[int], first: str, second: str, say: Say) -> list[tuple[float, float]]:
    say(f"{'bytes':>10} {first:>19} {second:>19}")
    found = []
    for size in sizes:
        a, b = _paired(size, first, second)
        say(f"{size:>10} {a:19.1f} {b:19.1f}", flush=True)
        found.append((a, b))
    return found


def _paired(size: int, *vias: str) -> list[float]:
    """Microseconds of an all_reduce of `size` bytes by each of the schedules, in turns; the same on all
    ranks."""
    tensors = {via: torch.ones(size // 4) for via in vias}
    times: dict[str, list[float]] = {via: [] for via in vias}
    began, turns = time.perf_counter(), MOST
    turn = 0
    while turn < turns:
        for via in vias:
            trigram.barrier()
            start = time.perf_counter()
            trigram.all_reduce(tensors[via], "avg", via=via)
            times[via].append(time.perf_counter() - start)
        turn += 1
        if turn == LEAST:
            # As many turns as the slowest rank has time for.
            spent = torch.tensor([time.perf_counter() - began])
            trigram.all_reduce(spent, "max")
            turns = min(MOST, max(LEAST, int(SECONDS * LEAST / float(spent[0]))))
    slowest = torch.tensor([times[via] for via in vias], dtype=torch.float64)
    trigram.all_reduce(slowest, "max")
    for via, tensor in tensors.items():
        if not bool((tensor == 1).all()):
            raise trigram.TrigramError(
                f"bench: all_reduce via {via} of {size} bytes gave a wrong mean of ones"
            )
    return [float(times) * 1e6 for times in slowest.median(1).values]


def keep(world: int, doubling: int, ring: int | None, path: Path) -> None:
    """Writes what was measured; lines for other numbers of ranks stay.

    Args:
        world: Number of ranks.
        doubling: The most bytes by recursive doubling.
        ring: The least bytes by a ring; None: it was never faster.
        path: The file.
    """
    lines = {world: f"{world} {doubling} {'-' if ring is None else ring}"}
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            found = re.fullmatch(r"\s*(\d+)\s+\d+\s+(\d+|-)\s*", line, re.ASCII)
            if found and int(found[1]) > 1:
                lines.setdefault(int(found[1]), line)  # others cannot be read, and would stop every job
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.environ.get('RANK', '')}.{os.getpid()}")
    new.write_text(HEAD + "".join(f"{lines[n]}\n" for n in sorted(lines)))
    new.replace(path)  # other ranks may have the same folder


def run() -> None:
    """Measures, prints on rank 0, and writes the file on every rank's host. All ranks call it."""
    path = usual_path()
    os.environ["TRIGRAM_TUNING"] = "off"  # the file need not be there, and may be what is to be replaced
    trigram.init()
    rank, world, hosts = trigram.rank(), trigram.world_size(), len(current().group.hosts())
    if hosts < max(world, 2):
        raise trigram.ConfigError(
            f"bench --tune: {world} rank(s) on {hosts} host(s); start one rank on each of at least two "
            "hosts, because only schedules between hosts depend on the network"
        )
    say: Say = print if rank == 0 else _silent
    doubling, ring = measure(say)
    keep(world, doubling, ring, path)
    large = f"a ring from {ring} bytes on" if ring is not None else "no ring"
    say(f"# recursive doubling up to {doubling} bytes, {large}; written to {path} on every host")


def _silent(*_: object, **__: object) -> None:
    pass
