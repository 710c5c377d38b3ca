"""`trigram demo --all`: trains two models with DistributedDataParallel and with each algorithm, and compares
them.

Every run starts from the same weights and reads the same batches in the same order, so the runs differ only
in their communication. The table marks losses that equal DistributedDataParallel's bit for bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.algorithms.names import algorithms
from trigram.cli import workloads

DDP = "DDP (gloo)"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f")
"""Told apart without red and green; each comes with three kinds of lines."""
SEED = 7
LAST = 10
# The first steps are not timed: they allocate memory, and DistributedDataParallel rebuilds its buckets.
UNTIMED = 5


@dataclass(frozen=True)
class Result:
    """The result of a training. Losses are means over ranks, in nats; `train_loss`: of the last ten steps."""

    workload: str
    algorithm: str
    train_loss: float
    held_out_loss: float
    samples_per_s: float
    bytes_per_step: int
    equals_ddp: bool | None
    losses: list[float]


def run(out: Path) -> list[Result]:
    """Trains all models. All ranks call it; rank 0 prints the table and writes the files.

    Args:
        out: The folder for `curves.png` and `results.json`; created if it does not exist.

    Returns:
        The results, the same on all ranks; for each workload DistributedDataParallel comes first.
    """
    dist.init_process_group("gloo")
    trigram.init()
    names: list[str | None] = [None, *(entry["name"] for entry in algorithms())]
    console = Console(quiet=trigram.rank() != 0)
    # In a narrower table the columns would be cut.
    console.width = max(console.width, 100)
    columns = (TextColumn("{task.description:<45}"), BarColumn(), TimeElapsedColumn())
    results: list[Result] = []
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        total = len(names) * sum(recipe.steps for recipe in workloads.RECIPES.values())
        bar = progress.add_task("", total=total)
        for workload in workloads.WORKLOADS:
            reference: torch.Tensor | None = None
            for name in names:
                progress.update(bar, description=f"{workload}: {name or DDP}")
                result, trace = train(
                    workload,
                    name,
                    reference=reference,
                    stepped=lambda: progress.advance(bar),
                )
                reference = trace if reference is None else reference
                results.append(result)
    if trigram.rank() == 0:
        for workload in workloads.WORKLOADS:
            console.print(_table(workload, results))
        out.mkdir(parents=True, exist_ok=True)
        facts = {"ranks": trigram.world_size(), "torch": torch.__version__, "seed": SEED}
        rows = [asdict(result) for result in results]
        (out / "results.json").write_text(json.dumps(facts | {"results": rows}, indent=1) + "\n")
        _draw(results, out / "curves.png")
        console.print(f"curves in {out / 'curves.png'}, numbers in {out / 'results.json'}")
    return results


def train(
    workload: str,
    algorithm: str | None,
    *,
    reference: torch.Tensor | None = None,
    stepped: Callable[[], None] = lambda: None,
) -> tuple[Result, torch.Tensor]:
    """Trains one workload with one algorithm.

    Args:
        workload: One of `workloads.WORKLOADS`.
        algorithm: Its name, or None for DistributedDataParallel.
        reference: The trace of the run with DistributedDataParallel, to compare with; None: no comparison.
        stepped: Called after each step.

    Returns:
        The result, and the trace: float64 of shape (ranks, 1 + steps), the held-out loss and the loss of each
        step.
    """
    recipe, rank, world = workloads.RECIPES[workload], trigram.rank(), trigram.world_size()
    torch.manual_seed(SEED)
    module = workloads.make_model(workload)
    optimizer = workloads.make_optimizer(workload, module, algorithm)
    model: nn.Module
    if algorithm is None:
        model = DistributedDataParallel(module)
    else:
        options = workloads.options(workload, algorithm)
        needs = optimizer if algorithm == "qadam" else None
        model = trigram.with_bagua(module, algorithm, optimizer=needs, **options)
    stream = workloads.batches(workload, rank, world, SEED)
    losses: list[float] = []
    started = 0.0
    for step in range(recipe.steps):
        if step == UNTIMED:
            started = time.perf_counter()
        x, y = next(stream)
        optimizer.zero_grad()
        loss = workloads.loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stepped()
    seconds = time.perf_counter() - started
    if algorithm is None:
        held = workloads.evaluate(module, workload)
    else:
        # Gossip and asynchronous algorithms are evaluated at the mean of the weights, as users save it.
        with trigram.consensus(module):
            held = workloads.evaluate(module, workload)
    everyone = _gathered([seconds, held, *losses])
    trace = everyone[:, 1:]
    mean = trace[:, 1:].mean(0)
    samples = (recipe.steps - UNTIMED) * recipe.batch * world
    if algorithm is None:
        sent = 2 * (world - 1) * sum(p.nbytes for p in module.parameters()) // world
    else:
        sent = int(trigram.stats(module)["bytes_per_step"])
        trigram.switch(module, "gradient_allreduce")  # ends the thread of an asynchronous algorithm
    result = Result(
        workload=workload,
        algorithm=algorithm or DDP,
        train_loss=float(mean[-LAST:].mean()),
        held_out_loss=float(trace[:, 0].mean()),
        samples_per_s=samples / float(everyone[:, 0].max()),
        bytes_per_step=sent,
        equals_ddp=None if reference is None else torch.equal(trace, reference),
        losses=mean.tolist(),
    )
    return result, trace


def _gathered(mine: Sequence[float]) -> torch.Tensor:
    """The numbers of all ranks: float64 of shape (ranks, numbers)."""
    row = torch.tensor(mine, dtype=torch.float64)
    everyone = torch.empty(trigram.world_size() * len(row), dtype=torch.float64)
    trigram.all_gather(everyone, row)
    return everyone.view(-1, len(row))


def _table(workload: str, results: Sequence[Result]) -> Table:
    title = (
        f"{workload}: {workloads.RECIPES[workload].steps} steps, losses in nats, bytes sent per step and rank"
    )
    table = Table(title=title, box=SIMPLE, pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for column in ("train", "held out", "samples/s", "bytes", "= DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        if result.workload == workload:
            table.add_row(
                result.algorithm,
                f"{result.train_loss:.4f}",
                f"{result.held_out_loss:.4f}",
                f"{result.samples_per_s:.0f}",
                decimal(result.bytes_per_step),
                {None: "", True: "bit for bit", False: "no"}[result.equals_ddp],
            )
    return table


def _draw(results: Sequence[Result], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, workload in zip(figure.subplots(1, 2), workloads.WORKLOADS, strict=True):
        for index, result in enumerate(each for each in results if each.workload == workload):
            style: dict[str, Any] = {
                "color": COLOURS[index % len(COLOURS)],
                "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3],
            }
            if result.algorithm == DDP:
                style = {"color": "black", "linewidth": 4, "alpha": 0.4}
            smooth = torch.tensor(result.losses).unfold(0, LAST, 1).mean(1)
            axes.plot(range(LAST, LAST + len(smooth)), smooth, label=result.algorithm, **style)
        axes.set(title=workload, xlabel="step", ylabel=f"training loss, nats (mean of {LAST} steps)")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=130)
