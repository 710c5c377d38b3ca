"""A slow network inside this machine: a command runs where its loopback carries no more than a cable would.

It runs in a network namespace of its own, which ends with it. Root makes one; others make it in a user
namespace, where the system lets them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "TRIGRAM_DEMO_NETWORK"
"""In the environment of what runs inside: Mbit/s in each direction."""
_SHAPE = (
    # What all ranks send goes through the one queue of the loopback.
    "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {all}mbit burst 128kb latency 200ms && "
)
_SECONDS = 20


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
    # gloo asks for the address of the host's name otherwise; the ranks of Trigram would share memory.
    settings = {
        INSIDE: str(mbit),
        "GLOO_SOCKET_IFNAME": "lo",
        "TRIGRAM_IFACE": "lo",
        "TRIGRAM_TRANSPORT": "tcp",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it cannot look up names there
    }
    command = _inside(mbit, ranks, argv)
    os.execvpe(command[0], command, {**os.environ, **settings})


def _found(name: str) -> str | None:
    """Where a program is, also of those that only root has in its path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _inside(mbit: int, ranks: int, argv: Sequence[str]) -> list[str]:
    who = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    shape = _SHAPE.format(all=ranks * mbit)
    for name in ("ip", "tc"):
        shape = shape.replace(f"{name} ", f"{_found(name)} ", 1)
    return ["unshare", *who, "--net", "sh", "-c", shape + 'exec "$@"', "sh", *argv]
