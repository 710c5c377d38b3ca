"""`trigram demo`: what Trigram is for, in a minute and a half. Two ranks train a small GPT on real text over
a network of 200 Mbit/s, with DistributedDataParallel and with five algorithms.

All trainings have the same weights at first, the same batches, learning rates and number of steps; they
differ in how the ranks talk. `trigram demo --all` has all algorithms, without a slow network.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.cli import slow_network, workloads

MBIT = 200
DDP = "DDP (gloo)"
ALGORITHMS = (
    "gradient_allreduce",
    "decentralized",
    "bytegrad",
    "async_low_precision",
    "async_low_precision_decentralized",
)
WIDTH, HEADS, LAYERS = 128, 4, 4
STEPS, WARM, LR, SEED = 120, 0.05, 3e-3, 7
SMOOTH = 10
"""Steps that a point of the curves is the mean of."""
UNTIMED = 5
"""The first steps, in which memory is allocated and DistributedDataParallel rebuilds its buckets."""
_MEANING = """loss: nats per byte, on text that was not trained on.
equal: when the training loss is what DDP's is at its end.
"""
_NEXT = """What next:
  trigram doctor                 what this machine has, and what to change
  trigram demo --all             all algorithms, without the slow network
  trigram run -n 2 train.py      your own script on two ranks; docs/start.md
"""


@dataclass(frozen=True)
class Training:
    """A training. Losses are means over ranks, in nats per byte.

    Attributes:
        algorithm: Its name.
        seconds: At the end of each step, since the start; those of the slowest rank.
        losses: Of each step.
        held_out: On text that was not trained on, with the mean of the ranks' weights.
    """

    algorithm: str
    seconds: list[float]
    losses: list[float]
    held_out: float

    @property
    def step(self) -> float:
        """Seconds of a step, without the first ones."""
        return (self.seconds[-1] - self.seconds[UNTIMED - 1]) / (len(self.seconds) - UNTIMED)

    def curve(self) -> tuple[list[float], list[float]]:
        """Seconds, and the mean loss of the last steps then."""
        smooth = torch.tensor(self.losses).unfold(0, SMOOTH, 1).mean(1).tolist()
        return self.seconds[SMOOTH - 1 :], smooth

    def reaches(self, loss: float) -> float | None:
        """After how many seconds the mean loss of the last steps is at most ``loss``; None: never."""
        return next((at for at, now in zip(*self.curve(), strict=True) if now <= loss), None)


def run(out: Path) -> list[Training]:
    """Makes the trainings. All ranks call it; rank 0 prints the table and writes the files.

    Args:
        out: The folder for `loss_over_seconds.png` and `demo.json`; created if it does not exist.

    Returns:
        The trainings, the same on all ranks; first that with DistributedDataParallel.
    """
    dist.init_process_group("gloo")
    trigram.init()
    torch.set_num_threads(1)
    logging.getLogger("trigram").setLevel(logging.ERROR)  # that ranks wait for the network is the point here
    console = Console(quiet=trigram.rank() != 0)
    paced = os.environ.get(slow_network.PACED)
    mbit = os.environ.get(slow_network.INSIDE) or paced
    if paced:
        slow_network.pace(int(paced))  # both libraries have connected all ranks
    console.print(_what(mbit, bool(paced)))
    columns = (TextColumn("{task.description:<33}"), BarColumn(20), TimeElapsedColumn())
    found: list[Training] = []
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        bar = progress.add_task("", total=STEPS * (1 + len(ALGORITHMS)))
        for name in (None, *ALGORITHMS):
            progress.update(bar, description=name or DDP)
            found.append(train(name, lambda: progress.advance(bar)))
    if trigram.rank() == 0:
        console.print(table(found))
        console.print(_MEANING, highlight=False)
        out.mkdir(parents=True, exist_ok=True)
        facts = {"ranks": trigram.world_size(), "torch": torch.__version__, "mbit": mbit and int(mbit)}
        rows = [asdict(each) for each in found]
        (out / "demo.json").write_text(json.dumps(facts | {"trainings": rows}, indent=1) + "\n")
        draw(found, mbit, out / "loss_over_seconds.png")
        console.print(f"The curves: {out / 'loss_over_seconds.png'}; the numbers: {out / 'demo.json'}\n")
        console.print(_NEXT, highlight=False)
    return found


def _what(mbit: str | None, paced: bool) -> str:
    """What is about to happen, on lines of 80 columns."""
    ranks = trigram.world_size()
    network = f"{mbit} Mbit/s" if mbit else "loopback"
    network += ", to which the kernel paces each connection" if paced else ""
    return (
        f"{ranks} ranks train a small GPT on Python's own source,\nover {network}:\n"
        f"{STEPS} steps with DistributedDataParallel (DDP), and with five algorithms.\n"
    )


def train(algorithm: str | None, stepped: Callable[[], None] = lambda: None) -> Training:
    """Makes one training; all ranks call it.

    Args:
        algorithm: Its name; None: DistributedDataParallel.
        stepped: Called after each step.
    """
    torch.manual_seed(SEED)
    module = workloads.TinyGPT(WIDTH, HEADS, LAYERS)
    optimizer = torch.optim.Adam(module.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
    model: nn.Module = DistributedDataParallel(module) if algorithm is None else module
    if algorithm is not None:
        trigram.with_bagua(module, algorithm)
    stream = workloads.batches("gpt", trigram.rank(), trigram.world_size(), SEED)
    seconds, losses = [], []
    trigram.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        x, y = next(stream)
        optimizer.zero_grad()
        loss = workloads.loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        stepped()
    if algorithm is None:
        held_out = workloads.evaluate(module, "gpt")
    else:
        with trigram.consensus(module):  # what users save
            held_out = workloads.evaluate(module, "gpt")
        trigram.switch(module, "gradient_allreduce")  # ends the thread of an asynchronous algorithm
        trigram.unwrap(module)
    everyone = _gathered([held_out, *seconds, *losses])
    mean = everyone.mean(0).tolist()
    slowest = everyone[:, 1 : 1 + STEPS].max(0).values.tolist()
    return Training(algorithm or DDP, slowest, mean[1 + STEPS :], mean[0])


def _factor(step: int) -> float:
    """The factor of the learning rate: a linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / (WARM * STEPS)) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def _gathered(mine: Sequence[float]) -> torch.Tensor:
    """The numbers of all ranks: float64 of shape (ranks, numbers)."""
    row = torch.tensor(mine, dtype=torch.float64)
    everyone = torch.empty(trigram.world_size() * len(row), dtype=torch.float64)
    trigram.all_gather(everyone, row)
    return everyone.view(-1, len(row))


def table(found: Sequence[Training]) -> Table:
    """The table, in 80 columns. What its columns are, `_MEANING` says."""
    ddp = found[0]
    goal = ddp.curve()[1][-1]
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("algorithm", no_wrap=True)
    for column in ("step", "total", "of DDP", "loss", "equal"):
        shown.add_column(column, justify="right", no_wrap=True)
    for each in found:
        at = each.reaches(goal)
        shown.add_row(
            each.algorithm,
            f"{1e3 * each.step:.0f} ms",
            f"{each.seconds[-1]:.1f} s",
            f"{each.seconds[-1] / ddp.seconds[-1]:.2f}",
            f"{each.held_out:.3f}",
            "never" if at is None else f"{at:.1f} s",
        )
    return shown


def draw(found: Sequence[Training], mbit: str | None, file: Path) -> None:
    """Draws the loss over seconds."""
    from matplotlib.figure import Figure  # of an extra

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    # Colours that are told apart without red and green, and dashes for who sees none.
    colours = ("#000000", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7")
    dashes = ("-", (0, (5, 1)), (0, (1, 1)), "-", (0, (5, 1)), (0, (1, 1)))
    for each, colour, dash in zip(found, colours, dashes, strict=False):
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 2}
        x, y = each.curve()
        axes.plot(x, y, label=each.algorithm, **style)
        axes.plot(x[-1:], y[-1:], "o", color=colour)
    network = f"a network of {mbit} Mbit/s" if mbit else "loopback"
    axes.set(
        title=f"{STEPS} steps of {trigram.world_size()} ranks over {network}",
        xlabel="seconds",
        ylabel=f"training loss, nats per byte (mean of {SMOOTH} steps)",
    )
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=130)
