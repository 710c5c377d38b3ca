"""What the integrations for elastic jobs share: calls of all ranks that have names, and a rank's own GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import trigram
from trigram.elastic import joining
from trigram.elastic.answers import Answers
from trigram.errors import MismatchError, TrigramError
from trigram.runtime import job, world

OfAll = Callable[[str, Any], list[Any]]
"""Gathers values of all ranks, for a call of that name."""


def of_all(library: str, what: str, value: Any, advice: str) -> list[Any]:
    """The values of the ranks that train, see :func:`trigram.elastic_all_gather`; after this one has left,
    its own.

    Args:
        library: Who calls, for errors.
        what: What is called, so that ranks that are at different calls do not get each other's values.
        value: This rank's.
        advice: What keeps ranks at the same calls.

    Raises:
        MismatchError: Other ranks are at another call.
    """
    if not trigram.is_initialized():
        return [value]
    told = trigram.elastic_all_gather([what, value])
    if others := {theirs for theirs, _ in told} - {what}:
        raise MismatchError(
            f"{library}: this rank calls {what}, and others {', '.join(sorted(others))}; {advice}"
        )
    return [value for _, value in told]


def by_first(of_all: OfAll, what: str, is_first: Callable[[], bool], write: Callable[[bool], Any]) -> Any:
    """What ``write(False)`` has returned on the first rank, which alone calls it; if that rank is lost before
    all know that it is done, the next one calls ``write(True)``.

    A rank that has joined, and has not begun its first step, neither writes nor waits: the others have made
    this call before, and its weights are not the job's. After a rank has left, it writes if it was the first.

    Returns:
        What was returned there; None on a rank that has no part in it.

    Raises:
        TrigramError: It has failed there; on that rank the error is its own. Or no rank is the first.
    """
    if not trigram.is_initialized():
        return write(False) if is_first() else None
    if joining.must_join() or job.here().part(Answers).alone:
        job.here().part(Answers).skip()
        return None
    again = False
    for _ in range(trigram.world_size() + 1):  # each time the first rank may be lost
        mine, failed = [False, None, ""], None
        if is_first():
            try:
                mine = [True, write(again), ""]
            except Exception as e:  # the others wait for this rank
                failed, mine = e, [True, None, f"rank {trigram.rank()}: {type(e).__name__}: {e}"]
        told = of_all(what, mine)
        if failed is not None:
            raise failed
        for wrote, result, error in told:
            if error:
                raise TrigramError(f"{what} has failed on {error}")
            if wrote:
                return result
        again = True
    raise TrigramError(f"{what}: none of the ranks that count is the first; call it between two steps")


def is_late() -> bool:
    """Whether this rank came after the job's start, and has not joined it yet."""
    present = world.present()
    return present is not None and present.elastic is not None and not present.elastic.ranks


def has_joined() -> bool:
    """Whether this rank came after the job's start, and has made no step yet."""
    present = world.present()
    return present is not None and present.elastic is not None and present.elastic.newcomer


def own_device() -> torch.device:
    """The GPU ``$LOCAL_RANK``, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
