"""Runs commands on other hosts, by ssh or the like, and starts the ranks of a job there.

On each host runs `trigram run` for the ranks of that host. What is set for them goes to its standard input,
and not into its command line, which every user of the host may see. When that input ends, because the
connection or this process has, it ends its ranks: nothing is left behind.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigram.runtime.end_signals import EndSignals
from trigram.runtime.launch import END_SECONDS, FOLLOWED, POLL_SECONDS, end, wait
from trigram.runtime.launchers import config_error
from trigram.runtime.rank_output import RankOutput

PASSED = ("TRIGRAM_", "NCCL_", "OMP_", "TORCH_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
"""The variables that ranks of other hosts get, by how they begin; `--env` names more."""
_PORTS = range(20000, 29999)
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Host:
    """A host as a user names it: ``NAME`` as ssh takes it, or ``NAME=ADDRESS``.

    Attributes:
        name: As ssh takes it.
        address: As the other hosts know it.
    """

    name: str
    address: str


def hosts(text: str) -> list[Host]:
    """The hosts of a list with commas."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, address = part.partition("=")
        found.append(Host(name, address or name.rpartition("@")[2]))
    return found


def command(ssh: str, host: str, words: Sequence[str]) -> list[str]:
    """What runs these words on a host.

    Args:
        ssh: ssh with its options, or another command that takes a host and words.
        host: The host.
        words: The program there and its arguments.
    """
    run = shlex.split(ssh)
    if not run:
        raise config_error("--ssh is empty; it is the command that runs another on a host, such as ssh")
    # ssh gives them to a shell there, which would split and expand them.
    is_ssh = Path(run[0]).name == "ssh"
    return [*run, host, *(shlex.quote(word) if is_ssh else word for word in words)]


def start(
    ssh: str, host: str, words: Sequence[str], more: Sequence[str] = (), **output: Any
) -> subprocess.Popen[bytes]:
    """Starts on a host what calls :func:`obey` there, and tells it what is set here.

    Args:
        ssh: See :func:`command`.
        host: The host.
        words: The program there and its arguments.
        more: Names of variables that it gets beside :data:`PASSED`.
        output: ``stdout`` and ``stderr``, as ``subprocess.Popen`` takes them.
    """
    passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED) or k in more}
    told = json.dumps({"environment": passed, "folder": str(Path.cwd())}).encode() + b"\n"
    process = subprocess.Popen(command(ssh, host, words), stdin=subprocess.PIPE, **output)
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already, and its exit code says so
        process.stdin.write(told)
        process.stdin.flush()
    return process


def launch(
    on: Sequence[Host],
    ranks: int,
    arguments: Sequence[str],
    *,
    ssh: str,
    python: str,
    port: int | None = None,
    more: Sequence[str] = (),
    least: int | None = None,
) -> int:
    """Runs a script as so many ranks on each host, and waits for them; returns the exit code.

    Args:
        on: The hosts; rank 0 is on the first.
        ranks: On each.
        arguments: Of `trigram run` there: the script and its own.
        ssh: See :func:`command`.
        python: The Python there that has trigram.
        port: Where the job's store is served on the first host; None: one is drawn.
        more: Names of variables that the ranks get as well.
        least: With so many ranks left, an elastic job goes on; None: all end when those of a host fail.
    """
    port = port or random.SystemRandom().choice(_PORTS)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        signals = EndSignals(stack)
        output = RankOutput()
        stack.callback(output.drain)
        stack.callback(_let_go, processes, signals)
        for k, host in enumerate(on):
            address = f"[{on[0].address}]" if ":" in on[0].address else on[0].address
            there = [python, "-m", "trigram", "run", "--obey", "-n", str(ranks), "--nnodes", str(len(on))]
            there += ["--node-rank", str(k), "--rdzv-endpoint", f"{address}:{port}"]
            there += [*([f"--min={least}"] if least is not None else []), *arguments]
            with output.pipes(k) as (stdout, stderr):
                processes.append(start(ssh, host.name, there, more, stdout=stdout, stderr=stderr))
        try:
            return _watch(on, processes, signals, least is not None)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _let_go(processes: Sequence[subprocess.Popen[bytes]], signals: EndSignals) -> None:
    """Ends the ranks of the other hosts, which follow the end of their input; then what started them."""
    for process in processes:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
    try:
        # As long as `trigram run` there gives its ranks, and a moment.
        wait(processes, 2 * END_SECONDS, signals)
    finally:
        end(processes, signals)


def _watch(
    on: Sequence[Host], processes: Sequence[subprocess.Popen[bytes]], signals: EndSignals, goes_on: bool
) -> int:
    """Waits until all have ended, or one has failed: then the others end by themselves, as their ranks lose
    those of that host, or are ended after a while. If the job ``goes_on``, they end when too few are left.
    What has ended for the others' sake may end before them, and has not failed."""
    failed_at: float | None = None
    code = 0
    while True:
        codes = [process.poll() for process in processes]
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if not code and any(found not in (None, 0, FOLLOWED) for found in codes):
            for host, found in zip(on, codes, strict=True):  # the first of these is not known
                if found and found != FOLLOWED:
                    code = code or found
                    state = f"exit code {found}" if found > 0 else f"signal {signal.Signals(-found).name}"
                    sys.stderr.write(f"trigram: the ranks of {host.name} have failed ({state})\n")
        if None not in codes:
            break
        if failed_at is not None and not goes_on and time.monotonic() - failed_at > END_SECONDS / 2:
            break
        signals.pause(POLL_SECONDS)
    if goes_on and 0 in codes:
        return 0
    first = next((found for found in (code, *codes) if found), 0)
    return 1 if first == FOLLOWED else first if first >= 0 else 128 - first


# On the other host.


def obey(source: int, moves: bool = True) -> None:
    """Takes what the starting host has set, and ends this process when that host has gone.

    Args:
        source: The descriptor of its standard input. It is read as it is: a thread that waits in a reader of
            Python would hold its lock when this process ends.
        moves: Whether it goes on in the folder of the starting host.

    Raises:
        ConfigError: Nothing was told, or the script's folder is not on this host.
    """
    try:
        told: Any = json.loads(_line(source))
        environment, folder = dict(told["environment"]), str(told["folder"])
    except (ValueError, KeyError, TypeError) as error:
        raise config_error("this is what trigram run --hosts, or doctor --hosts, starts on a host") from error
    os.environ.update({str(k): str(v) for k, v in environment.items()})
    try:
        if moves:
            os.chdir(folder)
    except OSError as error:
        raise config_error(
            f"run: this host has no folder {folder} ({error.strerror}); the script must be in the same place "
            "on all hosts"
        ) from error
    threading.Thread(target=_follow, args=(source,), name="trigram-starting-host", daemon=True).start()


def _line(source: int) -> bytes:
    text = bytearray()
    while len(text) < _LONGEST and (byte := os.read(source, 1)) not in (b"", b"\n"):
        text += byte
    return bytes(text)


def _follow(source: int) -> None:
    with suppress(OSError):
        while os.read(source, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
