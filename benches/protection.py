"""What checksums and TLS 1.3 cost: all_reduce between two ranks over TCP, bare and with either.

    python benches/protection.py [--sizes 1,25] [--rounds 21] [--rate 10gbit]

The jobs run by turns, one round of each after the other, so that whatever else the machine does meets all
alike; a ratio is taken in each turn, and the median of those is shown with its quartiles. Every result is
checked. Without `--rate` the ranks talk over loopback, where there is no wire to wait for: that is the most
that protection can cost. With it, they are on two hosts (network namespaces, as root) with such a cable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import hosts
import torch

import trigram
from trigram.cli.launch import free_port

WORLD = 2
SECONDS = 0.4
KINDS = {
    "bare": {"TRIGRAM_TLS": "0", "TRIGRAM_CHECKSUM": "off"},
    "checksums": {"TRIGRAM_TLS": "0", "TRIGRAM_CHECKSUM": "on"},
    "TLS": {"TRIGRAM_TLS": "1"},
}


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

    def __init__(self, stack: ExitStack, own: dict[str, str], cable: hosts.Hosts | None) -> None:
        shared = {
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": cable.addresses[0] if cable else "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TRIGRAM_TRANSPORT": "tcp",
            "TRIGRAM_SECRET": "of this measurement",
            "OMP_NUM_THREADS": "1",
            **({"TRIGRAM_IFACE": hosts.INTERFACE} if cable else {}),
            **own,
        }
        where = [["ip", "netns", "exec", name] for name in cable.names] if cable else [[]] * WORLD
        self.ranks = [
            subprocess.Popen(
                [*where[rank], sys.executable, __file__, "--rank"],
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
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rate", help="of the cable between two hosts: 10gbit, 1gbit; else loopback")
    asked = parser.parse_args()
    with ExitStack() as stack:
        cable = stack.enter_context(hosts.Hosts(WORLD, asked.rate)) if asked.rate else None
        jobs = {name: Job(stack, own, cable) for name, own in KINDS.items()}
        print(f"{'MiB':>6} {'':10} {'ms':>8} {'times bare':>11} {'quartiles':>15}")
        for size in map(float, asked.sizes.split(",")):
            for job in jobs.values():
                job.round(size)  # sockets and rates find their places
            seen: dict[str, list[float]] = {name: [] for name in jobs}
            for _ in range(asked.rounds):
                for name, job in jobs.items():
                    seen[name].append(job.round(size))
            for name, all_ in seen.items():
                ratios = [ms / bare for ms, bare in zip(all_, seen["bare"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                row = f"{size:6g} {name:10} {statistics.median(all_):8.2f} {middle:11.3f}"
                print(f"{row} {low:7.3f} {high:7.3f}", flush=True)


if __name__ == "__main__":
    rank_main() if "--rank" in sys.argv else main()
