"""What faults cost an elastic job: samples per second beside the same job without faults, and how long the
others wait after each.

    python benches/goodput.py --out goodput-out [--ranks 8] [--seconds 300] [--every 29] [--step 0.2]
        [--algorithms gradient_allreduce,diloco] [--faults kill,drain,stop,cut,slow] [--seed 0]

Each rank trains an MLP of a million parameters on random data; a step sleeps for ``--step`` seconds in the
place of computing, so that many ranks fit on few cores. Every ``--every`` seconds a rank suffers a fault, of
each kind in turn (`trigram chaos`, over TCP, with TRIGRAM_SILENCE=1.2); one that was ended is started again
at once. Each step that a rank has made counts as a sample of its batch.

``samples`` is the ratio of samples per second with faults to those without. ``pace`` counts only steps: it is
what the ranks that were there have lost. ``gap`` is the longest time between two steps of a rank that suffers
nothing, within three seconds after a fault (six after `stop` and `cut`, which nobody sees before), over the
median step. Writes results.json and table.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import trigram
from trigram.cli.chaos import Chaos, Settings

READY, OVER = "has made its first step", "over"


def train(args: argparse.Namespace) -> None:
    """A rank: trains until it is told to end, and notes the time of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 512)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    trigram.init(elastic=True)
    me = trigram.rank()
    options = {"every": 8} if args.algorithm == "diloco" else {}
    model = trigram.with_bagua(model, args.algorithm, optimizer=optimizer, elastic=True, **options)
    me = trigram.rank() if me < 0 else me
    over = torch.zeros(1)
    log = (Path(args.log) / f"steps-{args.number}").open("a", buffering=1)
    first = step = trigram.stats(model)["steps"]
    while not over.item():
        x = torch.randn(4, 512)
        time.sleep(args.step)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        log.write(f"{time.time():.4f} {step} {trigram.world_size()}\n")
        if step == first:
            print(READY, flush=True)
        step += 1
        if step % 8 == 0:  # all ranks see the end at the same step
            over = torch.tensor([float((Path(args.log) / OVER).exists())])
            agree(over)


def agree(over: torch.Tensor) -> None:
    """The largest of all ranks; if one is lost meanwhile, the next look tells."""
    try:
        trigram.all_reduce(over, "max")
    except trigram.TrigramError:
        over.zero_()


def steps(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """By rank, the times of its steps and their numbers, over all its lives."""
    found: dict[int, list[tuple[float, int]]] = {}
    for file in folder.glob("steps-*"):
        lines = (line.split() for line in file.read_text().splitlines())
        found[int(file.name[6:])] = [(float(t), int(s)) for t, s, _ in lines]
    return found


class Noting(Chaos):
    """Notes when which fault was injected into which rank, each kind in turn."""

    def __init__(self, settings: Settings, over: Path, seconds: float) -> None:
        super().__init__(settings)
        self.noted: list[tuple[float, str, int]] = []
        self.over, self.window, self.begun = over, seconds, 0.0

    def _handle_events(self) -> None:
        super()._handle_events()
        if not self.begun and self._all_ready():
            self.begun = time.time()
        if self.begun and time.time() > self.begun + self.window:
            self.over.touch()

    def _inject_fault(self) -> None:
        kinds, self.settings.faults = self.settings.faults, [self._due()]
        before = sum(self.faults.values())
        super()._inject_fault()
        if sum(self.faults.values()) > before:
            fault = self.settings.faults[0]
            victim = [r for r, f in self.injected.items() if f == fault][-1]
            self.noted.append((time.time(), fault, victim))
        self.settings.faults = kinds

    def _due(self) -> str:
        return list(self.settings.faults)[len(self.noted) % len(self.settings.faults)]


def measure(algorithm: str, faults: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One job, with these faults or none."""
    with tempfile.TemporaryDirectory(prefix="trigram-goodput-") as folder:
        command = [
            sys.executable,
            __file__,
            "--log",
            folder,
            "--algorithm",
            algorithm,
            "--step",
            str(args.step),
        ]
        environment = {"TRIGRAM_TRANSPORT": "tcp", "TRIGRAM_SILENCE": "1.2"}
        settings = Settings(
            command,
            args.ranks,
            args.seed,
            args.seconds if faults else 0.0,
            args.every,
            faults or ["pause"],
            settle=0.0,
            ready=READY,
            patience=args.seconds + 120.0,  # counted from the last word of a rank
            environment=environment,
        )
        with Noting(settings, Path(folder) / OVER, args.seconds) as chaos:
            report = chaos.run()
        if report.hung or report.unexpected:
            raise SystemExit(f"{algorithm}: the job did not survive\n{report}")
        made = steps(Path(folder))
        end = chaos.begun + args.seconds
        inside = [(t, s) for times in made.values() for t, s in times if chaos.begun <= t < end]
        numbers = {s for _, s in inside}
        return {
            "samples": len(inside) / args.seconds,
            "steps": (max(numbers) - min(numbers)) / args.seconds,
            "gaps": gaps(made, chaos.noted),
            "faults": dict(report.faults),
            "restarts": report.restarts,
        }


def gaps(made: dict[int, list[tuple[float, int]]], noted: list[tuple[float, str, int]]) -> list[Any]:
    """For each fault, the longest time between two steps of a healthy rank after it, and the median step."""
    found = []
    for at, fault, victim in noted:
        within = 6.0 if fault in ("stop", "cut") else 3.0
        longest = []
        for rank, times in made.items():
            if rank == victim:
                continue
            after = [t for t, _ in times if at - 1.0 < t < at + within]
            longest.append(max((b - a for a, b in itertools.pairwise(after)), default=0.0))
        if longest:
            found.append((fault, statistics.median(longest)))
    return found


def table(results: dict[str, Any]) -> str:
    """The table as text."""
    lines = [
        "| algorithm | ranks | faults | samples | pace | fault: gap over a step |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for algorithm, of in results.items():
        kinds: dict[str, list[float]] = {}
        for fault, gap in of["with"]["gaps"]:
            kinds.setdefault(fault, []).append(gap / of["step"])
        gap_text = ", ".join(f"{f} {statistics.median(g):.1f}" for f, g in kinds.items())
        samples = of["with"]["samples"] / of["without"]["samples"]
        pace = of["with"]["steps"] / of["without"]["steps"]
        count = sum(of["with"]["faults"].values())
        lines.append(f"| {algorithm} | {of['ranks']} | {count} | {samples:.3f} | {pace:.3f} | {gap_text} |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=29.0)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--algorithms", default="gradient_allreduce,diloco")
    parser.add_argument("--faults", default="kill,drain,stop,cut,slow")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("log", "algorithm"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.log:
        args.number = int(os.environ["RANK"])
        train(args)
        return
    results: dict[str, Any] = {}
    for algorithm in args.algorithms.split(","):
        without = measure(algorithm, [], args)
        with_faults = measure(algorithm, args.faults.split(","), args)
        step = 1 / without["steps"]
        results[algorithm] = {"ranks": args.ranks, "step": step, "with": with_faults, "without": without}
        print(table(results), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        (args.out / "table.md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
