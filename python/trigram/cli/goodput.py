"""`trigram goodput`: what faults cost a job, elastic and from checkpoints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, astuple, dataclass, fields

import typer

from trigram.cli.plan import PAYLOAD, RATES, SECONDS, UNITS, quantity
from trigram.errors import MisuseError
from trigram.plan.goodput import Goodput, Setting, elastic, meetings, restarted

TIMES = SECONDS | {"min": 60.0, "h": 3600.0, "d": 86400.0}
COUNTS = UNITS | {"B": 1e9}
STATE, WEIGHTS = 12, 4
"""Bytes for each parameter of the training state (with Adam's moments), and of weights in float32."""
HEAD = ("job", "goodput", "waiting", "again", "absent")


@dataclass(frozen=True)
class Times:
    """The options that are times, as they were typed."""

    step: str
    mtbf: str
    back: str
    restart: str
    checkpoint: str
    regroup: str
    silence: str


def show(ranks: int, times: Times, params: str, rate: str, silent: float, every: int, as_json: bool) -> None:
    """Prints the table."""
    found = {
        field.name: quantity(text, TIMES, f"--{field.name}")
        for field, text in zip(fields(times), astuple(times), strict=True)
    }
    count = quantity(params, COUNTS, "--params")
    speed = PAYLOAD * quantity(rate, RATES, "--rate")
    state, transfer = STATE * count, STATE * count / speed
    mean = 2 * (ranks - 1) / ranks * WEIGHTS * count / speed  # what the links of a ring carry
    try:
        moments = transfer * (1 - WEIGHTS / STATE)
        setting = Setting(ranks, transfer=transfer, moments=moments, mean=mean, silent=silent, **found)
    except MisuseError as error:
        raise typer.BadParameter(str(error)) from error
    kinds = meetings(every)
    rows = [(f"from checkpoints every {readable(setting.interval)}", restarted(setting))]
    rows += [(f"elastic, {kind.title}", elastic(setting, kind)) for kind in kinds]
    if as_json:
        names = {f"elastic, {kind.title}": kind.algorithms for kind in kinds}
        content = [{"job": job, "algorithms": names.get(job), **asdict(row)} for job, row in rows]
        sys.stdout.write(json.dumps({"setting": asdict(setting), "rows": content}, indent=1) + "\n")
        return
    sys.stdout.write(
        f"{ranks} ranks, a step of {readable(setting.step)}; a fault every {readable(setting.between)}, and "
        f"a rank that joins receives {state / 1e9:.3g} GB in {readable(transfer)}\n\n{table(rows)}\n"
    )
    for kind in kinds:
        sys.stdout.write(f"{kind.title}: {', '.join(kind.algorithms)}\n")


def table(rows: list[tuple[str, Goodput]]) -> str:
    """A line for each row; what is lost in per cent of all ranks' time."""
    cells = [HEAD, *((job, *(f"{100 * part:.2f} %" for part in astuple(found))) for job, found in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEAD))]
    lines = [
        "  ".join(c.rjust(w) if k else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def readable(seconds: float) -> str:
    """A time in the largest unit of which it has one."""
    unit = max((u for u in TIMES if TIMES[u] <= seconds), key=TIMES.__getitem__, default="us")
    return f"{seconds / TIMES[unit]:.3g} {unit}"
