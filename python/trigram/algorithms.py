"""Algorithms by name.

An algorithm is a *trigram*: who talks, what travels, when. Each is a value made of independent
parts, so that they multiply; a name is a shorthand for a value.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from trigram.errors import UnsupportedError


@dataclass(frozen=True)
class Trigram:
    """Three independent choices.

    Attributes:
        who: ``central`` (all agree) or ``gossip:TOPOLOGY`` (neighbours only).
        what: ``full`` (the numbers themselves) or a codec: ``int8``, ``topk:0.01``, ...
        when: ``sync`` (inside the step), ``every:H`` or ``async:STALENESS``.
        carry: ``gradients``, ``weights`` or ``differences``; None: what follows from the three.
    """

    who: str = "central"
    what: str = "full"
    when: str = "sync"
    carry: str | None = None

    def __str__(self) -> str:
        return f"{self.who}/{self.what}/{self.when}"


DEFAULT = "gradient_allreduce"

# Name -> value, and one line for the table. The eight corners first.
_NAMES: dict[str, tuple[Trigram, str]] = {
    DEFAULT: (Trigram(carry="gradients"), "bucketed AllReduce beside backward; trains as DDP does"),
    "bytegrad": (Trigram("central", "int8", "sync", "gradients"), "gradients in 8 bits"),
    "decentralized": (
        Trigram("gossip:one_peer", "full", "sync", "weights"),
        "weights mixed with a neighbour",
    ),
    "low_precision_decentralized": (
        Trigram("gossip:ring", "int8", "sync", "differences"),
        "weight differences in 8 bits, to neighbours",
    ),
    "async": (Trigram("central", "full", "async", "weights"), "averaging in the background, never waiting"),
    "async_low_precision": (
        Trigram("central", "int8", "async", "differences"),
        "the same in 8 bits",
    ),
    "async_decentralized": (
        Trigram("gossip:random", "full", "async", "weights"),
        "pairs average when they are free",
    ),
    "async_low_precision_decentralized": (
        Trigram("gossip:random", "int8", "async", "differences"),
        "the same in 8 bits",
    ),
}

_AVAILABLE = frozenset({DEFAULT})


def algorithms() -> list[dict[str, Any]]:
    """The algorithms that ``with_bagua`` knows.

    Returns:
        One dict each: ``name``, ``who``, ``what``, ``when``, ``carry``, ``available`` (whether this
        version has it) and ``about``.
    """
    return [
        {"name": name, **asdict(value), "available": name in _AVAILABLE, "about": about}
        for name, (value, about) in _NAMES.items()
    ]


def find(algorithm: str | Trigram | None) -> tuple[str, Trigram]:
    """The algorithm that a script or ``TRIGRAM_ALGORITHM`` names.

    Raises:
        UnsupportedError: It is unknown or not available; the message lists those that are.
    """
    source = ""
    if algorithm is None:
        algorithm = os.environ.get("TRIGRAM_ALGORITHM") or DEFAULT
        source = " (from TRIGRAM_ALGORITHM)" if "TRIGRAM_ALGORITHM" in os.environ else ""
    named = {n: v for n, (v, _) in _NAMES.items()}
    if isinstance(algorithm, str) and algorithm in named:
        name, value = algorithm, named[algorithm]
    else:
        wanted = str(algorithm)
        found = [(n, v) for n, v in named.items() if wanted == str(v)]
        if not found:
            known = ", ".join(named)
            raise UnsupportedError(f"unknown algorithm {wanted!r}{source}; known are {known}")
        name, value = found[0]
    if name not in _AVAILABLE:
        available = ", ".join(sorted(_AVAILABLE))
        raise UnsupportedError(f"algorithm {name!r}{source} is not in this version; available: {available}")
    return name, value
