"""Measures what needs a machine of many cores, beside gloo, and writes one page, in under five minutes.

    python benches/many_cores.py [--seconds 10] [--out many-cores.md]

Hosts are network namespaces with cores of their own (needs root and iproute2), as many as there are cores
for. `none` has no lanes, `auto` those that the engine takes by itself. Each table is one of
`paired_hosts.py`, whose command stands above it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = ["none=python:TRIGRAM_LANES=0", "auto=python"]
ALL = "65536,1048576,26214400,104857600"
LARGE = "1048576,26214400"
GOAL = "1.2 times gloo at each size"


def between(hosts: int, cores: int, *options: str, sizes: str = ALL) -> list[str]:
    """The options of hosts without and with lanes, beside gloo."""
    return ["--hosts", str(hosts), "--cores", str(cores), "--sizes", sizes, *options, "gloo", *OURS]


def inside(ranks: int, *contestants: str) -> list[str]:
    """The options of ranks on one host."""
    return ["--hosts", "1", "--ranks", str(ranks), "--sizes", ALL, *contestants]


def tables(cores: int) -> list[tuple[str, str, list[str]]]:
    """A title, a goal, and the options of each table that fits on so many cores."""
    found = [
        (f"{hosts} hosts of {each} cores", GOAL, between(hosts, each))
        for hosts, each in ((2, 4), (4, 4), (8, 2))
        if hosts * each <= cores
    ]
    if cores < 8:
        return found
    hosts, each = (4, 4) if cores >= 16 else (2, 4)
    wire = "0.95 of the wire at 25 MiB, 0.9 at 1 MiB"
    found.append((f"{hosts} hosts at 10 Gbit", wire, between(hosts, each, "--rate", "10gbit", sizes=LARGE)))
    found.append(("2 hosts at 25 Gbit", "0.9 of the wire", between(2, 4, "--rate", "25gbit", sizes=LARGE)))
    for call in ("reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        found.append((f"{call}, {hosts} hosts", GOAL, between(hosts, each, "--call", call, sizes=LARGE)))
    ranks = 8 if cores >= 16 else 4
    found.append((f"{ranks} ranks on one host", "3 times gloo at 25 MiB", inside(ranks, "gloo", *OURS)))
    registered = [f"{each}:memory=registered" for each in OURS]
    found.append((f"{ranks} ranks on one host, registered memory", "", inside(ranks, *registered)))
    return found


def main() -> None:
    """Runs all tables that fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each table")
    parser.add_argument("--within", type=float, default=290.0, help="seconds, after which no table begins")
    parser.add_argument("--out", type=Path, default=Path("many-cores.md"))
    args = parser.parse_args()
    cores, began = len(os.sched_getaffinity(0)), time.monotonic()
    head = f"# Many cores\n\n{cores} cores, {time.strftime('%d %B %Y')}. all_reduce of float32 unless said.\n"
    args.out.write_text(head)
    for title, goal, options in tables(cores):
        command = ["benches/paired_hosts.py", "--seconds", str(args.seconds), *options]
        text = f"\n## {title}\n\n    python {shlex.join(command)}\n\n"
        text += f"Goal: {goal}.\n\n" if goal else ""
        if time.monotonic() - began > args.within:
            text += "Left out: the time was over.\n"
        else:
            ran = subprocess.run(
                [sys.executable, str(HERE / "paired_hosts.py"), *command[1:]],
                check=False,
                cwd=HERE.parent,
                stdout=subprocess.PIPE,
                text=True,
            )
            text += ran.stdout if ran.returncode == 0 else f"It failed with exit status {ran.returncode}.\n"
        print(text, flush=True)
        with args.out.open("a") as page:  # At once: the machine may be taken away.
            page.write(text)


if __name__ == "__main__":
    main()
