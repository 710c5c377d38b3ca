"""Starts ranks on this machine: runs the same command once per rank, and waits until all have ended.

`trigram run`, `demo`, `bench` and `doctor` start their ranks here, and `chaos` with the same functions.

A rank is an ordinary process with torchrun's variables in its environment, so a script that runs here runs
under torchrun unchanged. If a rank fails, the others are ended too, unless it is started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from trigram.runtime.end_signals import EndSignals
from trigram.runtime.launchers import MEMBER, find, free_port, set_variables
from trigram.runtime.rank_output import RankOutput

POLL_SECONDS = 0.02
# After a failure the other ranks have this long to detect it and print their errors; then they are ended.
GRACE_SECONDS = 2.0
# Ranks that are ended have this long after the signal, as for saving a checkpoint; then they are killed.
END_SECONDS = 10.0
# After so long with ranks that still run, a line says what is waited for.
_SAYS_SO = 1.0
# A rank that was started again has this long after the others, which may have finished before it joined.
LATE_SECONDS = 20.0
TIMED_OUT = 124
FOLLOWED = 113
"""What `_watch`, and a part of a job that another machine has started, return when ranks were ended for what
those of other machines have done."""


class Elsewhere:
    """The ranks on the other hosts of a job; this is that of a job of one host."""

    def __call__(self, here: int) -> int:
        """Tells how many ranks are left here; returns how many are left elsewhere."""
        return 0

    def fail(self) -> None:
        """Tells that ranks here have failed, and the others are ended."""

    def has_failed(self) -> bool:
        """Whether ranks elsewhere have."""
        return False


_ALONE = Elsewhere()
_LEFT = 79
"""What a rank of an elastic job returns that `trigram drain` has sent away: it is not started again."""


class Outcome(NamedTuple):
    """How the ranks of a launch have ended.

    Attributes:
        code: The exit code of the first rank that failed, or 0.
        errors: The error output of all ranks that failed.
        codes: By rank, what its process returned before the others were ended; None: it ran.
        timed_out: The time was over.
        interrupted: By Ctrl-C.
        followed: They were ended because others have failed elsewhere.
    """

    code: int
    errors: str
    codes: tuple[int | None, ...] = ()
    timed_out: bool = False
    interrupted: bool = False
    followed: bool = False


@dataclass(frozen=True)
class Part:
    """The ranks of a job that one of its hosts starts.

    Attributes:
        first: The lowest of them.
        world: Ranks of the job.
        host: Where rank 0 is.
        port: Of the job's store there.
    """

    first: int
    world: int
    host: str
    port: int


def is_rank() -> bool:
    """Whether a launcher or this module started this process as one rank of a job.

    Under srun and mpiexec this sets torchrun's variables from the launcher's.
    """
    set_variables(os.environ)
    return "RANK" in os.environ


def refuse_inside_job() -> None:
    """Exits if a launcher has started this process as one of several, each of which would start a job."""
    process = find(os.environ)
    if process is not None and process.size != 1 and "RANK" not in os.environ:
        sys.exit(
            f"trigram run: {process.launcher} starts the ranks here; give it the script itself, such as "
            "srun python train.py. For a job in each of its processes set RANK=0 and WORLD_SIZE=1"
        )


def launch(
    ranks: int,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    show: Literal["none", "first", "all"] = "first",
    timeout: float | None = None,
    restarts: int = 0,
    least: int | None = None,
    prefix: bool = False,
    tee: Path | None = None,
    part: Part | None = None,
    elsewhere: Elsewhere = _ALONE,
) -> Outcome:
    """Runs a command as `ranks` processes and waits for them.

    Args:
        ranks: How many processes to start.
        command: The program and its arguments.
        environment: Variables to set for the ranks, in addition to torchrun's.
        show: Whose output goes to this terminal: nobody's, rank 0's or that of all ranks. That of the others
            is dropped, except the errors of ranks that fail.
        timeout: Seconds after which all ranks are ended and the exit code is 124; None: no limit.
        restarts: How often ranks of an elastic job that fail are started again, all ranks together. When one
            fails once more, the others are ended. Ranks are not started again once a rank has finished.
        least: With so many ranks left on all hosts, an elastic job goes on without those that have failed for
            good; None: the others are ended when one has.
        prefix: Each line that ranks write begins with the rank's number.
        tee: A folder that also gets what each rank writes, as ``rank3.log``; None: none does.
        part: These are ranks of a job on several hosts; None: they are the job.
        elsewhere: The ranks on the other hosts.

    Returns:
        The exit code and the failed ranks' error output.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    leaves = {}
    if restarts or least is not None:
        # A rank that was asked to leave and did, with status 0, would count as one that has finished.
        asked = 128 + signal.SIGTERM if restarts else _LEFT
        leaves = {"TRIGRAM_DRAIN_STATUS": str(asked), "TRIGRAM_LEFT_STATUS": str(_LEFT)}
    base = threads | job_environment(ranks, part) | leaves | dict(environment or {})
    first = 0 if part is None else part.first
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        error_files: list[IO[bytes] | None] = []
        signals = EndSignals(stack)
        output = RankOutput(prefix, tee)
        members = Path(stack.enter_context(tempfile.TemporaryDirectory())) if restarts else None
        stack.callback(output.drain)
        stack.callback(end, processes, signals)

        def is_member(rank: int) -> bool:
            return members is None or (members / str(rank)).exists()

        def start(rank: int) -> subprocess.Popen[bytes]:
            if members is not None:
                (members / str(rank)).unlink(missing_ok=True)
                base[MEMBER] = str(members / str(rank))
            if error_files[rank] is not None:
                return start_rank(
                    rank, command, base, stdout=subprocess.DEVNULL, stderr=error_files[rank], first=first
                )
            if not prefix and tee is None and (ranks == 1 or show == "first"):
                return start_rank(rank, command, base, stdout=None, stderr=None, first=first)
            with output.pipes(first + rank) as (stdout, stderr):
                return start_rank(rank, command, base, stdout=stdout, stderr=stderr, first=first)

        for rank in range(ranks):
            shown = show == "all" or (show == "first" and rank == 0)
            error_files.append(None if shown else stack.enter_context(tempfile.TemporaryFile()))
            processes.append(start(rank))
        try:
            code, failed = _watch(
                processes, signals, timeout, start, is_member, restarts, least, first, elsewhere
            )
            if code:
                elsewhere.fail()
        except KeyboardInterrupt:
            elsewhere.fail()
            end(processes, signals, interrupted=True)
            return Outcome(128 + signal.SIGINT, "", interrupted=True)
        codes = tuple(process.returncode for process in processes)
        output.drain()
        reports = "".join(
            _report(first + rank, processes[rank].returncode, error_files[rank]) for rank in failed
        )
        if failed and show == "all" and ranks > 1:
            origin = failed[-1]
            if processes[origin].returncode > 0:  # another may have raised before, and taken longer to end
                origin = min(failed, key=lambda rank: (output.raised_at(first + rank), rank != failed[-1]))
            reports += _why(output, first + origin, len(failed) > 1)
        if reports and show != "none":
            sys.stderr.write(reports)
            ends = not restarts and least is None and ranks > 1
            if ends and any(codes[rank] == -signal.SIGKILL for rank in failed):
                sys.stderr.write(
                    "trigram: the other ranks were ended; an elastic job goes on if started with --restarts, "
                    "which starts ranks again, or with --min\n"
                )
        over, followed = (code == special and not failed for special in (TIMED_OUT, FOLLOWED))
        return Outcome(1 if followed else code, reports, codes, timed_out=over, followed=followed)


def trigram_command(argv: Sequence[str]) -> list[str]:
    """The command line of `trigram ARGV`, for `launch`."""
    return [sys.executable, "-m", "trigram", *argv]


def job_environment(ranks: int, part: Part | None = None) -> dict[str, str]:
    """The environment of this process, with torchrun's variables for a job of `ranks` ranks on this host, or
    for that part of a job."""
    # A torchrun that started this process has set variables about its store, which the new job does not use.
    # Nor does it write for the launcher of this process.
    inherited = {
        n: value for n, value in os.environ.items() if not n.startswith("TORCHELASTIC_") and n != MEMBER
    }
    return inherited | {
        "WORLD_SIZE": str(ranks if part is None else part.world),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(0 if part is None else part.first // ranks),
        "MASTER_ADDR": "127.0.0.1" if part is None else part.host,
        "MASTER_PORT": str(free_port() if part is None else part.port),
    }


def start_rank(
    rank: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | int | None,
    first: int = 0,
) -> subprocess.Popen[bytes]:
    """Starts the process of one rank.

    Args:
        rank: Its local rank.
        command: The program and its arguments.
        environment: What `job_environment` returned, and more.
        stdout: Where its output goes, as `subprocess.Popen` takes it.
        stderr: Where its errors go.
        first: The lowest rank of this host.
    """
    return subprocess.Popen(
        list(command),
        env={**environment, "RANK": str(first + rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def end(
    processes: Sequence[subprocess.Popen[bytes]], signals: EndSignals, *, interrupted: bool = False
) -> None:
    """Ends the processes that still run: with SIGTERM, and ten seconds later with SIGKILL.

    A signal to this process meanwhile, as Ctrl-C, kills them at once.

    Args:
        processes: The processes.
        signals: What this process notes.
        interrupted: The terminal has sent them SIGINT: SIGTERM follows ten seconds later.
    """
    try:
        if interrupted:
            wait(processes, _SAYS_SO, signals)
            if any(process.poll() is None for process in processes):
                sys.stderr.write(
                    f"trigram: the ranks have {END_SECONDS:g} s to end after SIGINT; SIGTERM follows, which "
                    "reaches them also if that was sent to this process alone\n"
                )
            wait(processes, END_SECONDS - _SAYS_SO, signals)
        _stop(processes, signal.SIGTERM)
        wait(processes, END_SECONDS, signals)
    finally:
        _stop(processes, signal.SIGKILL)
        wait(processes, GRACE_SECONDS, signals)


def _stop(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _watch(
    processes: list[subprocess.Popen[bytes]],
    signals: EndSignals,
    timeout: float | None,
    start: Callable[[int], subprocess.Popen[bytes]],
    is_member: Callable[[int], bool],
    restarts: int,
    least: int | None,
    lowest: int,
    elsewhere: Elsewhere,
) -> tuple[int, list[int]]:
    """Waits until all have ended or one has failed for good.

    Args:
        processes: The processes by rank; one that is started again replaces the one before.
        signals: What this process notes.
        timeout: See `launch`.
        start: Starts a rank.
        is_member: Whether a rank has entered the job since it was started.
        restarts: See `launch`.
        least: See `launch`.
        lowest: The first of these ranks in the job.
        elsewhere: See `launch`.

    Returns:
        The exit code and the ranks that failed, of which the first to do so is last.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    first: int | None = None
    again: set[int] = set()
    lost: set[int] = set()  # without them the job goes on
    failure = 0  # how the first of them failed
    well = {0, _LEFT} if restarts or least is not None else {0}  # the others have failed
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code == _LEFT and _LEFT in well and rank not in lost:
                lost.add(rank)
                sys.stderr.write(f"trigram: rank {lowest + rank} has left the job for good\n")
            if code is None or code in well or rank in lost:
                continue
            if restarts and 0 not in codes:
                restarts -= 1
                sys.stderr.write(
                    f"trigram: rank {lowest + rank} {_how(code)}; starting it again ({restarts} restarts "
                    "left)\n"
                )
                processes[rank], codes[rank] = start(rank), None
                again.add(rank)
            elif rank in again and not is_member(rank) and _has_finished(codes, is_member):
                # What it failed for is that the others have finished, such as a store that is gone.
                lost.add(rank)
                sys.stderr.write(f"trigram: the job has finished without rank {lowest + rank}\n")
            elif first is None:
                left = codes.count(None) + codes.count(0)
                left += elsewhere(left)
                if least is None or left < least:
                    first = rank
                    continue
                lost.add(rank)
                failure = failure or code
                sys.stderr.write(f"trigram: rank {lowest + rank} {_how(code)}; the job goes on with {left}\n")
        if least is None and first is None and None in codes and elsewhere.has_failed():
            sys.stderr.write("trigram: ranks of another machine have failed; ending those here\n")
            return FOLLOWED, []
        here = codes.count(None) + codes.count(0)
        left = here + elsewhere(here)
        if least is not None and first is None and None in codes and left < least:
            are = "rank is" if left == 1 else "ranks are"
            sys.stderr.write(
                f"trigram: {left} {are} left on all machines, and --min is {least}; ending those here\n"
            )
            return FOLLOWED, []
        # Once a rank of an elastic job has finished, the others finish too, without the one that failed.
        if None not in codes or (first is not None and not (again and 0 in codes)):
            break
        late = {rank for rank, code in enumerate(codes) if code is None}
        if late <= again and 0 in codes and first is None:
            wait([processes[rank] for rank in late], LATE_SECONDS, signals)
            late = {rank for rank in late if processes[rank].poll() is None}
            if late:
                names = ", ".join(str(lowest + rank) for rank in sorted(late))
                sys.stderr.write(f"trigram: the job has finished without rank(s) {names}, ending them\n")
                return 0, []
        if deadline is not None and time.monotonic() > deadline:
            return TIMED_OUT, []
        signals.pause(POLL_SECONDS)
    if first is None:
        # None of this machine has finished: others go on, or have.
        return (0 if 0 in codes else _shown(failure)), []
    wait(processes, GRACE_SECONDS, signals)
    others = [r for r, process in enumerate(processes) if r != first and process.poll() not in {None, *well}]
    failed = [*others, first]
    return _shown(processes[first].returncode), failed


def _shown(code: int) -> int:
    """The exit code of a process, as shells have it; that of one that a signal ended is negative."""
    return code if code >= 0 else 128 - code


def _has_finished(codes: Sequence[int | None], is_member: Callable[[int], bool]) -> bool:
    """Whether a member of an elastic job has ended well. In other jobs each rank has work of its own."""
    return any(code == 0 and is_member(rank) for rank, code in enumerate(codes))


def wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float, signals: EndSignals) -> None:
    """Waits until all have ended, at most so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        signals.pause(POLL_SECONDS)


def _report(rank: int, code: int, errors: IO[bytes] | None) -> str:
    """How a rank failed, and its error output unless that went to this terminal."""
    text = ""
    if errors is not None:
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
    return f"trigram: rank {rank} {_how(code)}\n" + (f"{text}\n" if text else "")


def _why(output: RankOutput, rank: int, others: bool) -> str:
    """What the rank wrote that has failed first, if something was written since: the others have failed
    because of it, and say so."""
    end = output.end_of(rank)
    if not end or (not others and output.last == rank):
        return ""
    return f"trigram: rank {rank} failed first. The end of what it wrote:\n{end}\n"


def _how(code: int) -> str:
    return f"was ended by the signal {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"


def signal_name(number: int) -> str:
    """Such as SIGKILL; the number of a real-time signal, which has none."""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, str(number))


def leave_job() -> None:
    """Shuts trigram down, and then torch.distributed, whose store trigram may use."""
    import torch.distributed as dist

    from trigram.runtime.world import shutdown  # loads torch, as above: who only starts ranks needs neither

    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
