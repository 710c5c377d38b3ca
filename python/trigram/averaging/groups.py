"""The process groups of one model, and the settings that all of its averages share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from torch import nn

from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.exchange import Line
from trigram.averaging.gradient_filter import GradientFilter
from trigram.averaging.non_finite import NonFiniteCheck, NonFiniteSenders
from trigram.averaging.sample_weight import SampleWeight
from trigram.collectives import Work
from trigram.errors import AbortedError
from trigram.runtime import serving
from trigram.runtime.group import Group
from trigram.runtime.world import aided_group, internal_group


class Levels(Protocol):
    """Averages in two levels, inside and between hosts:
    :class:`trigram.averaging.hierarchical.HostLevels`."""

    def abort(self, why: str) -> None:
        """Aborts all calls under way; all ranks call it."""


class ModelGroups:
    """The process groups of one model, and the settings of its averages.

    All ranks must make the calls of one group in the same order. Calls whose order relative to each other
    differs between ranks therefore use different groups.

    Attributes:
        main: First phases of averages, in the order of buckets, and messages between neighbours.
        second_phase: Second phases of averages that have two.
        line: Their order.
        control: Broadcasts of weights and buffers, and the small calls by which ranks agree.
        group: The ranks that train the model, as the user gave them.
        aggregation: The robust aggregation that replaces the mean; None: the mean.
        sample_weight: This rank's weight in averages; None: all ranks weigh the same.
        check_replicas: Steps between two checks that all ranks hold the same weights; 0: no checks.
        broadcast_buffers: Whether training makes buffers the same on all ranks.
        ignored: The names of parameters and buffers that are left alone.
        non_finite_check: Looks for NaN and infinity in gradients before they are sent; None: no check.
        non_finite_senders: Ranks whose values a robust aggregation left out.
        copies_gradients: Whether the script holds gradients, so that parameters keep those they have, and get
            copies of averages.
        filters: What gradients pass before they are averaged, of the script's own.
        trained: ``id()`` of each parameter that has trained, and may again when it is frozen now.
        levels: The groups of averages in two levels; None: no such average was made yet.
        everyone: Elastic jobs whose replicas have several ranks only: all members, not those of one place.
        interrupted: Elastic jobs only: returns True if this rank must stop to wait for a neighbour, because
            the ranks are about to regroup.
        silent: Elastic jobs only: returns the places of the ranks that contribute nothing to the step under
            way.
        source: Returns the place of the rank from which others get weights and buffers.
        joining: True while this rank joins an elastic job and has not received its weights.
        patient: Whether calls may take longer than ``op_timeout``, see :meth:`be_patient`.
        description: Names the model in log lines, see :meth:`describe`.
    """

    def __init__(self, group: Group) -> None:
        self._aided: Group | None = None
        self.patient = False
        self.description: Callable[[], str] | None = None
        self.levels: Levels | None = None
        self.everyone: Group | None = None
        self.interrupted: Callable[[], bool] | None = None
        self.silent: Callable[[], Collection[int]] = tuple
        self.source: Callable[[], int] = int
        self.joining = False
        self.aggregation: RobustAggregation | None = None
        self.sample_weight: SampleWeight | None = None
        self.non_finite_check: NonFiniteCheck | None = None
        self.check_replicas = 0
        self.broadcast_buffers = True
        self.ignored: frozenset[str] = frozenset()
        self.non_finite_senders = NonFiniteSenders()
        self.copies_gradients = False
        self.filters: tuple[GradientFilter, ...] = ()
        self.trained: set[int] = set()
        self.line = Line()
        self.renew(group)

    def renew(self, group: Group) -> None:
        """Replaces all groups by new ones over the ranks of ``group``; an elastic job calls it when ranks
        change."""
        self.main = self._plain = internal_group(group, "gradients")
        self.group = group
        self.control = internal_group(group, "weights and buffers")
        self.second_phase = internal_group(group, "second phase")
        self.line.clear()
        self.levels = None  # those of other ranks
        self.size = group.size
        self.rank = group.rank
        if self.sample_weight is not None:
            self.sample_weight.renew(group)
        if self.non_finite_check is not None:
            self.non_finite_check.group = self.control
        self.be_patient(self.patient)

    def averaged(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of the model that are not left alone."""
        return [p for name, p in model.named_parameters() if name not in self.ignored]

    def be_patient(self, patient: bool) -> None:
        """Lets calls take any time, or as long as those of ``group``.

        Ranks of an asynchronous algorithm listen for messages that may come much later, and at the end the
        first waits for the last.
        """
        self.patient = patient
        for group in (self._plain, self.second_phase, self.control):
            group.timeout = None if patient else self.group.timeout
            group.describe = self.description

    @contextlib.contextmanager
    def among(self, control: Group) -> Iterator[None]:
        """A block in which the model's ranks, for calls between steps, are those of this group."""
        before = self.control, self.size
        self.control, self.size = control, control.size
        try:
            yield
        finally:
            self.control, self.size = before

    @contextlib.contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """Bounds the calls that are made inside; None: as they are bounded otherwise."""
        groups = {id(g): g for g in (self.main, self._plain, self.second_phase, self.control)}.values()
        before = [group.timeout for group in groups]
        try:
            for group in groups if seconds is not None else ():
                group.timeout = seconds
            yield
        finally:
            for group, timeout in zip(groups, before, strict=True):
                group.timeout = timeout

    def describe(self, say: Callable[[], str] | None) -> None:
        """Sets what log lines say about long waits in the model's calls, such as ``model Net, step 12``.

        Args:
            say: Called when a line is written, in another thread. It must not keep the model alive.
        """
        self.description = say
        self.be_patient(self.patient)

    @property
    def first(self) -> Group:
        """Deprecated name of :attr:`main`."""
        warnings.warn(
            "ModelGroups.first is deprecated; use ModelGroups.main", DeprecationWarning, stacklevel=2
        )
        return self.main

    def use_helpers(self, wanted: bool) -> None:
        """Makes ``main`` the group with helpers, if ``wanted`` and there is one. It supports all-reduce
        only."""
        if wanted and self._aided is None:
            self._aided = aided_group(self.group)
        self.main = self._aided if wanted and self._aided is not None else self._plain

    def wait(self, work: Work) -> None:
        """Waits for a message from a neighbour.

        In an elastic job the neighbour may have stopped sending because it waits for all ranks to regroup, so
        this rank asks now and then whether it must regroup too.

        Raises:
            AbortedError: This rank must regroup with the others.
            TimeoutError: The neighbour did not send within ``op_timeout``.
        """
        with serving.looking(self.check_interrupted) if self.interrupted else contextlib.nullcontext():
            work.wait()

    def check_interrupted(self) -> None:
        """Raises ``AbortedError`` if this rank must regroup with the others instead of waiting."""
        if self.interrupted is not None and self.interrupted():
            raise AbortedError(
                f"{self.name}: the wait for a neighbour was aborted, because a rank of this elastic job was "
                "lost or is joining; training continues when all ranks have regrouped"
            )

    @property
    def name(self) -> str:
        """This rank as error messages name it: ``rank`` and its world rank."""
        return f"rank {self.control.ranks[self.rank]}"
