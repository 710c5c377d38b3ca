"""What ``with_bagua`` is told beside the algorithm, and what an algorithm must be for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trigram.algorithms.trigram import Algorithm
from trigram.averaging.groups import ModelGroups
from trigram.averaging.non_finite import NonFiniteCheck
from trigram.averaging.sample_weight import SampleWeight
from trigram.errors import MisuseError, UnsupportedError


@dataclass(frozen=True)
class Options:
    """The terms of one model; see :func:`trigram.with_bagua`."""

    sample_weight: float | Callable[[], float] | None = None
    check_finite: bool = False
    check_replicas: int = 0

    def __str__(self) -> str:
        weighted = ", sample_weight" if self.sample_weight is not None else ""
        replicas = f", check_replicas={self.check_replicas}" if self.check_replicas else ""
        return weighted + (", check_finite" if self.check_finite else "") + replicas

    def check(self, algorithm: Algorithm, size: int) -> None:
        """Refuses what does not go together, before anything is begun."""
        rule = algorithm.aggregation
        if rule is not None and 1 < size < rule.least():
            raise UnsupportedError(
                f"{algorithm.name}: {algorithm.value.who} leaves out {rule.parameter:g} values on each side, of {size} "
                f"ranks in all; it needs {rule.least()} ranks or more"
            )
        if self.check_finite and not algorithm.gradients:
            raise UnsupportedError(
                f"{algorithm.name}: check_finite looks at gradients before they leave, and here weights travel; a "
                "robust average (central:median/...) leaves out those that are not finite, and names the rank"
            )
        if self.check_replicas < 0:
            raise MisuseError(f"with_bagua: check_replicas={self.check_replicas} is no number of steps")
        if self.check_replicas and not algorithm.gradients:
            raise UnsupportedError(
                f"{algorithm.name}: check_replicas is for algorithms that carry gradients; here ranks may hold "
                "different weights between rounds"
            )
        if self.sample_weight is None:
            return
        if not callable(self.sample_weight) and not isinstance(self.sample_weight, int | float):
            raise MisuseError(
                f"with_bagua: sample_weight={self.sample_weight!r} is neither a number nor a callable that "
                "gives one"
            )
        why = ""
        if rule is not None:
            why = "a robust rule counts ranks; a rank that says it has many samples would count as many"
        elif algorithm.kind != "central":
            why = "neighbours are mixed by the graph's weights, which keep the average of all where it is"
        elif algorithm.every is None:
            why = "ranks that are not in step have no step in common whose samples could be counted"
        elif algorithm.step is not None:
            why = "a registered exchange makes its averages itself"
        if why:
            raise UnsupportedError(f"{algorithm.name}: sample_weight is not for {algorithm.value}: {why}")

    def bind(self, groups: ModelGroups, algorithm: Algorithm) -> None:
        """Tells what averages: all ranks, once they have agreed."""
        groups.aggregation = algorithm.aggregation
        groups.check_replicas = self.check_replicas
        if self.sample_weight is not None and groups.sample_weight is None:
            groups.sample_weight = SampleWeight(self.sample_weight, groups.group)
        if self.check_finite and groups.non_finite_check is None:
            groups.non_finite_check = NonFiniteCheck(groups.control)
