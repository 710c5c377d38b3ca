"""torch's all_reduce over NCCL, through our network plugin and through NCCL's own sockets: two ranks, each a
host of its own, on one GPU.

    python benches/gpu_plugin.py [--mib 1,16,64] [--streams 1,2,4] [--rounds 1] [--calls 5]

Trigram takes no part but the plugin. The candidates take turns; each starts ranks of its own, as NCCL chooses
a network once. A row has the best median over the turns, as the rate of the tensor's bytes (for two ranks
that of the network too). The sums are checked, and so is, in what NCCL says with `NCCL_DEBUG=INFO`, that the
network was used that was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path

import gpu_ranks
import torch
import torch.distributed as dist
from figures import Figures

PLUGIN = "libnccl-net-trigram.so"
MARK = "gpu_plugin: "


def plugin() -> Path:
    """Where the plugin is, beside the installed trigram."""
    import trigram

    return Path(trigram.__file__).parent / PLUGIN


def rank(options: argparse.Namespace) -> None:
    """What each rank runs; rank 0 prints the median seconds by size."""
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = gpu_ranks.device(me)
    dist.init_process_group(gpu_ranks.backend())
    rates: dict[str, float] = {}
    for mib in options.mib.split(","):
        values = (torch.arange(int(float(mib) * (1 << 18))) % 1000).float().to(device)
        want = values * sum(range(1, world + 1))
        x = values * (me + 1)
        dist.all_reduce(x)
        if not torch.equal(x, want):
            raise SystemExit(f"rank {me}: the sum of {mib} MiB is wrong")
        x.zero_()
        times = [gpu_ranks.seconds(partial(dist.all_reduce, x), options.calls) for _ in range(5)]
        rates[mib] = statistics.median(times)
    if me == 0:
        print(MARK + json.dumps(rates), flush=True)
    dist.destroy_process_group()


def networks(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What is measured, and the environment that asks NCCL for it."""
    found = {"NCCL's sockets": {"NCCL_NET": "Socket"}}
    for streams in options.streams.split(","):
        found[f"the plugin, {streams} streams"] = {
            "NCCL_NET_PLUGIN": str(plugin()),
            "NCCL_NET": "Trigram",
            "NCCL_NET_PLUGIN_REF_COUNT": "1",
            "TRIGRAM_NET_STREAMS": streams,
        }
    return found


def main() -> None:
    """Starts the ranks of each candidate."""
    parser = gpu_ranks.arguments(__doc__, limit=120)
    parser.add_argument("--mib", default="1,16,64", help="MiB of float32, with commas")
    parser.add_argument("--streams", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    gpu_ranks.needs_gpu()
    argv, figures = gpu_ranks.as_rank(), Figures()
    best: dict[str, dict[str, float]] = {}
    failed = []
    for turn in range(options.rounds):
        for name, env in networks(options).items():
            try:
                said = gpu_ranks.start(argv, options.world, env | {"NCCL_DEBUG": "INFO"}, options.limit)[0]
            except RuntimeError as e:  # the other candidates are measured all the same
                failed.append(f"{name}: {e}")
                figures.add(f"{name}, turn {turn}", "failed")
                continue
            line = next(line for line in said.splitlines() if line.startswith(MARK))
            if turn == 0:
                used = f"via NET/{env['NCCL_NET']}" in said
                figures.add(
                    f"{name}: NCCL says that it is used",
                    float(used),
                    "1 is yes",
                    None if gpu_ranks.REHEARSES else 1,
                )
            for mib, seconds in json.loads(line[len(MARK) :]).items():
                sizes = best.setdefault(name, {})
                sizes[mib] = min(sizes.get(mib, seconds), seconds)
    for name, sizes in best.items():
        for mib, seconds in sizes.items():
            figures.add(f"{mib} MiB, {name}", float(mib) * (1 << 20) / seconds / 1e9, "GB/s")
            if name != "NCCL's sockets" and mib in best.get("NCCL's sockets", {}):
                figures.add(
                    f"{mib} MiB, {name}, times faster than NCCL's sockets",
                    best["NCCL's sockets"][mib] / seconds,
                )
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
