"""`trigram plan` and `trigram goodput`: the options of what predicts, before a job or beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Allowed = Literal["exact", "close", "any"]


def plan_command(
    context: typer.Context,
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, help="With a script: ranks to start here.")
    ] = 2,
    steps: Annotated[int, typer.Option(min=4, help="With a script: steps to measure.")] = 12,
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 350M.")] = None,
    compute: Annotated[
        str | None, typer.Option(help="A step of a rank without communication: 420ms.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Number of hosts; 2, or those of --links.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Of each host's link: 10gbit, 100mbit.")] = None,
    rtt: Annotated[str, typer.Option(help="From host to host and back: 0.2ms.")] = "0.2ms",
    links: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rates of unequal links, lines of host,rate.")
    ] = None,
    slow: Annotated[
        float, typer.Option(min=1.0, max=1e6, help="The slowest rank's step, of the others'.")
    ] = 1.0,
    cores: Annotated[float, typer.Option(min=0.1, help="Cores that a rank computes on.")] = 1.0,
    allow: Annotated[Allowed, typer.Option(help="What the plan's decision may change.")] = "exact",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Predict a training step with every algorithm, and recommend one.

    trigram plan --params 350M --compute 420ms --hosts 16 --rate 10gbit --rtt 0.2ms

    trigram plan -n 4 -- python train.py ARGS
    """
    from trigram.cli import plan  # each command loads what it needs
    from trigram.model import planned

    if context.args:
        if rate is not None or links is not None:
            raise typer.BadParameter(
                "--rate and --links are for a plan without a job: a script behind -- is measured on the "
                "links that it has. For others give --params and --compute in its place"
            )
        raise typer.Exit(plan.measured(context.args, ranks, steps, json_file or Path("plan.json"), allow))
    if params is None or compute is None:
        raise typer.BadParameter("give a script behind --, or both --params and --compute")
    job = plan.offline(params, compute, hosts, ranks_per_host, rate, rtt, links, slow, cores)
    planned.show(job, json_file, allow)


def goodput_command(
    *,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="Ranks, or replicas of several ranks.")],
    step: Annotated[str, typer.Option(help="A training step: 2s.")],
    params: Annotated[str, typer.Option(help="Parameters of the model: 7B.")],
    rate: Annotated[str, typer.Option(help="Of the link of a rank that joins: 25gbit.")],
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of one rank.")] = "50000h",
    back: Annotated[str, typer.Option(help="From a fault until another process asks to join.")] = "10min",
    restart: Annotated[
        str, typer.Option(help="From a fault until a job that is not elastic trains again.")
    ] = "10min",
    checkpoint: Annotated[str, typer.Option(help="How long ranks wait for a checkpoint.")] = "30s",
    regroup: Annotated[str, typer.Option(help="How long a change of the members takes.")] = "1s",
    silence: Annotated[str, typer.Option(help="TRIGRAM_SILENCE.")] = "15s",
    silent: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of faults that only silence tells.")
    ] = 0.5,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between two averages, for diloco and the like.")
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Simulate what faults cost a job of any size, elastic and from checkpoints.

    trigram goodput --ranks 1000 --step 2s --params 7B --rate 25gbit --mtbf 50000h
    """
    from trigram.cli import goodput  # each command loads what it needs

    times = goodput.Times(step, mtbf, back, restart, checkpoint, regroup, silence)
    goodput.show(ranks, times, params, rate, silent, every, as_json)
