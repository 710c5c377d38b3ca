"""Measures AllReduce between hosts with links of different rates, compared with the lower bound, a ring and
gloo.

    python benches/balance.py --rates 1gbit,1gbit,1gbit,500mbit --out balance-out
    python benches/balance.py --rates 1gbit,1gbit,1gbit,1gbit --change 3:500mbit --out balance-out

Hosts are network namespaces (needs root and iproute2). The library is not told the rates: it measures them.
`--change` changes the rate of a host during the run; the series shows how many operations the library needs
to adapt. Every result is checked. The lower bound is S max(max 1/B, 2 (p - 1) / sum B), with B the payload of
a cable per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hosts
import torch
import torch.distributed as dist

import trigram

# The fraction of the rate of a cable that is payload, with an MTU of 1500.
PAYLOAD = 0.948
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """The payload per second of a rate as `tc` writes it."""
    for unit, scale in UNITS.items():
        if rate.endswith(unit):
            return float(rate[: -len(unit)]) * scale / 8 * PAYLOAD
    raise ValueError(f"{rate} is no rate; write for example 1gbit or 500mbit")


def bound(size: int, rates: list[str]) -> float:
    """The lower bound for an AllReduce of `size` bytes, in seconds."""
    carried = [bytes_per_second(rate) for rate in rates]
    return size * max(1 / min(carried), 2 * (len(carried) - 1) / sum(carried))


def methods(names: list[str]) -> dict[str, Callable[[torch.Tensor], object]]:
    """The functions to measure, by name."""
    known: dict[str, Callable[[torch.Tensor], object]] = {
        "trigram": trigram.all_reduce,
        "trigram via ring": lambda x: trigram.all_reduce(x, via="ring"),
        "trigram via tree": lambda x: trigram.all_reduce(x, via="tree"),
        "gloo": dist.all_reduce,
    }
    return {name: known[name] for name in names}


def series(
    call: Callable[[torch.Tensor], object], n: int, count: int, before: Callable[[int], None]
) -> list[float]:
    """The seconds of each operation on its slowest rank; checks every result."""
    world, rank = trigram.world_size(), trigram.rank()
    base = torch.arange(n, dtype=torch.float32) % 1000
    expected = base * world + world * (world - 1) / 2
    times = []
    for step in range(count):
        before(step)
        x = base + rank
        trigram.barrier()
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
        if not torch.equal(x, expected):
            raise SystemExit(f"operation {step}: wrong sums")
    mine = torch.tensor(times, dtype=torch.float64)
    trigram.all_reduce(mine, "max")
    return mine.tolist()


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    trigram.init()
    dist.init_process_group("gloo")
    prefix, first = os.environ["TRIGRAM_BENCH_HOSTS"], trigram.rank() == 0
    rows, after = [], list(args.rates)
    if args.change:
        host, rate = args.change.split(":")
        after[int(host)] = rate

    def change(step: int) -> None:
        if first and args.change and step in (0, args.count // 2):
            hosts.shape(prefix, int(host), rate if step else args.rates[int(host)])
        if args.change and step in (0, args.count // 2):
            trigram.barrier()

    def known() -> str:
        return " ".join(f"{rate * 8 / 1e6:.0f}" for rate in trigram.stats()["rates"]) or "none"

    for size in args.sizes:
        for _ in range(args.repeats):
            for name, call in methods(args.methods).items():
                times = series(call, size // 4, args.count, change)
                rows.append({"size": size, "method": name, "seconds": times})
                if first:
                    print(
                        f"{size >> 10} KiB {name}: " + " ".join(f"{t * 1e3:.0f}" for t in times), flush=True
                    )
    if first:
        text = report(args, rows, after)
        print(text)
        (args.out / "balance.md").write_text(text)
        (args.out / "balance.json").write_text(json.dumps({"rates": args.rates, "rows": rows}))
    dist.destroy_process_group()
    trigram.shutdown()


def report(args: argparse.Namespace, rows: list[dict], after: list[str]) -> str:
    """The table: medians of the second half of each series, when all has settled."""
    lines = [
        f"cables {', '.join(after)}",
        "",
        "| MiB | method | ms | of the bound | of trigram |",
        "|---:|---|---:|---:|---:|",
    ]
    for size in args.sizes:
        least = bound(size, after)
        median = {
            name: statistics.median(
                t
                for row in rows
                if row["method"] == name and row["size"] == size
                for t in row["seconds"][-args.count // 3 :]
            )
            for name in args.methods
        }
        for name, seconds in median.items():
            ratio = seconds / median["trigram"] if "trigram" in median else 0.0
            lines.append(
                f"| {size / 2**20:g} | {name} | {seconds * 1e3:.1f} | {seconds / least:.3f} | {ratio:.2f} |"
            )
    if args.change:
        least = bound(args.sizes[-1], after)
        for row in rows:
            if row["method"] == "trigram" and row["size"] == args.sizes[-1]:
                tail = row["seconds"][args.count // 2 :]
                late = [i for i, t in enumerate(tail) if t > 1.15 * least]
                when = f"after the change at operation {args.count // 2}"
                first = late[-1] + 1 if late else 0
                lines.append(f"\n{when}: within 15 % of the new bound from operation {first} on")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Creates the hosts and starts a rank on each; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=lambda t: t.split(","), default=["1gbit"] * 3 + ["500mbit"])
    parser.add_argument(
        "--sizes",
        type=lambda t: [int(float(s) * 2**20) for s in t.split(",")],
        default=[25 << 20],
        help="MiB",
    )
    parser.add_argument(
        "--methods", type=lambda t: t.split(","), default=["trigram", "trigram via ring", "gloo"]
    )
    parser.add_argument("--count", type=int, default=24, help="operations of a series")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--change", help="HOST:RATE, in the middle of each series")
    parser.add_argument("--out", type=Path, default=Path("balance-out"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with hosts.Hosts(len(args.rates), ",".join(args.rates)) as namespaces:
        return hosts.start(sys.argv, len(args.rates), namespaces)


if __name__ == "__main__":
    sys.exit(main())
