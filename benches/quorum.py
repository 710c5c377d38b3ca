"""Measures the time of a step, and the held-out loss, with `quorum=` when ranks are late now and then.

    python benches/quorum.py --out quorum-out [--ranks 4] [--quorum 3] [--grace 0.2] [--every 8] [--pause 2]
        [--probability 0.05] [--late 3] [--steps 160] [--seeds 0,1,2,3,4]
        [--algorithm diloco]

In each step each rank (or those of `--late`) sleeps for `--pause` seconds with the given probability. For
each seed a small GPT is trained twice, with the same initial weights, batches and pauses: by `local_sgd` (or
another algorithm), whose averaging steps need all ranks, and by the same with `quorum=`; which of them comes
first changes with the seed. The optimizer is Adam; the learning rate rises for 5 % of the steps and falls by
half a cosine. A rank's time ends with its own last step; the loss is that of the averaged weights. Writes
results.json and table.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from typing import Any

import hosts
import torch
from paired import ratio

import trigram
from trigram.cli import workloads
from trigram.runtime import launch

ALL, QUORUM = "all ranks", "quorum"
WARM_UP = 0.05
"""The part of the steps in which the learning rate rises."""


def train(method: str, seed: int, steps: int, probability: float, args: argparse.Namespace) -> dict[str, Any]:
    """One training; its result is the same on all ranks.

    Args:
        method: `ALL` or `QUORUM`.
        seed: Of the weights, batches and pauses.
        steps: The training steps of each rank.
        probability: That a rank sleeps in a step.
        args: The options of the script.
    """
    rank, world = trigram.rank(), trigram.world_size()
    torch.manual_seed(seed)
    module = workloads.TinyGPT(args.width, args.heads, args.layers)
    adam = torch.optim.Adam(module.parameters(), args.lr)
    more = {"quorum": args.quorum, "grace": args.grace} if method == QUORUM else {}
    model = trigram.with_bagua(module, args.algorithm, every=args.every, **more)
    stream, draws = workloads.batches("gpt", rank, world, seed), random.Random(1000 * seed + rank)
    pauses = 0
    trigram.barrier()
    started = time.perf_counter()
    for step in range(steps):
        factor = min(1.0, (step + 1) / (WARM_UP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.param_groups[0]["lr"] = args.lr * factor
        x, y = next(stream)
        adam.zero_grad()
        loss = workloads.loss_of(model, x, y)
        if draws.random() < probability and (args.late is None or rank in args.late):
            time.sleep(args.pause)
            pauses += 1
        loss.backward()
        adam.step()
    seconds = time.perf_counter() - started
    with trigram.consensus(model):
        held_out = workloads.evaluate(model, "gpt")
    rounds = trigram.stats(model)["rounds"]
    trigram.unwrap(model)
    numbers = [seconds, float(pauses), float(rounds), held_out]
    everyone = torch.empty(world, len(numbers), dtype=torch.float64)
    trigram.all_gather(everyone, torch.tensor(numbers, dtype=torch.float64))
    each = dict(zip(("seconds", "pauses", "rounds"), everyone.T.tolist(), strict=False))
    return {"method": method, "seed": seed, "held_out": float(everyone[0, 3]), **each}


def markdown(runs: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """A row for each method, means over seeds; then what the quorum gains, paired by seed."""
    label = {ALL: f"`{args.algorithm}`, every {args.every}", QUORUM: f"with `quorum={args.quorum}`"}
    lines = ["| | ms per step, the last rank | mean of the ranks | held-out loss | averaging steps |"]
    lines.append("|---|---:|---:|---:|---:|")
    slowest, mean, held = {}, {}, {}
    for method in (ALL, QUORUM):
        same = sorted((run for run in runs if run["method"] == method), key=lambda run: run["seed"])
        slowest[method] = [1000 * max(run["seconds"]) / args.steps for run in same]
        mean[method] = [1000 * statistics.fmean(run["seconds"]) / args.steps for run in same]
        held[method] = [run["held_out"] for run in same]
        rounds = statistics.fmean(run["rounds"][0] for run in same)
        lines.append(
            f"| {label[method]} | {statistics.fmean(slowest[method]):.0f} "
            f"| {statistics.fmean(mean[method]):.0f} | {statistics.fmean(held[method]):.4f} | {rounds:.0f} |"
        )
    asleep = [1000 * args.pause * pauses / args.steps for run in runs for pauses in run["pauses"]]
    lines += ["", f"Asleep, mean of the ranks: {statistics.fmean(asleep):.0f} ms per step."]
    if len(held[ALL]) < 2:
        return "\n".join([*lines, "One seed: no quartiles."]) + "\n"
    lines += [
        "",
        f"| `{args.algorithm}` over quorum, by seed | median | quartiles | n |",
        "|---|---:|---:|---:|",
    ]
    for what, numbers in (
        ("time of the last rank", slowest),
        ("mean time of the ranks", mean),
        ("held-out loss", held),
    ):
        gain = ratio(numbers[QUORUM], numbers[ALL])
        lines.append(f"| {what} | {gain.median:.3f} | {gain.low:.3f} to {gain.high:.3f} | {gain.n} |")
    return "\n".join(lines) + "\n"


def rank_main(args: argparse.Namespace) -> None:
    """Trains on one rank; rank 0 writes the results after each seed."""
    torch.set_num_threads(1)
    trigram.init()
    for method in (ALL, QUORUM):  # not counted: the first steps of a process allocate its memory
        train(method, 0, 2 * args.every, 0.0, args)
    runs: list[dict[str, Any]] = []
    for turn, seed in enumerate(args.seeds):
        for method in (ALL, QUORUM) if turn % 2 == 0 else (QUORUM, ALL):
            runs.append(train(method, seed, args.steps, args.probability, args))
            if trigram.rank() == 0:
                run = runs[-1]
                print(method, seed, f"{max(run['seconds']):.1f} s, {run['held_out']:.4f}", file=sys.stderr)
        if trigram.rank() == 0:
            facts = {"torch": torch.__version__, "arguments": vars(args) | {"out": ""}}
            (args.out / "results.json").write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n")
            (args.out / "table.md").write_text(markdown(runs, args))
    if trigram.rank() == 0:
        print(markdown(runs, args))
    launch.leave_job()


def main() -> int:
    """Starts the ranks; in a rank, trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="local_sgd")
    parser.add_argument("--quorum", type=int, default=3)
    parser.add_argument("--grace", type=float, help="seconds; not given: the default of with_bagua")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds")
    parser.add_argument("--probability", type=float, default=0.05, help="of a pause, per rank and step")
    parser.add_argument("--late", type=_numbers, help="ranks that may be late; not given: all")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lr", type=float, default=workloads.RECIPES["gpt"].lr)
    for flag, value in (("width", 96), ("heads", 4), ("layers", 2)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    return hosts.run_ranks(parser, rank_main, "quorum-out", 4)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
