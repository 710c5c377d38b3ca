"""What the system has for links over which an answer takes long: congestion control and socket buffers.

The engine decides and sets it (`rust/engine/src/transport/far.rs`); here it is checked and told.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from trigram.errors import ConfigError

BBR = "bbr"
"""What far links use where the system has it."""

MOST_STREAMS = 16
STREAMS = 4
"""Connections to a far rank, with BBR."""

_SYSCTL = Path("/proc/sys/net/ipv4")


def controls() -> list[str]:
    """The names of the congestion controls that the system has loaded."""
    return _read("tcp_available_congestion_control")


def is_usable(name: str) -> bool:
    """Whether this process may use a congestion control."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True


def remedy(name: str) -> str:
    """What an administrator runs so that :func:`is_usable` becomes true."""
    allowed = " ".join([*_read("tcp_allowed_congestion_control"), name])
    load = "" if name in controls() else f"modprobe tcp_{name}; "
    return f'{load}sysctl -w net.ipv4.tcp_allowed_congestion_control="{allowed}"'


def most_in_flight() -> int:
    """Bytes that one socket may have under way; 0 if the system does not say.

    About half of its send buffer holds data, the other half the system's own.
    """
    limits = [_read(name)[2:] for name in ("tcp_wmem", "tcp_rmem")]
    return min((int(limit[0]) // 2 for limit in limits if limit), default=0)


def check() -> None:
    """Checks the variables that concern far links.

    Raises:
        ConfigError: TRIGRAM_STREAMS is no number from 1 to 16, or the system refuses TRIGRAM_CONGESTION.
    """
    streams = os.environ.get("TRIGRAM_STREAMS", "auto")
    if streams not in ("auto", *map(str, range(1, MOST_STREAMS + 1))):
        raise ConfigError(
            f"TRIGRAM_STREAMS={streams!r} is invalid; set it to auto or a number of connections from 1 to "
            f"{MOST_STREAMS}"
        )
    control = os.environ.get("TRIGRAM_CONGESTION", "auto")
    if control in ("auto", "system"):
        return
    if not control.isascii() or not control.isidentifier():
        raise ConfigError(
            f"TRIGRAM_CONGESTION={control!r} is invalid; set it to auto, system, or one of "
            f"{', '.join(controls())}"
        )
    if not is_usable(control):
        raise ConfigError(
            f"TRIGRAM_CONGESTION={control!r}: this system does not let this process use it; it has "
            f"{', '.join(controls())}. As root: {remedy(control)}"
        )


def _read(name: str) -> list[str]:
    try:
        return (_SYSCTL / name).read_text().split()
    except OSError:
        return []
