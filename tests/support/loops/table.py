"""The table of loops: what a row is, and the algorithms that each row is trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.loops.loop import Loop


def always(_step: int) -> bool:
    """An asynchronous average is applied at every boundary: the result does not depend on speed."""
    return True


ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "async": {"script": always},
    "async_low_precision": {"script": always},
    "async_decentralized": {"script": always},
    "async_low_precision_decentralized": {"script": always, "topology": "random"},
    "topk": {"fraction": 1.0},  # everything is sent: the result is the full mean's
    "local_sgd": {"every": 2},
    # With these the outer step is the plain mean, which has a reference; the code is the outer step's.
    "diloco": {"every": 2, "outer_lr": 1.0, "outer_momentum": 1e-9},
    "powersgd": {"warmup_steps": 3},
}
GRADIENTS = ("gradient_allreduce", "bytegrad", "topk", "powersgd")
WEIGHTS = tuple(a for a in ALGORITHMS if a not in GRADIENTS)
ASYNC = tuple(a for a in ALGORITHMS if "async" in a)
SYNC = tuple(a for a in ALGORITHMS if a not in ASYNC)
GOSSIP = tuple(a for a in ALGORITHMS if "decentralized" in a)
EVERY = ("local_sgd", "diloco")
QUICK = ("gradient_allreduce", "topk", "decentralized", "local_sgd", "async")
WORLDS = (2, 3)


@dataclass(frozen=True)
class Refused:
    """Every rank gets a trigram error in the same step, whose text contains each of `says`.

    "one|other" of them is either of the two.
    """

    algorithms: tuple[str, ...]
    says: tuple[str, ...]
    always: bool = True  # False: it may also be trained right


@dataclass(frozen=True)
class Row:
    """A loop, and what must come of it.

    Attributes:
        name: The function's name.
        subject: The file.
        loop: Called as `loop(t)`, t a Loop, on each rank and in the one process that it is compared with.
        options: By algorithm, options that replace those of ALGORITHMS.
        only: The algorithms for which the row has a meaning.
        refused: The algorithms that must refuse the loop, and what their messages say; the others train it.
        linear: The gradients are linear in the weights, so that the mean of the replicas under plain SGD is
            the one process's weights, whatever the algorithm.
        compare: Whether the weights are compared with the one process's, or under which algorithms.
        spread: Whether averages of weights must bring the replicas together, compared with training alone.
        alike: A refusal is the same on all ranks, in the same step. Else the ranks that have no reason for
            one learn that a rank has ended.
        even: Every rank makes the same steps; else asynchronous averages are applied whenever they come.
        passes: Backward passes in each iteration of the loop.
        boundaries: Optimizer steps in each iteration of the loop.
        steps: Steps that are counted in all, where they are not those of the loop; a tuple: by model.
        rounds: Whether the averages of weights are counted.
        tolerance: How far off the weights may be, in parts of how far those of a rank alone are off, where
            the row has a reason for another number than the algorithm's.
        long: Only `make test-all` runs it.
    """

    name: str
    subject: str
    loop: Callable[[Loop], None]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    only: tuple[str, ...] = tuple(ALGORITHMS)
    refused: Refused | None = None
    linear: bool = False
    compare: bool | tuple[str, ...] = True
    spread: bool = True
    alike: bool = True
    even: bool = True
    steps: int | tuple[int, ...] | None = None
    passes: int = 1
    boundaries: float = 1
    rounds: bool = True
    tolerance: float | None = None
    long: bool = False

    def is_refused(self, algorithm: str) -> bool:
        """Whether this algorithm must refuse the loop."""
        return self.may_be_refused(algorithm) and self.refused.always  # type: ignore[union-attr]

    def may_be_refused(self, algorithm: str) -> bool:
        """Whether this algorithm may refuse the loop, if it says why."""
        return self.refused is not None and algorithm in self.refused.algorithms

    def is_compared(self, algorithm: str) -> bool:
        """Whether the weights under this algorithm are compared with the one process's."""
        return self.compare if isinstance(self.compare, bool) else algorithm in self.compare


ROWS: dict[str, Row] = {}


def row(
    refused: tuple[Any, ...] | None = None, sometimes: bool = False, **more: Any
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Adds a loop to the table. `refused=(algorithms, "a word", ...)`: they refuse it and say these words.

    `sometimes`: or they train it right.
    """

    def add(fn: Callable[[Loop], None]) -> Callable[[Loop], None]:
        no = None
        if refused is not None:
            algorithms, *says = refused
            no = Refused(tuple(algorithms), tuple(says), not sometimes)
        assert fn.__name__ not in ROWS, fn.__name__
        ROWS[fn.__name__] = Row(fn.__name__, fn.__module__.rpartition(".")[2], fn, refused=no, **more)
        return fn

    return add
