"""Starts ranks on this machine: runs the same command once per rank, and waits until all have ended.

A rank is an ordinary process with torchrun's variables in its environment, so a script that runs here runs
under torchrun unchanged. If a rank fails, the others are ended too: they would wait for it.
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
# After a failure the other ranks have this long to detect it and print their errors; then they are ended.
GRACE_SECONDS = 2.0
TIMED_OUT = 124


class Outcome(NamedTuple):
    """The exit code of the first rank that failed, or 0, and the error output of all ranks that failed."""

    code: int
    errors: str


def is_rank() -> bool:
    """Whether torchrun, mpiexec or this module started this process as one rank of a job.

    Under mpiexec this sets torchrun's variables from MPI's.
    """
    if "RANK" not in os.environ and under_mpiexec():
        _set_variables_from_mpi()
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

    Rank 0 writes to this terminal; the output of the others is dropped, except the errors of ranks that fail.

    Args:
        ranks: How many processes to start.
        argv: The command's arguments, as in `sys.argv[1:]`.
        environment: Variables to set for the ranks, in addition to torchrun's.
        quiet: Drop the output of rank 0 too, and only return the errors.
        timeout: Seconds after which all ranks are ended and the exit code is 124; None: no limit.

    Returns:
        The exit code and the failed ranks' error output.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    base = threads | job_environment(ranks) | dict(environment or {})
    command = [sys.executable, "-m", "trigram", *argv]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        error_files: list[IO[bytes] | None] = []
        previous = signal.signal(signal.SIGTERM, _exit)
        stack.callback(signal.signal, signal.SIGTERM, previous)
        stack.callback(end, processes)
        for rank in range(ranks):
            shown = rank == 0 and not quiet
            errors = None if shown else stack.enter_context(tempfile.TemporaryFile())
            error_files.append(errors)
            output = None if shown else subprocess.DEVNULL
            processes.append(start_rank(rank, command, base, stdout=output, stderr=errors))
        try:
            code, failed = _watch(processes, timeout)
        except KeyboardInterrupt:
            # The terminal has sent SIGINT to the ranks too: give them time to exit.
            _wait(processes, GRACE_SECONDS)
            return Outcome(128 + signal.SIGINT, "")
        reports = "".join(_report(rank, processes[rank].returncode, error_files[rank]) for rank in failed)
        if reports and not quiet:
            sys.stderr.write(reports)
        return Outcome(code, reports)


def job_environment(ranks: int) -> dict[str, str]:
    """The environment of this process, with torchrun's variables for a job of `ranks` ranks on this host."""
    # A torchrun that started this process has set variables about its store, which the new job does not use.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return inherited | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def start_rank(
    rank: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | int | None,
) -> subprocess.Popen[bytes]:
    """Starts the process of one rank.

    Args:
        rank: The rank, which is also its local rank.
        command: The program and its arguments.
        environment: What `job_environment` returned, and more.
        stdout: Where its output goes, as `subprocess.Popen` takes it.
        stderr: Where its errors go.
    """
    return subprocess.Popen(
        list(command),
        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run, with SIGTERM and two seconds later with SIGKILL."""
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if process.poll() is None:
                stop(process)
        _wait(processes, GRACE_SECONDS)


def free_port() -> int:
    """A TCP port of the loopback interface that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> tuple[int, list[int]]:
    """Waits until all have ended or one has failed; returns the exit code and the ranks that failed."""
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
    # The return code of a process that a signal ended is negative; shells use 128 + signal.
    return code if code > 0 else 128 - code, failed


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def _report(rank: int, code: int, errors: IO[bytes] | None) -> str:
    """How a rank failed, and its error output unless that went to this terminal."""
    how = f"ended by the signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    text = ""
    if errors is not None:
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
    return f"trigram: rank {rank} failed {how}\n" + (f"{text}\n" if text else "")


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _set_variables_from_mpi() -> None:
    """Sets torchrun's variables from MPI's world, with mpi4py; exits if it is missing or does not fit."""
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
        address = "127.0.0.1"  # on one host the name need not resolve
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def leave_job() -> None:
    """Shuts trigram down, and then torch.distributed, whose store trigram may use."""
    import torch.distributed as dist

    import trigram  # takes seconds, and a process that only starts ranks does not need it

    trigram.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
