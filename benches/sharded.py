"""Measures steps with sharded and fused optimizers, in turns with DDP and AdamW, and their memory.

    python benches/sharded.py --out sharded-out [--ranks 2] [--width 768] [--layers 6] [--turns 15]

All train the same stack of linear layers with AdamW on this host. Ratios are of steps that followed each
other; above 1 the way is faster than DDP with AdamW. The cost of the update is what a step takes longer than
one of `gradient_allreduce` without an update, in the same turn; AdamW alone is its step for all weights, with
nothing else. Then the calls of one pass inside a host, alone: gradients of all ranks to weights of all ranks,
and beside it the all_reduce of the same gradients. Memory is that of one rank: the sum of the tensors of
weights, gradients (in their buckets, where these are ours) and of the optimizer's state. With --memory WAY
nothing but this way runs, and the growth of the process is printed too, shared pages in proportion
(/proc/self/smaps_rollup). DeepSpeed is measured where it is installed (pip install deepspeed ninja, and a C++
compiler); its gradients are in buffers of its own, which are not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import paired
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.integrations import fsdp
from trigram.runtime import launch

REFERENCE = "DDP, AdamW"
NO_UPDATE = "gradient_allreduce, no update"
DEEPSPEED = "DeepSpeed, ZeRO-2"
ONE_PASS = "sharded, fused"


def layers(args: argparse.Namespace) -> nn.Sequential:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(args.layers):
        parts += [nn.Linear(args.width, 4 * args.width), nn.ReLU(), nn.Linear(4 * args.width, args.width)]
    return nn.Sequential(*parts)


def ddp(model: nn.Module) -> tuple[nn.Module, Any]:
    """torch's DDP with the whole AdamW on each rank."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, adamw(wrapped)


def zero(model: nn.Module) -> tuple[nn.Module, Any]:
    """torch's ZeroRedundancyOptimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)


def fsdp2(use: bool) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """FSDP2, over gloo or through our collectives."""

    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        for part in model.children():
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(model)
        if use:
            fsdp.use(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    return make


class Engine:
    """DeepSpeed's engine as an optimizer: it resets gradients itself."""

    def __init__(self, engine: Any) -> None:
        self.step, self.optim = engine.step, engine.optimizer.optimizer

    def zero_grad(self) -> None:
        """Nothing."""


def deepspeed(model: nn.Module) -> tuple[nn.Module, Any]:
    """DeepSpeed's ZeRO-2, with the same AdamW."""
    import deepspeed  # not in requirements-dev.txt; it compiles an extension at first use

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    return engine, Engine(engine)


def ours(algorithm: str, **options: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """``with_bagua``."""

    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        optimizer = adamw(model)
        return trigram.with_bagua(model, algorithm, optimizer=optimizer, **options), optimizer

    return make


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all: the variant of torch with one kernel per list of tensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


WAYS: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    REFERENCE: ddp,
    "DDP, ZeroRedundancyOptimizer": zero,
    "FSDP2, gloo": fsdp2(False),
    "FSDP2, trigram": fsdp2(True),
    DEEPSPEED: deepspeed,
    "gradient_allreduce": ours("gradient_allreduce"),
    "gradient_allreduce, fused": ours("gradient_allreduce", fused=True),
    "sharded": ours("sharded"),
    ONE_PASS: ours("sharded", fused=True),
    "sharded, shards": ours("sharded", gradients="shards"),
    "sharded, shards, fused": ours("sharded", gradients="shards", fused=True),
}


class Training:
    """Steps of one way."""

    def __init__(self, make: Callable[[nn.Module], tuple[nn.Module, Any]], args: argparse.Namespace) -> None:
        before = resident()
        self.module = layers(args)
        self.model, self.optimizer = make(self.module)
        self.inputs = torch.randn(args.batch, args.width)
        for _ in range(3):
            self.step()
        self.grown = resident() - before

    def step(self) -> None:
        """One step."""
        self.without_update()
        self.optimizer.step()

    def without_update(self) -> None:
        """A step that ends with the means of the gradients."""
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def memory(self) -> dict[str, float]:
        """MiB of weights, gradients and the optimizer's state of this rank."""
        weights = list(self.module.parameters())
        hooks = getattr(trigram.model.wrapped.wrapped_models.get(self.module), "hooks", None)
        if hooks is None:
            gradients = sum(local(p.grad).nbytes for p in weights if p.grad is not None)
        else:
            kept = {}
            for bucket in hooks.buckets:
                held = [getattr(bucket, "part", bucket.memory), bucket.memory]
                kept |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
            gradients = sum(kept.values())
        inner = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer
        state = sum(
            local(t).nbytes for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        )
        found = {"weights": sum(local(p).nbytes for p in weights), "gradients": gradients, "state": state}
        return {k: v / 2**20 for k, v in found.items()}


def hooks_of(training: Training) -> Any:
    """What ``with_bagua`` has installed."""
    return trigram.model.wrapped.wrapped_models[training.module].hooks


def at_once(training: Training) -> None:
    """The updates of all buckets in one pass each, as at the end of a backward pass."""
    hooks = hooks_of(training)
    weights, one_pass = hooks.updates.state.weights, hooks.updates.values.one_pass
    for k, bucket in enumerate(hooks.buckets):
        weights.gathers.add(*one_pass.start(k, bucket, weights.shards))
    hooks.drain()


def averages(training: Training) -> None:
    """The averages of all buckets."""
    hooks = hooks_of(training)
    for bucket in hooks.buckets:
        bucket.average.start(0)
    for bucket in hooks.buckets:
        bucket.average.wait()


def pass_alone(args: argparse.Namespace) -> str:
    """The time of an update in one pass, beside what it replaces."""
    fused, plain = Training(WAYS[ONE_PASS], args), Training(WAYS["gradient_allreduce"], args)
    if not hooks_of(fused).updates.values.after_backward:
        return "\none pass: not taken here\n"
    calls = {
        "one pass": lambda: at_once(fused),
        "all_reduce": lambda: averages(plain),
        "AdamW alone": plain.optimizer.step,
    }
    times = paired.in_turns(calls, args.turns, before=dist.barrier, warmup=2)
    median = {name: statistics.median(t) for name, t in times.items()}
    values = sum(p.numel() for p in plain.module.parameters())
    # Of all values: AdamW reads four and writes three. Of a rank's part: one pass reads each rank's gradient,
    # the weight and two moments, and writes these and each rank's weight.
    moved = {
        "one pass": (2 * args.ranks + 5) / args.ranks,
        "all_reduce": 2,
        "AdamW alone": 7,
    }
    lines = [
        "",
        "| calls alone | ms | of AdamW alone | MB moved per rank | GB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, seconds in median.items():
        mb = 4 * values * moved[name] / 1e6
        share = seconds / median["AdamW alone"]
        lines.append(
            f"| {name} | {1000 * seconds:.1f} | {share:.2f} | {mb:.0f} | {mb / 1000 / seconds:.0f} |"
        )
    more = (median["one pass"] - median["all_reduce"]) / median["AdamW alone"]
    return "\n".join(lines) + f"\n\nOne pass takes {more:.2f} of AdamW alone longer than the all_reduce.\n"


def local(t: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return getattr(t, "_local_tensor", t)


def resident() -> int:
    """Bytes of the resident set, with shared pages in proportion."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trigram.init()
    rows, memory, costs = [], {}, []
    if args.memory:
        training = Training(WAYS[args.memory], args)
        found = training.memory() | {"process": training.grown / 2**20}
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{args.memory}: " + ", ".join(f"{k} {v:.0f} MiB" for k, v in found.items()))
        launch.leave_job()
        return
    for name, make in WAYS.items():
        if args.only and name != REFERENCE and name not in args.only:
            continue
        if name == DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
            if dist.get_rank() == 0:
                print(f"{name}: left out, deepspeed is not installed")
            continue
        reference, way = Training(ddp, args), Training(make, args)
        memory[name] = way.memory()
        plain = Training(ours("gradient_allreduce"), args)
        steps = {REFERENCE: reference.step, name: way.step, NO_UPDATE: plain.without_update}
        steps["AdamW alone"] = plain.optimizer.step
        times = paired.in_turns(steps, args.turns, before=dist.barrier, warmup=2)
        if name != REFERENCE:
            rows.append((name, paired.ratio(times[name], times[REFERENCE])))
        longer = [a - b for a, b in zip(times[name], times[NO_UPDATE], strict=True)]
        whole = statistics.median(times["AdamW alone"])
        costs.append((name, 1000 * statistics.median(longer), statistics.median(longer) / whole))
        dist.barrier()
    alone = pass_alone(args)
    if dist.get_rank() == 0:
        lines = [
            f"| {name} | " + " | ".join(f"{v:.0f}" for v in m.values()) + " |" for name, m in memory.items()
        ]
        head = "| MiB per rank | weights | gradients | state |\n|---|---:|---:|---:|\n"
        text = paired.table(rows) + "\n" + head + "\n".join(lines) + "\n"
        text += "\n| the update | ms | of AdamW alone |\n|---|---:|---:|\n"
        text += "".join(f"| {name} | {ms:.1f} | {share:.2f} |\n" for name, ms, share in costs) + alone
        (args.out / "table.md").write_text(text)
        facts = {
            "ranks": args.ranks,
            "torch": torch.__version__,
            "rows": rows,
            "memory": memory,
            "update": costs,
        }
        (args.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(text)
    launch.leave_job()


def main() -> int:
    """Starts the ranks; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--memory", help="the way whose memory is measured, alone")
    parser.add_argument("--only", type=lambda text: text.split(";"), help="ways, with ; between")
    return hosts.run_ranks(parser, rank_main, "sharded-out", 2)


if __name__ == "__main__":
    sys.exit(main())
