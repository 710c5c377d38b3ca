"""Measures loss and accuracy when one rank sends noise or NaN, with the mean and with robust aggregation.

    python benches/robust.py --out robust-out [--ranks 5] [--steps 200] [--seeds 0,1] [--noise 10]

The last rank's gradients are replaced by Gaussian noise with standard deviation `--noise` from the first step
on, or by NaN from the middle of the training on. All runs of a seed have the same initial weights, batches
and learning rate. The workload is scikit-learn's digits.
Writes results.json and table.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import hosts
import torch
from torch import Tensor

import trigram
from trigram.cli import workloads
from trigram.runtime import launch

ALGORITHMS = (
    "gradient_allreduce",
    "central:median/full/sync",
    "central:trimmed:1/full/sync",
    "central:clip:1/full/sync",
    "bytegrad",
    "central:median/int8/sync",
    "central:median/full/every:4",
)
TROUBLES = ("none", "noise", "nan")


def train(algorithm: str, trouble: str, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """Held-out loss and accuracy of the averaged weights."""
    rank, world = trigram.rank(), trigram.world_size()
    torch.manual_seed(seed)
    module = workloads.make_model("digits")
    broken = rank == world - 1
    done = 0

    def spoil(gradient: Tensor) -> Tensor:
        if trouble == "noise":
            return args.noise * torch.randn_like(gradient)
        return gradient * torch.nan if trouble == "nan" and done >= args.steps // 2 else gradient

    if broken:
        for p in module.parameters():
            p.register_hook(spoil)
    model = trigram.with_bagua(module, algorithm)
    optimizer = workloads.make_optimizer("digits", model, algorithm)
    stream = workloads.batches("digits", rank, world, seed)
    while done < args.steps:
        x, y = next(stream)
        optimizer.zero_grad()
        workloads.loss_of(model, x, y).backward()
        optimizer.step()
        done += 1
    with trigram.consensus(model):
        loss = workloads.evaluate(model, "digits")
        split = workloads.data("digits")
        model.eval()
        with torch.no_grad():
            right = (model(split.held_x).argmax(-1).flatten() == split.held_y.flatten()).float().mean()
    return loss, float(right)


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row for each algorithm: loss and accuracy with each fault, means over seeds."""
    lines = ["| algorithm | undisturbed | one rank sends noise | one rank sends NaN |", "|---|---|---|---|"]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        cells = []
        for trouble in TROUBLES:
            same = [r for r in rows if (r["algorithm"], r["trouble"]) == (algorithm, trouble)]
            if same:
                loss = statistics.mean(r["loss"] for r in same)
                right = statistics.mean(r["accuracy"] for r in same)
                cells.append(f"{loss:.3f}, {100 * right:.1f} %")
        lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rank_main(args: argparse.Namespace) -> None:
    """Trains on one rank; the last rank is the broken one."""
    torch.set_num_threads(1)
    trigram.init()
    rows: list[dict[str, Any]] = []
    for algorithm in args.algorithms:
        for trouble in TROUBLES:
            for seed in args.seeds:
                loss, accuracy = train(algorithm, trouble, seed, args)
                rows.append(
                    {
                        "algorithm": algorithm,
                        "trouble": trouble,
                        "seed": seed,
                        "loss": loss,
                        "accuracy": accuracy,
                    }
                )
                if trigram.rank() == 0:
                    print(algorithm, trouble, seed, f"{loss:.3f} {accuracy:.3f}", file=sys.stderr, flush=True)
    if trigram.rank() == 0:
        facts = {"ranks": trigram.world_size(), "steps": args.steps, "noise": args.noise}
        (args.out / "results.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
        (args.out / "table.md").write_text(markdown(rows))
        print(markdown(rows))
    launch.leave_job()


def main() -> int:
    """Starts the ranks; in a rank, trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1])
    parser.add_argument("--noise", type=float, default=10.0)
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=list(ALGORITHMS))
    return hosts.run_ranks(parser, rank_main, "robust-out", 5)


if __name__ == "__main__":
    sys.exit(main())
