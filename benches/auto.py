"""Compares ``algorithm="auto"`` with the default and with fixed settings, between hosts that are network
namespaces.

    python benches/auto.py --hosts 2 --rate 1gbit --turns 20

Every setting trains a GPT like that of `steptime.py`. They take turns of some steps each, so that drift of
the machine affects all alike, and each is compared with the default in the same turn; in brackets are
quartiles over turns. Namespaces need root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import hosts
import torch

import trigram
from trigram.cli import workloads
from trigram.collectives.consistency import tell_all
from trigram.runtime.world import resolve

SETTINGS = "default,auto,auto from 25,auto:close,1 MiB,25 MiB,bytegrad"


def wrapped(setting: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model as a setting says."""
    if setting == "default":
        return trigram.with_bagua(model)
    if setting.endswith(" MiB"):
        return trigram.with_bagua(model, bucket_mb=float(setting.removesuffix(" MiB")))
    if setting == "auto from 25":
        return trigram.with_bagua(model, "auto", after=0, bucket_mb=25)
    if setting.startswith("auto"):
        return trigram.with_bagua(model, setting, after=0)
    return trigram.with_bagua(model, setting)


class Setting:
    """A training under way with one setting."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = wrapped(name, workloads.TinyGPT(args.width, 6, 6))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.at = 0

    def turn(self, data: workloads.Split, steps: int) -> float:
        """Makes some steps; milliseconds of the median one, by the slowest rank."""
        group, times = resolve(None), []
        for _ in range(steps):
            before = time.perf_counter()
            rows = (torch.arange(4) + 4 * (self.at * group.size + group.rank)) % len(data.x)
            self.optimizer.zero_grad()
            workloads.loss_of(self.model, data.x[rows], data.y[rows]).backward()
            self.optimizer.step()
            times.append(int(1e9 * (time.perf_counter() - before)))
            self.at += 1
        slowest = [max(step) for step in zip(*tell_all(times, group), strict=True)]
        return statistics.median(slowest) / 1e6


def train(args: argparse.Namespace) -> None:
    """A rank: all settings take turns."""
    torch.set_num_threads(1)
    data = workloads.data("gpt")
    settings = {name: Setting(name, args) for name in args.settings.split(",")}
    found: dict[str, list[float]] = {name: [] for name in settings}
    for turn in range(args.turns):
        for name in settings if turn % 2 == 0 else reversed(settings):
            found[name].append(settings[name].turn(data, args.steps))
    if trigram.rank() == 0:
        said = {
            name: trigram.stats(setting.model).get("auto", {}).get("said", "")
            for name, setting in settings.items()
        }
        args.out.write_text(json.dumps({"ms": found, "said": said}, indent=1))
        report(found, said)
    trigram.shutdown()


def report(found: dict[str, list[float]], said: dict[str, str]) -> None:
    """Prints a Markdown table: of all turns, and of the last half, in which auto has decided."""
    base = found.get("default") or next(iter(found.values()))
    print("| setting | ms of a step | of the default's | of the default's, all turns | what auto said |")
    print("|---|---:|---:|---:|---|")
    for name, turns in found.items():
        half = len(turns) // 2
        ratios = [a / b for a, b in zip(turns, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios[half:], n=4)
        print(
            f"| {name} | {statistics.median(turns[half:]):.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {statistics.median(ratios):.2f} | {said[name]} |"
        )


def main() -> int:
    """Starts the hosts and the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of every cable; unshaped, if not given")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--width", type=int, default=240)
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
