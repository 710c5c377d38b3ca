"""Averages a tensor of GPUs over TCP, through codecs, beside NCCL over TCP: encode, send, decode, add,
encode, send, decode.

    python benches/gpu_network.py [--world 2] [--mib 4,25,100] [--codecs int8,topk:0.01] [--rounds 5]

Each rank is a host of its own: Trigram's engine is held to TCP (`TRIGRAM_TRANSPORT=tcp`) and NCCL to its
sockets (`NCCL_NET=Socket`), both on loopback, where bytes cost the processor's time instead of the network's.
The candidates take turns; a row has the median time, the rate of the tensor's bytes, and the ratio to NCCL. A
mean that is too far from the right one ends the script.
"""

from __future__ import annotations

import argparse
import os
import statistics

import gpu_ranks
import torch
import torch.distributed as dist
from figures import Figures

import trigram
from trigram.averaging.average import padded
from trigram.averaging.coded import CodedAverage
from trigram.averaging.groups import ModelGroups
from trigram.codecs.registry import find
from trigram.runtime.world import resolve

CODECS = "int8,int4,fp8,bf16,sign,topk:0.01"
# How far the mean of random normal values may be from the right one, as a share of its length.
FAR = {"int8": 0.02, "int4": 0.3, "fp8": 0.06, "bf16": 0.01, "sign": 1.0, "topk:0.01": 1.0, "in full": 1e-6}


def rank(options: argparse.Namespace) -> None:
    """What each rank runs."""
    me, world, figures = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Figures()
    device = gpu_ranks.device(me)
    dist.init_process_group(gpu_ranks.backend())
    trigram.init()
    group = resolve(None)
    groups = ModelGroups(group)
    for mib in options.mib.split(","):
        n = padded(int(float(mib) * (1 << 18)), world)
        start = torch.randn(n, generator=torch.Generator().manual_seed(me)).to(device)
        right = sum(torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(world)) / world
        x = torch.empty_like(start)

        def nccl(x: torch.Tensor = x) -> None:
            dist.all_reduce(x)
            x /= world

        def in_full(x: torch.Tensor = x) -> None:
            trigram.all_reduce(x, "avg")

        candidates = {"NCCL": nccl, "in full": in_full}
        for name in options.codecs.split(","):
            codec = find(name)
            average = CodedAverage(x, groups, codec, codec, (False, False))

            def coded(average: CodedAverage = average) -> None:
                average.start(0)
                average.wait()

            candidates[name] = coded
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(options.rounds + 1):
            for name, call in candidates.items():
                x.copy_(start)
                dist.barrier()
                times[name].append(gpu_ranks.seconds(call, 1))
                off = float((x.cpu() - right).norm() / right.norm())
                if off > FAR.get(name, 1e-6):
                    raise SystemExit(
                        f"rank {me}: {name}, {mib} MiB: the mean is off by {off:.2g} of its length"
                    )
        if me == 0:
            # The first round compiles.
            for name, taken in times.items():
                each = [a / b for a, b in zip(times["NCCL"][1:], taken[1:], strict=True)]
                figures.add(f"{mib} MiB, {name}", 1e3 * statistics.median(taken[1:]), "ms")
                if name != "NCCL":
                    figures.add(
                        f"{mib} MiB, {name}, times faster than NCCL over TCP", statistics.median(each)
                    )
    dist.barrier()
    trigram.shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = gpu_ranks.arguments(__doc__)
    parser.add_argument("--mib", default="4,25,100", help="MiB of float32, with commas")
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    gpu_ranks.needs_gpu()
    extra = {"TRIGRAM_GPU_TRANSPORT": "host", "TRIGRAM_TRANSPORT": "tcp", "NCCL_NET": "Socket"}
    print(gpu_ranks.start(gpu_ranks.as_rank(), options.world, extra, options.limit)[0])


if __name__ == "__main__":
    main()
