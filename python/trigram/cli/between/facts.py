"""What a host says of itself to the others."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from trigram._core import interfaces
from trigram.runtime import far_links


def of_this_host(word: str) -> dict[str, Any]:
    """What the others must know, and what should be alike.

    Args:
        word: Of this check: the secret is told only as a hash with it.
    """
    try:
        trigram = version("trigram")
    except PackageNotFoundError:
        trigram = "not installed"
    try:
        room = os.statvfs("/dev/shm")
        shm = room.f_frsize * room.f_blocks
    except OSError:
        shm = 0
    settings = {
        k: v for k, v in sorted(os.environ.items()) if k.startswith("TRIGRAM_") and k != "TRIGRAM_SECRET"
    }
    return {
        "host": socket.gethostname(),
        "versions": {
            "trigram": trigram,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "addresses": addresses(),
        "cores": len(os.sched_getaffinity(0)),
        "controls": [*far_links.controls(), *([far_links.BBR] if far_links.is_usable(far_links.BBR) else [])],
        "socket_bytes": far_links.most_in_flight(),
        "shm_bytes": shm,
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "settings": settings,
        "secret": _secret(word),
    }


def addresses() -> list[dict[str, Any]]:
    """The addresses by which others may reach this host: ``interface``, ``address``, ``mtu``; those of
    ``TRIGRAM_IFACE`` first."""
    chosen = [part.strip() for part in os.environ.get("TRIGRAM_IFACE", "").split(",") if part.strip()]
    found = [
        {"interface": name, "address": address, "mtu": _mtu(name)}
        for name, address in interfaces()
        if name != "lo" and not address.startswith(("127.", "fe80:", "169.254.")) and address != "::1"
    ]
    return sorted(found, key=lambda a: a["interface"] not in chosen and a["address"] not in chosen)


def _mtu(interface: str) -> int:
    try:
        return int((Path("/sys/class/net") / interface / "mtu").read_text())
    except (OSError, ValueError):
        return 0


def _secret(word: str) -> str:
    """Shows whether hosts have the same secret, and nothing else."""
    secret = os.environ.get("TRIGRAM_SECRET")
    if not secret:
        return ""
    return hashlib.scrypt(secret.encode(), salt=word.encode(), n=1 << 14, r=8, p=1, dklen=8).hex()
