"""Measures the time of a training step between hosts, compared with DistributedDataParallel and other peers.

    python benches/steptime.py --hosts 2 --rate 1gbit --out steptime-out
    python benches/steptime.py --hosts 4 --rate 100mbit --to-loss --width 192 --layers 4 --out steptime-out

The model is a byte-level GPT on the text of the standard library (10.9 million parameters by default),
trained with Adam, with one rank of one thread per host. Hosts are network namespaces (needs root). With
`--to-loss` the script measures the time until a method reaches the held-out loss of DDP after `--steps`
steps, with the learning rates and options of `losses.CARDS`; it averages and evaluates snapshots of the
weights outside the measured time. With `--curves` of earlier runs at another rate, DDP, its fp16 hook and
synchronous algorithms do not train again: their losses do not depend on the network, so a few of their steps
are timed, and a few of the warm-up, which is the same for all.
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
import tempfile
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
from trigram.cli import launch, workloads

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
    name = "diloco" if method == TORCHFT else method
    if tuned and "every" in losses.CARDS.get(name, losses.Card()).options:
        return int(losses.CARDS[name].options["every"])
    when = next((each["when"] for each in trigram.algorithms() if each["name"] == name), "")
    return int(when.removeprefix("every:")) if when.startswith("every:") else 1


def build(method: str, args: argparse.Namespace, steps: int) -> Training:
    """The model made data-parallel by one method.

    Raises:
        trigram.UnsupportedError: The algorithm is not in this version.
        ModuleNotFoundError: The peer is not installed.
    """
    torch.manual_seed(args.seed)
    module = workloads.TinyGPT(args.width, args.heads, args.layers)
    if method in losses.CARDS or method == DDP:
        model, optimizer = losses.wrap(
            method, module, args.lr, "adam", steps, "gpt" if args.to_loss else None
        )
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
    averager = PeriodicModelAverager(every(method, args.to_loss), warmup_steps=1)
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
    told = losses.CARDS["diloco"].options if args.to_loss else {}
    momentum = told.get("outer_momentum", 0.9)
    outer = torch.optim.SGD(
        module.parameters(), told.get("outer_lr", 0.7), momentum=momentum, nesterov=momentum > 0
    )
    diloco = DiLoCo(manager, [module], adam, outer, every(TORCHFT, args.to_loss), pin_memory=False)
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


def step(training: Training, x: Tensor, y: Tensor) -> float:
    """Makes one training step; returns its seconds."""
    started = time.perf_counter()
    training.optimizer.zero_grad()
    workloads.loss_of(training.model, x, y).backward()
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
    period = every(method, args.to_loss)
    steps, untimed = -(-args.steps // period) * period, max(args.untimed, period + 1 if period > 1 else 0)
    training = build(method, args, length)
    stream = losses.batches(workloads.data("gpt"), args.batch, args.seed)
    for _ in range(untimed):
        step(training, *next(stream))
    dist.barrier()
    before, idle = hosts.sent_bytes(), aside()
    mine = [step(training, *next(stream)) for _ in range(steps)]
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
        "ms": 1000 * (float(slowest.median()) if period == 1 and not method.startswith("async") else mean),
        "mean_ms": 1000 * mean,
        "bytes": statistics.fmean(bytes_sent) / steps,
        "aside_ms": 1000 * statistics.fmean(spent) / steps,
        "steps_ms": (1000 * slowest).tolist(),
    }


def reach(method: str, args: argparse.Namespace, target: float | None, scratch: Path) -> dict[str, Any]:
    """Trains until the loss reaches the target; without a target for `args.steps` steps, whose loss is the
    target."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training = build(method, args, args.steps)
    split = workloads.data("gpt")
    stream = losses.batches(split, args.batch, args.seed)
    judge = workloads.TinyGPT(args.width, args.heads, args.layers)
    seconds: list[float] = []
    curve: list[tuple[int, float, float]] = []  # steps, seconds, loss
    limit = args.steps if target is None else int(args.steps * args.limit)
    found: tuple[float, float] | None = None
    # What an asynchronous algorithm has under way arrives while nobody trains: rarely, then.
    part = args.steps // (2 if method.startswith("async") else 4)
    dist.barrier()
    while found is None and len(seconds) < limit:
        kept: dict[int, Tensor] = {}
        for _ in range(min(part, limit - len(seconds))):
            seconds.append(step(training, *next(stream)))
            if len(seconds) % args.evaluate == 0 or len(seconds) == limit:
                kept[len(seconds)] = nn.utils.parameters_to_vector(training.module.parameters()).detach()
        if len(seconds) <= part:
            # The first two steps allocate memory and, with DDP, rebuild the buckets: count them as the
            # median.
            seconds[:2] = [statistics.median(seconds)] * 2
        elapsed = torch.tensor(gathered(seconds)).cumsum(1).max(0).values
        # Through files, not the network, because this averaging must not be measured.
        torch.save(kept, scratch / f"{rank}.pt")
        dist.barrier()
        all_kept = [torch.load(scratch / f"{each}.pt") for each in range(world)]
        mine = []
        for at in sorted(kept)[rank::world]:
            mean = torch.stack([each[at] for each in all_kept]).mean(0)
            nn.utils.vector_to_parameters(mean, judge.parameters())
            mine.append((at, float(elapsed[at - 1]), losses.evaluate(judge, split)))
        curve += sorted(point for points in gathered(mine) for point in points)
        found = crossing(curve, target)
    training.end()
    return {"method": method, "found": found, "curve": curve}


def curves(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows of earlier runs, by method, without those whose losses depend on the network.

    Raises:
        SystemExit: They were of another training.
    """
    known: dict[str, dict[str, Any]] = {}
    for path in args.curves:
        earlier = json.loads(path.read_text())
        for name in ("hosts", "steps", "width", "heads", "layers", "batch", "lr", "evaluate", "seed"):
            if earlier["arguments"].get(name, 0) != getattr(args, name):
                sys.exit(f"steptime.py: {path} is of a run with another --{name}")
        known |= {row["method"]: row for row in earlier["rows"]}
    alike = {DDP, FP16} | {name for name in losses.CARDS if not name.startswith("async")}
    return {method: row for method, row in known.items() if method in alike}


def timed(
    method: str, args: argparse.Namespace, row: dict[str, Any], warmups: dict[str, float]
) -> dict[str, Any]:
    """What `reach` would find, if steps took as long as `TIMED` of them do.

    Args:
        method: The method.
        args: The command's arguments.
        row: Its row of an earlier run.
        warmups: Seconds of a step of the warm-up, which is that of all algorithms; filled by the first.
    """
    few = argparse.Namespace(**vars(args) | {"steps": TIMED})
    card = losses.CARDS.get(method, losses.Card())
    warmup = losses.warmup_steps(card, args.steps)
    after = measure(method, few, SHORT)["ms"] / 1000
    if warmup and not warmups:
        clean()
        warmups[method] = measure(method, few, args.steps)["ms"] / 1000
    during = next(iter(warmups.values())) if warmup else 0.0

    def when(step: float) -> float:
        return min(step, warmup) * during + max(step - warmup, 0) * after

    curve = [(at, when(at), loss) for at, _, loss in row["curve"]]
    found = row["found"] and (row["found"][0], when(row["found"][0]))
    return {
        "method": method,
        "found": found,
        "curve": curve,
        "ms": 1000 * after,
        "warmup": warmup,
        "warmup_ms": 1000 * during,
    }


def crossing(curve: list[tuple[int, float, float]], target: float | None) -> tuple[float, float] | None:
    """Steps and seconds at which the curve first reaches the target, interpolated linearly."""
    if target is None:
        return None
    for (at, when, loss), (later_at, later, after) in zip(
        [(0, 0.0, math.log(256)), *curve], curve, strict=False
    ):
        if after <= target:
            fraction = (loss - target) / (loss - after)
            return at + fraction * (later_at - at), when + fraction * (later - when)
    return None


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


def race(args: argparse.Namespace, write: Callable[[list[dict[str, Any]], list[str]], None]) -> None:
    """Measures the time to DDP's loss, for all methods."""
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    target, known = None, curves(args)
    warmups: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(gathered(folder)[0])
        for method in each_method(args, notes):
            if method == ALONE:
                continue
            try:
                if method in known:
                    row = timed(method, args, known[method], warmups)
                else:
                    row = reach(method, args, target, scratch)
            except (trigram.UnsupportedError, ModuleNotFoundError, AttributeError) as error:
                notes[method] = str(error)
                continue
            clean()
            if target is None:
                steps, seconds, target = row["curve"][-1]
                row["found"] = (steps, seconds)  # DDP is the first
            rows.append(row)
            row["target"] = target
            row["of_ddp"] = row["found"] and row["found"][1] / rows[0]["found"][1]
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


def markdown(rows: list[dict[str, Any]], to_loss: bool) -> str:
    """The Markdown table, for step times or for times to a loss."""
    if not to_loss:
        head = "method | ms per step | of DDP | of DDP's fp16 | MB sent per step and rank"
        lines = [f"| {head} | processor ms of other threads |", "|---|---:|---:|---:|---:|---:|"]
        for row in rows:
            name = row["method"] + (f" (every {row['every']})" if row["every"] > 1 else "")
            of = " | ".join(f"{row[key]:.3f}" if key in row else "" for key in (f"of_{DDP}", f"of_{FP16}"))
            lines.append(
                f"| {name} | {row['ms']:.0f} | {of} | {row['bytes'] / 1e6:.2f} | {row['aside_ms']:.1f} |"
            )
        return "\n".join(lines)
    lines = [f"| method | steps to {rows[0]['target']:.4f} | seconds | of DDP |", "|---|---:|---:|---:|"]
    for row in rows:
        if row["found"]:
            steps, seconds = row["found"]
            lines.append(f"| {row['method']} | {steps:.0f} | {seconds:.1f} | {row['of_ddp']:.3f} |")
        else:
            at, seconds, loss = row["curve"][-1]
            lines.append(f"| {row['method']} | not in {at}: {loss:.4f} | ({seconds:.1f}) | |")
    return "\n".join(lines)


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank; rank 0 writes the results after each method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    trigram.init()
    name = f"{args.hosts}x{args.rate or 'unshaped'}" + ("-to-loss" if args.to_loss else "")
    size = sum(each.numel() for each in workloads.TinyGPT(args.width, args.heads, args.layers).parameters())
    title = f"{size / 1e6:.1f}M parameters, {args.hosts} hosts, {args.rate or 'unshaped'}"
    text = ""

    def write(rows: list[dict[str, Any]], notes: list[str]) -> None:
        nonlocal text
        if dist.get_rank() == 0:
            print(rows[-1]["method"], file=sys.stderr, flush=True)
            text = f"{title}\n\n{markdown(rows, args.to_loss)}\n" + "".join(
                f"\nskipped: {n}\n" for n in notes
            )
            arguments = vars(args) | {"out": "", "curves": [str(path) for path in args.curves]}
            facts = {"title": title, "torch": torch.__version__, "arguments": arguments}
            (args.out / f"{name}.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
            (args.out / f"{name}.md").write_text(text)

    (race if args.to_loss else compare)(args, write)
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
    parser.add_argument("--steps", type=int, help="timed steps (10); with --to-loss those of DDP (60)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--to-loss", action="store_true")
    parser.add_argument("--evaluate", type=int, default=5, help="--to-loss: every so many steps")
    parser.add_argument(
        "--limit", type=float, default=2.0, help="--to-loss: at most so many times DDP's steps"
    )
    parser.add_argument(
        "--curves",
        type=Path,
        nargs="+",
        default=[],
        help="--to-loss: .json files of earlier runs, for losses",
    )
    parser.add_argument("--out", type=Path, default=Path("steptime-out"))
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.to_loss else 10)
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
