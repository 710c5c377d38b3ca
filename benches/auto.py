"""Compares ``algorithm="auto"`` with the default and with fixed settings, between hosts that are network
namespaces.

    python benches/auto.py --hosts 2 --rate 1gbit
    python benches/auto.py --hosts 4 --rate 1gbit,1gbit,1gbit,100mbit --seconds 150   # a slow link
    python benches/auto.py --hosts 2 --rate 1gbit --slow 100                          # a slow rank

Every setting trains a GPT like that of `steptime.py`. Those that choose train alone until they have chosen.
Then all settings take turns of some steps each, so that drift of the machine affects all alike, and each is
compared with the default in the same turn; in brackets are quartiles over turns. Namespaces need root and
iproute2.
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
import losses
import torch

import trigram
from trigram.cli import workloads
from trigram.collectives.consistency import tell_all
from trigram.runtime.world import resolve

SETTINGS = "default,auto,auto:any,1 MiB,2 MiB,25 MiB,bytegrad,topk,local_sgd,async_decentralized"
MOST_LEARNING = 260
"""Steps of a setting that chooses, before the turns begin."""


def wrapped(setting: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The model as a setting says, with what the cards of algorithms recommend besides a warm-up."""
    if setting == "default":
        return trigram.with_bagua(model)
    if setting.endswith(" MiB"):
        return trigram.with_bagua(model, bucket_mb=float(setting.removesuffix(" MiB")))
    if setting == "auto from 25":
        return trigram.with_bagua(model, "auto", after=0, bucket_mb=25)
    if setting.startswith("auto"):
        return trigram.with_bagua(model, setting, after=0)
    card = losses.CARDS.get(setting, losses.Card())
    return trigram.with_bagua(model, setting, **({"optimizer": optimizer} if card.optimizer else {}))


class Setting:
    """A training under way with one setting."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = workloads.TinyGPT(args.width, 6, 6)
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        self.model = wrapped(name, model, self.optimizer)
        self.late = args.slow / 1e3 if int(os.environ["RANK"]) == args.hosts - 1 else 0.0
        self.at, self.autocast = 0, args.autocast

    def state(self) -> str:
        """What auto does now; "": the setting does not choose."""
        found: str = trigram.stats(self.model).get("auto", {}).get("state", "")
        return found

    def turn(self, data: workloads.Split, steps: int) -> float:
        """Makes some steps; milliseconds of one, by the slowest rank."""
        group = resolve(None)
        began = time.perf_counter()
        for _ in range(steps):
            rows = (torch.arange(4) + 4 * (self.at * group.size + group.rank)) % len(data.x)
            self.optimizer.zero_grad()
            time.sleep(self.late)  # as a slower processor would, without keeping this one busy
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = workloads.loss_of(self.model, data.x[rows], data.y[rows])
            loss.backward()
            self.optimizer.step()
            self.at += 1
        mine = int(1e9 * (time.perf_counter() - began) / steps)
        return max(of for (of,) in tell_all([mine], group)) / 1e6


def train(args: argparse.Namespace) -> None:
    """A rank: settings learn, then all take turns."""
    torch.set_num_threads(1)
    data = workloads.data("gpt")
    settings = {name: Setting(name, args) for name in args.settings.split(",")}
    for setting in settings.values():
        while setting.state() in ("watching", "trying") and setting.at < MOST_LEARNING:
            setting.turn(data, args.steps)
    for setting in settings.values():  # allocates, and averages once
        setting.turn(data, args.steps)
    found: dict[str, list[float]] = {name: [] for name in settings}
    began = time.monotonic()
    turns = 0
    while turns < 4 or tell_all([int(time.monotonic() - began)], resolve(None))[0][0] < args.seconds:
        for name in settings if turns % 2 == 0 else reversed(settings):
            found[name].append(settings[name].turn(data, args.steps))
        turns += 1
    if trigram.rank() == 0:
        autos = {name: trigram.stats(setting.model).get("auto", {}) for name, setting in settings.items()}
        args.out.write_text(json.dumps({"ms": found, "auto": autos}, indent=1, default=str))
        report(found, {name: auto.get("said", "") for name, auto in autos.items()})
    trigram.shutdown()


def report(found: dict[str, list[float]], said: dict[str, str]) -> None:
    """Prints a Markdown table."""
    base = found.get("default") or next(iter(found.values()))
    print(f"{len(base)} turns\n")
    print("| setting | ms of a step | of the default's | what auto said |\n|---|---:|---:|---|")
    for name, turns in found.items():
        ratios = [a / b for a, b in zip(turns, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ms = statistics.median(turns)
        print(f"| {name} | {ms:.0f} | {middle:.3f} ({low:.3f} to {high:.3f}) | {said[name]} |")


def main() -> int:
    """Starts the hosts and the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of each cable, or one for each with commas; unshaped, if not given")
    parser.add_argument("--slow", type=float, default=0.0, help="ms by which the last rank is late in a step")
    parser.add_argument("--seconds", type=float, default=120.0, help="of turns")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--width", type=int, default=240)
    parser.add_argument("--autocast", action="store_true", help="steps under torch.autocast(bfloat16)")
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
