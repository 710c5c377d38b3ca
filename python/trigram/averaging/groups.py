"""The process groups that one model talks in, and what all of its averages go by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.non_finite import NonFiniteCheck, NonFiniteSenders
from trigram.averaging.sample_weight import SampleWeight
from trigram.collectives import Work
from trigram.errors import AbortedError
from trigram.runtime.group import Group
from trigram.runtime.world import aided_group, internal_group


class Levels(Protocol):
    """What stands between the ranks of a host and the other hosts: ``hierarchical.py`` has it."""

    def abort(self, why: str) -> None:
        """What is under way fails; all ranks do this."""


class ModelGroups:
    """The process groups of one model. All ranks make the calls of a group in the same order, so what
    has an order of its own has a group of its own.

    Attributes:
        main: Calls that begin in the order of buckets; messages between neighbours.
        second_phase: The second phase of averages that have two.
        control: WeightSync, buffers, and small calls by which ranks agree.
        group: The ranks.
        aggregation: What stands in the place of means; None: they are means.
        sample_weight: This rank's weight in averages; None: all weigh the same.
        check_replicas: Steps between two checks that all ranks hold the same weights; 0: no checks.
        non_finite_check: Looks for NaN and infinity in gradients before they are sent; None: no check.
        non_finite_senders: Which ranks sent what a robust aggregation left out.
        levels: Of averages in two levels; None: there are none yet.
        interrupted: In an elastic job: whether it is pointless to wait for neighbours.
        joining: This rank takes the weights from the elastic job that it joins.
    """

    def __init__(self, group: Group) -> None:
        self._aided: Group | None = None
        self.levels: Levels | None = None
        self.interrupted: Callable[[], bool] | None = None
        self.joining = False
        self.aggregation: RobustAggregation | None = None
        self.sample_weight: SampleWeight | None = None
        self.non_finite_check: NonFiniteCheck | None = None
        self.check_replicas = 0
        self.non_finite_senders = NonFiniteSenders()
        self.renew(group)

    def renew(self, group: Group) -> None:
        """Makes new groups in the place of those so far."""
        self.main = self._plain = internal_group(group, "gradients")
        self.group = group
        self.control = internal_group(group, "weights and buffers")
        self.second_phase = internal_group(group, "second phase")
        self.size = group.size
        self.rank = group.rank
        if self.sample_weight is not None:
            self.sample_weight.renew(group)
        if self.non_finite_check is not None:
            self.non_finite_check.group = self.control

    @property
    def first(self) -> Group:
        """The old name of :attr:`main`."""
        warnings.warn(
            "ModelGroups.first is deprecated; use ModelGroups.main", DeprecationWarning, stacklevel=2
        )
        return self.main

    def use_helpers(self, wanted: bool) -> None:
        """Makes ``main`` the group with helpers, if one is free and wanted: it offers AllReduce only."""
        if wanted and self._aided is None:
            self._aided = aided_group(self.group)
        self.main = self._aided if wanted and self._aided is not None else self._plain

    def wait(self, work: Work) -> None:
        """Waits for a message; in an elastic job its sender may have left to meet the others instead.

        Raises:
            AbortedError: This rank has to meet them too.
        """
        while self.interrupted is not None:
            try:
                work.wait(0.05)
                return
            except TimeoutError:
                if self.interrupted():
                    raise AbortedError(
                        f"{self.name}: the wait for a neighbour's message was aborted, because a rank of "
                        "this elastic job was lost or is joining; training continues when all ranks have "
                        "regrouped"
                    ) from None
        work.wait()

    @property
    def name(self) -> str:
        """This rank, as errors name it."""
        return f"rank {self.control.ranks[self.rank]}"
