"""What faults do to a job of three ranks: is a healthy rank lost, is a number wrong, how soon are the dead
named?

    python benches/faults.py [--repeats 20] [--faults kill,stop] [--transports shm,tcp,hosts] [--json FILE]

Every rank runs all_reduce in a loop and checks each result, while one rank, another in each run, suffers the
fault. A *lasting* fault ends it or cuts it off: all others must name it, and the time is from the fault to
the last of their errors. After any other fault all ranks must go on. `lost` counts runs in which a healthy
rank was lost, `wrong` those with a wrong number, `failed` those that failed otherwise. `stop` and `cut` set
TRIGRAM_SILENCE=1.2; all others run with the default, 15 s. `link` and `cut` need hosts: network namespaces
(root and `ip`); `freeze` needs root and a cgroup with a freezer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from tests.faults import test_liveness as liveness
from tests.faults import test_machine as machine
from tests.support import cgroups, netns
from tests.support.harness import Ranks, RanksFailed

WORLD = 3
HOSTS = "hosts"


@dataclass
class Run:
    """One run: its ranks, and who suffers the fault."""

    ranks: Ranks
    victim: int


@dataclass
class Fault:
    """A fault, and what the ranks run meanwhile.

    Attributes:
        what: What happens to the victim.
        inject: Does it; None: the ranks do it to themselves.
        rank: What each rank runs.
        arguments: Its arguments after rank and world.
        lasting: Whether the victim is lost; the ranks return what `test_liveness.loop` returns.
        transports: On which transports.
        world: The number of ranks.
        environment: Environment variables of the ranks.
    """

    what: str
    inject: Callable[[Run], None] | None
    rank: Callable[..., Any] = liveness.paused
    arguments: tuple[Any, ...] = ()
    lasting: bool = False
    transports: tuple[str, ...] = ("shm", "tcp")
    world: int = WORLD
    environment: dict[str, str] = field(default_factory=dict)


def _kill(run: Run) -> None:
    run.ranks.signal(run.victim, signal.SIGKILL)


def _stop(run: Run) -> None:
    run.ranks.signal(run.victim, signal.SIGSTOP)


def _pause(run: Run) -> None:
    _stop(run)
    time.sleep(5)
    run.ranks.signal(run.victim, signal.SIGCONT)


def _hold(run: Run) -> None:
    _stop(run)
    time.sleep(2.5)
    run.ranks.signal(run.victim, signal.SIGCONT)


def _cable(run: Run, state: str) -> None:
    command = ["ip", "-n", netns._switch(), "link", "set", f"port{run.victim}", state]
    subprocess.run(command, check=True)


def _cut(run: Run) -> None:
    _cable(run, "down")


def _link(run: Run) -> None:
    _cable(run, "down")
    time.sleep(5)
    _cable(run, "up")


def _debug(run: Run) -> None:
    liveness._debug(run.ranks.pid(run.victim), 3)


def _freeze(run: Run) -> None:
    for root, file, freeze, thaw in machine.FREEZERS:
        with suppress(pytest.skip.Exception), cgroups.new(root, file) as folder:
            (folder / "cgroup.procs").write_text(str(run.ranks.pid(run.victim)))
            (folder / file).write_text(freeze)
            try:
                time.sleep(3)
            finally:
                (folder / file).write_text(thaw)
                (folder.parent / "cgroup.procs").write_text(str(run.ranks.pid(run.victim)))
            return
    raise SystemExit("freeze: this machine lets nobody make a cgroup")


SHORT = {"TRIGRAM_SILENCE": "1.2"}
FAULTS = {
    "kill": Fault("SIGKILL", _kill, liveness.loop, lasting=True),
    "core": Fault("SIGABRT, with a core dump of 0.5 GiB", None, machine.crashes, (0.5,), lasting=True),
    "stop": Fault("SIGSTOP, for ever", _stop, liveness.loop, lasting=True, environment=SHORT),
    "cut": Fault(
        "its cable is cut", _cut, liveness.loop, lasting=True, transports=(HOSTS,), environment=SHORT
    ),
    "pause": Fault("SIGSTOP for 5 s", _pause, arguments=(7.0,)),
    "debug": Fault("a debugger holds it for 3 s", _debug, arguments=(5.0,)),
    "freeze": Fault("its container is frozen for 3 s", _freeze, arguments=(5.0,)),
    "link": Fault("its cable is out for 5 s", _link, arguments=(7.0,), transports=(HOSTS,)),
    "disk": Fault("no room for log and checkpoint", _hold, machine.disk_is_full, (4.0,)),
    "stderr": Fault("nobody reads the logs", _hold, liveness.cannot_write, (4.0,)),
    "files": Fault("no free descriptor", None, liveness.without_descriptors, transports=("shm",)),
    "threads": Fault("no memory for a thread", None, liveness.without_threads),
    "map": Fault("no room to map what a peer shares", None, machine.cannot_map, transports=("shm",)),
    "memory": Fault("no room for registered memory", None, machine.cannot_allocate),
    "buffers": Fault("no room for the engine's buffers", None, machine.cannot_buffer),
    "crowd": Fault("16 ranks on these cores", None, arguments=(2.0,), world=16),
}


@dataclass
class Row:
    """The runs of one fault on one transport."""

    fault: str
    transport: str
    runs: int = 0
    lost: int = 0
    wrong: int = 0
    failed: int = 0
    ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        times = ""
        if self.ms:
            times = f"{min(self.ms):8.1f} {statistics.median(self.ms):8.1f} {max(self.ms):8.1f}"
        counts = f"{self.runs:4} {self.lost:5} {self.wrong:6} {self.failed:7}"
        return f"{self.fault:8} {self.transport:10} {counts}  {times}"


def once(fault: Fault, transport: str, victim: int, stack: ExitStack) -> float | None:
    """One run: milliseconds until the last survivor has named the victim, for a lasting fault.

    Raises:
        RanksFailed: A rank raised, died unasked or hung.
        AssertionError: The wrong rank was named.
    """
    hosts = None
    if transport == HOSTS:
        netns.make(fault.world)
        stack.callback(netns.remove, fault.world)
        hosts = list(range(fault.world))
    arguments, environment = fault.arguments, dict(fault.environment)
    if fault.rank is machine.crashes:
        arguments = (victim, *arguments)
        environment["CORE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
    named = "auto" if hosts else transport
    with Ranks(fault.world, fault.rank, *arguments, transport=named, hosts=hosts, env=environment) as ranks:
        run, began = Run(ranks, victim), time.monotonic()
        if fault.inject is not None:
            for rank in range(fault.world):
                ranks.await_said(rank, "in the loop", 60)
            time.sleep(0.05 + 0.013 * victim)  # somewhere in the loop
            began = time.monotonic()
            fault.inject(run)
        if not fault.lasting:
            ranks.results(120)
            return None
        others = [r for r in range(fault.world) if r != victim]
        while any(ranks.ranks[r].answer is None for r in others) and time.monotonic() < began + 60:
            ranks.hear(0.2)
        if fault.inject is None:
            began = next((said for said in ranks.ranks[victim].said if isinstance(said, float)), began)
        worst = 0.0
        for r in others:
            answer = ranks.ranks[r].answer
            if answer is None or answer[0] != "returned":
                raise RanksFailed(ranks.report())
            who, text, when, *_ = answer[1]
            assert who == victim, f"rank {r} lost rank {who}: {text}"
            if fault.rank is liveness.loop and answer[1][3]:
                raise RanksFailed("not equal")
            worst = max(worst, when - began)
        return worst * 1e3


def measure(name: str, transport: str, repeats: int) -> Row:
    """All runs of a fault on a transport."""
    row = Row(name, transport)
    for i in range(repeats):
        row.runs += 1
        try:
            with ExitStack() as stack:
                ms = once(FAULTS[name], transport, (i + 1) % WORLD, stack)
            if ms is not None:
                row.ms.append(ms)
        except AssertionError as e:  # RanksFailed is one
            text = str(e)
            if "PeerLostError" in text or " lost rank " in text:
                row.lost += 1
            elif "torch.equal" in text or "not equal" in text:
                row.wrong += 1
            else:
                row.failed += 1
            print(text, file=sys.stderr)
    return row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="runs of each fault on each transport")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, by name")
    parser.add_argument("--transports", default="shm,tcp,hosts", help="of shm, tcp and hosts")
    parser.add_argument("--json", type=Path, help="a file to which each row is added")
    args = parser.parse_args()
    os.environ.pop("TRIGRAM_SILENCE", None)
    print(
        f"{'fault':8} {'transport':10} {'runs':>4} {'lost':>5} {'wrong':>6} {'failed':>7}  "
        f"{'min ms':>8} {'median':>8} {'max':>8}",
        flush=True,
    )
    for name in args.faults.split(","):
        for transport in FAULTS[name].transports:
            if transport not in args.transports.split(","):
                continue
            row = measure(name, transport, args.repeats)
            print(row, flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
