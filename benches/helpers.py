"""Measures AllReduce between hosts with and without helpers: ranks that have no data and only reduce.

    python benches/helpers.py --workers 3 --rate 1gbit --helper-rates 1gbit,4gbit --out helpers-out

The table has the speed that the formula of `rust/core/src/topology/balance.rs` predicts: with three workers
and one helper of the same rate 10/9 of that without helpers, 4/3 at most. The library is not told the rates.
Hosts are network namespaces (needs root and iproute2). Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import hosts
import torch

import trigram


def rank(workers: int, mib: float, count: int, out: Path) -> None:
    """What each rank runs: a series of all_reduce among the workers; the other ranks help."""
    trigram.init()
    helpers = range(workers, trigram.world_size())
    group, alone = trigram.new_group(range(workers), helpers), trigram.new_group(range(workers))
    if trigram.rank() in helpers:
        group.help()
        return
    times = []
    x = torch.empty(int(mib * (1 << 20)) // 4)
    right = float(sum(range(workers)))
    for _ in range(count):
        x.fill_(trigram.rank())
        trigram.barrier(alone)
        began = time.perf_counter()
        trigram.all_reduce(x, group=group)
        times.append(time.perf_counter() - began)
        if not bool((x == right).all()):
            raise SystemExit(f"rank {trigram.rank()}: the sum is wrong")
    if trigram.rank() == 0:
        out.write_text(json.dumps([t * 1e3 for t in times]))


def series(workers: int, rates: list[str], args: argparse.Namespace) -> float:
    """The median of the second half of a series, in milliseconds."""
    out = args.out / "series.json"
    argv = [__file__, "--rank", "--workers", str(workers), "--mib", str(args.mib)]
    argv += ["--count", str(args.count), "--out", str(out)]
    with hosts.Hosts(len(rates), ",".join(rates)) as namespaces:
        if code := hosts.start(argv, len(rates), namespaces, quiet=True):
            raise SystemExit(code)
    times: list[float] = json.loads(out.read_text())
    print(f"{rates}: {' '.join(f'{t:.0f}' for t in times)}", file=sys.stderr)
    return statistics.median(times[len(times) // 2 :])


def predicted(workers: int, helper: float) -> float:
    """The speedup that the formula predicts; `helper` is the helper's rate, relative to a worker's."""
    alone = 2 * (workers - 1) / workers
    helped = max(1.0, 2 * (workers - 1) / (workers + (workers - 2) / workers * helper))
    return alone / helped


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--helper-rates", type=lambda text: text.split(","), default=["1gbit", "4gbit"])
    parser.add_argument("--mib", type=float, default=25)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("helpers-out"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank(args.workers, args.mib, args.count, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    workers = [args.rate] * args.workers
    sides: dict[str, list[float]] = {rate: [] for rate in ["", *args.helper_rates]}
    for _ in range(args.repeats):
        for helper, times in sides.items():
            times.append(series(args.workers, [*workers, *([helper] if helper else [])], args))
    alone = min(sides[""])
    print(f"{args.mib:g} MiB, {args.workers} workers at {args.rate}, ms\n")
    print("| helper | ms | times faster | by the formula |\n|---|---:|---:|---:|")
    for helper, times in sides.items():
        ratio = _number(helper) / _number(args.rate) if helper else 0.0
        formula = predicted(args.workers, ratio)
        print(f"| {helper or 'none'} | {min(times):.0f} | {alone / min(times):.2f} | {formula:.2f} |")


def _number(rate: str) -> float:
    """Mbit/s of a rate as `tc` writes it."""
    return float(rate.rstrip("gmbit")) * (1000 if "gbit" in rate else 1)


if __name__ == "__main__":
    main()
