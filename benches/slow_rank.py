"""Measures the samples per second of fast ranks and of one slow rank, with each algorithm.

    python benches/slow_rank.py --out slow-rank-out [--ranks 4] [--algorithms ...] [--seconds 4]

The last rank sleeps in each step so that, alone, it takes twice the time of the others; the script calibrates
the sleep at the start. "nobody communicates" is the rate without communication. With synchronous
algorithms all ranks make the same number of steps; with asynchronous ones each rank trains until the time is
over.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import hosts
import losses
import torch
import torch.distributed as dist
from torch import nn

import trigram
from trigram.cli import workloads
from trigram.runtime import launch

ALONE = "nobody communicates"
UNTIMED = 5


class Pace:
    """Makes training steps on this rank, which sleep for `pause` seconds."""

    def __init__(self, batch: int, pause: float) -> None:
        self.batch, self.pause = batch, pause
        self.stream = losses.batches(workloads.data("gpt"), batch, 0)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """Makes one step; returns its seconds."""
        started = time.perf_counter()
        x, y = next(self.stream)
        optimizer.zero_grad()
        loss = workloads.loss_of(model, x, y)
        # Before the gradients, where a slower processor would lose about half of its time.
        time.sleep(self.pause)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - started


def calibrate(pace: Pace, slow: bool) -> float:
    """Sets the slow rank's pause so that its steps take twice the others'; returns the others' seconds."""
    module = workloads.make_model("gpt")
    adam = torch.optim.Adam(module.parameters())
    others = 0.0
    # The ranks may share cores: a rank that sleeps makes the others faster, so once is not enough.
    for _ in range(4):
        mine = statistics.median([pace.step(module, adam) for _ in range(25)][UNTIMED:])
        seconds = gathered(mine)
        others = statistics.fmean(seconds[:-1])
        if slow:
            pace.pause = max(0.0, pace.pause + 2 * others - mine)
        dist.barrier()
    return others


def gathered(mine: float) -> list[float]:
    """The numbers of all ranks."""
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    everyone[dist.get_rank()] = mine
    dist.all_reduce(everyone)
    return everyone.tolist()


def measure(algorithm: str, pace: Pace, seconds: float, compute: float) -> list[float]:
    """Samples per second of each rank."""
    torch.manual_seed(0)
    module = workloads.make_model("gpt")
    lr = workloads.RECIPES["gpt"].lr
    free = algorithm == ALONE
    model: nn.Module = module
    optimizer: torch.optim.Optimizer = torch.optim.Adam(module.parameters(), lr)
    if not free:
        model, optimizer = losses.wrap(algorithm, module, lr, "adam", 10 * UNTIMED, None)
        free = any(each["name"] == algorithm and "async" in each["when"] for each in trigram.algorithms())
    for _ in range(UNTIMED):
        pace.step(model, optimizer)
    dist.barrier()
    started, done = time.perf_counter(), 0
    steps = max(8, round(seconds / (2 * compute) / 8) * 8)
    while time.perf_counter() - started < seconds if free else done < steps:
        pace.step(model, optimizer)
        done += 1
    rate = done * pace.batch / (time.perf_counter() - started)
    dist.barrier()
    return gathered(rate)


def markdown(rows: list[dict[str, Any]], slow: int) -> str:
    """A row per algorithm: samples/s, and the fraction of the rate without communication."""
    lines = [
        "| algorithm | others, samples/s | of alone | slow rank | of alone |",
        "|---|---:|---:|---:|---:|",
    ]
    split = [
        (
            row["algorithm"],
            statistics.fmean([*row["rates"][:slow], *row["rates"][slow + 1 :]]),
            row["rates"][slow],
        )
        for row in rows
    ]
    _, alone_others, alone_slow = split[0]
    for name, others, late in split:
        lines.append(
            f"| {name} | {others:.0f} | {others / alone_others:.2f} | {late:.0f} | {late / alone_slow:.2f} |"
        )
    return "\n".join(lines) + "\n"


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank; the last rank is the slow one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trigram.init()
    rank, slow = dist.get_rank(), dist.get_world_size() - 1
    pace = Pace(args.batch, 0.0)
    compute = calibrate(pace, rank == slow)
    rows: list[dict[str, Any]] = []
    notes = ""
    for algorithm in (ALONE, losses.DDP, *args.algorithms):
        try:
            rates = measure(algorithm, pace, args.seconds, compute)
        except (trigram.UnsupportedError, AttributeError) as error:
            notes += f"\nskipped: {algorithm}: {error}\n"
            continue
        gc.collect()
        rows.append({"algorithm": algorithm, "rates": rates})
        if rank == 0:
            print(algorithm, *(f"{each:.1f}" for each in rates), file=sys.stderr, flush=True)
            facts = {
                "ranks": slow + 1,
                "slow": slow,
                "compute_ms": 1000 * compute,
                "torch": torch.__version__,
            }
            (args.out / "results.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
            (args.out / "table.md").write_text(markdown(rows, slow) + notes)
    if rank == 0:
        print(markdown(rows, slow) + notes)
    launch.leave_job()


def main() -> int:
    """Starts the ranks; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=list(losses.CARDS))
    parser.add_argument("--seconds", type=float, default=6, help="about, for each algorithm")
    parser.add_argument("--batch", type=int, default=8)
    return hosts.run_ranks(parser, rank_main, "slow-rank-out", 4)


if __name__ == "__main__":
    sys.exit(main())
