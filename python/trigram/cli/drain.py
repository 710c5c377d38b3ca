"""`trigram drain`: asks ranks of an elastic job to leave it, through its store, and waits until they have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer

from trigram.cli.job_store import open_store
from trigram.cli.status import checked
from trigram.elastic import orders
from trigram.elastic.join_queue import STATUS_TIMEOUT, JobWatch
from trigram.elastic.orders import Period
from trigram.elastic.replicas import Replicas
from trigram.runtime import seals

_LOOK = 0.1
"""Seconds between two looks."""
_HEED = 5.0
"""Seconds after which a rank that heeds an order has said so."""


def send_away(store: str | None, ranks: Sequence[int], timeout: float) -> int:
    """Asks ranks to leave, and waits until they have.

    Args:
        store: ``HOST:PORT``; None: where MASTER_ADDR and MASTER_PORT say.
        ranks: The ranks; where replicas have several ranks, those of their replicas leave too.
        timeout: Seconds to wait.

    Returns:
        The exit code: 1 if some have not left, or no elastic job is alive there.

    Raises:
        typer.BadParameter: They are not members, or are all of them.
    """
    client = open_store(store)
    watch = JobWatch(client)
    status = _alive(watch)
    if status is None:
        typer.echo(f"no elastic job is alive at the store {client.address}", err=True)
        return 1
    leave = chosen(status, ranks)
    end, asked_at, seen = time.monotonic() + timeout, time.monotonic(), set[int]()
    period: Period | None = None
    while status is not None and (left := [rank for rank in leave if rank in status["members"]]):
        now = Period(status["epoch"], status["empty_regroups"])
        if now != period:  # an order holds in one of them
            orders.give(client, now, left)
            period, asked_at = now, time.monotonic()
        seen.update(status["draining"])
        if time.monotonic() > end or (not seen & set(left) and time.monotonic() - asked_at > _HEED):
            typer.echo(_stays(left, seen, timeout), err=True)
            return 1
        time.sleep(_LOOK)
        status = _alive(watch)
    if status is None:
        typer.echo(
            f"rank(s) {_listed(leave)} were asked to leave, but the job's store {client.address} or its "
            "leader is gone, so whether they have is not known",
            err=True,
        )
        return 1
    typer.echo(f"rank(s) {_listed(leave)} left; the members are {_listed(status['members'])}")
    return 0


def ask(store: str | None, ranks: Sequence[int]) -> None:
    """Asks ranks to leave, and does not wait until they have; the arguments are those of :func:`send_away`.

    Raises:
        typer.BadParameter: They are not members, or are all of them; or no elastic job is alive there.
    """
    client = open_store(store)
    status = _alive(JobWatch(client))
    if status is None:
        raise typer.BadParameter(f"no elastic job is alive at the store {client.address}")
    orders.give(client, Period(status["epoch"], status["empty_regroups"]), chosen(status, ranks))


def chosen(status: dict[str, Any], ranks: Sequence[int]) -> list[int]:
    """Who leaves if these ranks are asked to: their replicas."""
    members: list[int] = status["members"]
    if unknown := sorted(set(ranks) - set(members)):
        raise typer.BadParameter(
            f"rank(s) {_listed(unknown)} are no members of the job, whose members are {_listed(members)}"
        )
    touched = Replicas(status["replica_size"]).touched(ranks)
    leave = [rank for rank in members if rank in touched]
    if leave == members:
        raise typer.BadParameter(
            f"rank(s) {_listed(leave)} are all members, so nobody would go on with the training; end the job "
            "where it was started"
        )
    return leave


def _alive(watch: JobWatch) -> dict[str, Any] | None:
    """The status of a job that is alive."""
    end = time.monotonic() + STATUS_TIMEOUT + 1.0
    while (found := watch.status()) is None and time.monotonic() < end:
        time.sleep(_LOOK)
    return None if found is None else checked(found)


def _stays(left: list[int], seen: set[int], timeout: float) -> str:
    """Why ranks have not left."""
    if heeding := sorted(seen & set(left)):
        return (
            f"rank(s) {_listed(heeding)} heed the order and have not left after {timeout:g} s: a rank ends "
            "its step first, or the steps until its next averaging step"
        )
    has = "is set here" if seals.secret() else "is not set here"
    return (
        f"rank(s) {_listed(left)} do not heed the order: their logs say why. The job's TRIGRAM_SECRET must "
        f"be set where it is given, and {has}"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
