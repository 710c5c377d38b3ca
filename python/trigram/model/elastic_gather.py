"""``trigram.elastic_all_gather``: a collective of the script's own that the loss of a rank does not end."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import serialization
from trigram.collectives.consistency import tell_all
from trigram.elastic import joining, losses, membership, recovery
from trigram.elastic.answers import Answers
from trigram.elastic.membership import Membership, current
from trigram.errors import AbortedError, MisuseError
from trigram.runtime import job, serving, world
from trigram.runtime.group import Group

_WHAT = "elastic_all_gather"


def elastic_all_gather(value: Any) -> list[Any]:
    """Gathers a value of each rank; in an elastic job it goes on when ranks are lost meanwhile.

    Its answer is the same on all ranks that remain, also where some had it before the loss and others not.
    So what a script decides by it, such as to stop, all decide alike::

        losses = trigram.elastic_all_gather(float(loss))
        if sum(losses) / len(losses) < goal:
            break

    All ranks call it, the same number of times between two steps, and outside of backward passes; where
    weights are averaged, outside of steps. A rank that joins calls it alone until its first step begins, and
    once more where it joined in the middle of a step of the others; it gets its own value. Ranks that have
    joined in this step and spares call it too, and the answer is without their values. In jobs that are not
    elastic it gathers from all ranks.

    Args:
        value: None, bools, numbers, strings, tensors, and lists, tuples and dicts of them.

    Returns:
        The values, by rank; tensors are on the CPU.

    Raises:
        MisuseError: A forward pass has begun a step, and the algorithm averages weights: a rank that is lost
            now would change them before the backward pass.
        UnsupportedError: The value contains an object of another type.
        PeerLostError: The ranks that this rank reaches are too few to continue the job.
        TimeoutError: A rank has not called it within ``op_timeout`` seconds.
    """
    now = world.current()
    mine = now.elastic
    data = serialization.pack(value, _WHAT)
    if not isinstance(mine, Membership):
        return _values(gather(data.numpy().tobytes(), now.group)[0])
    calls = job.here().part(Answers)
    if joining.must_join() or calls.alone:
        calls.skip()
        return [serialization.unpack(data, now.rank)]
    if any(model.recovery.keeps_weights for model in recovery.trained()):
        raise MisuseError(
            f"{_WHAT}: the algorithm averages weights, and a forward pass has begun a step; call it before "
            "the forward pass, or after the update"
        )
    number = calls.done + 1
    with calls.called():
        _make(calls, number, data)
    kept = serialization.unpack(_tensor(calls.last), now.rank)
    return _values([each.numpy().tobytes() for each in kept])


def _make(calls: Answers, number: int, data: torch.Tensor) -> None:
    """Makes the call of this number, with the members that there are in the end."""
    out_of_step = not all(model.in_step for model in recovery.trained())
    while calls.done < number:
        now, mine = current()
        counts = not mine.newcomer and now.rank in mine.training()
        # Ranks that are not in step regroup when they see that they are to, and abort calls of the ranks that
        # they know to take part; one that has just joined may be in another.
        with losses.caught() as lost, serving.looking(_look) if out_of_step else contextlib.nullcontext():
            gathered, told = gather(data.numpy().tobytes() if counts else b"", calls.group(), calls.tells)
            answer = serialization.pack([_tensor(each) for each in gathered], _WHAT)
            calls.complete(answer.numpy().tobytes(), told)
        if losses.agreed(bool(lost)):
            recovery.regroup()


def _look() -> None:
    if any(model.is_called() for model in recovery.trained()):
        raise AbortedError(membership.why_aborted())


def gather(mine: bytes, group: Group, flag: bool = False) -> tuple[list[bytes], bool]:
    """The byte strings of all ranks, and whether one has the flag. Unlike
    :func:`trigram.runtime.records.all_gather_bytes` it serves the averages that go on in the background, for
    which ranks wait that have not come yet."""
    told = tell_all([len(mine), int(flag)], group)
    sizes, flag = [size for size, _ in told], any(flag for _, flag in told)
    padded = _tensor(mine.ljust(max(sizes), b"\0"))
    everyone = torch.empty(group.size, max(sizes), dtype=torch.uint8, device="cpu")
    if max(sizes):
        collectives.all_gather(everyone, padded, group)
    return [row.numpy().tobytes()[:size] for row, size in zip(everyone, sizes, strict=True)], flag


def _values(gathered: list[bytes]) -> list[Any]:
    """What ranks have given; those that do not count give nothing."""
    return [serialization.unpack(_tensor(data), place) for place, data in enumerate(gathered) if data]


def _tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
