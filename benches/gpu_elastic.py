"""Loses ranks of an elastic job on GPUs: how long the step takes in which one is lost, with a new
communicator and with NCCL's shrink (`TRIGRAM_GPU_SHRINK=1`).

    python benches/gpu_elastic.py [--world 4] [--steps 24] [--rounds 1]

Rank 1 ends without a word a third of the way, rank 2 at two thirds. The rest train on; the script fails
unless all of them have the same weights at the end. The times are those of rank 0: of the steps in which a
rank was lost, and the median of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import gpu_ranks
import torch
from figures import Figures

import trigram

MARK = "gpu_elastic: "


def rank(options: argparse.Namespace) -> None:
    """What each rank runs; rank 0 prints the seconds of its steps."""
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = gpu_ranks.device(me)
    dies = {1: options.steps // 3, 2: 2 * options.steps // 3}
    trigram.init(elastic=True)
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(options.layers):
        layers += [torch.nn.Linear(options.width, options.width), torch.nn.Tanh()]
    net = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = trigram.with_bagua(net, optimizer=optimizer, elastic=True)
    x = torch.randn(64, options.width, generator=torch.Generator().manual_seed(me)).to(device)
    seconds, members = [], []
    for step in range(options.steps):
        if dies.get(me) == step:
            os._exit(0)
        began = time.monotonic()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        members.append(len(trigram.stats(model)["ranks"]))
    total = torch.cat([p.detach().flatten() for p in net.parameters()])
    all_of_them = torch.empty(len(trigram.stats(model)["ranks"]), total.numel(), device=device)
    trigram.all_gather(all_of_them, total)
    if not bool((all_of_them == all_of_them[0]).all()) or members[-1] != world - 2:
        raise SystemExit(f"rank {me}: the ranks that are left differ, or are not those: {members}")
    if me == 0:
        print(MARK + json.dumps([seconds, members]), flush=True)
    trigram.shutdown()


def main() -> None:
    """Starts the ranks, with each way in turn."""
    parser = gpu_ranks.arguments(__doc__, limit=120)
    parser.set_defaults(world=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    gpu_ranks.needs_gpu()
    figures = Figures()
    ways = {"a new communicator": {}, "shrink": {"TRIGRAM_GPU_SHRINK": "1"}}
    lost: dict[str, list[float]] = {way: [] for way in ways}
    others: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, env in ways.items():
            by_nccl = env | {"TRIGRAM_GPU_TRANSPORT": "nccl"}
            said = gpu_ranks.start(gpu_ranks.as_rank(), options.world, by_nccl, options.limit)[0]
            line = next(line for line in said.splitlines() if line.startswith(MARK))
            seconds, members = json.loads(line[len(MARK) :])
            for step in range(1, len(seconds)):
                (others if members[step] == members[step - 1] else lost)[way].append(seconds[step])
    for way in ways:
        figures.add(f"{way}: steps in which a rank is lost, median", statistics.median(lost[way]), "s")
        figures.add(f"{way}: the longest of them", max(lost[way]), "s")
        figures.add(f"{way}: other steps, median", 1e3 * statistics.median(others[way]), "ms")


if __name__ == "__main__":
    main()
