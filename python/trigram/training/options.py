"""What ``with_bagua`` is told beside the algorithm, and what an algorithm must be for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trigram.algorithms.names import Plan
from trigram.averaging.non_finite import Check
from trigram.averaging.sample_weight import Share
from trigram.errors import MisuseError, UnsupportedError
from trigram.training.step_hooks import Channels


@dataclass(frozen=True)
class Terms:
    """The terms of one model; see :func:`trigram.with_bagua`."""

    sample_weight: float | Callable[[], float] | None = None
    check_finite: bool = False
    check_replicas: int = 0

    def __str__(self) -> str:
        weighted = ", sample_weight" if self.sample_weight is not None else ""
        replicas = f", check_replicas={self.check_replicas}" if self.check_replicas else ""
        return weighted + (", check_finite" if self.check_finite else "") + replicas

    def check(self, plan: Plan, size: int) -> None:
        """Refuses what does not go together, before anything is begun."""
        rule = plan.rule
        if rule is not None and 1 < size < rule.least():
            raise UnsupportedError(
                f"{plan.name}: {plan.value.who} leaves out {rule.parameter:g} values on each side, of {size} "
                f"ranks in all; it needs {rule.least()} ranks or more"
            )
        if self.check_finite and not plan.gradients:
            raise UnsupportedError(
                f"{plan.name}: check_finite looks at gradients before they leave, and here weights travel; a "
                "robust average (central:median/...) leaves out those that are not finite, and names the rank"
            )
        if self.check_replicas < 0:
            raise MisuseError(f"with_bagua: check_replicas={self.check_replicas} is no number of steps")
        if self.check_replicas and not plan.gradients:
            raise UnsupportedError(
                f"{plan.name}: check_replicas is for algorithms that carry gradients; here ranks may hold "
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
        elif plan.kind != "central":
            why = "neighbours are mixed by the graph's weights, which keep the average of all where it is"
        elif plan.every is None:
            why = "ranks that are not in step have no step in common whose samples could be counted"
        elif plan.exchange is not None:
            why = "a registered exchange makes its averages itself"
        if why:
            raise UnsupportedError(f"{plan.name}: sample_weight is not for {plan.value}: {why}")

    def bind(self, channels: Channels, plan: Plan) -> None:
        """Tells what averages: all ranks, once they have agreed."""
        channels.rule = plan.rule
        channels.check_replicas = self.check_replicas
        if self.sample_weight is not None and channels.share is None:
            channels.share = Share(self.sample_weight, channels.group)
        if self.check_finite and channels.finite is None:
            channels.finite = Check(channels.side)
