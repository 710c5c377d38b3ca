"""The table of algorithm names: the eight combinations of WHO, WHAT and WHEN, related ones, and registered
ones.

A name stands for a trigram and its options. docs/algorithms.md defines each algorithm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trigram.algorithms.trigram import Trigram
from trigram.errors import MisuseError, UnsupportedError

DEFAULT = "gradient_allreduce"
SHARDED = "sharded"
"""The word for the default algorithm with ``state="sharded"``; not in the table, for its trigram is there."""


@dataclass(frozen=True)
class Entry:
    """An entry of the table.

    Attributes:
        value: The trigram.
        about: A description of one line.
        options: Defaults of options that the trigram does not have.
        step: The class of a registered averaging step of weights.
        average: The class of a registered average of gradients.
    """

    value: Trigram
    about: str
    options: dict[str, Any] = field(default_factory=dict)
    step: Callable[..., Any] | None = None
    average: Callable[..., Any] | None = None


# First the eight combinations of two choices each for WHO, WHAT and WHEN.
_NAMES: dict[str, Entry] = {
    DEFAULT: Entry(
        Trigram(carry="gradients"), "AllReduce of gradient buckets during backward; the same training as DDP"
    ),
    "bytegrad": Entry(Trigram("central", "int8", "sync", "gradients"), "gradients in 8 bits"),
    "lossless": Entry(
        Trigram("central", "lossless", "sync", "gradients"),
        "gradients in exact codes: the bits of the default with fewer bytes",
    ),
    "decentralized": Entry(
        Trigram("gossip:one_peer", "full", "sync", "weights"),
        "weights averaged with a neighbour, during forward and backward",
    ),
    "low_precision_decentralized": Entry(
        Trigram("gossip:ring", "int8", "sync", "differences"),
        "weight differences in 8 bits, averaged with neighbours",
    ),
    "async": Entry(
        Trigram("central", "full", "async", "weights"), "weights averaged in the background, without waiting"
    ),
    "async_low_precision": Entry(Trigram("central", "int8", "async", "differences"), "the same in 8 bits"),
    "async_decentralized": Entry(
        Trigram("gossip:random", "full", "async", "weights"), "pairs of ranks average in the background"
    ),
    "async_low_precision_decentralized": Entry(
        Trigram("gossip:exponential", "int8", "async", "differences"), "the same in 8 bits"
    ),
    "qadam": Entry(
        Trigram("central", "int8", "sync", "momentum"),
        "Adam's momentum in 8 bits or 1 bit, after a warm-up; needs trigram.QAdam",
        {"warmup_steps": 100, "bits": 8},
    ),
    "local_sgd": Entry(Trigram("central", "full", "every:8", "weights"), "weights averaged every 8 steps"),
    "diloco": Entry(
        Trigram("central", "full", "every:32", "differences"),
        "an outer Nesterov step on the averaged difference, every 32 steps",
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    "noloco": Entry(
        Trigram("gossip:random", "full", "every:32", "differences"),
        "as diloco, each outer step averaged with one other rank",
        {"outer_lr": 0.7, "outer_momentum": 0.5},
    ),
    "sparta": Entry(
        Trigram("central", "share:0.05", "sync", "weights"), "a share of the weights averaged in every step"
    ),
    "sparseloco": Entry(
        Trigram("central", "chunktopk:0.02", "every:32", "differences"),
        "the largest weight differences in two bits, with error feedback that decays, every 32 steps",
        {"feedback": 0.95},
    ),
    "powersgd": Entry(
        Trigram("central", "powersgd:2", "sync", "gradients"),
        "gradients as products of low-rank matrices, with error feedback",
        {"warmup_steps": 100},
    ),
    "topk": Entry(
        Trigram("central", "topk:0.01", "sync", "gradients"), "the largest gradients, with error feedback"
    ),
    "signsgd": Entry(
        Trigram("central", "sign", "sync", "gradients"), "gradients' signs, with error feedback"
    ),
    "push_sum": Entry(
        Trigram("push:random", "full", "sync", "weights"), "weights pushed along directed edges (push-sum)"
    ),
}


def algorithms() -> list[dict[str, Any]]:
    """The algorithms that ``with_bagua`` accepts by name.

    Returns:
        One dict for each, with ``name``, ``who``, ``what``, ``when``, ``carry``, ``available`` (always True)
        and ``about``.
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
    average: Callable[..., Any] | None = None,
    exchange: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Registers an algorithm under a name; see docs/extending.md.

    Args:
        name: The name that ``with_bagua`` accepts.
        value: Its trigram.
        about: A description of one line.
        step: Your class: ``step(tensors, groups, **options)`` creates a
            :class:`trigram.mixing.AveragingStep`, which averages weights. None: Trigram composes ``value`` of
            its own parts.
        average: Your class: ``average(memory, views, groups, **options)`` creates a
            :class:`trigram.averaging.GradientAverage`, which averages the gradients of a bucket.
        exchange: Deprecated: the old name of ``step``.
        **options: The options of ``step`` or ``average``, with their defaults.

    Raises:
        UnsupportedError: The name is taken.
        MisuseError: ``step`` and ``average`` are both given.
    """
    if exchange is not None:
        warnings.warn("register: exchange= is deprecated; use step=", DeprecationWarning, stacklevel=2)
        step = step or exchange
    if name in _NAMES or name == SHARDED:
        raise UnsupportedError(f"register: the name {name!r} is already taken; choose another name")
    if step is not None and average is not None:
        raise MisuseError(
            "register: step= averages weights and average= gradients; pass one of them, or register two names"
        )
    _NAMES[name] = Entry(value, about, options, step, average)


def named(name: str) -> Entry | None:
    """The entry of a name; None: there is none."""
    if name == SHARDED:
        return replace(_NAMES[DEFAULT], options={"state": "sharded"})
    return _NAMES.get(name)


def names() -> list[str]:
    """All names."""
    return list(_NAMES)
