"""Asynchronous algorithms that other ranks may wait for, and how they end together."""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

from torch import nn

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.errors import TimeoutError, TrigramError
from trigram.runtime import exit_status, job, serving
from trigram.runtime.job import Part
from trigram.steps.elasticity import Elasticity
from trigram.training.schedule import StepSchedule


class Running(serving.Server, Protocol):
    """The hooks of a model, as others need them that wait for it."""

    model: weakref.ref[nn.Module]
    groups: ModelGroups
    schedule: StepSchedule
    elastic: Elasticity

    def drain(self) -> None:
        """Ends the averaging steps under way, on all ranks, and applies them."""

    def close(self) -> None:
        """Removes the hooks."""


@job.told_first
class RunningModels(Part):
    """The hooks of a rank's asynchronous algorithms, in the order in which they were made.

    They stay here until they have ended on all ranks, even if the script drops the model, because other ranks
    may wait for their messages. In an elastic job the model stays too: a rank that has ended its training may
    have to send its state to a joining rank.
    """

    def __init__(self) -> None:
        self.models: dict[Running, nn.Module | None] = {}

    def add(self, hooks: Running, model: nn.Module | None) -> None:
        """Threads of this process that wait serve the hooks, until :meth:`remove`; keeps ``model``."""
        exit_status.watch()
        self.models[hooks] = model
        serving.add(hooks)

    def remove(self, hooks: Running) -> None:
        """Ends :meth:`add`."""
        self.models.pop(hooks, None)
        serving.remove(hooks)

    def finish(self) -> None:
        """Ends the algorithms together with all ranks, unless this rank has failed."""
        failed = exit_status.has_failed()
        for hooks in self.models:  # they may have been made in another thread
            serving.bind(hooks)
        for hooks in list(self.models):
            if not failed:
                # `SystemExit`: the others have let this rank go meanwhile, as it was asked to leave.
                with contextlib.suppress(TrigramError, SystemExit):
                    hooks.drain()
            self.remove(hooks)


class _RanksChange(Exception):
    """A rank was lost or is joining, while this one waits for all."""


def wait_for_all(hooks: Running, timeout: float | None, end: float | None, admits: bool) -> bool:
    """Waits until all ranks end the averaging steps of a model; False if the ranks must regroup first.

    Args:
        hooks: The model's hooks.
        timeout: Seconds; None for the group's.
        end: When they are over, by ``time.monotonic``.
        admits: This rank may change the membership so that ranks join or leave. In a call that the script
            makes with all ranks none may, whose script would not make it: it waits until another rank, which
            has not come to the call, aborts it.

    Raises:
        TimeoutError: Not all ranks did within ``timeout`` seconds.
    """
    serving.bind(hooks)
    if hooks.elastic.has_lost():
        return False  # this rank may have left out a boundary for it, in which the others make calls
    finish = getattr(hooks.schedule, "finish_pending", None)
    control = hooks.groups.control
    before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
    arrived: collectives.Work | None = None
    # What another rank aborts must be under way, also while this one has averaging steps to end.
    come = None if admits or not hooks.elastic.can_redo else collectives.barrier(control, async_op=True)

    def look() -> None:
        if come is not None and come.is_completed():
            come.wait()
        # If the barrier has ended, all ranks were there before the loss.
        called = hooks.elastic.is_called() if admits else hooks.elastic.has_lost()
        if called and not (arrived is not None and arrived.is_completed()):
            raise _RanksChange

    try:
        with serving.looking(look):
            if finish is not None and not serving.until(finish, end, idle=True):
                raise TimeoutError(
                    f"{hooks.groups.name}: waited {timeout} s for neighbours to finish their averaging "
                    "steps; check that all ranks make this call, or pass a longer timeout"
                )
            arrived = collectives.barrier(control, async_op=True)
            assert arrived is not None
            serving.rest(arrived)
    except _RanksChange:
        return False
    finally:
        control.timeout = before
    return True
