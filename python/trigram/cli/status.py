"""`trigram status`: what the leader of an elastic job publishes in the job's store."""

from __future__ import annotations

import json
import time
from typing import Any

import typer

from trigram.cli.job_store import open_store
from trigram.elastic.join_queue import MOST_RANKS, STATUS_TIMEOUT, JobWatch

_NAMES = {
    "left": "left",
    "asked to leave": "left, as asked to",
    "dead": "dead",
    "silent": "silent, evicted",
    "evicted": "evicted, as asked to",
    "refused": "refused",
    "joined": "joined",
    "takes a place": "was a spare, counts now",
    "is a spare again": "is a spare again",
}
"""Events, and what is shown of them."""


def show(store: str | None, as_json: bool) -> int:
    """Prints the status of a job.

    Args:
        store: ``HOST:PORT``; None: where MASTER_ADDR and MASTER_PORT say.
        as_json: As JSON.

    Returns:
        The exit code: 1 if no elastic job is alive there.
    """
    client = open_store(store)
    watch = JobWatch(client)
    end = time.monotonic() + STATUS_TIMEOUT + 1.0
    while (found := watch.status()) is None and time.monotonic() < end:
        time.sleep(0.1)
    if found is None:
        known = "has ended, or its leader is about to be replaced" if watch.known() else "has never run"
        typer.echo(f"an elastic job {known} at the store {client.address}", err=True)
        return 1
    status = checked(found)
    typer.echo(json.dumps(status, indent=1) if as_json else text(status, time.time()))
    return 0


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a status; any process may write to the store, so that all may be missing or wrong."""
    return {
        "epoch": _number(found.get("epoch")),
        "empty_regroups": _number(found.get("empty_regroups")),
        "leader": _number(found.get("leader"), -1),
        "transport": _word(found.get("transport")),
        "model": _word(found.get("model")),
        "algorithm": _word(found.get("algorithm")),
        "steps": _number(found.get("steps")),
        "goodput": _number(found.get("goodput"), 1.0),
        "seconds_wasted": _number(found.get("wasted"), 0.0),
        "since": _number(found.get("began"), 0.0),
        "members": _ranks(found.get("ranks")),
        "replica_size": min(max(1, int(_number(found.get("replica_size"), 1))), MOST_RANKS),
        "spares": _ranks(found.get("spares")),
        "joining": _ranks(found.get("joining")),
        "draining": _ranks(found.get("draining")),
        "events": [
            {
                "at": _number(event.get("at"), 0.0),
                "epoch": _number(event.get("epoch")),
                "what": _word(event.get("what")),
                "ranks": _ranks(event.get("ranks")),
            }
            for event in _list(found.get("events"))
            if isinstance(event, dict)
        ],
    }


def text(status: dict[str, Any], now: float) -> str:
    """The lines that a terminal shows; ``now`` is a time of ``time.time``."""
    training = f"{status['steps']} steps of {status['model']}, {status['algorithm']}"
    lines = [
        f"epoch     {status['epoch']}, led by rank {status['leader']}",
        f"members   {_listed(status['members'])}",
        *_replicas(status),
        f"spares    {_listed(status['spares'])}",
        f"joining   {_listed(status['joining'])}",
        f"draining  {_listed(status['draining'])}",
        f"training  {training if status['model'] else 'none'}",
        f"goodput   {100 * status['goodput']:.1f} % (changes of the members, and averages made again: "
        f"{status['seconds_wasted']:.1f} s of {_ago(status, now)})",
    ]
    for event in reversed(status["events"]):
        what = _NAMES.get(event["what"], event["what"])
        plural = "s" if len(event["ranks"]) != 1 else ""
        seconds = max(0, round(now - event["at"]))
        lines.append(f"{seconds:6d} s ago: rank{plural} {_listed(event['ranks'])} {what}")
    return "\n".join(lines)


def _replicas(status: dict[str, Any]) -> list[str]:
    """A line that names the replicas, if they have several ranks."""
    size = status["replica_size"]
    numbers = sorted({rank // size for rank in status["members"]})
    return [f"replicas  {_listed(numbers)}, of {size} ranks each"] if size > 1 else []


def _ago(status: dict[str, Any], now: float) -> str:
    return f"{max(0.0, now - status['since']):.0f} s"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def _number(value: Any, default: float = 0) -> Any:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return value if ok else default


def _word(value: Any) -> str:
    return value[:64] if isinstance(value, str) and value[:64].isprintable() else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ranks(value: Any) -> list[int]:
    return [r for r in _list(value) if isinstance(r, int) and not isinstance(r, bool)]
