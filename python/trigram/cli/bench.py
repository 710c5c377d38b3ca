"""`trigram bench`: times an operation at several sizes, beside other libraries, in nccl-tests' columns."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import typer

import trigram
from trigram.cli.libraries import Call, Library, Trigram, Unavailable, open_libraries
from trigram.cli.operations import DTYPES, ONE_WAY, REDUCTIONS, Allocate, Case

WIDTHS = (12, 12, 9, 5, 10, 8, 8, 7, 18, 9)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """What to measure, and how often."""

    operation: str
    sizes: Sequence[int]
    transport: str = "auto"
    iters: int = 20
    warmup: int = 5
    dtype: str = "float32"
    op: str = "sum"
    via: str | None = None
    registered: bool = False
    against: Sequence[str] = ()
    device: str = "cpu"

    @property
    def compares(self) -> bool:
        """Whether several libraries or schedules are measured at each size."""
        return bool(self.against) or self.via == "all"


@dataclass(frozen=True)
class Row:
    """One library at one size. Times: microseconds, of the slowest rank. Bandwidths: GB/s, at the median."""

    op: str
    ranks: int
    transport: str
    via: str | None
    dtype: str
    registered: bool
    bytes: int
    time_us_min: float
    time_us_p50: float
    time_us_p99: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int
    library: str


def parse_size(text: str) -> int:
    """The number of bytes in a text such as "4", "16K", "1.5M" or "1GiB"; K, M and G are powers of 1024.

    Args:
        text: The number with or without its unit.

    Raises:
        typer.BadParameter: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a size: write a number of bytes, such as 4096, 4K, 16M or 1G"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_sizes(sizes: str, low: str | None, high: str | None, factor: int) -> list[int]:
    """The sizes to measure in bytes: the list, or with `low` or `high` the series from low to high.

    Args:
        sizes: Sizes separated by commas.
        low: The smallest size of a series; 4 bytes if only `high` is given.
        high: The largest size of a series; 100M if only `low` is given.
        factor: The ratio of a size to the one before.

    Raises:
        typer.BadParameter: A text is not a size, the factor is less than 2, or the series is empty.
    """
    if low is None and high is None:
        return [parse_size(text) for text in sizes.split(",")]
    size, last, series = parse_size(low or "4"), parse_size(high or "100M"), []
    if factor < 2 or not 0 < size <= last:
        raise typer.BadParameter(
            f"--min {size} --max {last} --factor {factor} give no sizes: use 0 < min <= max and factor >= 2"
        )
    while size <= last:
        series.append(size)
        size *= factor
    return series


def run(settings: Settings) -> list[Row]:
    """Measures and prints on rank 0. All ranks call it with the same settings.

    Args:
        settings: What to measure.

    Returns:
        A row per size and library, the same on all ranks.
    """
    if settings.device == "cuda":
        _take_gpu()
    libraries, notes = open_libraries(settings.against, settings.transport, settings.via)
    rank, world = trigram.rank(), trigram.world_size()
    say = print if rank == 0 else _silent
    say(_heading(settings, world))
    for note in notes:
        say(f"# {note}")
    allocate: Allocate = trigram.empty if settings.registered else torch.empty
    if settings.device == "cuda":
        allocate = partial(torch.empty, device="cuda")
    rows: list[Row] = []
    measured = set[int]()
    for size in [0] if settings.operation == "barrier" else settings.sizes:
        dtype = DTYPES[settings.dtype]
        case = Case.make(
            settings.operation, size, rank=rank, world=world, op=settings.op, dtype=dtype, allocate=allocate
        )
        if case.bytes in measured:
            continue  # two sizes may be rounded to one
        measured.add(case.bytes)
        ours: Row | None = None
        for library in libraries[:]:
            try:
                row = _measure(settings, case, library)
            except (Unavailable, RuntimeError) as reason:
                ours_failed = isinstance(reason, trigram.TrigramError)
                if ours is None or (ours_failed and not isinstance(reason, trigram.UnsupportedError)):
                    raise
                libraries.remove(library)
                say(f"# {library.name} skipped: {reason}")
                continue
            ours = ours or row
            rows.append(row)
            say(_line(settings, row, ours), flush=True)
    return rows


def _take_gpu() -> None:
    """Gives each rank a GPU. Ranks share GPUs if there are too few; then NCCL takes each rank for a host."""
    gpus, rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank % gpus)
    if int(os.environ["WORLD_SIZE"]) > gpus:
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")


def write_json(rows: Sequence[Row], file: Path) -> None:
    """Writes the rows as a JSON list."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def write_plot(rows: Sequence[Row], file: Path) -> None:
    """Draws time and bus bandwidth over size, one line per library.

    Args:
        rows: What `run` returned.
        file: The picture; its suffix selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'trigram[demo]'") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    for library in dict.fromkeys(row.library for row in rows):
        mine = [row for row in rows if row.library == library]
        sizes = [row.bytes for row in mine]
        times.plot(sizes, [row.time_us_p50 for row in mine], marker="o", label=library)
        rates.plot(sizes, [row.busbw_GBps for row in mine], marker="o", label=library)
    for axes, label in ((times, "time, us (median, slowest rank)"), (rates, "bus bandwidth, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{rows[0].op}, {rows[0].ranks} ranks, {rows[0].dtype}")
    figure.savefig(file, dpi=150)


def _measure(settings: Settings, case: Case, library: Library) -> Row:
    call = library.prepare(case)
    if settings.device == "cuda":
        call = partial(_synchronized, call)
    wrong = _checked(case, call)
    for _ in range(settings.warmup):
        call()
    times = _timed(call, settings.iters, with_barrier=case.operation in ONE_WAY)
    # Checked again, because a call may still read its input when the next input replaces it.
    wrong += _checked(case, call)
    # All results in one call after the loop, so that the loop runs nothing but the measured operation.
    mine = torch.tensor([*times, wrong], dtype=torch.float64)
    gathered = torch.empty(case.world * len(mine), dtype=torch.float64)
    trigram.all_gather(gathered, mine)
    everyone = gathered.view(case.world, -1)
    slowest = everyone[:, :-1].amax(0) / (2000 if case.operation == "send_recv" else 1000)
    p50 = float(slowest.quantile(0.5))
    algbw = case.bytes / p50 / 1000
    return Row(
        op=case.operation,
        ranks=case.world,
        transport=library.transport,
        via=library.via if isinstance(library, Trigram) else None,
        dtype=settings.dtype,
        registered=settings.registered,
        bytes=case.bytes,
        time_us_min=round(float(slowest.min()), 3),
        time_us_p50=round(p50, 3),
        time_us_p99=round(float(slowest.quantile(0.99)), 3),
        algbw_GBps=round(algbw, 6),
        busbw_GBps=round(algbw * case.bus_factor, 6),
        wrong=int(everyone[:, -1].sum()),
        library=library.name,
    )


def _synchronized(call: Call) -> None:
    """Makes the call and waits for its end, because on a GPU it returns earlier."""
    call()
    torch.cuda.synchronize()


def _checked(case: Case, call: Call) -> int:
    """Makes the call on new inputs; returns the number of wrong elements in this rank's result."""
    case.fill()
    for _ in range(case.repeats):
        call()
    return case.wrong()


def _timed(call: Call, iters: int, *, with_barrier: bool) -> list[int]:
    """Nanoseconds of each iteration on this rank; `with_barrier`: a barrier precedes each, untimed."""
    clock = time.perf_counter_ns
    times = [0] * iters
    trigram.barrier()
    for index in range(iters):
        if with_barrier:
            trigram.barrier()
        start = clock()
        call()
        times[index] = clock() - start
    return times


def _heading(settings: Settings, world: int) -> str:
    how = f"transport {settings.transport}, via {settings.via or 'auto'}"
    memory = "registered" if settings.registered else "plain"
    names = ["size", "count", "type", "op", "time", "algbw", "busbw", "#wrong"]
    units = ["(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""]
    if settings.compares:
        names += ["library", "time/ours"]
    return (
        f"# trigram bench {settings.operation}: {world} ranks, {how}, {memory} memory\n"
        f"# time: of the slowest rank, median of {settings.iters} iterations "
        f"after {settings.warmup} untimed ones\n"
        f"#{_columns(names)}\n#{_columns(units)}"
    )


def _line(settings: Settings, row: Row, ours: Row) -> str:
    count, op = row.bytes // DTYPES[row.dtype].itemsize, settings.op if row.op in REDUCTIONS else "none"
    rates = [f"{row.time_us_p50:.2f}", f"{row.algbw_GBps:.2f}", f"{row.busbw_GBps:.2f}"]
    cells = [str(row.bytes), str(count), row.dtype, op, *rates, str(row.wrong)]
    if settings.compares:
        cells += [row.library, f"{row.time_us_p50 / ours.time_us_p50:.2f}"]
    return f" {_columns(cells)}"


def _columns(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False))


def _silent(*_: object, **__: object) -> None:
    pass
