"""plan.json: what a plan was made from, the table, and the decision; and how all ranks take it.

docs/planning.md documents the format. ``with_bagua`` uses ``decision`` only.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trigram._core as core
from trigram.collectives.consistency import listed, ranks_unlike_first
from trigram.errors import ConfigError, MismatchError
from trigram.plan.choice import Comparison, Decision, as_rows
from trigram.plan.inputs import Job
from trigram.plan.losses import ALLOWED
from trigram.runtime.world import AnyGroup, resolve

VERSION = 1
VARIABLE = "TRIGRAM_PLAN"


def write(path: Path, job: Job, found: Comparison, allowed: str, decision: Decision | None = None) -> None:
    """Writes a plan; who reads it meanwhile gets the file as it was, or the new one.

    Args:
        path: The file.
        job: What the plan was made from.
        found: The comparison.
        allowed: Which recommendation is the decision: ``exact``, ``close`` or ``any``.
        decision: Another decision, that a job has tried.
    """
    content = {
        "version": VERSION,
        "trigram": core.__version__,
        "allowed": allowed,
        "decision": asdict(decision or found.decision(allowed)),
        "recommended": {name: asdict(found.decision(name)) for name in ALLOWED},
        "rows": as_rows(found),
        "inputs": asdict(job),
    }
    text = json.dumps(content, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device, which keeps its place
        path.write_text(text)
        return
    path = path.resolve()  # what a link leads to
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> Decision:
    """The decision of a plan.

    Raises:
        ConfigError: There is no such file, or it is no plan of this version; the message says what is wrong.
    """
    try:
        content: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"plan: cannot read {os.fspath(path)}: {error}; write one with trigram plan"
        ) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ConfigError(
            f"plan: {os.fspath(path)} is no plan of version {VERSION}; write a new one with trigram plan"
        )
    try:
        decision = Decision(**content["decision"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"plan: {os.fspath(path)} has no valid decision ({error}); write a new one with trigram plan"
        ) from error
    sized = decision.bucket_mb is None or (
        isinstance(decision.bucket_mb, int | float) and 0 < decision.bucket_mb < 1 << 40
    )
    if not isinstance(decision.algorithm, str) or not isinstance(decision.options, dict) or not sized:
        raise ConfigError(
            f"plan: the decision of {os.fspath(path)} must have an algorithm, options and bucket_mb; it is "
            f"{content['decision']}"
        )
    return decision


def agreed(
    path: str | os.PathLike[str] | None, group: AnyGroup, uses: bool = True, asks: bool = True
) -> Decision | None:
    """The decision of the plan that all ranks of a group use; all of them call it.

    Args:
        path: The file; None: that of ``TRIGRAM_PLAN``, if it is set.
        group: The ranks that train a model.
        uses: Whether this rank takes a plan; not so if its script names an algorithm.
        asks: Whether the ranks compare their plans; those of an elastic job come one by one.

    Returns:
        The decision; None if no rank has a plan.

    Raises:
        ConfigError: This rank's file is no plan; the other ranks raise a ``MismatchError``.
        MismatchError: The ranks have different plans; all ranks raise it, and it names them.
    """
    chosen = (path if path is not None else os.environ.get(VARIABLE)) if uses else None
    failure: ConfigError | None = None
    decision: Decision | None = None
    try:
        decision = read(chosen) if chosen else None
    except ConfigError as error:
        failure = error
    text = (
        f"unreadable on this rank: {failure}"
        if failure is not None
        else json.dumps(decision and asdict(decision), sort_keys=True)
    )
    ranks = resolve(group) if asks else None
    other = (
        ranks_unlike_first(text, ranks) if ranks is not None and ranks.size > 1 and ranks.rank >= 0 else []
    )
    if failure is not None:
        raise failure
    if ranks is not None and other:
        raise MismatchError(
            f"with_bagua: the plan of rank(s) {listed(other)} differs from that of rank {ranks.ranks[0]}, or "
            f"cannot be read there; the decision of this rank is {text}. Give all ranks the same plan= or "
            f"{VARIABLE}, and copy the file to all hosts"
        )
    return decision
