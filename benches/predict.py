"""Compares the simulator's prediction for each schedule of all_reduce with measurements on shaped links.

    python benches/predict.py --rate 1gbit --hosts 2,3,4,8 --sizes 1M,4M,25M,100M

The simulator (`rust/core/src/sim.rs`) gets two numbers: the payload rate of a cable, and the latency, which
is measured in the same run as the time of one hop with 4 bytes. Hosts are network namespaces (needs root and
iproute2). Results are checked.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import balance
import hosts

from trigram.cli.bench import parse_size

VIAS = ("ring", "tree", "recursive_doubling", "scatter_gather")
ROOT = Path(__file__).parents[1]


def measured(namespaces: hosts.Hosts, via: str, sizes: list[int], iters: int) -> dict[int, float]:
    """Milliseconds of the slowest rank, by size: the median of the iterations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        argv = ["-m", "trigram", "bench", "all_reduce", "--via", via, "--json", str(file)]
        argv += ["--sizes", ",".join(map(str, sizes)), "--iters", str(iters), "--warmup", "8"]
        if code := hosts.start(argv, namespaces.count, namespaces, quiet=True):
            raise SystemExit(code)
        return {row["bytes"]: row["time_us_p50"] / 1000 for row in json.loads(file.read_text())}


def predicted(via: str, sizes: list[int], latency: float, rates: list[float]) -> dict[int, float]:
    """Simulated milliseconds, by size."""
    command = [
        "cargo",
        "run",
        "--release",
        "--quiet",
        "--locked",
        "-p",
        "trigram-core",
        "--example",
        "predict",
        "--",
    ]
    numbers = [",".join(map(str, sizes)), str(latency), ",".join(map(str, rates))]
    done = subprocess.run([*command, via, *numbers], cwd=ROOT, check=True, capture_output=True, text=True)
    return {int(line.split()[1]): float(line.split()[2]) for line in done.stdout.splitlines()}


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of every cable")
    parser.add_argument("--hosts", default="2,3,4,8")
    parser.add_argument("--sizes", default="1M,4M,25M,100M")
    parser.add_argument("--iters", type=int, default=5)
    args = parser.parse_args()
    sizes = [parse_size(size) for size in args.sizes.split(",")]
    subprocess.run(
        ["cargo", "build", "--release", "--quiet", "--locked", "-p", "trigram-core", "--example", "predict"],
        cwd=ROOT,
        check=True,
    )
    print("| hosts | schedule | MiB | measured, ms | simulated, ms | simulated / measured |")
    print("|---:|---|---:|---:|---:|---:|")
    for count in map(int, args.hosts.split(",")):
        with hosts.Hosts(count, args.rate) as namespaces:
            small = measured(namespaces, "recursive_doubling", [4], 200)[4]
            latency = small / 1000 / math.ceil(math.log2(count))
            rates = [balance.bytes_per_second(args.rate)] * count
            for via in VIAS:
                real = measured(namespaces, via, sizes, args.iters)
                model = predicted(via, sizes, latency, rates)
                for size in sizes:
                    ratio = model[size] / real[size]
                    numbers = f"{real[size]:.1f} | {model[size]:.1f} | {ratio:.2f}"
                    print(f"| {count} | {via} | {size / 2**20:g} | {numbers} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
