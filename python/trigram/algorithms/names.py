"""Algorithms by name: the eight corners, their relatives, and those that users register.

A name is a shorthand for a trigram and its options. What each means is written down in docs/algorithms.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trigram.algorithms.trigram import Trigram
from trigram.errors import UnsupportedError

DEFAULT = "gradient_allreduce"


@dataclass(frozen=True)
class Entry:
    """A name: its value, a line for the table, and options that are not what the value says."""

    value: Trigram
    about: str
    options: dict[str, Any] = field(default_factory=dict)
    step: Callable[..., Any] | None = None


# The eight corners first.
_NAMES: dict[str, Entry] = {
    DEFAULT: Entry(Trigram(carry="gradients"), "bucketed AllReduce beside backward; trains as DDP does"),
    "bytegrad": Entry(Trigram("central", "int8", "sync", "gradients"), "gradients in 8 bits"),
    "decentralized": Entry(
        Trigram("gossip:one_peer", "full", "sync", "weights"),
        "weights mixed with a neighbour, beside forward and backward",
    ),
    "low_precision_decentralized": Entry(
        Trigram("gossip:ring", "int8", "sync", "differences"),
        "weight differences in 8 bits, to neighbours",
    ),
    "async": Entry(
        Trigram("central", "full", "async", "weights"), "averaging in the background, never waiting"
    ),
    "async_low_precision": Entry(Trigram("central", "int8", "async", "differences"), "the same in 8 bits"),
    "async_decentralized": Entry(
        Trigram("gossip:random", "full", "async", "weights"), "pairs average when they are free"
    ),
    "async_low_precision_decentralized": Entry(
        Trigram("gossip:exponential", "int8", "async", "differences"), "the same in 8 bits"
    ),
    "qadam": Entry(
        Trigram("central", "int8", "sync", "momentum"),
        "Adam's momentum in 8 bits or 1, after a warm-up; needs trigram.QAdam",
        {"warmup_steps": 100, "bits": 8},
    ),
    "local_sgd": Entry(Trigram("central", "full", "every:8", "weights"), "weights averaged every 8 steps"),
    "diloco": Entry(
        Trigram("central", "full", "every:32", "differences"),
        "an outer Nesterov step on the averaged difference, every 32 steps",
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    "powersgd": Entry(
        Trigram("central", "powersgd:2", "sync", "gradients"),
        "gradients as products of thin matrices, with error feedback",
        {"warmup_steps": 100},
    ),
    "topk": Entry(
        Trigram("central", "topk:0.01", "sync", "gradients"), "the largest gradients, with error feedback"
    ),
    "signsgd": Entry(
        Trigram("central", "sign", "sync", "gradients"), "gradients' signs, with error feedback"
    ),
    "push_sum": Entry(
        Trigram("push:random", "full", "sync", "weights"), "shares pushed along directed edges"
    ),
}


def algorithms() -> list[dict[str, Any]]:
    """The algorithms that ``with_bagua`` knows.

    Returns:
        One dict each: ``name``, ``who``, ``what``, ``when``, ``carry``, ``available`` (whether this
        version has it) and ``about``.
    """
    return [
        {"name": name, **asdict(entry.value), "available": True, "about": entry.about}
        for name, entry in _NAMES.items()
    ]


def register(
    name: str,
    value: Trigram,
    about: str = "",
    *,
    step: Callable[..., Any] | None = None,
    exchange: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Gives a name to an algorithm of your own; see docs/extending.md.

    Args:
        name: What ``with_bagua`` will be given.
        value: Its trigram.
        about: A line for the table.
        step: A class of your own: ``step(tensors, groups, **options)`` makes a
            :class:`trigram.mixing.AveragingStep`. None: the value is composed of the parts there are.
        exchange: The old name of ``step``.
        **options: Its options, with their defaults; ``with_bagua`` takes these and no others.
    """
    if exchange is not None:
        warnings.warn("register: exchange= is deprecated; use step=", DeprecationWarning, stacklevel=2)
        step = step or exchange
    if name in _NAMES:
        raise UnsupportedError(f"register: the name {name!r} is already taken; choose another name")
    _NAMES[name] = Entry(value, about, options, step)


def named(name: str) -> Entry | None:
    """The entry of a name, if there is one."""
    return _NAMES.get(name)


def names() -> list[str]:
    """All names."""
    return list(_NAMES)
