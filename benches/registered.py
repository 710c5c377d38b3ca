"""How near all_reduce on registered memory comes to the floor inside a host: the two take turns.

    python benches/registered.py [--ranks 2] [--sizes 65536,1048576,26214400] [--blocks 8] [--op avg]

The floor is `floor.c`: the same sum in C, without copies, queues or checks. Ours are sums, or means with
`--op avg`. A block is the median of the floor's iterations, and then the median of ours; a row has the best
blocks, the median of the blocks' ratios and its quartiles. Above 1 the floor is faster. Every result
is checked. Writes rows.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts
import torch

import trigram

WINDOWS = 30


def floor_us(program: Path, ranks: int, size: int) -> float:
    """Microseconds of the floor."""
    done = subprocess.run([program, str(ranks), str(size)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[1])


def ours_us(t: torch.Tensor, op: str) -> float:
    """Microseconds of an all_reduce: the median of windows."""
    calls = max(5, min(400, 20_000_000 // t.nbytes))
    times = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        for _ in range(calls):
            trigram.all_reduce(t, op)
        times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times)


def rank_main(args: argparse.Namespace) -> None:
    """In a rank: measures; rank 0 prints."""
    trigram.init()
    rank, world, rows = trigram.rank(), trigram.world_size(), []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        if rank == 0:
            source = Path(__file__).parent / "floor.c"
            subprocess.run(["cc", "-O3", "-march=native", source, "-o", program], check=True)
        for size in args.sizes:
            # Sums grow with every call; these stay what they are.
            t = trigram.empty(size // 4).fill_(rank if args.op == "avg" else 0)
            ours, floors = [], []
            for _ in range(args.blocks):
                if rank == 0:  # the others sleep in the barrier
                    floors.append(floor_us(program, world, size))
                trigram.barrier()
                ours.append(ours_us(t, args.op))
            t.copy_(want := torch.arange(size // 4) % 97 + rank)
            trigram.all_reduce(t, args.op)
            want = (want - rank) * world + world * (world - 1) / 2
            if not bool((t == (want / world if args.op == "avg" else want)).all()):
                raise SystemExit(f"rank {rank}: the {args.op} of {size} bytes is wrong")
            if rank == 0:
                ratios = sorted(a / b for a, b in zip(ours, floors, strict=True))
                low, middle, high = statistics.quantiles(ratios, n=4)
                rows.append({"bytes": size, "ours": ours, "floor": floors})
                print(
                    f"{size:>10} bytes: best {min(ours):8.1f} us, floor {min(floors):8.1f}; "
                    f"ratio {middle:.2f} [{low:.2f} {high:.2f}]",
                    flush=True,
                )
    if rank == 0:
        (args.out / "rows.json").write_text(json.dumps(rows))
    trigram.shutdown()


def main() -> int:
    """Starts the ranks; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1 << 16, 1 << 18, 1 << 20, 4 << 20, 25 << 20],
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--op", default="sum", choices=("sum", "avg"))
    return hosts.run_ranks(parser, rank_main, "registered-out", 2)


if __name__ == "__main__":
    sys.exit(main())
