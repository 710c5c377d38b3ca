"""Compares ``algorithm="auto"`` with the default and with fixed settings, between hosts that are network
namespaces.

    python benches/auto.py --hosts 2 --rate 1gbit --steps 60

Every setting trains the GPT of `steptime.py` for the same number of steps, one after the other in each of
several rounds, so that drift of the machine affects all alike. For auto the steps before its decision count
in the first column only. Namespaces need root and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import hosts
import torch

import trigram
from trigram.cli import workloads
from trigram.collectives.consistency import tell_all
from trigram.runtime.world import resolve

SETTINGS = (
    "default,auto,auto from 25,auto:close,auto:any,1 MiB,2 MiB,8 MiB,25 MiB,bytegrad,central/bf16/sync,powersgd,topk"
)


def wrapped(setting: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model as a setting says."""
    if setting == "default":
        return trigram.with_bagua(model)
    if setting.endswith(" MiB"):
        return trigram.with_bagua(model, bucket_mb=float(setting.split()[0]))
    if setting == "auto from 25":
        return trigram.with_bagua(model, "auto", after=0, bucket_mb=25)
    if setting.startswith("auto"):
        return trigram.with_bagua(model, setting, after=0)
    return trigram.with_bagua(model, setting)


def measure(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step of the slowest rank: the mean of all, and the median of the last half."""
    torch.manual_seed(0)
    model = wrapped(setting, workloads.TinyGPT(args.width, 6, 6))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data, group = workloads.data("gpt"), resolve(None)
    times = []
    for at in itertools.count():
        before = time.perf_counter()
        rows = torch.arange(4) + 4 * (at * group.size + group.rank) % (len(data.x) - 4)
        optimizer.zero_grad()
        workloads.loss_of(model, data.x[rows], data.y[rows]).backward()
        optimizer.step()
        times.append(int(1e9 * (time.perf_counter() - before)))
        if at + 1 == args.steps:
            break
    slowest = [max(step) for step in zip(*tell_all(times, group), strict=True)]
    said = trigram.stats(model).get("auto", {}).get("said", "")
    trigram.unwrap(model)
    last = slowest[args.steps // 2 :]
    return {"mean": statistics.fmean(slowest) / 1e6, "last": statistics.median(last) / 1e6, "said": said}


def train(args: argparse.Namespace) -> None:
    """A rank: measures all settings in rounds."""
    torch.set_num_threads(1)
    names = args.settings.split(",")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(measure(name, args))
            if trigram.rank() == 0:
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
                args.out.write_text(json.dumps(found, indent=1))
    if trigram.rank() == 0:
        report(found)
    trigram.shutdown()


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """Prints a Markdown table."""
    base = found.get("default") or next(iter(found.values()))
    print("| setting | mean step, ms | step at the end, ms | of the default's | what auto said |\n|---|---:|---:|---:|---|")
    for name, runs in found.items():
        ratio = statistics.median(a["last"] / b["last"] for a, b in zip(runs, base, strict=True))
        mean, last = (statistics.median(run[key] for run in runs) for key in ("mean", "last"))
        print(f"| {name} | {mean:.0f} | {last:.0f} | {ratio:.2f} | {runs[-1]['said']} |")


def main() -> int:
    """Starts the hosts and the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of every cable; unshaped, if not given")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--out", type=Path, default=Path("auto-out.json"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args)
        return 0
    with hosts.Hosts(args.hosts, args.rate) as namespaces:
        return hosts.start(sys.argv, args.hosts, namespaces)


if __name__ == "__main__":
    sys.exit(main())
