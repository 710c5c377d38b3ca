r"""Compares all_reduce between hosts over TCP: gloo, and trigram in several versions or with settings.

    python benches/paired_hosts.py --hosts 4 gloo now=python "summed=python:TRIGRAM_CHECKSUM=on"
    python benches/paired_hosts.py --hosts 4 --rate 1gbit gloo before=../before/python after=python
    python benches/paired_hosts.py --hosts 2 --rate 200mbit --second 200mbit one=python \
        two=python:TRIGRAM_IFACE=eth0,eth1
    python benches/paired_hosts.py --call reduce_scatter --hosts 2 --ranks 2 gloo now=python:memory=registered

A contestant is `gloo`, `NAME=PATH[:VARIABLE=VALUE...]` (the folder with the package `trigram`; settings,
`via`, and `memory=registered` for tensors from `trigram.empty`), or `mpich=/path/to/mpiexec` (all_reduce by
MPICH over TCP, where mpi4py is installed beside it). All contestants have `--ranks` ranks on every host
(network namespaces; needs root), and take turns, so that
other load on the machine affects all alike. The table has the median time, the median and the quartiles of
the ratios of pairs (above 1: faster than the first contestant), and the processor time of all ranks together.
Sums are checked. Of reduce_scatter and all_gather, `--sizes` are those of the whole: all blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import hosts
import torch
from slow_cores import SlowCores

from trigram.runtime.launch import free_port

CLONE_NEWNET = 0x40000000
PAYLOAD = 0.948
"""Of a cable's rate, with an MTU of 1500."""


def rank_main(spec: str, settings: dict[str, str], namespace: str, asked: TextIO, told: TextIO) -> None:
    """One rank of a contestant that enters its host by itself."""
    entry = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(entry, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"entering {namespace}")
    os.environ.update(settings)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    world, what = int(settings["WORLD_SIZE"]), settings["BENCH_CALL"]
    make: Callable[[int], torch.Tensor] = torch.ones
    if spec == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        calls: dict[str, Callable[..., object]] = {
            "all_reduce": dist.all_reduce,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_gather": dist.all_gather_into_tensor,
            "all_to_all": dist.all_to_all_single,
            "broadcast": functools.partial(dist.broadcast, src=0),
        }
        call = calls[what]
    else:
        path, *variables = spec.split(":")
        chosen = dict(each.split("=", 1) for each in variables)
        via, memory = chosen.pop("via", None), chosen.pop("memory", None)
        os.environ.update(chosen)
        for name in [name for name in sys.modules if name.split(".")[0] == "trigram"]:
            del sys.modules[name]
        sys.path.insert(0, str(Path(path).resolve()))
        import trigram

        trigram.init()
        call = functools.partial(trigram.all_reduce, via=via) if via else getattr(trigram, what)
        if what == "broadcast":
            call = functools.partial(trigram.broadcast, src=0)
        if memory == "registered":
            make = trigram.empty
    if what in ("all_reduce", "broadcast"):
        result = float(world) if what == "all_reduce" else 1.0
        answer(spec, call, lambda size: (make(size // 4),), 1.0, result, asked, told)
        return

    def tensors(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole, part = make(size // 4 // world * world), make(size // 4 // world)
        if what == "all_to_all":
            return make(len(whole)), whole
        return (part, whole) if what == "reduce_scatter" else (whole, part)

    answer(spec, call, tensors, 1.0, float(world) if what == "reduce_scatter" else 1.0, asked, told)


def mpi_main(folder: Path) -> None:
    """One rank of MPI, started by its launcher."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    ask, told_to = folder / f"ask.{world.rank}", folder / f"told.{world.rank}"
    with ask.open() as asked, told_to.open("w", 1) as told:

        def all_reduce(tensor: torch.Tensor) -> None:
            world.Allreduce(MPI.IN_PLACE, tensor.numpy())

        answer("mpi", all_reduce, lambda size: (torch.ones(size // 4),), 1.0, float(world.size), asked, told)


def answer(
    spec: str,
    call: Callable[..., object],
    make: Callable[[int], tuple[torch.Tensor, ...]],
    given: float,
    result: float,
    asked: TextIO,
    told: TextIO,
) -> None:
    """Answers requests `BYTES COUNT` with figures as JSON, one line each. The first tensor that `make` makes
    for a number of bytes is the output, the last the input; they may be one."""
    made: dict[int, tuple[torch.Tensor, ...]] = {}
    told.write("ready\n")
    for line in asked:
        size, count = map(int, line.split())
        tensors = made.setdefault(size, make(size))
        tensors[0].fill_(-1.0)
        tensors[-1].fill_(given)
        call(*tensors)
        if not bool((tensors[0] == result).all()):
            raise SystemExit(f"{spec}: the result of {size} bytes is wrong")
        before, times = resource.getrusage(resource.RUSAGE_SELF), []
        for _ in range(count):
            started = time.perf_counter()
            call(*tensors)
            times.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        told.write(json.dumps([statistics.median(times), spent / count]) + "\n")


class Contestant:
    """The ranks of one contestant, as many on each host."""

    def __init__(
        self, text: str, where: hosts.Hosts, folder: Path, ranks: int, what: str, cores: int | None
    ) -> None:
        self.name, _, spec = text.partition("=")
        self.asks: list[TextIO] = []
        self.answers: list[TextIO] = []
        self.pids: list[int] = []
        self.launched = spec.endswith("mpiexec")
        if self.launched:
            self._start_mpi(Path(spec), where, folder / self.name)
        else:
            self._fork(text, spec, where, ranks, what, cores)
        for each in self.answers:
            if each.readline() != "ready\n":
                raise SystemExit(f"{self.name}: a rank has failed")

    def _start_mpi(self, mpiexec: Path, where: hosts.Hosts, folder: Path) -> None:
        folder.mkdir()
        pipes = [(folder / f"ask.{rank}", folder / f"told.{rank}") for rank in range(where.count)]
        for pipe in (each for pair in pipes for each in pair):
            os.mkfifo(pipe)
        # In place of ssh: the launcher gives options, the host, and a command for its shell.
        enter = folder / "enter"
        cases = "\n".join(
            f'{address}) shift; exec ip netns exec {name} sh -c "$*" ;;'
            for address, name in zip(where.addresses, where.names, strict=True)
        )
        enter.write_text(f'#!/bin/sh\nwhile :; do case "$1" in\n{cases}\n*) shift ;;\nesac; done\n')
        enter.chmod(0o755)
        libraries = next(mpiexec.parent.parent.glob("lib/python*/site-packages"))
        command = ["ip", "netns", "exec", where.names[0], str(mpiexec), "-launcher", "ssh"]
        command += ["-launcher-exec", str(enter), "-iface", hosts.INTERFACE, "-ppn", "1"]
        command += ["-hosts", ",".join(where.addresses), "-n", str(where.count)]
        command += ["-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", hosts.INTERFACE]
        command += ["-genv", "PYTHONPATH", f"{libraries}:{os.environ.get('PYTHONPATH', '')}"]
        command += ["-genv", "MPI4PY_LIBMPI", str(mpiexec.parent.parent / "lib" / "libmpi.so.12")]
        command += [sys.executable, __file__, "--mpi-rank", str(folder)]
        launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)

        def give_up(*_: object) -> None:
            launcher.terminate()
            launcher.wait()
            raise SystemExit(
                f"{self.name}: its ranks have not started; is mpi4py installed beside {mpiexec}?"
            )

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(30)  # Opening waits for the ranks, which may not start.
        self.asks = [ask.open("w", 1) for ask, _ in pipes]
        self.answers = [told.open() for _, told in pipes]
        signal.alarm(0)
        self.pids.append(launcher.pid)

    def _fork(
        self, text: str, spec: str, where: hosts.Hosts, ranks: int, what: str, cores: int | None
    ) -> None:
        port = str(free_port())
        for rank in range(where.count * ranks):
            settings = {
                "BENCH_CALL": what,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank // where.count),
                "WORLD_SIZE": str(where.count * ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": where.addresses[0],
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
                "TRIGRAM_IFACE": hosts.INTERFACE,
            }
            inward, ask = os.pipe()
            answer, outward = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    if cores:
                        first = rank % where.count * cores
                        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[first : first + cores]))
                    with os.fdopen(inward) as asked, os.fdopen(outward, "w", buffering=1) as told:
                        rank_main(spec or text, settings, where.names[rank % where.count], asked, told)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
            os.close(inward)
            os.close(outward)
            self.asks.append(os.fdopen(ask, "w", buffering=1))
            self.answers.append(os.fdopen(answer))
            self.pids.append(pid)

    def run(self, size: int, count: int) -> tuple[float, float]:
        """Seconds of rank 0 per call, and processor seconds of all ranks per call."""
        for each in self.asks:
            each.write(f"{size} {count}\n")
        lines = [each.readline() for each in self.answers]
        if not all(lines):
            raise SystemExit(f"{self.name}: a rank has failed")
        rows: list[Any] = [json.loads(line) for line in lines]
        return rows[0][0], sum(row[1] for row in rows)

    def end(self) -> None:
        """Ends the ranks."""
        for each in self.asks:
            each.close()
        for pid in self.pids:
            if not self.launched:  # A rank of MPI ends when nothing more can be asked.
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument(
        "--call",
        choices=("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"),
        default="all_reduce",
    )
    parser.add_argument("--cores", type=int, help="of each host, which no other has; else all have all")
    parser.add_argument("--rate", help="of each cable; else unshaped")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds between hosts, one way")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of frames, each way")
    parser.add_argument("--second", help="the rate of a second cable of each host, eth1")
    parser.add_argument(
        "--core-share", type=float, help="a machine of many cores that are so fast, see slow_cores.py"
    )
    parser.add_argument("--sizes", default="65536,1048576,26214400", help="bytes, with commas")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--mpi-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("contestants", nargs="*")
    args = parser.parse_args()
    if args.mpi_rank:
        mpi_main(args.mpi_rank)
        return
    if args.cores and args.cores * args.hosts > len(os.sched_getaffinity(0)):
        parser.error(f"{args.hosts} hosts of {args.cores} cores are more than this process may use")
    sizes = [int(each) for each in args.sizes.split(",")]
    teams: list[Contestant] = []
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.Hosts(args.hosts, args.rate, args.delay, args.loss, args.second) as where,
        SlowCores(args.core_share) if args.core_share else nullcontext() as cores,
    ):
        try:
            for each in args.contestants:
                teams.append(Contestant(each, where, Path(folder), args.ranks, args.call, args.cores))
            # Rates are known after some calls; only then are the schedules those of a long job.
            pace = {(team.name, size): team.run(size, 14)[0] for team in teams for size in sizes}
            if cores:
                cores.limit(pid for team in teams for pid in team.pids)
                pace = {(team.name, size): team.run(size, 2)[0] for team in teams for size in sizes}
            deadline = time.monotonic() + args.seconds
            turn = 0
            while time.monotonic() < deadline:
                for size in sizes:
                    for i in range(len(teams)):
                        team = teams[(i + turn) % len(teams)]
                        count = max(1, min(400, round(0.15 / pace[team.name, size])))
                        figures.setdefault((team.name, size), []).append(team.run(size, count))
                turn += 1
        finally:
            for team in reversed(teams):  # Ranks forked later hold the pipes of those before them.
                team.end()
    print("| bytes | contestant | ms | of the wire | times as fast | quartiles | processor ms |")
    print("|---:|---|---:|---:|---:|---|---:|")
    for size in sizes:
        for team in teams:
            rows, first = figures[team.name, size], figures[teams[0].name, size]
            ratios = [b[0] / a[0] for a, b in zip(rows, first, strict=True)] * 2
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = 1000 * statistics.median(row[0] for row in rows)
            of_wire = ""
            if args.rate and args.rate.endswith("gbit"):
                per_second = float(args.rate.removesuffix("gbit")) * PAYLOAD * 1e9 / 8
                ways = 2 if args.call == "all_reduce" else 1
                of_wire = f"{ways * (args.hosts - 1) / args.hosts * size / per_second / ms * 1000:.3f}"
            spent = 1000 * statistics.median(row[1] for row in rows)
            cells = f"{ms:.3f} | {of_wire} | {middle:.2f} | {low:.2f} {high:.2f} | {spent:.1f}"
            print(f"| {size} | {team.name} | {cells} |")


if __name__ == "__main__":
    main()
