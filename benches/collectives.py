"""Measures collectives, compared with gloo, MPI and the floor; writes a page of tables and a picture.

    python benches/collectives.py --out docs
    python benches/collectives.py --out docs --mpi mpich=/path/to/mpiexec --mpi openmpi=/path/to/mpiexec

On one host the floor is `floor.c`, compiled with `cc`. The libraries run in turns, several times. A figure is
the best of the runs' medians, each of the slowest rank: on a virtual machine a run takes several times as
long when its processors are far apart. Hosts are network namespaces (needs root and iproute2). The Python
beside an mpiexec needs mpi4py, torch and this package. Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import hosts
import torch

INSIDE = ["4", "1K", "16K", "64K", "1M", "25M"]
OTHERS = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
BETWEEN = ["4", "1K", "16K", "64K", "256K", "1M", "4M", "25M"]
LARGE = "100M"  # not by default: checking all its elements takes longer than everything else
BYTES = {"K": 1 << 10, "M": 1 << 20}
HERE = Path(__file__).parent

Times = dict[tuple[str, int], list[float]]  # library and bytes: microseconds of each run


def number(size: str) -> int:
    """Bytes."""
    return int(size.rstrip("KM")) * BYTES.get(size[-1], 1)


def rows(command: Sequence[str], ranks: int, network: hosts.Hosts | None = None) -> list[dict[str, Any]]:
    """The rows that `trigram bench` measures; exits if one of its checks fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        argv = ["-m", "trigram", "bench", *command, "--json", str(file)]
        if code := hosts.start(argv, ranks, network, quiet=True):
            raise SystemExit(code)
        return list(json.loads(file.read_text()))


def mpi_rows(name: str, mpiexec: str, command: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """The same rows for an MPI library, measured under its own launcher."""
    options = ["--allow-run-as-root", "--oversubscribe"] if name.startswith("open") else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        argv = [
            mpiexec,
            *options,
            "-n",
            str(ranks),
            str(Path(mpiexec).parent / "python"),
            "-m",
            "trigram",
            "bench",
        ]
        argv += [*command, "--against", "mpi", "--json", str(file)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            argv, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600
        )
        found = json.loads(file.read_text())
        return [{**row, "library": name} if row["library"] == "mpi" else row for row in found]


def take(times: Times, found: Sequence[dict[str, Any]], rename: str | None = None) -> None:
    """Adds the rows of a run to `times`; `rename` replaces the library name trigram."""
    for row in found:
        library = rename if rename and row["library"] == "trigram" else row["library"]
        times[library, row["bytes"]].append(row["time_us_p50"])


def table(times: Times, sizes: Sequence[str], ours: str, base: str) -> Iterator[str]:
    """Microseconds by size and library. In brackets: the ratio to `ours`, and for `ours` the ratio to
    `base`."""
    libraries = list(dict.fromkeys(library for library, _ in times))
    yield "| bytes | " + " | ".join(libraries) + " |"
    yield "|---:|" + "---:|" * len(libraries)
    for size in sizes:
        medians = {
            library: min(times[library, number(size)])
            for library in libraries
            if (library, number(size)) in times
        }
        cells = []
        for library in libraries:
            if library not in medians:
                cells.append("")
                continue
            other = base if library == ours and base in medians else ours
            cells.append(f"{medians[library]:.4g} ({medians[library] / medians[other]:.2f})")
        yield f"| {size} | " + " | ".join(cells) + " |"
    yield ""


def inside(runs: int, mpis: dict[str, str]) -> Iterator[tuple[str, Times, list[str]]]:
    """AllReduce on one host: registered and ordinary memory, the floor, gloo and MPI."""
    with tempfile.TemporaryDirectory() as folder:
        floor = Path(folder) / "floor"
        subprocess.run(["cc", "-O3", "-march=native", HERE / "floor.c", "-o", floor], check=True)
        sizes = ",".join(INSIDE)
        for ranks in (2, 4):
            times: Times = defaultdict(list)
            for _ in range(runs):
                run = [floor, str(ranks), *(str(number(size)) for size in INSIDE)]
                lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
                for line in lines:
                    times["floor", int(line.split()[0])].append(float(line.split()[1]))
                base = ["all_reduce", "--sizes", sizes]
                take(times, rows([*base, "--registered", "--against", "gloo"], ranks), "registered")
                take(times, rows([*base, "--against", "gloo"], ranks), "ordinary")
                for name, mpiexec in mpis.items():
                    take(times, mpi_rows(name, mpiexec, base, ranks), "ordinary")
            head = f"### all_reduce, {ranks} ranks on one host\n"
            yield f"{ranks} ranks, one host", times, [head, *table(times, INSIDE, "registered", "floor")]


def others(runs: int) -> Iterator[tuple[str, Times, list[str]]]:
    """The other collectives on one host."""
    for operation in OTHERS:
        times: Times = defaultdict(list)
        sizes = ("16K", "64K", "1M", "25M")
        for _ in range(runs):
            base = [operation, "--sizes", ",".join(sizes)]
            take(times, rows([*base, "--registered", "--against", "gloo"], 2), "registered")
            take(times, rows([*base, "--against", "gloo"], 2), "ordinary")
        yield (
            f"{operation}, 2 ranks",
            times,
            [
                f"### {operation}, 2 ranks on one host\n",
                *table(times, sizes, "ordinary", "gloo"),
            ],
        )


def between(runs: int) -> Iterator[tuple[str, Times, list[str]]]:
    """AllReduce between hosts."""
    for rate in (None, "1gbit"):
        for count, ranks in ((2, 2), (3, 3), (4, 4), (8, 8), (2, 4)):
            times: Times = defaultdict(list)
            with hosts.Hosts(count, rate) as network:
                for _ in range(runs if rate is None else 1):
                    command = ["all_reduce", "--sizes", ",".join(BETWEEN), "--iters", "10", "--warmup", "13"]
                    take(times, rows([*command, "--against", "gloo"], ranks, network))
            what = f"{count} hosts, {ranks} ranks, {rate or 'unshaped'}"
            yield what, times, [f"### all_reduce, {what}\n", *table(times, BETWEEN, "trigram", "gloo")]


def draw(parts: Sequence[tuple[str, Times]], file: Path) -> None:
    """Draws one panel for each part: microseconds over bytes."""
    from matplotlib.figure import Figure

    columns = 4
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for (title, times), axes in zip(parts, panels, strict=False):
        for library in dict.fromkeys(library for library, _ in times):
            sizes = sorted(size for name, size in times if name == library)
            axes.plot(sizes, [min(times[library, size]) for size in sizes], marker=".", label=library)
        axes.set(xscale="log", yscale="log", title=title, xlabel="bytes", ylabel="us")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in list(panels)[len(parts) :]:
        axes.remove()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measures, prints as it goes, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder, for collectives.md")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each library, in turns")
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=MPIEXEC")
    parser.add_argument("--parts", default="inside,others,between", help="what to measure")
    parser.add_argument("--large", action="store_true", help=f"{LARGE} too")
    args = parser.parse_args()
    if args.large:
        INSIDE.append(LARGE)
        BETWEEN.append(LARGE)
    mpis = dict(text.split("=", 1) for text in args.mpi)
    made = {
        "inside": lambda: inside(args.rounds, mpis),
        "others": lambda: others(args.rounds),
        "between": lambda: between(args.rounds),
    }
    page = [
        "# Collectives, measured",
        "",
        f"    {' '.join(['python benches/collectives.py', *_public(sys.argv[1:])])}",
        "",
        f"Measured on {date.today()} with {os.cpu_count()} cores ({_processor()}), Linux "
        f"{platform.release().partition('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}.",
        "",
        "Times are microseconds of the slowest rank: the median of the iterations, and the best of several",
        "runs, in which the libraries took turns. Numbers in brackets are ratios. One of Trigram's columns",
        "is the reference: `registered` for all_reduce on one host, `trigram` between hosts, `ordinary`",
        "elsewhere. Its ratio is relative to the floor, or to gloo where there is no floor; the ratios of",
        "all other columns are relative to it. The column `registered` uses tensors from `trigram.empty`,",
        "and `floor` is `benches/floor.c`, the same sum in C without copies, queues or checks. Hosts are",
        "network namespaces, with TCP cubic.",
        "",
        "![Times](images/collectives.png)",
        "",
    ]
    drawn: list[tuple[str, Times]] = []
    for part in args.parts.split(","):
        for title, times, lines in made[part]():
            drawn.append((title, times))
            page += lines
            print("\n".join(lines), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "collectives.md").write_text("\n".join(page))
    draw(drawn, args.out / "images" / "collectives.png")


def _public(words: Sequence[str]) -> Iterator[str]:
    """The command line, with the paths of this machine replaced."""
    for word in words:
        name, found, path = word.partition("=")
        yield f"{name}=/path/to/{Path(path).name}" if found else word


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
