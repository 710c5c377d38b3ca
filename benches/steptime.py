"""Measures the time of a training step between hosts, compared with DistributedDataParallel and other peers.

    python benches/steptime.py --hosts 2 --rate 1gbit --out steptime-out
    python benches/steptime.py --hosts 2 --rate 1gbit --train --out steptime-out

The model is a byte-level GPT on the text of the standard library (10.9 million parameters by default),
trained with Adam, with one rank of one thread per host. Hosts are network namespaces (needs root). With
`--train` each method makes a whole training of `--steps` steps, with the schedule of the learning rate and
the `CARDS` of losses.py; the script measures its time and the held-out loss of the averaged weights. With
`--losses` of earlier runs at another rate, DDP, its fp16 hook and synchronous algorithms do not train again:
their losses do not depend on the network, so a few of their steps are timed, and a few of the warm-up, which
is the same for all.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import hosts
import losses
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.cli import workloads
from trigram.runtime import launch

ALONE, DDP, FP16, POST_LOCAL, TORCHFT = (
    "compute alone",
    losses.DDP,
    "ddp_fp16",
    "post_local_sgd",
    "torchft_diloco",
)
PEERS = (DDP, ALONE, FP16, POST_LOCAL, TORCHFT)
TIMED = 20
SHORT = 5
"""Steps of a training whose warm-up, two of them, ends before its first timed step."""
MEDIANS = ("ms", "mean_ms", "bytes", "aside_ms")
LIGHTHOUSE_PORT = 29510


class Training(NamedTuple):
    """A training: the model to call, the bare module, the optimizer, and a function that ends it."""

    model: nn.Module
    module: nn.Module
    optimizer: Any
    end: Callable[[], object]


def every(method: str, tuned: bool) -> int:
    """Of how many steps one communicates."""
    if method == POST_LOCAL:
        return 8
    name, card = losses.variant("diloco" if method == TORCHFT else method)
    if tuned and "every" in card.options:
        return int(card.options["every"])
    when = next((each["when"] for each in trigram.algorithms() if each["name"] == name), name.split("/")[-1])
    return int(when.removeprefix("every:")) if when.startswith("every:") else 1


def build(method: str, args: argparse.Namespace, steps: int) -> Training:
    """The model made data-parallel by one method.

    Raises:
        trigram.UnsupportedError: The algorithm is not in this version.
        ModuleNotFoundError: The peer is not installed.
    """
    torch.manual_seed(args.seed)
    module = workloads.TinyGPT(args.width, args.heads, args.layers)
    if method not in PEERS[1:]:
        model, optimizer = losses.wrap(method, module, args.lr, "adam", steps, "gpt" if args.train else None)
        return Training(model, module, optimizer, lambda: None)
    adam = torch.optim.Adam(module.parameters(), args.lr)
    if method == ALONE:
        return Training(module, module, adam, lambda: None)
    if method == TORCHFT:
        return torchft_diloco(module, adam, args)
    parallel = DistributedDataParallel(module)
    if method == FP16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        parallel.register_comm_hook(None, fp16_compress_hook)
        return Training(parallel, module, adam, lambda: None)
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = post_local.PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
    parallel.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(every(method, args.train), warmup_steps=1)
    return Training(parallel, module, PostLocalSGDOptimizer(adam, averager), lambda: None)


def torchft_diloco(module: nn.Module, adam: torch.optim.Optimizer, args: argparse.Namespace) -> Training:
    """torchft's DiLoCo, with one replica group per rank; rank 0 runs the lighthouse."""
    if importlib.util.find_spec("torchft") is None:
        raise ModuleNotFoundError("torchft is not installed")
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, world, minutes = dist.get_rank(), dist.get_world_size(), timedelta(minutes=3)
    light = LighthouseServer(f"[::]:{LIGHTHOUSE_PORT}", min_replicas=world) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore(hosts.address(), launch.free_port(), is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=minutes),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=world,
        use_async_quorum=False,
        timeout=minutes,
        quorum_timeout=minutes,
        rank=0,
        world_size=1,
        store_addr=hosts.address(),
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"bench_{rank}",
        hostname=hosts.address(),
        init_sync=False,
    )
    told = losses.CARDS["diloco"].options if args.train else {}
    momentum = told.get("outer_momentum", 0.9)
    outer = torch.optim.SGD(
        module.parameters(), told.get("outer_lr", 0.7), momentum=momentum, nesterov=momentum > 0
    )
    diloco = DiLoCo(manager, [module], adam, outer, every(TORCHFT, args.train), pin_memory=False)
    diloco.__enter__()
    kept = [store]  # keeps the server of the store alive

    def end() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown(wait=False)
        dist.barrier()
        if light is not None:
            light.shutdown()
        kept.clear()

    return Training(module, module, adam, end)


def step(training: Training, x: Tensor, y: Tensor, half: bool = False) -> float:
    """Makes one training step, in bfloat16 if `half`; returns its seconds."""
    started = time.perf_counter()
    training.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = workloads.loss_of(training.model, x, y)
    loss.backward()
    training.optimizer.step()
    return time.perf_counter() - started


def aside() -> float:
    """Processor seconds of all threads except this one, which computes: those of communication."""
    return time.process_time() - time.thread_time()


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(method: str, args: argparse.Namespace, length: int) -> dict[str, Any]:
    """Step times and bytes of `args.steps` steps, rounded up to whole periods of averaging.

    Args:
        method: The method.
        args: The command's arguments.
        length: The steps of the training to begin, of which a card's warm-up is a fraction.
    """
    period = every(method, args.train)
    steps, untimed = -(-args.steps // period) * period, max(args.untimed, period + 1 if period > 1 else 0)
    training = build(method, args, length)
    stream = losses.batches(workloads.data("gpt"), args.batch, args.seed)
    for _ in range(untimed):
        step(training, *next(stream), args.autocast)
    dist.barrier()
    before, idle = hosts.sent_bytes(), aside()
    mine = [step(training, *next(stream), args.autocast) for _ in range(steps)]
    sent = hosts.sent_bytes() - before
    spent = gathered(aside() - idle)
    everyone, bytes_sent = torch.tensor(gathered(mine)), gathered(sent)
    training.end()
    slowest = everyone.max(0).values
    mean = float(everyone.mean(1).max())
    return {
        "method": method,
        "every": period,
        # Asynchronous ranks are at different steps at a time: the slowest of each is no step of the job.
        "ms": 1000 * (float(slowest.median()) if period == 1 and "async" not in method else mean),
        "mean_ms": 1000 * mean,
        "bytes": statistics.fmean(bytes_sent) / steps,
        "aside_ms": 1000 * statistics.fmean(spent) / steps,
        "steps_ms": (1000 * slowest).tolist(),
    }


def train(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """A whole training: its seconds, and the held-out loss of the averaged weights."""
    training = build(method, args, args.steps)
    split = workloads.data("gpt")
    stream = losses.batches(split, args.batch, args.seed)
    seconds: list[float] = []
    peaks = [group["lr"] for group in training.optimizer.param_groups]
    dist.barrier()
    for number in range(args.steps):
        for group, peak in zip(training.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak if args.constant else peak * losses.lr_factor(number, args.steps)
        seconds.append(step(training, *next(stream)))
    # The first two steps allocate memory and, with DDP, rebuild the buckets: count them as the median.
    seconds[:2] = [statistics.median(seconds)] * 2
    mean = nn.utils.parameters_to_vector(training.module.parameters()).detach()
    dist.all_reduce(mean)
    training.end()
    judge = workloads.TinyGPT(args.width, args.heads, args.layers)
    nn.utils.vector_to_parameters(mean / dist.get_world_size(), judge.parameters())
    loss = losses.evaluate(judge, split) if dist.get_rank() == 0 else math.nan
    return {"method": method, "seconds": max(gathered(sum(seconds))), "loss": gathered(loss)[0]}


def earlier(args: argparse.Namespace) -> dict[str, float]:
    """The losses of earlier runs, by method, without those that depend on the network.

    Raises:
        SystemExit: They were of another training.
    """
    known: dict[str, float] = {}
    for path in args.losses:
        run = json.loads(path.read_text())
        for name in ("hosts", "steps", "width", "heads", "layers", "batch", "lr", "constant", "seed"):
            if run["arguments"][name] != getattr(args, name):
                sys.exit(f"steptime.py: {path} is of a run with another --{name}")
        known |= {row["method"]: row["loss"] for row in run["rows"]}
    return {method: loss for method, loss in known.items() if "async" not in method}


def timed(method: str, args: argparse.Namespace, warmups: dict[str, float]) -> float:
    """The seconds of a training whose steps take as long as `TIMED` of them do.

    Args:
        method: The method.
        args: The command's arguments.
        warmups: Seconds of a step of the warm-up, which is that of all algorithms; filled by the first.
    """
    few = argparse.Namespace(**vars(args) | {"steps": TIMED})
    warmup = losses.warmup_steps(losses.variant(method)[1], args.steps)
    after = measure(method, few, SHORT)["ms"] / 1000
    if warmup and not warmups:
        clean()
        warmups[method] = measure(method, few, args.steps)["ms"] / 1000
    during = next(iter(warmups.values())) if warmup else 0.0
    return warmup * during + (args.steps - warmup) * after


def compare(args: argparse.Namespace, write: Callable[[list[dict[str, Any]], list[str]], None]) -> None:
    """Measures the step times of all methods, DDP first, in turns, so that drift of the machine affects all
    alike."""
    results: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, str] = {}
    for _ in range(args.repeats):
        for method in each_method(args, notes):
            try:
                results.setdefault(method, []).append(measure(method, args, args.untimed * 10))
            except (trigram.UnsupportedError, ModuleNotFoundError, AttributeError) as error:
                results.pop(method, None)
                notes[method] = str(error)
            clean()
            rows = []
            for name, runs in results.items():
                row = {"method": name, "every": runs[0]["every"], "runs": runs}
                rows.append(row | {key: statistics.median(run[key] for run in runs) for key in MEDIANS})
            for row in rows:
                for base in (DDP, FP16):
                    if base in results:
                        reference = next(each["ms"] for each in rows if each["method"] == base)
                        row[f"of_{base}"] = row["ms"] / reference
            write(rows, [f"{name}: {why}" for name, why in notes.items()])


def train_all(args: argparse.Namespace, write: Callable[[list[dict[str, Any]], list[str]], None]) -> None:
    """Measures whole trainings, with all methods."""
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    known, warmups = earlier(args), dict[str, float]()
    for method in each_method(args, notes):
        if method == ALONE:
            continue
        try:
            if method in known:
                seconds = timed(method, args, warmups)
                row = {"method": method, "seconds": seconds, "loss": known[method]}
            else:
                row = train(method, args)
        except (trigram.UnsupportedError, ModuleNotFoundError, AttributeError) as error:
            notes[method] = str(error)
            continue
        clean()
        rows.append(row)
        for base in (each for each in rows if each["method"] in (DDP, FP16)):
            row[f"of_{base['method']}"] = row["seconds"] / base["seconds"]
        row["loss_of_ddp"] = row["loss"] / rows[0]["loss"]  # DDP is the first
        write(rows, [f"{name}: {why}" for name, why in notes.items()])


def each_method(args: argparse.Namespace, notes: dict[str, str]) -> Iterator[str]:
    """DDP, then the other selected methods that have not failed before."""
    for method in (DDP, *(each for each in args.methods if each != DDP)):
        if method not in notes:
            yield method


def clean() -> None:
    """Frees the last model on all ranks before the next one is created."""
    gc.collect()
    dist.barrier()


def markdown(rows: list[dict[str, Any]], trained: bool) -> str:
    """The Markdown table, for step times or for trainings."""
    if not trained:
        head = "method | ms per step | of DDP | of DDP's fp16 | MB sent per step and rank"
        lines = [f"| {head} | processor ms of other threads |", "|---|---:|---:|---:|---:|---:|"]
        for row in rows:
            name = row["method"] + (f" (every {row['every']})" if row["every"] > 1 else "")
            lines.append(
                f"| {name} | {row['ms']:.0f} | {ratios(row)} | {row['bytes'] / 1e6:.2f} "
                f"| {row['aside_ms']:.1f} |"
            )
        return "\n".join(lines)
    lines = [
        "| method | loss | beside DDP | seconds | of DDP | of DDP's fp16 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        beside = f"{100 * (row['loss_of_ddp'] - 1):+.1f} %"
        lines.append(
            f"| {row['method']} | {row['loss']:.4f} | {beside} | {row['seconds']:.1f} | {ratios(row)} |"
        )
    return "\n".join(lines)


def ratios(row: dict[str, Any]) -> str:
    """Two columns: a row's time relative to DDP's and to its fp16 hook's, as far as these were measured."""
    return " | ".join(f"{row[key]:.3f}" if key in row else "" for key in (f"of_{DDP}", f"of_{FP16}"))


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank; rank 0 writes the results after each method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    trigram.init()
    name = f"{args.hosts}x{args.rate or 'unshaped'}" + ("-train" if args.train else "")
    size = sum(each.numel() for each in workloads.TinyGPT(args.width, args.heads, args.layers).parameters())
    title = f"{size / 1e6:.1f}M parameters, {args.hosts} hosts, {args.rate or 'unshaped'}"
    text = ""

    def write(rows: list[dict[str, Any]], notes: list[str]) -> None:
        nonlocal text
        if dist.get_rank() == 0:
            print(rows[-1]["method"], file=sys.stderr, flush=True)
            text = f"{title}\n\n{markdown(rows, args.train)}\n" + "".join(f"\nskipped: {n}\n" for n in notes)
            arguments = vars(args) | {"out": "", "losses": [str(path) for path in args.losses]}
            facts = {"title": title, "torch": torch.__version__, "arguments": arguments}
            (args.out / f"{name}.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
            (args.out / f"{name}.md").write_text(text)

    (train_all if args.train else compare)(args, write)
    print(text)
    launch.leave_job()


def main() -> int:
    """Creates the hosts and starts a rank on each; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="a rank on each; 1: two ranks on this machine")
    parser.add_argument("--rate", help="of each host's cable, both ways: 1gbit, 100mbit; else unshaped")
    methods = [*PEERS, *losses.CARDS]
    parser.add_argument("--methods", type=lambda text: text.split(","), default=methods)
    for flag, value in (("width", 384), ("heads", 6), ("layers", 6), ("batch", 4), ("untimed", 4)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--steps", type=int, help="timed steps (10); with --train all (500)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--lr", type=float, default=5e-4, help="the best of DDP, to a factor of two, with --train"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--train", action="store_true", help="whole trainings of --steps steps")
    parser.add_argument("--autocast", action="store_true", help="steps under torch.autocast(bfloat16)")
    parser.add_argument("--constant", action="store_true", help="--train: with a constant learning rate")
    parser.add_argument(
        "--losses", type=Path, nargs="+", default=[], help="--train: .json files of earlier runs, for losses"
    )
    parser.add_argument("--out", type=Path, default=Path("steptime-out"))
    args = parser.parse_args()
    args.steps = args.steps or (500 if args.train else 10)
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.hosts == 1:
        return hosts.start(sys.argv, 2)
    with hosts.Hosts(args.hosts, args.rate) as namespaces:
        return hosts.start(sys.argv, args.hosts, namespaces)


if __name__ == "__main__":
    sys.exit(main())
