"""Starts the ranks of a measurement on GPUs; the other scripts of this folder that need one use it.

Each rank is a host of its own to NCCL, so that several share one GPU and reach each other over TCP. Nothing
is needed but torch and trigram. With `TRIGRAM_REHEARSAL=1` the scripts run without a GPU
(`tests/support/gpu_rehearsal.py`).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.support import gpu_rehearsal  # noqa: E402

REHEARSES = gpu_rehearsal.REHEARSES
gpu_rehearsal.use()


def needs_gpu() -> None:
    """Ends the script if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name}: torch finds no GPU here")


def device(rank: int = 0) -> torch.device:
    """This rank's GPU; in a rehearsal, the CPU. Ends the script if there is none."""
    needs_gpu()
    return gpu_rehearsal.device(rank)


def backend() -> str:
    """torch's backend beside which is measured: NCCL; in a rehearsal, gloo."""
    return gpu_rehearsal.backend()


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    argv: Sequence[str], world: int, extra: Mapping[str, str] | None = None, limit: float = 240
) -> list[str]:
    """Runs `python ARGV` once per rank, and waits for all.

    Args:
        argv: The script and its arguments.
        world: The number of ranks.
        extra: Additional environment variables.
        limit: Seconds after which all ranks are killed.

    Returns:
        What each rank printed.

    Raises:
        RuntimeError: A rank failed, or the time is over; the message ends with what it printed last. The
        others are killed.
    """
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="trigram-bench-") as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(world)]
        try:
            for rank, log in enumerate(logs):
                env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(extra or {})
                with log.open("wb") as out:
                    command = [sys.executable, "-u", *argv]
                    ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
            end = time.monotonic() + limit
            while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
            if any(r.poll() for r in ranks):
                time.sleep(2)  # the others notice, and say what they know
        finally:
            late = [rank for rank, r in enumerate(ranks) if r.poll() is None]
            for r in ranks:
                r.kill()
                r.wait()
        said = [log.read_text(errors="replace") for log in logs]
    if late or any(r.returncode for r in ranks):
        codes = [r.returncode for r in ranks]
        tails = "\n".join(f"--- rank {rank}:\n{text[-3000:]}" for rank, text in enumerate(said))
        raise RuntimeError(f"{argv[0]}: exit codes {codes}, killed: ranks {late}\n{tails}")
    return said


def arguments(doc: str | None, limit: float = 400) -> argparse.ArgumentParser:
    """The arguments that scripts with ranks have in common: --world, --limit, and --rank in a rank."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which ranks are killed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def as_rank() -> list[str]:
    """What :func:`start` runs in each rank: this script, with the arguments it has."""
    return [*sys.argv, "--rank"]


def seconds(call: Callable[[], object], calls: int) -> float:
    """Seconds of one of several calls, from the host's clock, the device idle before and after."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls
