"""Measures the cost of checksums and TLS 1.3: all_reduce between two ranks over TCP, without and with either.

    python benches/protection.py [--sizes 1,25] [--rounds 21] [--rate 10gbit]

The jobs take turns, so that other load on the machine affects all alike. Each turn gives a ratio; the table
has the median of the ratios, with quartiles. Every result is checked. Without `--rate` the ranks use
loopback, where no time is spent on the wire: this is the upper bound of the cost. With `--rate`, they are on
two hosts (network namespaces, needs root) with a cable of that rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack

import hosts
import jobs
import torch

import trigram

WORLD = 2
SECONDS = 0.4
KINDS = {
    "bare": {"TRIGRAM_TLS": "0", "TRIGRAM_CHECKSUM": "off"},
    "checksums": {"TRIGRAM_TLS": "0", "TRIGRAM_CHECKSUM": "on"},
    "TLS": {"TRIGRAM_TLS": "1"},
}


def rank_main() -> None:
    """One rank: reads sizes in MiB from rank 0's standard input, and prints milliseconds per call for
    each."""
    torch.set_num_threads(1)
    trigram.init()
    rank = trigram.rank()
    while True:
        asked = torch.tensor([float(sys.stdin.readline() or 0) if rank == 0 else 0.0])
        trigram.broadcast(asked, 0)
        if asked.item() == 0:
            return
        n = int(asked.item() * (1 << 20)) // 4
        mine = torch.arange(n, dtype=torch.float32) % 1021 + rank
        right = mine * WORLD + (1 - 2 * rank)
        calls, spent = 0, 0.0
        over = torch.zeros(1)
        while over.item() == 0:
            t = mine.clone()
            began = time.perf_counter()
            trigram.all_reduce(t)
            spent, calls = spent + time.perf_counter() - began, calls + 1
            if not torch.equal(t, right):
                raise SystemExit(f"rank {rank}: the sum is wrong")
            over = torch.tensor([float(rank == 0 and spent > SECONDS)])
            trigram.broadcast(over, 0)
        if rank == 0:
            print(1e3 * spent / calls, flush=True)


def milliseconds(job: jobs.Job, mebibytes: float) -> float:
    """Of one all_reduce: the mean over 0.4 seconds of calls."""
    return float(job.ask(str(mebibytes)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,25", help="MiB, with commas between them")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rate", help="of the cable between two hosts: 10gbit, 1gbit; else loopback")
    asked = parser.parse_args()
    with ExitStack() as stack:
        cable = stack.enter_context(hosts.Hosts(WORLD, asked.rate)) if asked.rate else None
        shared = {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_SECRET": "of this measurement"}
        running = {
            name: jobs.Job(stack, [__file__, "--rank"], WORLD, shared | settings, cable)
            for name, settings in KINDS.items()
        }
        print(f"{'MiB':>6} {'':10} {'ms':>8} {'times bare':>11} {'quartiles':>15}")
        for size in map(float, asked.sizes.split(",")):
            for job in running.values():
                milliseconds(job, size)  # warm-up: congestion windows, link rates
            seen: dict[str, list[float]] = {name: [] for name in running}
            for _ in range(asked.rounds):
                for name, job in running.items():
                    seen[name].append(milliseconds(job, size))
            for name, all_ in seen.items():
                ratios = [ms / bare for ms, bare in zip(all_, seen["bare"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                row = f"{size:6g} {name:10} {statistics.median(all_):8.2f} {middle:11.3f}"
                print(f"{row} {low:7.3f} {high:7.3f}", flush=True)


if __name__ == "__main__":
    rank_main() if "--rank" in sys.argv else main()
