"""Trains with `with_bagua` on GPUs beside DistributedDataParallel over NCCL: losses, time of a step, overlap,
cost of a wait.

    python benches/gpu_overlap.py [--world 2] [--width 1024] [--layers 12] [--batch 16384]

Two ranks share one GPU if there is only one; their step times then hold the work of both. The losses of both
are compared bit for bit over `--steps` steps. Then the two train in turns, `--rounds` times. Overlap is the
share of the time of NCCL's kernels during which another kernel runs, from the kernels of torch's profiler.
`--world 1` leaves out the network: NCCL then has nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
from figures import Figures

import trigram


def net(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """Layers of equal size: their gradients come one after another, as those of a transformer do."""
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(options.layers):
        layers += [torch.nn.Linear(options.width, options.width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers).to(device)


class Training:
    """A model, its optimizer, and its data."""

    def __init__(self, model: Any, rank: int, device: torch.device, options: argparse.Namespace) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(rank)
        shape = (8, options.batch, options.width)
        self.data = torch.randn(*shape, generator=generator).to(device)
        self.steps = 0

    def step(self) -> torch.Tensor:
        """One step; the loss, on the device."""
        self.optimizer.zero_grad()
        x = self.data[self.steps % len(self.data)]
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss.detach()


def kernels(trace: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When NCCL's kernels ran, and when others did, in microseconds, from a trace of torch's profiler."""
    ours, others = [], []
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            (ours if "nccl" in event["name"].lower() else others).append(span)
    return ours, others


def covered(spans: list[tuple[float, float]], by: list[tuple[float, float]]) -> tuple[float, float]:
    """How long the spans last together, and for how much of it one of the others lasts too."""
    inside = sum(min(e, f) - max(b, c) for b, e in merged(spans) for c, f in merged(by) if c < e and b < f)
    return sum(e - b for b, e in merged(spans)), inside


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans that do not overlap."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def overlap(training: Training, steps: int) -> tuple[float, float, float, float] | None:
    """Milliseconds of NCCL's kernels per step, and the share of it that others cover; the same of the others,
    and the share that NCCL's cover. None: no kernel of NCCL ran."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not gpu_ranks.REHEARSES:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            training.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="trigram-bench-") as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        ours, others = kernels(trace)
    total, inside = covered(ours, others)
    computing, hidden = covered(others, ours)
    if not total:
        return None
    return total / 1000 / steps, inside / total, computing / 1000 / steps, hidden / computing


def waits(device: torch.device, values: int, calls: int) -> dict[str, float]:
    """Microseconds of an all_reduce that is waited for, by the way of waiting."""
    x = torch.zeros(values, device=device)

    def one() -> None:
        work = trigram.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    times: dict[str, list[float]] = {"host": [], "stream": []}
    for _ in range(6):
        for way, taken in times.items():
            os.environ["TRIGRAM_GPU_WAIT"] = way
            taken.append(1e6 * gpu_ranks.seconds(one, calls))
    os.environ.pop("TRIGRAM_GPU_WAIT")
    return {way: statistics.median(taken[1:]) for way, taken in times.items()}


def rank(options: argparse.Namespace) -> None:
    """What each rank runs."""
    me, figures = int(os.environ["RANK"]), Figures()
    device = gpu_ranks.device(me)
    dist.init_process_group(gpu_ranks.backend())

    def say(what: str, value: float | str, unit: str = "", least: float | None = None) -> None:
        if me == 0:
            figures.add(what, value, unit, least)

    ddp_device = None if gpu_ranks.REHEARSES else [device]
    ddp = torch.nn.parallel.DistributedDataParallel(net(options, device), device_ids=ddp_device)
    sides = {
        "with_bagua": Training(trigram.with_bagua(net(options, device)), me, device, options),
        "DDP": Training(ddp, me, device, options),
    }
    losses = {
        name: torch.stack([side.step() for _ in range(options.steps)]).cpu() for name, side in sides.items()
    }
    differ = int((losses["with_bagua"].view(torch.int32) != losses["DDP"].view(torch.int32)).sum())
    say(f"steps of {options.steps} whose loss differs from DDP's in a bit", float(differ), "steps")
    say("losses are DDP's, bit for bit", float(differ == 0), "1 is yes", 1)

    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, side in sides.items():
            dist.barrier()
            times[name].append(1e3 * gpu_ranks.seconds(side.step, 5))
    for name, taken in times.items():
        say(f"step of {name}, median of {options.rounds} times 5", statistics.median(taken), "ms")
    each = [theirs / ours for ours, theirs in zip(times["with_bagua"], times["DDP"], strict=True)]
    say("times faster than DDP, median of neighbours", statistics.median(each))
    os.environ["TRIGRAM_GPU_WAIT"] = "stream"
    dist.barrier()
    ordered = 1e3 * gpu_ranks.seconds(sides["with_bagua"].step, 5)
    os.environ.pop("TRIGRAM_GPU_WAIT")
    say("step of with_bagua, TRIGRAM_GPU_WAIT=stream", ordered, "ms")

    for name, side in sides.items():
        dist.barrier()
        found = overlap(side, 3)
        if found is None:
            say(f"overlap of {name}", "the profiler saw no kernel of NCCL")
        else:
            say(f"NCCL's kernels, {name}", found[0], "ms per step")
            say(f"overlap of {name}", found[1], "of that time")
            say(f"other kernels, {name}", found[2], "ms per step")
            say(f"during which NCCL's run too, {name}", found[3], "of that time")

    for values in (256, 1 << 20):
        dist.barrier()
        for way, taken in waits(device, values, options.waits).items():
            say(f"all_reduce of {values} values and Work.wait, {way}", taken, "us")
    dist.barrier()
    trigram.shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = gpu_ranks.arguments(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waits", type=int, default=50, help="calls that are waited for, per measurement")
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    gpu_ranks.needs_gpu()
    began = time.monotonic()
    extra = {"TRIGRAM_GPU_TRANSPORT": "nccl"}
    print(gpu_ranks.start(gpu_ranks.as_rank(), options.world, extra, options.limit)[0])
    print(f"{torch.cuda.get_device_name()}: {options.world} ranks, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
