"""`trigram drain` and `trigram evict`: have ranks of an elastic job leave it, through its store, and wait
until they have.

Any process may write to the store. So what an order says, and what is sealed, is what was asked for; the
status says only whom to wait for.
"""

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
from trigram.runtime.live_store import ReconnectingStore

_LOOK = 0.1
"""Seconds between two looks."""
_HEED = 5.0
"""Seconds after which a rank that heeds an order has said so."""


def send_away(store: str | None, ranks: Sequence[int], timeout: float, evicts: bool = False) -> int:
    """Asks ranks to leave, and waits until they have.

    Args:
        store: ``HOST:PORT``; None: where MASTER_ADDR and MASTER_PORT say.
        ranks: The ranks; where replicas have several ranks, those of their replicas leave too.
        timeout: Seconds to wait; 0: it only asks.
        evicts: They are taken out at once, and do not end their step.

    Returns:
        The exit code: 1 if some have not left, or no elastic job is alive there.

    Raises:
        typer.BadParameter: They are not members, or nobody else would be left.
    """
    client = open_store(store)
    watch = JobWatch(client)
    status = _alive(watch)
    if status is None:
        typer.echo(f"no elastic job is alive at the store {client.address}", err=True)
        return 1
    leave = chosen(status, ranks)
    if 0 in leave:
        typer.echo("if rank 0 serves the job's store, nobody can join any more once it has left", err=True)
    asked = f"rank(s) {_listed(leave)} " + ("are evicted" if evicts else "were asked to leave")
    if timeout == 0:
        orders.give(client, _period(status), ranks, evicts)
        typer.echo(asked)
        return 0
    try:
        if evicts:
            return _until_evicted(client, watch, status, ranks, leave, timeout)
        return _until_left(client, watch, status, ranks, leave, timeout)
    except KeyboardInterrupt:
        typer.echo(f"{asked}, which stands", err=True)
        raise


def ask(store: str | None, ranks: Sequence[int], evicts: bool = False) -> None:
    """Asks ranks to leave, and does not wait until they have; the arguments are those of :func:`send_away`.

    Raises:
        typer.BadParameter: They are not members, or nobody else would be left; or no elastic job is alive
            there.
    """
    client = open_store(store)
    status = _alive(JobWatch(client))
    if status is None:
        raise typer.BadParameter(f"no elastic job is alive at the store {client.address}")
    chosen(status, ranks)
    orders.give(client, _period(status), ranks, evicts)


def chosen(status: dict[str, Any], ranks: Sequence[int]) -> list[int]:
    """Who leaves if these ranks are asked to: their replicas, as far as the status says so."""
    members: list[int] = status["members"]
    if unknown := sorted(set(ranks) - set(members)):
        raise typer.BadParameter(
            f"rank(s) {_listed(unknown)} are no members of the job, whose members are {_listed(members)}"
        )
    replicas = Replicas(status["replica_size"])
    numbers = {replicas.number(rank) for rank in ranks}
    leave = [rank for rank in members if replicas.number(rank) in numbers]
    if not set(members) - set(leave) - set(status["draining"]):
        already = " with those that leave already" if leave != members else ""
        raise typer.BadParameter(
            f"rank(s) {_listed(leave)}{already} are all members, so nobody would go on with the training; "
            "end the job where it was started"
        )
    return leave


def _until_left(
    client: ReconnectingStore,
    watch: JobWatch,
    status: dict[str, Any] | None,
    ranks: Sequence[int],
    leave: list[int],
    timeout: float,
) -> int:
    """Gives the order, again after each change of the members, and waits; returns the exit code."""
    begun, asked_at = time.monotonic(), 0.0
    period: Period | None = None
    heeding, lost = set[int](), set[int]()
    events = _events(status)
    while status is not None and (left := [rank for rank in leave if rank in status["members"]]):
        now = _period(status)
        if now != period:  # an order holds in one of them
            orders.give(client, now, [rank for rank in ranks if rank in left] or left)
            period, asked_at = now, time.monotonic()
        heeding.update(status["draining"])
        nobody = not heeding & set(left) and time.monotonic() - asked_at > _HEED
        if nobody or time.monotonic() - begun > timeout:
            typer.echo(_stays(status["leader"], left, heeding, time.monotonic() - begun), err=True)
            return 1
        time.sleep(_LOOK)
        status = _alive(watch)
    if status is None:
        return _unknown(client, f"rank(s) {_listed(leave)} were asked to leave", "they have")
    for _, what, of in sorted(_events(status) - events):
        lost.update(set(leave) & set(of) if what in ("dead", "silent") else ())
    if lost:
        typer.echo(f"rank(s) {_listed(sorted(lost))} were lost before they could leave", err=True)
        return 1
    typer.echo(f"rank(s) {_listed(leave)} left; the members are {_listed(status['members'])}")
    return 0


def _until_evicted(
    client: ReconnectingStore,
    watch: JobWatch,
    status: dict[str, Any] | None,
    ranks: Sequence[int],
    leave: list[int],
    timeout: float,
) -> int:
    """Gives the order once, and waits until the members have gone on without these; returns the exit code.

    Not again in a later epoch: another process may have taken a rank's place in it.
    """
    begun = time.monotonic()
    if status is not None:
        orders.give(client, _period(status), ranks, True)
    while status is not None and (left := [rank for rank in leave if rank in status["members"]]):
        if time.monotonic() - begun > timeout:
            secret = "has one: is it the job's?" if seals.secret() else "has none"
            typer.echo(
                f"rank(s) {_listed(left)} are members still after {timeout:.0f} s: the others go on when "
                "they next wait for a call. If they do not heed the order, the log of the leader (rank "
                f"{status['leader']}) says why. An order needs the job's TRIGRAM_SECRET, if there is one; "
                f"this command {secret}",
                err=True,
            )
            return 1
        time.sleep(_LOOK)
        status = _alive(watch)
    if status is None:
        return _unknown(client, f"rank(s) {_listed(leave)} were to be evicted", "they were")
    typer.echo(f"rank(s) {_listed(leave)} were evicted; the members are {_listed(status['members'])}")
    return 0


def _unknown(client: ReconnectingStore, asked: str, whether: str) -> int:
    """Says that nobody is left to tell whether an order was followed; returns the exit code."""
    gone = f"the job's store {client.address} or its leader is gone"
    typer.echo(f"{asked}, but {gone}, so whether {whether} is not known", err=True)
    return 1


def _events(status: dict[str, Any] | None) -> set[tuple[float, str, tuple[int, ...]]]:
    """What has happened in a job: when, what, and to whom."""
    events = [] if status is None else status["events"]
    return {(event["at"], event["what"], tuple(event["ranks"])) for event in events}


def _period(status: dict[str, Any]) -> Period:
    return Period(int(status["epoch"]), int(status["empty_regroups"]))


def _alive(watch: JobWatch) -> dict[str, Any] | None:
    """The status of a job that is alive."""
    end = time.monotonic() + STATUS_TIMEOUT + 1.0
    while (found := watch.status()) is None and time.monotonic() < end:
        time.sleep(_LOOK)
    return None if found is None else checked(found)


def _stays(leader: int, left: list[int], heeding: set[int], seconds: float) -> str:
    """Why ranks have not left."""
    slow, deaf = [r for r in left if r in heeding], [r for r in left if r not in heeding]
    lines = []
    if slow:
        lines.append(
            f"rank(s) {_listed(slow)} heed the order and have not left after {seconds:.0f} s: a rank ends "
            "its step first, or the steps until its next averaging step"
        )
    if deaf and seconds > _HEED:
        has = "is set here" if seals.secret() else "is not set here"
        lines.append(
            f"rank(s) {_listed(deaf)} do not heed the order: their logs, or that of the leader (rank "
            f"{leader}), say why. The job's TRIGRAM_SECRET must be set where it is given, and {has}"
        )
    elif deaf:
        lines.append(f"rank(s) {_listed(deaf)} have not left after {seconds:.0f} s")
    return "\n".join(lines)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
