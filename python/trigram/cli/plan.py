"""`trigram plan`: predicts a training step with every algorithm, and recommends one.

Offline from numbers on the command line, or by running a script for a few dozen steps.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import re
import sys
from pathlib import Path

import typer

from trigram.plan import costs, measuring, socket_cost
from trigram.plan.inputs import Compute, Job, Machines
from trigram.runtime import launch

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
PAYLOAD = 0.948
"""Of a link's rate, what payloads get: an MTU of 1500 without headers."""
MATRIX = 1024
_MOST_PARAMETERS = 1e12


def quantity(text: str, units: dict[str, float], what: str) -> float:
    """A positive number with a unit, such as ``420ms``, in the base unit."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if found and (unit := _unit(found[2], units)) is not None and found[1].count(".") <= 1:
        value = float(found[1]) * unit
        if 0 < value < math.inf:
            return value
    known = ", ".join(u for u in units if u)
    raise typer.BadParameter(f"{what} {text!r} is no positive number with one of the units {known}")


def _unit(text: str, units: dict[str, float]) -> float | None:
    return units.get(text, units.get(text.upper(), units.get(text.lower())))


def links(path: Path) -> list[float]:
    """Bytes per second of each host's link, from a file with lines ``host,rate`` such as ``node3,10gbit``."""
    try:
        rows = [
            row
            for row in csv.reader(path.read_text("utf-8-sig").splitlines())  # as spreadsheets write it
            if row and not row[0].startswith("#")
        ]
    except (OSError, UnicodeError, csv.Error) as error:
        raise typer.BadParameter(f"--links {path}: {error}") from error
    if rows and [cell.strip() for cell in rows[0]] == ["host", "rate"]:
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise typer.BadParameter(f"--links: row {number} of {path} is {','.join(row)!r}; write host,rate")
    if not rows:
        raise typer.BadParameter(f"--links: {path} names no host")
    return [PAYLOAD * quantity(rate, RATES, f"--links: the rate of {host}") for host, rate in rows]


def offline(
    params: str,
    compute: str,
    hosts: int | None,
    ranks_per_host: int,
    rate: str | None,
    rtt: str,
    links_file: Path | None,
    slow: float,
    cores: float,
) -> Job:
    """The job that the options describe; the costs of codecs are measured here."""
    if links_file is not None:
        rates = links(links_file)
        if rate is not None or hosts not in (None, len(rates)):
            raise typer.BadParameter(
                f"--links {links_file} has the rates of {len(rates)} hosts; leave out --rate and --hosts"
            )
    elif rate is not None:
        rates = [PAYLOAD * quantity(rate, RATES, "--rate")] * (2 if hosts is None else hosts)
    else:
        raise typer.BadParameter("give the rate of the links, --rate 10gbit or --links FILE")
    seconds = quantity(compute, SECONDS, "--compute")
    count = quantity(params, UNITS, "--params")
    if not 1 <= count <= _MOST_PARAMETERS:
        raise typer.BadParameter(f"--params {params!r} is not from 1 to {_MOST_PARAMETERS:.0e} parameters")
    step = Compute.even(int(count), seconds * slow, MATRIX)
    step = dataclasses.replace(step, typical=seconds, cores=cores)
    machines = Machines(tuple(rates), quantity(rtt, SECONDS, "--rtt") / 2, ranks_per_host, cores + 1)
    if ranks_per_host * len(rates) < 2:
        raise typer.BadParameter("one rank has nobody to average with; give --hosts or --ranks-per-host")
    measured = costs.measure([t.shape for t in step.tensors[:4]])
    measured = dataclasses.replace(measured, wire=socket_cost.measure(), message=socket_cost.message())
    return Job(step, machines, measured, "given; codecs measured on this machine")


def measured(command: list[str], ranks: int, steps: int, json_file: Path, allowed: str) -> int:
    """Runs a script with measuring switched on; in a process that a launcher has started, as that rank.

    Returns:
        The exit code.
    """
    setting = {measuring.VARIABLE: f"{steps}:{allowed}:{json_file.absolute()}"}
    if launch.is_rank():
        os.environ.update(setting)
        os.execvp(command[0], command)
    before = _version(json_file)
    code = launch.launch(ranks, command, environment=setting).code
    if code == 0 and _version(json_file) == before:
        sys.stderr.write(
            "trigram plan: the script has ended and has measured nothing; it must call with_bagua on more "
            "than one rank and train for enough steps\n"
        )
        return 1
    return code


def _version(file: Path) -> tuple[int, int] | None:
    """Another value once a file was replaced; None: there is none."""
    if not file.exists():
        return None
    about = file.stat()
    return about.st_ino, about.st_mtime_ns
