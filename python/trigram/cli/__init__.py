"""The `trigram` command: demo, bench, chaos, doctor, algorithms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import trigram

Operation = Literal[
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "gossip",
    "barrier",
]
Transport = Literal["auto", "shm", "tcp"]
DeviceType = Literal["cpu", "cuda"]
Dtype = Literal["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
Reduction = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]
Via = Literal["shared", "ring", "tree", "recursive_doubling", "scatter_gather", "all"]
Count = Annotated[int, typer.Option(min=1)]
SIZES = "4,1K,16K,64K,256K,1M,4M,25M,100M"
PEERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}

app = typer.Typer(
    help="Trigram: communication for data-parallel PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """The `trigram` console script."""
    try:
        app(prog_name="trigram")
    except trigram.TrigramError as error:
        # Its text names the operation, the rank and what to do; the way through this package adds nothing.
        sys.exit(f"trigram: {type(error).__name__}: {error}")


@app.command("chaos", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def chaos_command(
    context: typer.Context,
    *,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed gives the same faults.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long faults happen.")] = 60.0,
    every: Annotated[float, typer.Option(help="Seconds between two faults, about.")] = 5.0,
    faults: Annotated[
        str, typer.Option(help="Which, with commas: kill, stop, pause, slow, cut, corrupt.")
    ] = "kill,stop,pause,slow",
    restart: Annotated[bool, typer.Option(help="Start a rank again that has ended.")] = True,
    settle: Annotated[float, typer.Option(help="Seconds that a rank has to come up unharmed.")] = 8.0,
    ready: Annotated[
        str | None, typer.Option(metavar="TEXT", help="These seconds begin when the rank has written this.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds that the job has to end by itself after.")] = 120.0,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep what ranks write here.")] = None,
) -> None:
    """Run a script on several ranks under random faults, and report what was survived.

    trigram chaos --ranks 4 --seed 1 -- train.py ARGS
    """
    from trigram.cli import chaos  # each command loads what it needs

    if not context.args:
        raise typer.BadParameter("name the script and its arguments after --")
    settings = chaos.Settings(
        [sys.executable, *context.args],
        ranks,
        seed,
        seconds,
        every,
        faults.split(","),
        restart,
        settle=settle,
        ready=ready,
        patience=patience,
        logs=logs,
    )
    report = chaos.run(settings)
    sys.stdout.write(f"{report}\n")
    raise typer.Exit(0 if report.survived else 1)


# A function named like the submodule it imports would hide it, hence the names.
@app.command("bench")
def bench_command(
    *,
    operation: Annotated[Operation, typer.Argument(metavar="OP", help="What to measure.")],
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks to start here; not under torchrun or mpiexec.")
    ] = 2,
    transport: Annotated[
        Transport, typer.Option(envvar="TRIGRAM_TRANSPORT", help="How ranks are reached.")
    ] = "auto",
    sizes: Annotated[str, typer.Option(help="Bytes, with commas; K, M, G are binary.")] = SIZES,
    low: Annotated[
        str | None, typer.Option("--min", help="Smallest size of a series, in place of --sizes.")
    ] = None,
    high: Annotated[str | None, typer.Option("--max", help="Largest size of a series.")] = None,
    factor: Annotated[int, typer.Option(min=2, help="From one size of a series to the next.")] = 4,
    iters: Annotated[int, typer.Option(min=1, help="Timed iterations for each size.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations before those.")] = 5,
    dtype: Annotated[Dtype, typer.Option(help="The elements' type.")] = "float32",
    op: Annotated[Reduction, typer.Option(help="The reduction.")] = "sum",
    via: Annotated[
        Via | None, typer.Option(help="The all_reduce schedule, in place of the library's choice; all: each.")
    ] = None,
    registered: Annotated[bool, typer.Option("--registered", help="Tensors from trigram.empty.")] = False,
    against: Annotated[
        str, typer.Option(help="Peers on the same tensors: gloo and mpi, with a comma; nccl on GPUs.")
    ] = "",
    device: Annotated[DeviceType, typer.Option(help="Where the tensors are.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw time and bandwidth.")
    ] = None,
) -> None:
    """Measure an operation over sizes, checking every result, in nccl-tests' columns."""
    from trigram.cli import bench, launch  # each command loads what it needs

    peers = [name for name in against.split(",") if name]
    if unknown := set(peers) - set(PEERS[device]):
        raise typer.BadParameter(
            f"unknown peer {', '.join(sorted(unknown))} on {device}: choose among {', '.join(PEERS[device])}"
        )
    if device == "cuda":
        _check_gpu(registered, via)
    if op in (("band", "bor", "bxor") if "float" in dtype else ("avg",)):
        raise typer.BadParameter(f"{op} of {dtype} is not defined")
    if via and operation != "all_reduce":
        raise typer.BadParameter(f"{operation} has no --via: only all_reduce offers a choice")
    settings = bench.Settings(
        operation=operation,
        sizes=bench.parse_sizes(sizes, low, high, factor),
        transport=transport,
        iters=iters,
        warmup=warmup,
        dtype=dtype,
        op=op,
        via=via,
        registered=registered,
        against=peers,
        device=device,
    )
    os.environ["TRIGRAM_TRANSPORT"] = transport
    if not launch.is_rank():
        raise typer.Exit(launch.launch(ranks, sys.argv[1:]).code)
    rows = bench.run(settings)
    if os.environ["RANK"] == "0":
        if json_file:
            bench.write_json(rows, json_file)
        if plot_file:
            bench.write_plot(rows, plot_file)
    launch.leave_job()
    if any(row.wrong for row in rows):
        typer.echo("trigram: there are wrong results, see the column #wrong", err=True)
        raise typer.Exit(1)


def _check_gpu(registered: bool, via: str | None) -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no GPU here; see trigram doctor")
    if registered or via:
        raise typer.BadParameter(
            "--registered and --via are for CPU tensors; GPUs have TRIGRAM_GPU_TRANSPORT"
        )


@app.command("demo")
def demo_command(
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks to start here; not under torchrun or mpiexec.")
    ] = 2,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where curves.png and results.json go.")] = Path(
        "demo-out"
    ),
) -> None:
    """Train two small models on real data, with DistributedDataParallel and then with each algorithm."""
    from trigram.cli import demo, launch  # each command loads what it needs

    if absent := demo.missing():
        typer.echo(f"the demo needs {' and '.join(absent)}: pip install 'trigram[demo]'", err=True)
        raise typer.Exit(2)
    if not launch.is_rank():
        raise typer.Exit(launch.launch(ranks, sys.argv[1:]).code)
    demo.run(out)
    launch.leave_job()


@app.command("doctor")
def doctor_command() -> None:
    """Report what this machine has, try two ranks on it, and say what to do about what is missing."""
    from trigram.cli import doctor  # each command loads what it needs

    raise typer.Exit(doctor.run())


@app.command("algorithms")
def algorithms_command() -> None:
    """List the eight trigrams and their relatives."""
    from trigram.cli import algorithms  # each command loads what it needs

    algorithms.show()
