"""A trigram, three independent choices, and an algorithm: a trigram with its options, ready to be composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trigram.algorithms.robust import RobustAggregation


@dataclass(frozen=True)
class Trigram:
    """Three independent choices, and what follows from them.

    Attributes:
        who: ``central`` (all agree), ``central:median``, ``central:trimmed:F`` or ``central:clip:R`` (all
            agree on what few broken ranks cannot steer), ``gossip:TOPOLOGY`` (neighbours only) or
            ``push:TOPOLOGY`` (neighbours, in one direction).
        what: ``full`` (the numbers themselves) or a codec: ``int8``, ``topk:0.01``, ``powersgd:2``, ...
        when: ``sync`` (inside the step), ``every:H`` or ``async``, ``async:STALENESS``.
        carry: ``gradients``, ``momentum``, ``weights`` or ``differences``; None: what follows from
            the three.
    """

    who: str = "central"
    what: str = "full"
    when: str = "sync"
    carry: str | None = None

    def __str__(self) -> str:
        return f"{self.who}/{self.what}/{self.when}"


WHO = (
    ("central", "all agree on the mean"),
    ("central:median", "all agree on the median of each value: fewer than half of the ranks may be broken"),
    ("central:trimmed:F", "all agree on the mean without the F largest and F smallest of each value"),
    ("central:clip:R", "all agree on a mean of what is clipped at R times the ranks' median distance"),
    ("gossip:TOPOLOGY", "neighbours mix what they have"),
    ("push:TOPOLOGY", "neighbours, in one direction"),
)
"""What WHO may be, and what that is."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with its options, ready to be composed.

    Attributes:
        name: As the user called it.
        value: The trigram, with what options say of it.
        kind, graph: WHO, taken apart.
        every: Steps per round; None: asynchronous.
        options: The rest.
    """

    name: str
    value: Trigram
    kind: str
    graph: str
    every: int | None
    options: dict[str, Any]
    step: Callable[..., Any] | None = None

    def __str__(self) -> str:
        options = {k: v for k, v in self.options.items() if k != "script"}
        return f"{self.value} carrying {self.value.carry}, {options}"

    @property
    def title(self) -> str:
        """Its name and its trigram."""
        return self.name if self.name == str(self.value) else f"{self.name} ({self.value})"

    @property
    def rule(self) -> RobustAggregation | None:
        """The robust rule of a ``central:RULE``."""
        rule = RobustAggregation.parse(self.graph) if self.kind == "central" else None
        return rule and replace(rule, iterations=self.options.get("iterations", rule.iterations))

    @property
    def gradients(self) -> bool:
        """Whether it carries gradients, or what stands in their place."""
        return self.value.carry in ("gradients", "momentum")
