"""Ranks on this machine: the command line run again, once per rank, watched until the last has ended.

A rank is an ordinary process with torchrun's variables in its environment, so that what runs here runs under
torchrun unchanged. One that fails takes the others with it, which would wait for it in vain.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import IO, NamedTuple

POLL_SECONDS = 0.02
# The survivors of a failure find it out themselves and say what they know; then they are ended.
GRACE_SECONDS = 2.0
TIMED_OUT = 124


class Outcome(NamedTuple):
    """How a launch ended: the first failing rank's exit code, or 0, and what the failed ranks said."""

    code: int
    errors: str


def is_rank() -> bool:
    """Whether torchrun, mpiexec, this module or the like started this process as one rank of a job.

    Under mpiexec torchrun's variables are derived from MPI, so that the rest need not know the difference.
    """
    if "RANK" not in os.environ and under_mpiexec():
        _adopt_mpi()
    return "RANK" in os.environ


def under_mpiexec() -> bool:
    """Whether an MPI launcher (MPICH's and Intel's, or Open MPI's) started this process."""
    return "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def launch(
    ranks: int,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    timeout: float | None = None,
) -> Outcome:
    """Runs `python -m trigram ARGV` as `ranks` processes and waits for them.

    Rank 0 has this terminal; of the others nothing is shown unless one fails.

    Args:
        ranks: How many processes to start.
        argv: The command's arguments, as in `sys.argv[1:]`.
        environment: Variables set for the ranks beside the launcher's own.
        quiet: Show nothing of rank 0 either; what failing ranks said is in the outcome only.
        timeout: Seconds after which all ranks are ended and the exit code is 124; None waits for ever.

    Returns:
        The exit code and the failed ranks' error output.
    """
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    # A torchrun above us has told our process things about its own store that do not hold for these ranks.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    base = threads | inherited | shared | dict(environment or {})
    command = [sys.executable, "-m", "trigram", *argv]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        said: list[IO[bytes] | None] = []
        previous = signal.signal(signal.SIGTERM, _leave)
        stack.callback(signal.signal, signal.SIGTERM, previous)
        stack.callback(end, processes)
        for rank in range(ranks):
            shown = rank == 0 and not quiet
            errors = None if shown else stack.enter_context(tempfile.TemporaryFile())
            said.append(errors)
            processes.append(
                subprocess.Popen(
                    command,
                    env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=None if shown else subprocess.DEVNULL,
                    stderr=errors,
                )
            )
        try:
            code, failed = _watch(processes, timeout)
        except KeyboardInterrupt:
            # The terminal has interrupted the ranks too: let them leave by themselves.
            _wait(processes, GRACE_SECONDS)
            return Outcome(128 + signal.SIGINT, "")
        reports = "".join(_report(rank, processes[rank].returncode, said[rank]) for rank in failed)
        if reports and not quiet:
            sys.stderr.write(reports)
        return Outcome(code, reports)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those of the processes that still run: SIGTERM, and two seconds later SIGKILL."""
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if process.poll() is None:
                stop(process)
        _wait(processes, GRACE_SECONDS)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> tuple[int, list[int]]:
    """Waits for all to end or one to fail; returns the exit code, and which ranks failed by themselves."""
    deadline = None if timeout is None else time.monotonic() + timeout
    first = None
    while first is None:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return 0, []
        first = next((rank for rank, code in enumerate(codes) if code), None)
        if deadline is not None and time.monotonic() > deadline:
            return TIMED_OUT, []
        time.sleep(POLL_SECONDS)
    _wait(processes, GRACE_SECONDS)
    code = processes[first].returncode
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    # A process ended by a signal has a negative code here; a shell's convention is 128 + signal.
    return code if code > 0 else 128 - code, failed


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def _report(rank: int, code: int, said: IO[bytes] | None) -> str:
    """What a failed rank said, unless this terminal has seen it already."""
    how = f"ended by the signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    text = ""
    if said is not None:
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
    return f"trigram: rank {rank} failed {how}\n" + (f"{text}\n" if text else "")


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _adopt_mpi() -> None:
    """Sets torchrun's variables from MPI's world, if mpi4py is there to ask."""
    try:
        from mpi4py import MPI
    except ImportError:
        sys.exit(
            "trigram: under mpiexec mpi4py is needed: pip install mpi4py, or start the ranks with torchrun"
        )
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    started = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    if world.size != started:
        sys.exit(
            f"trigram: mpiexec started {started} ranks, but mpi4py sees {world.size}: install mpi4py for "
            "the MPI of this mpiexec"
        )
    address, port = world.bcast((socket.gethostname(), free_port()) if world.rank == 0 else None)
    if local.size == world.size:
        address = "127.0.0.1"  # A host name that does not resolve is no reason to fail inside one host.
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def leave_job() -> None:
    """Ends this rank's part in the job: trigram's first, for torch.distributed may have lent it its store."""
    import torch.distributed as dist

    import trigram  # takes seconds, and whoever starts ranks does not need it

    trigram.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
