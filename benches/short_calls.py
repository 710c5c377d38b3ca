"""How long a short all_reduce takes from Python, beside MPI: the libraries run in turns, several times.

    python benches/short_calls.py --mpi openmpi=/path/to/mpiexec --mpi mpich=/path/to/mpiexec [--ranks 2]

A window is a row of calls; its time per call is one value, of rank 0. On a virtual machine whose processors
are shared, windows differ by a factor of ten, so the table has the best and the quartiles of each library's
windows. The Python beside an mpiexec needs mpi4py and numpy. All ranks take the maximum of their numbers, and
check it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def windows(call: Callable[[], None], together: Callable[[], None], count: int, row: int) -> list[float]:
    """Microseconds per call of each window."""
    times = []
    for _ in range(count):
        together()
        began = time.perf_counter()
        for _ in range(row):
            call()
        times.append((time.perf_counter() - began) / row * 1e6)
    return times


def by_trigram(size: int, count: int, row: int) -> tuple[int, list[float], bool]:
    """This rank, its windows, and whether the result is right."""
    import torch

    import trigram

    torch.set_num_threads(1)
    t = torch.full((size // 4,), trigram.rank() + 1.0)
    all_reduce = trigram.all_reduce
    times = windows(lambda: all_reduce(t, "max") and None, trigram.barrier, count, row)
    return trigram.rank(), times, bool((t == trigram.world_size()).all())


def by_mpi(size: int, count: int, row: int) -> tuple[int, list[float], bool]:
    """The same by MPI, in place too."""
    import numpy as np
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    t = np.full(size // 4, world.rank + 1.0, dtype=np.float32)
    times = windows(lambda: world.Allreduce(MPI.IN_PLACE, t, op=MPI.MAX), world.Barrier, count, row)
    return world.rank, times, bool((t == world.size).all())


def rank(library: str, size: int, count: int, row: int, out: Path) -> None:
    """What a rank runs."""
    place, times, right = (by_trigram if library == "trigram" else by_mpi)(size, count, row)
    if not right:
        raise SystemExit(f"rank {place}: the result of {library} is wrong")
    if place == 0:
        out.write_text(json.dumps(times))


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=MPIEXEC")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4,64,1024", help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--row", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("short-calls-out/times.json"))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, int(args.sizes), args.windows, args.row, args.out)
        return
    trigram = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    starts = {"trigram": trigram}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, mpiexec in (text.split("=", 1) for text in args.mpi):
        options = ["--allow-run-as-root", "--oversubscribe"] if name.startswith("open") else []
        python = str(Path(mpiexec).parent / "python")
        starts[name] = [mpiexec, *options, "-n", str(args.ranks), python]
    print("| bytes | library | best, us | lower quartile | median |\n|---:|---|---:|---:|---:|")
    for size in map(int, args.sizes.split(",")):
        found: dict[str, list[float]] = {name: [] for name in starts}
        for name in list(starts) * args.rounds:
            options = ["--rank", name, "--sizes", str(size), "--out", str(args.out.resolve())]
            options += ["--windows", str(args.windows), "--row", str(args.row)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([*starts[name], __file__, *options], check=True, env=environment, timeout=300)
            found[name] += json.loads(args.out.read_text())
        for name, times in found.items():
            low, middle, _ = statistics.quantiles(times, n=4)
            print(f"| {size} | {name} | {min(times):.2f} | {low:.2f} | {middle:.2f} |", flush=True)
    args.out.unlink()


if __name__ == "__main__":
    main()
