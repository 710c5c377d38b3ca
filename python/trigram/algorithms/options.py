"""The options of an algorithm, with their types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class AlgorithmOptions:
    """The checked options of an algorithm; those that it does not have are as here. docs/algorithms.md says
    what they do. Options of a registered class are its own, and not among them.

    Attributes:
        block: Values that a codec scales together; None: the codec's own number.
        bits: Of QAdam's codec, 8 or 1.
        momentum: Of gradients, before they are made sparse.
        gamma: The fraction of a compressed difference that gossip applies.
        feedback: How much of what a codec lost the next averaging step adds; None: by the codec.
        iterations: Of a robust aggregation; None: its own number.
        due: Says, from the number of training steps, whether weights are averaged after that one; None: every
            so many steps.
        overlap: Averages of weights run during the next step, and sharded weights are collected then.
        fragments: Parts of the weights, averaged one after the other; None: by their size.
        pieces: Whether parameters may be divided between fragments; False: as a saved state was made by a
            version that divided none.
        staleness: Boundaries after which a rank waits for an averaging step in the background; None: never.
        script: For tests: says at which steps averages are awaited.
        quorum: Ranks that an averaging step needs; None: all.
        grace: Seconds that a quorum waits for the others; None: it finds them.
        outer_lr, outer_momentum: Of the outer optimizer.
        second_moment: Adam's second moment is that of the ``mean`` gradient, or this rank's ``own``.
        warmup_steps: Steps in which gradients are averaged in full before the algorithm begins.
        state: Where the optimizer's state is: ``replicated`` or ``sharded``.
        gradients: Of a sharded optimizer, ``full`` or ``shards``.
        copies: Ranks that hold each part of a sharded optimizer in elastic jobs; None: not given.
        fused: The optimizer steps in backward.
        elementwise: Whether the optimizer treats each value alone; None: found out.
    """

    block: int | None = None
    bits: int = 8
    momentum: float = 0.0
    gamma: float = 1.0
    feedback: float | None = None
    iterations: int | None = None
    due: Callable[[int], bool] | None = None
    overlap: bool = False
    fragments: int | None = None
    pieces: bool = True
    staleness: int | None = None
    script: Callable[[int], bool] | None = None
    quorum: int | None = None
    grace: float | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    second_moment: str = "own"
    warmup_steps: int = 0
    state: str = "replicated"
    gradients: str = "full"
    copies: int | None = None
    fused: bool = False
    elementwise: bool | None = None

    @property
    def sharded(self) -> bool:
        """Whether the optimizer's state is divided over the ranks."""
        return self.state == "sharded"

    def __str__(self) -> str:
        """Those that are not as above. Functions are of each rank's own, so only that there is one counts."""
        told = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(
            f"{name}={'a function' if callable(value) else repr(value)}"
            for name, value in told
            if name not in ("script", "pieces")
        )
