"""Measures the held-out loss on real data that each algorithm reaches with as many samples as DDP.

    python benches/losses.py --out losses-out [--ranks 4] [--seeds 0,1,2] [--algorithms ...] [--workloads ...]
        [--steps N] [--skew 0.8] [--optimizer adamw|muon]

An algorithm's settings may be replaced, to switch one part of it at a time:
`--algorithms decentralized,decentralized:topology=complete:overlap=false:warmup=0.2`, with the attributes of
`Card` and options of `with_bagua`; each is a row.

Runs that `--out` already has are not made again, so a long measurement can be made in parts.

All runs of a seed have the same initial weights, batches and schedule (linear warm-up over 5 % of the steps,
then half a cosine); they differ only in the settings of `CARDS`. The loss is that of the averaged weights;
asynchronous averaging steps are at most one step old. Writes results.json, curves.png and table.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import clicks
import hosts
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.algorithms import parse
from trigram.cli import workloads
from trigram.runtime import launch

DDP, DDP_ADAM = "ddp", "ddp_adam"
SMOOTH = 20


@dataclass(frozen=True)
class Card:
    """The settings of an algorithm that differ from DDP's.

    Attributes:
        lr: By workload: the factor of DDP's learning rate; absent: 1.
        options: Options for `with_bagua`.
        warmup: The fraction of all steps that average full gradients first (`warmup_steps`).
        optimizer: Whether to pass the optimizer to `with_bagua`.
        matrix_lr: With Muon: the factor of the learning rate of matrices.
    """

    lr: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    warmup: float = 0.0
    optimizer: bool = False
    matrix_lr: float = 1.0


CARDS: dict[str, Card] = {
    "gradient_allreduce": Card(),
    "bytegrad": Card(),
    "lossless": Card(),
    "decentralized": Card(),
    "low_precision_decentralized": Card(),
    "async": Card(),
    "async_low_precision": Card(),
    "async_decentralized": Card(),
    "async_low_precision_decentralized": Card(),
    "qadam": Card(warmup=0.2, optimizer=True),
    "local_sgd": Card(options={"every": 4}, warmup=0.2, optimizer=True),
    # An outer momentum of 0.9 needs about a hundred averaging steps; these trainings have a few dozen.
    "diloco": Card(
        options={"every": 4, "outer_lr": 0.8, "outer_momentum": 0.3, "second_moment": "mean"}, warmup=0.2
    ),
    "noloco": Card(
        options={"every": 2, "outer_lr": 0.8, "outer_momentum": 0.3, "second_moment": "mean"}, warmup=0.4
    ),
    "sparta": Card(options={"share": 0.25}, warmup=0.2),
    # A value that is not sent waits for the next averaging steps, of which there are few.
    "sparseloco": Card(options={"every": 4, "fraction": 0.3}, warmup=0.2),
    "powersgd": Card(options={"rank": 8}, warmup=0.2),
    # What is not sent is late, by a few steps on average; early in a training that costs most.
    "topk": Card(options={"fraction": 0.1}, warmup=0.4),
    "signsgd": Card({"digits": 0.5, "gpt": 0.5, "characters": 0.7}, warmup=0.4),
    # With random receivers a rank may receive nothing for some steps, and its weight halves in each.
    "push_sum": Card(options={"topology": "one_peer"}),
}


def variant(name: str) -> tuple[str, Card]:
    """An algorithm and its card, with the settings after its name: `async:staleness=4:warmup=0.2`.
    One that is written out has no card: `central/int4/every:8:fragments=8`."""
    parts = name.split(":")
    algorithm = ":".join(part for part in parts if "=" not in part)
    settings = [part for part in parts if "=" in part]
    card = CARDS.get(algorithm, Card())
    options = dict(card.options)
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if key == "lr":
            card = replace(card, lr=dict.fromkeys(TASKS, value))
        elif key in ("warmup", "optimizer", "matrix_lr"):
            card = replace(card, **{key: value})
        else:
            options[key] = value
    return algorithm, replace(card, options=options)


class Task(NamedTuple):
    """A workload: samples per rank and step, steps, learning rates of SGD and Adam, and which of them DDP
    uses."""

    batch: int
    steps: int
    sgd: float
    adam: float
    uses: str


# The best learning rates of DDP, to a factor of two, so that no algorithm gains only because DDP's rate is
# bad.
TASKS = {
    "digits": Task(16, 500, 0.05, 3e-3, "sgd"),
    "gpt": Task(2, 500, 0.0, 3e-3, "adam"),
    "characters": Task(32, 700, 0.0, 2e-2, "adam"),
    "clicks": Task(64, 500, 0.0, 1e-2, "adam"),
}
OPTIMIZERS = ("adamw", "muon")


class Characters(nn.Module):
    """Scores a character's category from embeddings of its block, direction, width, and words of its name."""

    def __init__(self, sizes: Sequence[int], words: int, categories: int, width: int = 32) -> None:
        super().__init__()
        self.single = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.words = nn.EmbeddingBag(words, width, mode="sum", padding_idx=0)
        hidden = nn.Linear((len(sizes) + 1) * width, 64)
        self.head = nn.Sequential(hidden, nn.ReLU(), nn.Linear(64, categories))

    def forward(self, x: Tensor) -> Tensor:
        """Scores for ids of shape (batch, features): a column per single feature, then the words."""
        singles = [embedding(x[:, column]) for column, embedding in enumerate(self.single)]
        return self.head(torch.cat([*singles, self.words(x[:, len(self.single) :])], 1))


@lru_cache(maxsize=1)
def characters() -> workloads.Split:
    """Named Unicode characters, from Python's own table; every eighth, in a random order, is held out."""
    # Tens of thousands of ideographs and Korean syllables are all the same, and named by number.
    alike = ("CJK UNIFIED", "CJK COMPATIBILITY IDEO", "HANGUL SYLLABLE")
    named = [(point, unicodedata.name(chr(point), "")) for point in range(sys.maxunicode + 1)]
    named = [(point, name) for point, name in named if name and not name.startswith(alike)]
    points, words = [chr(point) for point, _ in named], [name.split() for _, name in named]
    ends = Counter(word for each in words for word in (each[0], each[-1]))
    known = {word: number for number, word in enumerate(sorted(w for w in ends if ends[w] > 1), 1)}
    columns = [
        _numbered([point // 128 for point, _ in named]),
        _numbered([unicodedata.bidirectional(each) for each in points]),
        _numbered([unicodedata.east_asian_width(each) for each in points]),
        [known.get(each[0], 0) for each in words],
        [known.get(each[-1], 0) for each in words],
    ]
    x, y = torch.tensor(columns).T, torch.tensor(_numbered([unicodedata.category(each) for each in points]))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, kept = order[: len(x) // 8], order[len(x) // 8 :]
    return workloads.Split(x[kept], y[kept], x[held], y[held])


def _numbered(values: Sequence[Any]) -> list[int]:
    number = {value: index for index, value in enumerate(sorted(set(values)))}
    return [number[value] for value in values]


def data(workload: str) -> workloads.Split:
    """A workload's training part and held-out part."""
    made = {"characters": characters, "clicks": clicks.clicks}.get(workload)
    return workloads.data(workload) if made is None else made()


def make_model(workload: str) -> nn.Module:
    """A fresh model; its weights depend on torch's seed alone."""
    if workload == "clicks":
        return clicks.Recommender()
    if workload != "characters":
        return workloads.make_model(workload)
    split = characters()
    x, y = torch.cat([split.x, split.held_x]), torch.cat([split.y, split.held_y])
    sizes = [int(column.max()) + 1 for column in x[:, :3].T]
    return Characters(sizes, int(x[:, 3:].max()) + 1, int(y.max()) + 1)


def batches(
    split: workloads.Split, size: int, seed: int, skew: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches, endless: each epoch has a new permutation, divided among the ranks.

    Args:
        split: The data.
        size: Samples in a batch.
        seed: Of the permutations.
        skew: The part of the samples that is divided by label: each rank always trains on the same of them,
            those of its labels (of a text: of its pages). The rest is divided anew in each epoch.
    """
    generator, rank, world = torch.Generator().manual_seed(seed), dist.get_rank(), dist.get_world_size()
    own, shared = torch.empty(0, dtype=torch.long), torch.arange(len(split.x))
    if skew:
        order = torch.randperm(len(split.x), generator=generator)
        by_label, shared = order[: round(skew * len(order))], order[round(skew * len(order)) :]
        labels = split.y[by_label] if split.y.dim() == 1 else by_label
        own = by_label[labels.argsort(stable=True)].tensor_split(world)[rank]
    while True:
        order = shared[torch.randperm(len(shared), generator=generator)][rank::world]
        if skew:
            # Each rank permutes as many values, so that all draw the same numbers.
            keys = torch.rand(len(split.x), generator=generator)
            order = torch.cat([own, order])
            order = order[keys[order].argsort()]
        for start in range(0, len(split.x) // world - size + 1, size):
            index = order[start : start + size]
            yield split.x[index], split.y[index]


def evaluate(model: nn.Module, split: workloads.Split) -> float:
    """The mean loss on the held-out part, in nats per label."""
    model.eval()
    with torch.no_grad():
        parts = zip(split.held_x.split(256), split.held_y.split(256), strict=True)
        total = sum(float(workloads.loss_of(model, x, y)) * len(x) for x, y in parts)
    model.train()
    return total / len(split.held_x)


class Optimizers:
    """Several optimizers, each of some of the parameters, with the methods of one."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each = each

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for one in self.each for group in one.param_groups]

    def zero_grad(self) -> None:
        """Drops the gradients of all."""
        for one in self.each:
            one.zero_grad()

    def step(self) -> None:
        """Updates all parameters."""
        for one in self.each:
            one.step()


def make_optimizer(
    kind: str, module: nn.Module, lr: float, matrix_lr: float = 1.0
) -> torch.optim.Optimizer | Optimizers:
    """The optimizer of a model: `sgd` (with momentum), `adam`, `adamw` or `muon` (of matrices in blocks; the
    rest has AdamW). Tables with sparse gradients have SparseAdam."""
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    layers = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = {id(m.weight) for m in layers if m.sparse}
    sparse = [p for p in module.parameters() if id(p) in tables]
    dense = [p for p in module.parameters() if id(p) not in tables]
    each: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(sparse, lr=lr)] if sparse else []
    if kind == "muon":
        matrices = [p for name, p in module.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
        rest = [p for p in dense if all(p is not m for m in matrices)]
        # Its steps have the size of Adam's, so they have one learning rate.
        each += [
            torch.optim.Muon(matrices, lr=matrix_lr * lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        ]
        each += [torch.optim.AdamW(rest, lr=lr)]
    else:
        each += [(torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(dense, lr=lr)]
    return each[0] if len(each) == 1 else Optimizers(*each)


def warmup_steps(card: Card, steps: int) -> int:
    """How many of a training's steps are its warm-up; 0: it has none."""
    return max(2, round(card.warmup * steps)) if card.warmup else 0


def wrap(
    algorithm: str, module: nn.Module, lr: float, kind: str, steps: int, workload: str | None, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer | Optimizers]:
    """The module made data-parallel by an algorithm, or by DDP, and its optimizer.

    Args:
        algorithm: The name of an algorithm, maybe with settings (see `variant`), or `DDP`.
        module: The model.
        lr: The learning rate of DDP.
        kind: As for `make_optimizer`.
        steps: The number of training steps.
        workload: The workload whose learning rate and options in `CARDS` to use; None: the defaults, and a
            warm-up of two steps.
        **more: Additional options of `with_bagua`; those of the card have precedence.
    """
    algorithm, card = variant(algorithm)
    lr *= card.lr.get(workload, 1.0) if workload else 1.0
    optimizer: torch.optim.Optimizer | Optimizers
    if algorithm == "qadam":
        optimizer = trigram.QAdam(module.parameters(), lr=lr)
    else:
        optimizer = make_optimizer(kind, module, lr, card.matrix_lr)
    if algorithm in (DDP, DDP_ADAM):
        return DistributedDataParallel(module), optimizer
    options: dict[str, Any] = dict(card.options) if workload else {}
    if card.warmup:
        options["warmup_steps"] = warmup_steps(card, steps) if workload else 2
    if card.optimizer and not isinstance(optimizer, Optimizers):
        options["optimizer"] = optimizer
    return trigram.with_bagua(module, algorithm, **more | options), optimizer


def lr_factor(step: int, steps: int) -> float:
    """By what the learning rate is multiplied in a step: a linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    workload: str, algorithm: str, seed: int, steps: int, skew: float = 0.0, uses: str | None = None
) -> dict[str, Any]:
    """One training; its result is the same on all ranks.

    Args:
        workload: Its name.
        algorithm: The algorithm, maybe with settings (see `variant`), `DDP` or `DDP_ADAM`.
        seed: Of the weights and batches.
        steps: The number of steps.
        skew: As for `batches`.
        uses: One of `OPTIMIZERS`; None: the workload's.
    """
    task, split = TASKS[workload], data(workload)
    kind = "adam" if variant(algorithm)[0] in ("qadam", DDP_ADAM) else uses or task.uses
    # Ranks that share processors need several of these small steps for one averaging step; bound the
    # staleness.
    more = {"staleness": 1} if "async" in algorithm else {}
    torch.manual_seed(seed)
    module, lr = make_model(workload), task.sgd if kind == "sgd" else task.adam
    model, optimizer = wrap(algorithm, module, lr, kind, steps, workload, **more)
    stream, losses = batches(split, task.batch, seed, skew), []
    peaks = [group["lr"] for group in optimizer.param_groups]
    started = time.perf_counter()
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * lr_factor(step, steps)
        x, y = next(stream)
        optimizer.zero_grad()
        loss = workloads.loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    with nullcontext() if algorithm in (DDP, DDP_ADAM) else trigram.consensus(model):
        held = evaluate(model, split) if dist.get_rank() == 0 else 0.0
        dist.barrier()
    numbers = torch.tensor([held, *(loss / dist.get_world_size() for loss in losses)], dtype=torch.float64)
    dist.all_reduce(numbers)
    return {
        "workload": workload,
        "algorithm": algorithm,
        "seed": seed,
        "held_out": float(numbers[0]),
        "losses": numbers[1:].tolist(),
        "seconds": seconds,
    }


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per workload and algorithm: the mean held-out loss over seeds, and the difference to the
    reference."""
    held: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        held.setdefault((run["workload"], run["algorithm"]), []).append(run["held_out"])
    rows = []
    for (workload, algorithm), values in held.items():
        if (workload, DDP) not in held:
            continue
        against = DDP_ADAM if variant(algorithm)[0] == "qadam" and TASKS[workload].uses == "sgd" else DDP
        reference = held[workload, against]
        mean, base = statistics.fmean(values), statistics.fmean(reference)
        spread = statistics.stdev(reference) if len(reference) > 1 else 0.0
        errors = 100 * 2 * spread / math.sqrt(len(reference)) / base
        percent = 100 * (mean / base - 1)
        rows.append(
            {"workload": workload, "algorithm": algorithm, "seeds": len(values), "held_out": mean}
            | {"against": against, "percent": percent, "two_standard_errors": errors}
            | {"within": percent <= max(1.0, errors)}
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table; losses in nats."""
    lines = [
        "| workload | algorithm | held-out loss | beside | difference | 2 SE of DDP | within max(1 %, 2 SE) |"
    ]
    lines.append("|---|---|---:|---|---:|---:|---|")
    for row in rows:
        verdict = "" if row["algorithm"] in (DDP, DDP_ADAM) else "yes" if row["within"] else "**no**"
        lines.append(
            f"| {row['workload']} | {row['algorithm']} | {row['held_out']:.4f} | {row['against']} "
            f"| {row['percent']:+.1f} % | {row['two_standard_errors']:.1f} % | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Training curves, means over seeds: a row of panels per workload, a column per family."""
    from matplotlib.figure import Figure

    known = {each["name"]: each for each in trigram.algorithms()}

    def family(name: str) -> str:
        name, _ = variant(name)
        if known[name]["when"].startswith("async"):
            return "asynchronous"
        if known[name]["when"].startswith("every"):
            return "every few steps"
        return "gradients" if known[name]["who"].startswith("central") else "gossip"

    names = [run["workload"] for run in runs]
    shown = [workload for workload in TASKS if workload in names]
    families = ("gradients", "gossip", "asynchronous", "every few steps")
    figure = Figure(figsize=(4 * len(families), 3.2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), len(families), squeeze=False, sharey="row", sharex="row")
    for row, workload in zip(panels, shown, strict=True):
        curves: dict[str, list[list[float]]] = {}
        for run in runs:
            if run["workload"] == workload:
                curves.setdefault(run["algorithm"], []).append(run["losses"])
        for axes, title in zip(row, families, strict=True):
            for name, losses in curves.items():
                if variant(name)[0] in known and family(name) != title:
                    continue
                mean = torch.tensor(losses).mean(0)
                width = min(SMOOTH, len(mean))
                smooth = mean.unfold(0, width, 1).mean(1)
                style = {} if variant(name)[0] in known else {"color": "black", "alpha": 0.4, "linewidth": 3}
                if name == DDP_ADAM:
                    style["linestyle"] = ":"
                axes.plot(range(width, width + len(smooth)), smooth, label=name, **style)
            axes.set(title=f"{workload}: {title}", xlabel="step", yscale="log")
            axes.grid(alpha=0.3, which="both")
            axes.legend(fontsize="x-small")
        row[0].set_ylabel(f"training loss, nats (mean of {SMOOTH} steps)")
    figure.savefig(file, dpi=110)


def earlier(file: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The runs, and what was skipped, of an earlier call with the same settings.

    Raises:
        SystemExit: They had other settings.
    """
    if not file.exists():
        return [], {}
    found = json.loads(file.read_text())
    if {name: found.get(name) for name in settings} != settings:
        # On rank 0 only: one message is enough.
        sys.exit(
            f"losses.py: {file} has runs with other settings ({', '.join(settings)}); choose another --out"
            if dist.get_rank() == 0
            else 1
        )
    return found["runs"], {}


def rank_main(args: argparse.Namespace) -> None:
    """Trains everything on one rank; rank 0 prints and writes the results after each training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trigram.init()
    settings = {
        "ranks": dist.get_world_size(),
        "steps": args.steps,
        "skew": args.skew,
        "optimizer": args.optimizer,
        "torch": torch.__version__,
    }
    runs, skipped = earlier(args.out / "results.json", settings)
    done = {(run["workload"], run["algorithm"], run["seed"]) for run in runs}
    dist.barrier()  # all have read the file before rank 0 writes it
    first = dist.get_rank() == 0
    names = {variant(algorithm)[0] for algorithm in args.algorithms}
    for workload in args.workloads:
        with_sgd = TASKS[workload].uses == "sgd" and args.optimizer is None
        references = [DDP, DDP_ADAM] if with_sgd and "qadam" in names else [DDP]
        for algorithm in dict.fromkeys((*references, *args.algorithms)):
            for seed in args.seeds:
                if (workload, algorithm, seed) in done:
                    continue
                steps = args.steps or TASKS[workload].steps
                try:
                    run = train(workload, algorithm, seed, steps, args.skew, args.optimizer)
                except (trigram.UnsupportedError, AttributeError) as error:
                    skipped[f"{algorithm} on {workload}"] = str(error)
                    break
                runs.append(run)
                if first:
                    words = (workload, algorithm, f"seed {seed}", f"held out {run['held_out']:.4f}")
                    print(*words, f"{run['seconds']:.1f} s", flush=True)
                    facts = settings | {"skipped": skipped, "table": table(runs), "runs": runs}
                    # Whole or not at all: a later call goes on from it.
                    (args.out / "results.new").write_text(json.dumps(facts, indent=1) + "\n")
                    (args.out / "results.new").replace(args.out / "results.json")
    if first:
        notes = "".join(f"\nskipped: {name}: {why}\n" for name, why in skipped.items())
        (args.out / "table.md").write_text(markdown(table(runs)) + notes)
        draw(runs, args.out / "curves.png")
        print("\n" + markdown(table(runs)) + notes)
    launch.leave_job()


def known_algorithms(text: str) -> list[str]:
    """The algorithms of a command line, maybe with settings (see `variant`)."""
    for name in text.split(","):
        algorithm, card = variant(name)
        if algorithm in (DDP, DDP_ADAM):
            continue
        try:
            parse.find(algorithm, card.options)
        except trigram.TrigramError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def known_workloads(text: str) -> list[str]:
    """The workloads of a command line."""
    unknown = [name for name in text.split(",") if name not in TASKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown workload {unknown[0]!r}; use some of {', '.join(TASKS)}")
    return text.split(",")


def main() -> int:
    """Starts the ranks; in a rank, trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", type=known_algorithms, default=list(CARDS))
    parser.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument("--workloads", type=known_workloads, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="replaces the number of steps of each workload")
    parser.add_argument("--skew", type=float, default=0.0, help="the part of the samples divided by label")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="replaces SGD and Adam; muon is for gpt")
    return hosts.run_ranks(parser, rank_main, "losses-out", 4)


if __name__ == "__main__":
    sys.exit(main())
