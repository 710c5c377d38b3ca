"""Compares steps of jobs that differ in one thing, in turns: what looking costs, what elasticity costs.

    python benches/beside.py plain observed [--hosts 2 --rate 1gbit] [--jobs 5] [--turns 12]
    python benches/beside.py sharded "sharded, elastic" --ranks 3 --kill

Each job trains the same small GPT, one rank of one thread per process. The jobs take turns of some steps, so
that other load on the machine affects all alike, and each turn gives a ratio to the first kind named. Jobs
differ from each other by a few per cent whatever they do, by where their memory lies, so all are started anew
several times. Processor time of all threads of a rank is the steadier figure. The table has medians, with
quartiles over all turns, and the medians of each start. With `--kill` the last rank of each elastic job is
then killed during a step: how much longer than the median that step takes until the others have made it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import hosts
import jobs
import torch

import trigram
from trigram.cli import workloads


class Kind(NamedTuple):
    """A job: the arguments of ``with_bagua``, and whether everything of docs/observing.md is on."""

    options: dict[str, Any]
    observed: bool = False


KINDS = {
    "plain": Kind({}),
    "observed": Kind({}, observed=True),
    "elastic": Kind({"elastic": True}),
    "sharded": Kind({"algorithm": "sharded"}),
    "sharded, elastic": Kind({"algorithm": "sharded", "elastic": True}),
}


def observed(folder: str) -> dict[str, str]:
    """The variables that turn on everything of docs/observing.md."""
    return {
        "TRIGRAM_TIMELINE": f"{folder}/timeline",
        "TRIGRAM_REPORT": f"{folder}/report",
        "TRIGRAM_TOP": "1",
        "TRIGRAM_METRICS": "127.0.0.1:9400",
        "TRIGRAM_DUMP": f"{folder}/dumps",
    }


def rank_main(kind: str, steps: int, width: int) -> None:
    """One rank: makes some steps for each line of rank 0's standard input; rank 0 prints wall and processor
    milliseconds per step, means of the ranks, and those of its longest step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = KINDS[kind].options
    elastic = bool(options.get("elastic"))
    trigram.init(elastic=elastic)
    model = workloads.TinyGPT(width, 6, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    model = trigram.with_bagua(model, optimizer=optimizer, **options)
    data, rank, at = workloads.data("gpt"), trigram.rank(), 0
    while True:
        asked = torch.tensor([float(bool(sys.stdin.readline())) if rank == 0 else 0.0])
        trigram.broadcast(asked, 0)
        if asked.item() == 0:
            break
        used, each = time.process_time(), []
        for _ in range(steps):
            began = time.perf_counter()
            rows = (torch.arange(4) + 4 * (at + 1000 * rank)) % len(data.x)
            optimizer.zero_grad()
            workloads.loss_of(model, data.x[rows], data.y[rows]).backward()
            optimizer.step()
            at += 1
            each.append(time.perf_counter() - began)
        if elastic:
            trigram.recover()
        found = torch.tensor([sum(each) / steps, (time.process_time() - used) / steps])
        trigram.all_reduce(found, "avg")
        if rank == 0:
            print(*(1e3 * found).tolist(), 1e3 * max(each), flush=True)
    trigram.shutdown()


def turn(job: jobs.Job) -> list[float]:
    """Wall and processor milliseconds of a step, and wall milliseconds of the longest one."""
    return [float(word) for word in job.ask("go").split()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", default=["plain", "observed"], metavar="kind", help=", ".join(KINDS)
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="above 1: network namespaces, needs root")
    parser.add_argument("--rate", help="of each host's cable")
    parser.add_argument("--jobs", type=int, default=5, help="how often all jobs are started")
    parser.add_argument("--turns", type=int, default=12, help="of each start")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--kill", action="store_true", help="the last rank of each elastic job, at the end")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := [kind for kind in asked.kinds if kind not in KINDS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if asked.rank:
        rank_main(asked.kinds[0], asked.steps, asked.width)
        return
    shared = ["--rank", "--steps", str(asked.steps), "--width", str(asked.width)]
    first, starts = asked.kinds[0], []
    times: dict[str, list[float]] = {kind: [] for kind in asked.kinds}
    deaths: dict[str, list[float]] = {}
    for number in range(asked.jobs):
        with ExitStack() as stack:
            cables = stack.enter_context(hosts.Hosts(asked.hosts, asked.rate)) if asked.hosts > 1 else None
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            order = asked.kinds if number % 2 == 0 else asked.kinds[::-1]
            running = {}
            for kind in order:
                extra = {"TRIGRAM_SECRET": "of this measurement"}
                extra |= observed(folder) if KINDS[kind].observed else {}
                running[kind] = jobs.Job(stack, [__file__, kind, *shared], asked.ranks, extra, cables)
            for job in running.values():
                turn(job)  # allocates
            ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in asked.kinds}
            for k in range(asked.turns):
                found = {kind: turn(running[kind]) for kind in (order if k % 2 == 0 else order[::-1])}
                for kind, (wall, used, _) in found.items():
                    times[kind].append(wall)
                    ratios[kind].append((wall / found[first][0], used / found[first][1]))
            starts.append(ratios)
            for kind, job in running.items():
                if asked.kill and KINDS[kind].options.get("elastic"):
                    usual = statistics.median(times[kind])
                    job.send("go")
                    time.sleep(usual * asked.steps / 2500)  # in the midst of the turn
                    job.ranks[-1].kill()
                    deaths.setdefault(kind, []).append(float(job.answer().split()[2]) - usual)
    print("| kind | ms of a step | time | quartiles | each start | processor time | quartiles | each start |")
    print("|---|---:|---:|---|---|---:|---|---|")
    for kind in asked.kinds:
        cells = []
        for which in (0, 1):
            of = [ratio[which] for ratios in starts for ratio in ratios[kind]]
            low, middle, high = statistics.quantiles(of, n=4)
            each = ", ".join(f"{statistics.median(r[which] for r in ratios[kind]):.3f}" for ratios in starts)
            cells += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}", each]
        print(f"| {kind} | {statistics.median(times[kind]):.1f} | {' | '.join(cells)} |")
    for kind, found in deaths.items():
        print(f"\n{kind}: a death in a step took {', '.join(f'{ms:.0f}' for ms in sorted(found))} ms")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
