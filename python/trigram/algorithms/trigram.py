"""``Trigram``, three independent choices, and ``Algorithm``, a trigram with its resolved options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trigram.algorithms.options import AlgorithmOptions
from trigram.algorithms.robust import RobustAggregation
from trigram.errors import MisuseError


@dataclass(frozen=True)
class Trigram:
    """An algorithm as three independent choices: WHO/WHAT/WHEN.

    Attributes:
        who: ``central`` (the mean over all ranks), ``central:median``, ``central:trimmed:F`` or
            ``central:clip:R`` (robust aggregation over all ranks), ``gossip:TOPOLOGY`` (averages with
            neighbours) or ``push:TOPOLOGY`` (push-sum along directed edges).
        what: ``full`` (uncompressed), ``share:S`` (uncompressed, a share of the weights in each step) or a
            codec: ``int8``, ``topk:0.01``, ``powersgd:2``, ``chunktopk:0.02``, ...
        when: ``sync`` (in every step), ``every:H`` (every H steps), ``async`` or ``async:STALENESS`` (in the
            background).
        carry: The tensors that ranks average: ``gradients``, ``momentum``, ``weights`` or ``differences``;
            None: derived from the three.
    """

    who: str = "central"
    what: str = "full"
    when: str = "sync"
    carry: str | None = None

    def __post_init__(self) -> None:
        for name in ("who", "what", "when", "carry"):
            value: object = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("carry", None):
                hint = (
                    "; a function of the step is the option every= of with_bagua" if callable(value) else ""
                )
                raise MisuseError(f"Trigram: {name}={value!r} must be a str{hint}")

    def __str__(self) -> str:
        return f"{self.who}/{self.what}/{self.when}"


WHO = (
    ("central", "all agree on the mean"),
    ("central:median", "all agree on the median of each value: fewer than half of the ranks may be broken"),
    ("central:trimmed:F", "all agree on the mean without the F largest and F smallest of each value"),
    ("central:clip:R", "all agree on the mean of values clipped at R times the ranks' median distance"),
    ("gossip:TOPOLOGY", "neighbours average their weights"),
    ("push:TOPOLOGY", "the same along directed edges (push-sum)"),
)
"""The values of WHO, with a description each."""


@dataclass(frozen=True)
class Algorithm:
    """A checked algorithm with its options.

    Attributes:
        name: The name that the user gave, or the trigram.
        value: The trigram, with the values that options changed.
        kind, graph: The two parts of WHO.
        every: Training steps per averaging step; None: asynchronous.
        options: The other options.
        step: The class of a registered averaging step of weights; None: composed of Trigram's own.
        average: The class of a registered average of gradients; None: composed of Trigram's own.
        arguments: The options of this class.
        from_environment: Whether ``TRIGRAM_ALGORITHM`` named it.
        unknown: Options that the script gave and the algorithm of the environment does not have.
    """

    name: str
    value: Trigram
    kind: str
    graph: str
    every: int | None
    options: AlgorithmOptions
    step: Callable[..., Any] | None = None
    average: Callable[..., Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    from_environment: bool = False
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.value} carrying {self.value.carry}, {self.options}, {self.arguments}"

    @property
    def title(self) -> str:
        """Name and trigram, for messages."""
        return self.name if self.name == str(self.value) else f"{self.name} ({self.value})"

    @property
    def aggregation(self) -> RobustAggregation | None:
        """The robust aggregation of ``central:AGGREGATION``; None: the mean."""
        found = RobustAggregation.parse(self.graph) if self.kind == "central" else None
        return found and replace(found, iterations=self.options.iterations or found.iterations)

    @property
    def gradients(self) -> bool:
        """Whether it carries gradients or momentum, not weights or differences."""
        return self.value.carry in ("gradients", "momentum")

    @property
    def in_step(self) -> bool:
        """Whether all ranks make the same averaging steps together: it is neither asynchronous nor has it a
        quorum."""
        return self.every is not None and self.options.quorum is None
