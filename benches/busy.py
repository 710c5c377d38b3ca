"""Compares all_reduce on one host, beside processes that compute: gloo, and trigram in several versions.

    python benches/busy.py gloo ours=python [--ranks 2,4] [--busy 0,2,4] [--transports shm,tcp]
    python benches/busy.py gloo before=../before/python ours=python --sizes 4,26214400

A contestant is `gloo` or `NAME=PATH[:VARIABLE=VALUE...]` (the folder with the package `trigram`; settings,
and `via`), with as many ranks, one thread each. For each number of busy processes, which this script starts
and always ends, the contestants take turns, so that other load on the machine affects all alike. A turn is a
row of calls; its time is that of the slowest rank. The table has microseconds per call (mean and median of a
row, of both the median over the turns), and the median and the quartiles of the ratios of neighbouring turns:
above 1 the contestant is faster than the first one. Results are checked, times never.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from paired import ratio

from trigram.runtime.launch import free_port

ROW = 0.15
"""Seconds of a row of calls, about."""


class Row(NamedTuple):
    """Seconds per call of one turn."""

    mean: float
    median: float


def rank_main(spec: str, settings: dict[str, str], asked: TextIO, told: TextIO) -> None:
    """One rank of a contestant: answers requests `BYTES COUNT` with seconds per call, one line each."""
    os.environ.update(settings)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    world = int(settings["WORLD_SIZE"])
    call: Callable[[torch.Tensor], object]
    if spec == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        call = dist.all_reduce
    else:
        path, *variables = spec.split(":")
        chosen = dict(each.split("=", 1) for each in variables)
        via = chosen.pop("via", None)
        os.environ.update(chosen)
        for name in [name for name in sys.modules if name.split(".")[0] == "trigram"]:
            del sys.modules[name]
        sys.path.insert(0, str(Path(path).resolve()))
        import trigram

        trigram.init()
        call = functools.partial(trigram.all_reduce, via=via)
    told.write("ready\n")
    for line in asked:
        size, count = map(int, line.split())
        tensor = torch.full((size // 4,), float(int(settings["RANK"]) + 1))
        call(tensor)
        if not bool((tensor == world * (world + 1) / 2).all()):
            raise SystemExit(f"{spec}: the sum of {size} bytes is wrong")
        tensor.zero_()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call(tensor)
            times.append(time.perf_counter() - began)
        told.write(json.dumps([sum(times) / count, statistics.median(times)]) + "\n")


class Contestant:
    """The ranks of one contestant."""

    def __init__(self, text: str, transport: str, ranks: int) -> None:
        self.name, _, spec = text.partition("=")
        self.asks: list[TextIO] = []
        self.answers: list[TextIO] = []
        self.pids: list[int] = []
        port = str(free_port())
        for rank in range(ranks):
            settings = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TRIGRAM_TRANSPORT": transport,
            }
            inward, ask = os.pipe()
            answer, outward = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    with os.fdopen(inward) as asked, os.fdopen(outward, "w", buffering=1) as told:
                        rank_main(spec or text, settings, asked, told)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
            os.close(inward)
            os.close(outward)
            self.asks.append(os.fdopen(ask, "w", buffering=1))
            self.answers.append(os.fdopen(answer))
            self.pids.append(pid)

    def wait(self) -> None:
        """Waits until the ranks have met."""
        for each in self.answers:
            if each.readline() != "ready\n":
                raise SystemExit(f"{self.name}: a rank has failed")

    def run(self, size: int, count: int) -> Row:
        """A row of calls, by the times of the slowest rank."""
        for each in self.asks:
            each.write(f"{size} {count}\n")
        lines = [each.readline() for each in self.answers]
        if not all(lines):
            raise SystemExit(f"{self.name}: a rank has failed")
        rows = [json.loads(line) for line in lines]
        return Row(max(mean for mean, _ in rows), max(median for _, median in rows))

    def end(self) -> None:
        """Ends the ranks."""
        for each in self.asks:
            each.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Has `count` processes that compute, until the block ends, however it ends."""
    with contextlib.ExitStack() as started:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            started.callback(process.wait)
            started.callback(process.kill)
        yield


def compare(teams: list[Contestant], sizes: list[int], turns: int) -> dict[tuple[str, int], list[Row]]:
    """The rows of all contestants by name and size; each turn begins with another contestant."""
    pace = {(team.name, size): team.run(size, 3).mean for team in teams for size in sizes}
    found: dict[tuple[str, int], list[Row]] = {key: [] for key in pace}
    for turn in range(turns):
        for size in sizes:
            for i in range(len(teams)):
                team = teams[(i + turn) % len(teams)]
                key = team.name, size
                row = team.run(size, max(2, min(400, round(ROW / pace[key]))))
                pace[key] = row.mean
                found[key].append(row)
    return found


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--busy", default="0,2,4", help="numbers of busy processes, with commas")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--sizes", default="4,65536,1048576,26214400", help="bytes, with commas")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("contestants", nargs="+")
    args = parser.parse_args()
    # A busy process or a rank that outlives this script would disturb whatever is measured next.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = [int(each) for each in args.sizes.split(",")]
    columns = ["ranks", "busy", "transport", "bytes", "contestant", "mean, us", "median, us"]
    columns += ["means: times as fast", "quartiles", "medians: times as fast", "quartiles"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for ranks, transport in ((r, t) for r in args.ranks.split(",") for t in args.transports.split(",")):
        with contextlib.ExitStack() as started:
            teams = []
            for each in args.contestants:
                teams.append(Contestant(each, transport, int(ranks)))
                started.callback(teams[-1].end)
            for team in teams:
                team.wait()
            for load in args.busy.split(","):
                with busy(int(load)):
                    found = compare(teams, sizes, args.turns)
                for team, size in ((team, size) for size in sizes for team in teams):
                    rows, first = found[team.name, size], found[teams[0].name, size]
                    cells = [ranks, load, transport, str(size), team.name]
                    cells += [f"{statistics.median(times) * 1e6:.1f}" for times in zip(*rows, strict=True)]
                    for times, others in zip(zip(*rows, strict=True), zip(*first, strict=True), strict=True):
                        compared = ratio(times, others)
                        cells += [f"{compared.median:.2f}", f"{compared.low:.2f} to {compared.high:.2f}"]
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
