"""The options of ``with_bagua`` that do not belong to an algorithm, and which algorithms support them."""

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
    """The options of one model; see :func:`trigram.with_bagua`."""

    sample_weight: float | Callable[[], float] | None = None
    check_finite: bool = False
    check_replicas: int = 0

    def __str__(self) -> str:
        weighted = ", sample_weight" if self.sample_weight is not None else ""
        replicas = f", check_replicas={self.check_replicas}" if self.check_replicas else ""
        return weighted + (", check_finite" if self.check_finite else "") + replicas

    def check(self, algorithm: Algorithm, size: int) -> None:
        """Raises if the algorithm does not support an option on ``size`` ranks; sends nothing."""
        rule = algorithm.aggregation
        if rule is not None and 1 < size < rule.least():
            raise UnsupportedError(
                f"{algorithm.name}: {algorithm.value.who} leaves out the {rule.parameter:g} largest and the "
                f"{rule.parameter:g} smallest values, so it needs at least {rule.least()} ranks; there are "
                f"{size}"
            )
        if self.check_finite and not algorithm.gradients:
            raise UnsupportedError(
                f"{algorithm.name}: check_finite checks gradients before they are sent, but this algorithm "
                "averages weights; remove check_finite, or use a robust average (central:median/...), which "
                "leaves out NaN and infinite values and names the rank that sent them"
            )
        if self.check_replicas < 0:
            raise MisuseError(
                f"with_bagua: check_replicas={self.check_replicas} must be a number of steps, or 0 for no "
                "checks"
            )
        if self.check_replicas and not algorithm.gradients:
            raise UnsupportedError(
                f"{algorithm.name}: check_replicas needs an algorithm that averages gradients; with this "
                "one the ranks hold different weights between averaging steps; remove check_replicas"
            )
        if self.sample_weight is None:
            return
        if not callable(self.sample_weight) and not isinstance(self.sample_weight, int | float):
            raise MisuseError(
                f"with_bagua: sample_weight={self.sample_weight!r} must be a number or a callable that "
                "returns one"
            )
        why = ""
        if rule is not None:
            why = "a robust average counts ranks, so one rank with a wrong weight would count as many"
        elif algorithm.kind != "central":
            why = "the graph fixes the weights of neighbours, so that the mean over all ranks does not change"
        elif algorithm.every is None:
            why = "its ranks are at different steps, so no averaging step belongs to one set of samples"
        elif algorithm.step is not None:
            why = "an averaging step added with trigram.register computes the average without it"
        if why:
            raise UnsupportedError(
                f"{algorithm.name}: sample_weight is not supported with {algorithm.value}: {why}; remove "
                "sample_weight"
            )

    def bind(self, groups: ModelGroups, algorithm: Algorithm) -> None:
        """Sets the options in the model's process groups, after all ranks have agreed on them."""
        groups.aggregation = algorithm.aggregation
        groups.check_replicas = self.check_replicas
        if self.sample_weight is not None and groups.sample_weight is None:
            groups.sample_weight = SampleWeight(self.sample_weight, groups.group)
        if self.check_finite and groups.non_finite_check is None:
            groups.non_finite_check = NonFiniteCheck(groups.control)
