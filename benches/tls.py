"""What encryption costs: all_reduce between two hosts' worth of ranks over loopback, plain and under TLS 1.3.

    python benches/tls.py [--sizes 1,25] [--rounds 7]

Both jobs run by turns, one round of each after the other, so that whatever else the machine does meets both
alike. Every result is checked. On loopback there is no wire to wait for: this is the most that it can cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import torch

import trigram
from trigram.cli.launch import free_port

WORLD = 2
SECONDS = 0.6


def rank_main() -> None:
    """A rank: for each number of mebibytes on rank 0's input a round of calls; says milliseconds per call."""
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
                raise SystemExit(f"rank {rank}: a wrong sum")
            over = torch.tensor([float(rank == 0 and spent > SECONDS)])
            trigram.broadcast(over, 0)
        if rank == 0:
            print(1e3 * spent / calls, flush=True)


class Job:
    """Two ranks that wait to be asked for a round."""

    def __init__(self, stack: ExitStack, tls: str) -> None:
        shared = {
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TRIGRAM_TRANSPORT": "tcp",
            "TRIGRAM_SECRET": "of this measurement",
            "TRIGRAM_TLS": tls,
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                env={**os.environ, **shared, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        for rank in self.ranks:
            stack.callback(rank.wait)
            stack.callback(rank.kill)

    def round(self, mebibytes: float) -> float:
        """Milliseconds of one all_reduce, the mean of a round."""
        zero = self.ranks[0]
        assert zero.stdin is not None
        assert zero.stdout is not None
        zero.stdin.write(f"{mebibytes}\n")
        zero.stdin.flush()
        said = zero.stdout.readline()
        if not said:
            raise SystemExit("a rank has failed; see above")
        return float(said)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,25", help="MiB, with commas between them")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with ExitStack() as stack:
        jobs = {"plain": Job(stack, "0"), "TLS": Job(stack, "1")}
        print(f"{'MiB':>6} {'plain ms':>10} {'TLS ms':>10} {'times':>7}   medians of {asked.rounds}; spread")
        for size in map(float, asked.sizes.split(",")):
            for job in jobs.values():
                job.round(size)  # sockets and rates find their places
            seen: dict[str, list[float]] = {name: [] for name in jobs}
            for _ in range(asked.rounds):
                for name, job in jobs.items():
                    seen[name].append(job.round(size))
            plain, tls = (statistics.median(seen[name]) for name in jobs)
            spread = ", ".join(f"{name} {min(all_):.2f} to {max(all_):.2f}" for name, all_ in seen.items())
            print(f"{size:6g} {plain:10.2f} {tls:10.2f} {tls / plain:7.2f}   {spread}")


if __name__ == "__main__":
    rank_main() if "--rank" in sys.argv else main()
