"""Times training steps beside a DataLoader whose workers compute, compared with DDP over gloo.

    python benches/loader.py --out loader-out [--ranks 2] [--workers 2] [--work 0,2,8] [--transport shm]

Each rank of this host trains a byte-level GPT with one thread. Its loader's workers take pieces of a text and
compress each for `--work` milliseconds of processor time, as a tokenizer or an augmentation would. Methods
take turns, a block of steps each, all with the same loader, so that other load on the machine affects all
alike. A block's time is that of the slowest rank. The table has the time of a step, how long of it ranks
waited for samples (if it is most of it, the loader is the bottleneck), and how many times as fast as DDP it
is, of neighbouring turns. Times are never asserted. Asynchronous algorithms would go on in the others' turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import paired
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trigram
from trigram.cli import workloads
from trigram.runtime import launch

METHODS = "gradient_allreduce,bytegrad,decentralized"


def compress(piece: bytes, times: int) -> None:
    """What a worker computes for a sample."""
    for _ in range(times):
        zlib.compress(piece, 9)


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, for more epochs than anybody trains.

    Args:
        milliseconds: What each costs to prepare, as this process measures it now.
    """

    def __init__(self, milliseconds: float) -> None:
        split = workloads.data("gpt")
        self.x, self.y = split.x, split.y
        began = time.process_time()
        compress(self._bytes(0), 200)
        once = 1000 * (time.process_time() - began) / 200
        self.times = round(milliseconds / once)

    def _bytes(self, i: int) -> bytes:
        return self.x[i].to(torch.uint8).numpy().tobytes()

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        i = index * 7919 % len(self.x)
        compress(self._bytes(i), self.times)
        return self.x[i], self.y[i]


class Run:
    """A model, trained by one method, a block of steps at a time."""

    def __init__(self, method: str, args: argparse.Namespace, batches: Iterator[Any]) -> None:
        torch.manual_seed(0)
        module = workloads.TinyGPT(args.width, args.heads, args.layers)
        self.optimizer = torch.optim.Adam(module.parameters(), 1e-3)
        self.model: nn.Module = (
            DistributedDataParallel(module)
            if method == "ddp"
            else trigram.with_bagua(module, method, optimizer=self.optimizer)
        )
        self.batches, self.steps = batches, args.steps
        self.waited = 0.0

    def block(self) -> None:
        """Makes some steps."""
        for _ in range(self.steps):
            asked = time.perf_counter()
            x, y = next(self.batches)
            self.waited += time.perf_counter() - asked
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).backward()
            self.optimizer.step()


def rank_main(args: argparse.Namespace) -> None:
    """One rank; the first writes the rows of each amount of work."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trigram.init()
    text = HEAD
    for work in map(float, args.work.split(",")):
        loader = DataLoader(Pieces(work), args.batch, num_workers=args.workers)
        batches = iter(loader)
        runs = {method: Run(method, args, batches) for method in ("ddp", *args.methods.split(","))}
        calls = {method: run.block for method, run in runs.items()}
        mine = paired.in_turns(calls, args.turns, before=dist.barrier)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (mine, {name: run.waited for name, run in runs.items()}))
        slowest = {n: [max(t) for t in zip(*(each[0][n] for each in everyone), strict=True)] for n in runs}
        for name, seconds in slowest.items():
            step = 1000 * statistics.median(seconds) / args.steps
            waited = max(each[1][name] for each in everyone) / (args.turns + 1) / args.steps
            ratio = paired.ratio(seconds, slowest["ddp"])
            text += (
                f"| {work:g} ms | {name} | {step:.1f} | {1000 * waited:.1f} | {ratio.median:.2f} "
                f"({ratio.low:.2f} to {ratio.high:.2f}) |\n"
            )
        for run in runs.values():
            if trigram.is_wrapped(run.model):
                trigram.unwrap(run.model)
        del loader, batches, runs, calls
        dist.barrier()
        if dist.get_rank() == 0:
            (args.out / "loader.md").write_text(text)
    if dist.get_rank() == 0:
        print(text)
    launch.leave_job()


def main() -> int:
    """Starts ranks on this host; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default="0,2,8", help="milliseconds for each sample")
    parser.add_argument("--methods", default=METHODS, help="beside DDP")
    parser.add_argument("--transport", default="shm", help="shm or tcp")
    for flag, value in (("ranks", 2), ("workers", 2), ("batch", 8), ("steps", 10), ("turns", 15)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    for flag, value in (("width", 256), ("heads", 4), ("layers", 4)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("loader-out"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TRIGRAM_TRANSPORT"] = args.transport
    return hosts.start(sys.argv, args.ranks)


HEAD = """\
| work | method | step, ms | waits for samples, ms | times as fast as DDP (quartiles) |
|---:|---|---:|---:|---:|
"""


if __name__ == "__main__":
    sys.exit(main())
