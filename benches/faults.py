"""Measures how soon ranks detect a fault: of 4 ranks in a loop of 16 MiB AllReduces, one is killed, stopped
or cut off.

    python benches/faults.py [--repeats 20] [--slow 5]

Times are from the signal until the last survivor has raised its error. The script checks the errors: every
survivor must name the victim, and all results before must be right. Hosts are network namespaces
(needs root and `ip`).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults.test_liveness import loop
from tests.support import netns
from tests.support.harness import Ranks

WORLD = 4


def once(fault: Callable[[Ranks, int], None], victim: int, transport: str, hosts: list[int] | None) -> float:
    """Seconds until the last survivor has raised its error."""
    with Ranks(WORLD, loop, transport=transport, hosts=hosts) as ranks:
        for rank in range(WORLD):
            ranks.await_said(rank, "in the loop")
        time.sleep(0.05 + 0.013 * victim)  # somewhere in the loop
        began = time.monotonic()
        fault(ranks, victim)
        others = [r for r in range(WORLD) if r != victim]
        while any(ranks.ranks[r].answer is None for r in others) and time.monotonic() < began + 60:
            ranks.hear(0.2)
        worst = 0.0
        for r in others:
            answer = ranks.ranks[r].answer
            if answer is None or answer[0] != "returned":
                raise SystemExit(f"rank {r} did not detect the fault: {answer}\n{ranks.report()}")
            who, _, when, wrong = answer[1]
            if who != victim or wrong:
                raise SystemExit(
                    f"rank {r} named rank {who}, not rank {victim}; largest wrong number {wrong}"
                )
            worst = max(worst, when - began)
        return worst


def kill(ranks: Ranks, victim: int) -> None:
    """Ends the process."""
    ranks.signal(victim, signal.SIGKILL)


def stop(ranks: Ranks, victim: int) -> None:
    """Stops the process."""
    ranks.signal(victim, signal.SIGSTOP)


def cut(_ranks: Ranks, victim: int) -> None:
    """Takes the victim's host off the switch."""
    subprocess.run(["ip", "-n", netns._switch(), "link", "set", f"port{victim}", "down"], check=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="kills of each kind")
    parser.add_argument("--slow", type=int, default=5, help="stops and cuts of each kind")
    args = parser.parse_args()
    print(f"{'fault':8} {'transport':10} {'n':>3} {'min ms':>8} {'median':>8} {'max':>8}", flush=True)
    cases: list[tuple[Callable[[Ranks, int], None], str, int]] = [
        (kill, "shm", args.repeats),
        (kill, "tcp", args.repeats),
        (stop, "shm", args.slow),
        (stop, "tcp", args.slow),
        (cut, "hosts", args.slow),
    ]
    for fault, transport, repeats in cases:
        times = []
        for i in range(repeats):
            victim = i % WORLD
            if transport != "hosts":
                times.append(once(fault, victim, transport, None))
                continue
            try:
                netns.make(WORLD)
                times.append(once(fault, victim, "auto", list(range(WORLD))))
            finally:
                netns.remove(WORLD)
        ms = [t * 1e3 for t in times]
        row = f"{min(ms):8.1f} {statistics.median(ms):8.1f} {max(ms):8.1f}"
        print(f"{fault.__name__:8} {transport:10} {len(ms):3} {row}", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
