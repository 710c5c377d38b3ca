"""The `trigram` command: run, plan, goodput, top, status, drain, evict, report, compare, timeline,
postmortem, demo, bench, chaos, test, doctor, algorithms."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import typer

import trigram
from trigram.cli import predictions

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
_HOSTS_SECONDS = 120.0
"""How long launchers that are started at the same time wait for each other, at most."""
PEERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}

app = typer.Typer(
    help="Trigram: communication for data-parallel PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from trigram.cli import version  # each command loads what it needs

        typer.echo(version.text())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Trigram: communication for data-parallel PyTorch."""


def main() -> None:
    """The `trigram` console script."""
    try:
        app(prog_name="trigram")
    except SystemExit:  # as usual: first, for the next line imports torch
        raise
    except trigram.TrigramError as error:
        # The text names the operation, the rank and what to do: a traceback adds nothing.
        sys.exit(f"trigram: {type(error).__name__}: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"trigram: {error}")


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    *,
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Python script and its arguments.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks to start.")] = 2,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often ranks of an elastic job that fail are started again.")
    ] = 0,
    least: Annotated[
        int | None,
        typer.Option("--min", min=1, help="With so many ranks left in all, an elastic job goes on."),
    ] = None,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Begin each line of a rank with its number.")
    ] = False,
    tee: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what each rank says to DIR/rank0.log too.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Run on these hosts too, over ssh: a,b,c; -n ranks on each.")
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="With --hosts: what runs a command on a host.")
    ] = "ssh -o BatchMode=yes",
    there: Annotated[
        str | None, typer.Option("--python", help="With --hosts: the Python there. As here, if not given.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Of the store in which the ranks meet, on the first host; else a free one. An elastic job's "
            "trigram status, drain and evict ask there.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --hosts: a variable for all ranks."),
    ] = None,
    nnodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Launchers like this one, one on each machine, that meet. MIN:MAX: an elastic job begins "
            "with MIN of them, and others join it.",
        ),
    ] = "1",
    place: Annotated[
        int | None,
        typer.Option("--node-rank", min=0, help="This machine's number; else in the order of coming."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where they meet: one of the machines."),
    ] = None,
    patience: Annotated[
        float, typer.Option("--rdzv-timeout", min=1, help="Seconds to wait for the other launchers.")
    ] = 600.0,
    obey: Annotated[bool, typer.Option("--obey", hidden=True)] = False,
) -> None:
    """Run a script on several ranks of this machine, or of several.

    trigram run -n 4 train.py ARGS, or trigram run --hosts a,b -n 4 train.py ARGS, or on each machine
    trigram run --nnodes 2 --rdzv-endpoint a:29400 -n 4 train.py ARGS

    If a rank fails, the others are ended. In an elastic job it may be started again (--restarts), or
    the others may go on (--min).
    On SIGTERM or Ctrl-C the ranks have ten seconds to end; a second signal ends them at once.
    """
    from trigram.cli import remote  # each command loads what it needs
    from trigram.runtime import launch  # likewise

    if obey:
        remote.obey(sys.stdin.fileno())
    if not module and not Path(command[0]).exists():
        raise typer.BadParameter(f"there is no script {command[0]}")
    launch.refuse_inside_job()
    script = [*(["-m"] if module else []), *command]
    by_hand = [
        ("--rdzv-endpoint", endpoint),
        ("--node-rank", place),
        ("--nnodes", nnodes if nnodes != "1" else None),
    ]
    if hosts is not None and (given := [name for name, value in by_hand if value is not None]):
        raise typer.BadParameter(
            f"--hosts starts ranks over ssh, {', '.join(given)} is for launchers on each host"
        )
    if hosts is None and (env or there is not None):
        raise typer.BadParameter(f"{'--env' if env else '--python'} goes with --hosts")
    if port is not None and endpoint is not None:
        raise typer.BadParameter("--rdzv-endpoint HOST:PORT names the port already; leave out --port")
    if hosts is not None:
        named, python = remote.hosts(hosts), there or sys.executable
        if not named:
            raise typer.BadParameter("--hosts needs a host or more, with commas in between")
        _check_least(least, ranks * len(named))
        if least is not None:  # ranks that go on without others are not ended by those of a host that fails
            patience = min(patience, _HOSTS_SECONDS)
        words = ["--prefix", f"--restarts={restarts}", f"--rdzv-timeout={patience}"]
        words += [*([f"--tee={tee}"] if tee else []), *script]
        code = remote.launch(
            named, ranks, words, ssh=ssh, python=python, port=port, more=env or [], least=least
        )
        raise typer.Exit(code)
    from trigram.cli.node_counts import Nodes  # likewise

    several = Nodes.parse(nnodes, place)
    if several.most > 1 and endpoint is None:
        raise typer.BadParameter(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, one of the machines and a free port there"
        )
    if least is None and several.least < several.most:
        least = several.least  # each machine has a rank at least, and one may go without ending the others
    if endpoint is None:
        _check_least(least, ranks)
    of: launch.Part | None = None
    elsewhere = launch.Elsewhere()
    if tee is not None:
        tee.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        more = {} if port is None else {"MASTER_PORT": str(port)}
        if endpoint is not None:
            from trigram.cli import nodes  # likewise; it loads torch

            meeting = stack.enter_context(nodes.met(endpoint, several, ranks, patience, least))
            of, more, elsewhere = meeting.part, meeting.environment, meeting.tally
            if several.least == several.most:
                _check_least(least, of.world)
        done = launch.launch(
            ranks,
            [sys.executable, *script],
            environment=more,
            show="all",
            restarts=restarts,
            least=least,
            prefix=prefix,
            tee=tee,
            part=of,
            elsewhere=elsewhere,
        )
    raise typer.Exit(launch.FOLLOWED if obey and done.followed else done.code)


def _check_least(least: int | None, ranks: int) -> None:
    if least is not None and least > ranks:
        raise typer.BadParameter(f"--min {least} is more than the {ranks} ranks that are started (-n)")


@app.command("chaos", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def chaos_command(
    context: typer.Context,
    *,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks to start.")] = 4,
    seed: Annotated[int, typer.Option(help="Random seed: the same seed gives the same faults.")] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds during which faults are injected.")] = 60.0,
    every: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 5.0,
    faults: Annotated[
        str,
        typer.Option(
            help="Faults to inject, separated by commas: kill, drain, crash, stop, freeze, pause, slow, cut, "
            "outage, corrupt."
        ),
    ] = "kill,stop,pause,slow",
    restart: Annotated[bool, typer.Option(help="Restart a rank that a fault has ended.")] = True,
    settle: Annotated[float, typer.Option(help="Seconds without faults after a rank starts.")] = 8.0,
    ready: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Count --settle from when the rank prints TEXT.")
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds that the job has to end after the last fault.")
    ] = 120.0,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for a log file per rank.")] = None,
) -> None:
    """Run a script on several ranks, inject random faults, and report whether the job survived.

    trigram chaos --ranks 4 --seed 1 -- train.py ARGS
    """
    from trigram.cli import chaos  # each command loads what it needs

    if not context.args:
        raise typer.BadParameter("no script: write it and its arguments after --")
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


# Not named `bench`: a function would hide the submodule of that name.
@app.command("bench")
def bench_command(
    *,
    operation: Annotated[Operation, typer.Argument(metavar="OP", help="Operation to measure.")],
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks to start here; not under torchrun or mpiexec.")
    ] = 2,
    transport: Annotated[
        Transport, typer.Option(envvar="TRIGRAM_TRANSPORT", help="Transport between ranks.")
    ] = "auto",
    sizes: Annotated[
        str, typer.Option(help="Sizes in bytes, separated by commas; K, M, G are powers of 1024.")
    ] = SIZES,
    low: Annotated[
        str | None, typer.Option("--min", help="Smallest size of a series, instead of --sizes.")
    ] = None,
    high: Annotated[str | None, typer.Option("--max", help="Largest size of a series.")] = None,
    factor: Annotated[int, typer.Option(min=2, help="Ratio between two sizes of a series.")] = 4,
    iters: Annotated[int, typer.Option(min=1, help="Timed iterations per size.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=0, help="Untimed iterations per size, before the timed ones.")
    ] = 5,
    dtype: Annotated[Dtype, typer.Option(help="Data type of the elements.")] = "float32",
    op: Annotated[Reduction, typer.Option(help="Reduction.")] = "sum",
    via: Annotated[
        Via | None,
        typer.Option(help="Schedule of all_reduce, instead of the one trigram picks; all: measure each."),
    ] = None,
    registered: Annotated[
        bool, typer.Option("--registered", help="Allocate tensors with trigram.empty.")
    ] = False,
    against: Annotated[
        str, typer.Option(help="Libraries to compare with, separated by commas: gloo, mpi; nccl on GPUs.")
    ] = "",
    device: Annotated[DeviceType, typer.Option(help="Device of the tensors.")] = "cpu",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure at which sizes the schedule of all_reduce should change here; later jobs read it.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot time and bandwidth to this file.")
    ] = None,
) -> None:
    """Measure an operation at several sizes, check every result, and print the columns of nccl-tests."""
    from trigram.cli import bench  # each command loads what it needs
    from trigram.runtime import launch  # likewise

    peers = [name for name in against.split(",") if name]
    if unknown := set(peers) - set(PEERS[device]):
        raise typer.BadParameter(
            f"--against: unknown library {', '.join(sorted(unknown))}; on {device} choose from "
            f"{', '.join(PEERS[device])}"
        )
    if device == "cuda":
        _check_gpu(registered, via)
    if op in (("band", "bor", "bxor") if "float" in dtype else ("avg",)):
        raise typer.BadParameter(
            f"--op {op} does not support --dtype {dtype}: choose another reduction or data type"
        )
    if via and operation != "all_reduce":
        raise typer.BadParameter(
            f"--via: only all_reduce has a choice of schedules; leave --via out for {operation}"
        )
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
    if tune and operation != "all_reduce":
        raise typer.BadParameter(f"--tune: only all_reduce has a choice of schedules, not {operation}")
    os.environ["TRIGRAM_TRANSPORT"] = transport
    if not launch.is_rank():
        raise typer.Exit(launch.launch(ranks, launch.trigram_command(sys.argv[1:])).code)
    if tune:
        from trigram.cli import tune as tuning  # each command loads what it needs

        tuning.run()
        launch.leave_job()
        return
    rows = bench.run(settings)
    if os.environ["RANK"] == "0":
        if json_file:
            bench.write_json(rows, json_file)
        if plot_file:
            bench.write_plot(rows, plot_file)
    launch.leave_job()
    if any(row.wrong for row in rows):
        typer.echo("trigram: some results are wrong, see the column #wrong", err=True)
        raise typer.Exit(1)


def _check_gpu(registered: bool, via: str | None) -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no GPU on this machine; run trigram doctor")
    if registered or via:
        raise typer.BadParameter(
            "--registered and --via apply to CPU tensors only; on GPUs set TRIGRAM_GPU_TRANSPORT"
        )


@app.command("timeline")
def timeline_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the ranks' timelines (TRIGRAM_TIMELINE).")
    ],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File to write; .gz is compressed.")
    ] = Path("timeline.json.gz"),
    profiler: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of torch.profiler's files of the same job.")
    ] = None,
) -> None:
    """Make one timeline of those of all ranks, for https://ui.perfetto.dev."""
    from trigram.observe import merge  # each command loads what it needs

    profiles = sorted(profiler.glob("*.json*")) if profiler is not None else []
    if profiler is not None and not profiles:
        raise typer.BadParameter(f"{profiler} has no .json or .json.gz files of torch.profiler")
    left_out: list[str] = []
    trace, told = merge.merge(merge.read_folder(folder, left_out), profiles)
    merge.write(trace, out)
    for line in left_out + told:
        typer.echo(line)
    typer.echo(f"{out}: open it in https://ui.perfetto.dev")


@app.command("report")
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the ranks' files (TRIGRAM_REPORT).")
    ],
    *,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to this file too.")
    ] = None,
) -> None:
    """Say where the steps of a job went, which rank or link held it up, and what to change."""
    from trigram.observe import figures, report  # each command loads what it needs

    rows = figures.read(folder)
    typer.echo(report.text(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(rows), indent=1), encoding="utf-8")


@app.command("top")
def top_command(
    *,
    store: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The job's store; else MASTER_ADDR and MASTER_PORT."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    web: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="As a page in the browser; 0: any free port."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where the page is served; it has no password.")
    ] = "127.0.0.1",
) -> None:
    """Show the ranks of a running job, live; they leave snapshots in its store with TRIGRAM_TOP=1."""
    if web is not None:
        from trigram.cli import web as page  # each command loads what it needs

        raise typer.Exit(page.show(store, listen, web))
    from trigram.cli import top  # likewise

    raise typer.Exit(top.show(store, once))


@app.command("status")
def status_command(
    *,
    store: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The job's store; else MASTER_ADDR and MASTER_PORT."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say which ranks an elastic job has, who joins, leaves and was lost, and its goodput."""
    from trigram.cli import status  # each command loads what it needs

    raise typer.Exit(status.show(store, as_json))


@app.command("drain")
def drain_command(
    ranks: Annotated[list[int], typer.Argument(metavar="RANK...", help="Members of the job.", min=0)],
    *,
    store: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The job's store; else MASTER_ADDR and MASTER_PORT."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until they have left.", min=0)] = 60.0,
) -> None:
    """Ask ranks of an elastic job to leave it for good: each ends its step first, and the others go on."""
    from trigram.cli import drain  # each command loads what it needs

    raise typer.Exit(drain.send_away(store, ranks, timeout))


@app.command("evict")
def evict_command(
    ranks: Annotated[list[int], typer.Argument(metavar="RANK...", help="Members of the job.", min=0)],
    *,
    store: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The job's store; else MASTER_ADDR and MASTER_PORT."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until they are out.", min=0)] = 60.0,
) -> None:
    """Take ranks out of an elastic job at once, such as one that hangs: each says where it is, and ends."""
    from trigram.cli import drain  # each command loads what it needs

    raise typer.Exit(drain.send_away(store, ranks, timeout, evicts=True))


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a job (TRIGRAM_REPORT).")],
    second: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of another.")],
) -> None:
    """Compare the reports of two jobs."""
    from trigram.observe import figures, report  # each command loads what it needs

    typer.echo(report.compare(figures.read(first), figures.read(second)))


@app.command("postmortem")
def postmortem_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the ranks' dumps (TRIGRAM_DUMP).")],
) -> None:
    """Say which rank a failed or stuck job has waited for, and in which call, from the dumps of its ranks."""
    from trigram.observe import postmortem  # each command loads what it needs

    typer.echo(postmortem.report(folder))


@app.command("demo")
def demo_command(
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks to start here; not under torchrun or mpiexec.")
    ] = 2,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the curves and numbers.")] = Path(
        "demo-out"
    ),
    every: Annotated[
        bool, typer.Option("--all", help="All algorithms, on two models, without the slow network.")
    ] = False,
) -> None:
    """Show the gain: a GPT over a network of 200 Mbit/s, with DistributedDataParallel and five algorithms."""
    from trigram.cli import slow_network  # each command loads what it needs
    from trigram.runtime import launch  # likewise

    needs = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    if absent := [package for module, package in needs.items() if find_spec(module) is None]:
        typer.echo(f"the demo needs {' and '.join(absent)}: pip install 'trigram[demo]'", err=True)
        raise typer.Exit(2)
    if os.environ.get("RANK", "0") == "0":  # who writes it finds out now: the trainings take minutes
        try:
            out.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=out).close()
        except OSError as error:
            raise typer.BadParameter(f"--out {out} cannot be written: {error}") from error
    if not launch.is_rank():
        command = launch.trigram_command(sys.argv[1:])
        more: dict[str, str] = {}
        if not every and slow_network.INSIDE not in os.environ:
            from trigram.cli.demo import MBIT  # likewise

            if not (why := slow_network.why_not()):
                slow_network.enter(MBIT, ranks, command)
            if not (more := slow_network.paced(MBIT)):
                typer.echo(f"The network is not slow here, so there is little to gain: {why}.\n", err=True)
        raise typer.Exit(launch.launch(ranks, command, environment=more).code)
    if every:
        from trigram.cli import every_algorithm  # likewise

        every_algorithm.run(out)
    else:
        from trigram.cli import demo  # likewise

        demo.run(out)
    launch.leave_job()


@app.command("doctor")
def doctor_command(
    *,
    hosts: Annotated[
        str | None, typer.Option(help="Check the ways between these hosts, over ssh: a,b,c.")
    ] = None,
    listen: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Check the ways to those that --join."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Take part in the check of a host that --listen.")
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="With --listen: hosts, this one among them.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send on each way.")] = 1.0,
    ssh: Annotated[
        str, typer.Option(help="With --hosts: what runs a command on a host.")
    ] = "ssh -o BatchMode=yes",
    python: Annotated[
        str | None, typer.Option(help="With --hosts: the Python there. As here, if not given.")
    ] = None,
    started: Annotated[bool, typer.Option("--started", hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="As text for a bug report, without secrets.")
    ] = False,
) -> None:
    """Check what this machine has for training, run two ranks on it, and say how to fix what is missing.

    With --hosts, or --listen on one host and --join on the others: who reaches whom, and what to change.
    """
    from trigram.cli import doctor  # each command loads what it needs

    if sum(given is not None for given in (hosts, listen, join)) > 1:
        raise typer.BadParameter("give one of --hosts, --listen and --join")
    if started:
        from trigram.cli import remote  # each command loads what it needs

        remote.obey(sys.stdin.fileno(), moves=False)
    if hosts is None and listen is None and join is None:
        raise typer.Exit(doctor.run(as_json=as_json, report=report))
    from trigram.cli.between import command  # likewise

    if hosts is not None:
        there = python or sys.executable
        raise typer.Exit(command.over(hosts, ssh, there, command.PORT, seconds, as_json))
    if join is not None:
        raise typer.Exit(command.join(join, seconds, as_json))
    assert listen is not None
    raise typer.Exit(command.listen(listen, count, seconds, as_json))


@app.command("test")
def test_command() -> None:
    """Test this installation: two ranks, every collective, a training beside DDP, the eight corners."""
    from trigram.cli import self_test  # each command loads what it needs

    raise typer.Exit(self_test.run())


@app.command("algorithms")
def algorithms_command() -> None:
    """List the algorithms by name, and the communication graphs."""
    from trigram.cli import algorithms  # each command loads what it needs

    algorithms.show()


app.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(
    predictions.plan_command
)
app.command("goodput")(predictions.goodput_command)
