"""A slow network inside this machine: a command runs where its loopback carries no more than a cable would.

It runs in a network namespace of its own, which ends with it. Root makes one; others make it in a user
namespace, where the system lets them. Where it does not, as in most containers, each rank has the kernel pace
its connections: each carries as much in each direction as the cable would.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

INSIDE = "TRIGRAM_DEMO_NETWORK"
"""In the environment of what runs inside: Mbit/s in each direction."""
PACED = "TRIGRAM_DEMO_PACED"
"""The same, where connections are to be paced (:func:`pace`)."""
_SO_MAX_PACING_RATE = 47
"""Linux; Python's socket has no name for it."""
_PROBE = 4 << 20
_SHAPE = (
    # What all ranks send goes through the one queue of the loopback.
    "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {all}mbit burst 128kb latency 200ms && "
)
_SECONDS = 20
_SETTINGS = {
    # gloo asks for the address of the host's name otherwise; the ranks of Trigram would share memory.
    "GLOO_SOCKET_IFNAME": "lo",
    "TRIGRAM_IFACE": "lo",
    "TRIGRAM_TRANSPORT": "tcp",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it cannot look up names there
}


def why_not() -> str:
    """Why this machine cannot make one; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    missing = [name for name in ("unshare", "ip", "tc") if _found(name) is None]
    if missing:
        return f"it needs {', '.join(missing)} (packages util-linux and iproute2)"
    try:
        done = subprocess.run(_inside(100, 2, ["true"]), capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"unshare ended with {done.returncode}")


def enter(mbit: int, ranks: int, argv: Sequence[str]) -> None:
    """Runs a command inside, in the place of this process.

    Args:
        mbit: What each rank's cable carries in each direction.
        ranks: How many send at a time; together they have what their cables would carry.
        argv: The command.
    """
    command = _inside(mbit, ranks, argv)
    os.execvpe(command[0], command, {**os.environ, **_SETTINGS, INSIDE: str(mbit)})


def paced(mbit: int) -> dict[str, str]:
    """The environment of ranks whose connections are to be paced; empty if this machine cannot."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            took = _send_paced(server, mbit)
    except OSError:
        return {}
    return {**_SETTINGS, PACED: str(mbit)} if took > 0.6 * 8e-6 * _PROBE / mbit else {}


def pace(mbit: int) -> None:
    """Has the kernel pace all TCP connections that this process has now, also those of other libraries."""
    for fd in Path("/proc/self/fd").iterdir():
        # Not every descriptor is a socket, and those of threads may be closed meanwhile.
        with suppress(OSError):
            if not stat.S_ISSOCK(fd.stat().st_mode):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(mbit * 125_000))


def _send_paced(server: socket.socket, mbit: int) -> float:
    """How many seconds a paced connection takes for ``_PROBE`` bytes."""

    def send() -> None:
        with suppress(OSError), socket.create_connection(server.getsockname()) as sends:
            sends.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(mbit * 125_000))
            sends.sendall(bytes(_PROBE))

    began = time.monotonic()
    thread = threading.Thread(target=send)
    thread.start()
    got = 0
    with server.accept()[0] as receives:
        while part := receives.recv(1 << 16):
            got += len(part)
    thread.join()
    return time.monotonic() - began if got == _PROBE else 0.0


def _found(name: str) -> str | None:
    """Where a program is, also of those that only root has in its path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _inside(mbit: int, ranks: int, argv: Sequence[str]) -> list[str]:
    who = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    shape = _SHAPE.format(all=ranks * mbit)
    for name in ("ip", "tc"):
        shape = shape.replace(f"{name} ", f"{_found(name)} ", 1)
    return ["unshare", *who, "--net", "sh", "-c", shape + 'exec "$@"', "sh", *argv]
