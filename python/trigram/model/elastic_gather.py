"""``trigram.elastic_all_gather``: a collective of the script's own that the loss of a rank does not end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
    if is_alone():
        return [serialization.unpack(data, now.rank)]
    calls = job.here().part(Answers)
    if any(model.recovery.keeps_weights for model in recovery.trained()):
        raise MisuseError(
            f"{_WHAT}: the algorithm averages weights, and a forward pass has begun a step; call it before "
            "the forward pass, or after the update"
        )

    def make() -> tuple[bytes, bool]:
        now, mine = current()
        counts = not mine.newcomer and now.rank in mine.training()
        gathered, told = gather(data.numpy().tobytes() if counts else b"", calls.group(), calls.tells)
        return serialization.pack([_tensor(each) for each in gathered], _WHAT).numpy().tobytes(), told

    repeated(make)
    kept = serialization.unpack(_tensor(calls.last), now.rank)
    return _values([each.numpy().tobytes() for each in kept])


def is_alone() -> bool:
    """Whether this rank makes this call of its script without the others, in an elastic job that it joins."""
    calls = job.here().part(Answers)
    if not (joining.must_join() or calls.alone):
        return False
    calls.skip()
    return True


def repeated(make: Callable[[], tuple[bytes, bool]], undo: Callable[[], object] | None = None) -> None:
    """Makes a call of the script, in an elastic job, with the members that there are in the end.

    Args:
        make: Makes it, and ends with :func:`gather`, so that it ends on no rank before all have come that
            far. Returns the answer, which is told to ranks that were in it when a rank was lost; and whether
            one has :attr:`Answers.tells`.
        undo: Called after a loss, before the ranks change the membership.
    """
    calls = job.here().part(Answers)
    number = calls.done + 1
    # Ranks that are not in step change the membership when one sees that they are to, and it aborts the
    # others' calls. Nobody joins meanwhile: its script would not come to this call.
    out_of_step = not all(model.in_step for model in recovery.trained())
    with calls.called():
        while calls.done < number:
            with losses.caught() as lost, serving.looking(_look) if out_of_step else contextlib.nullcontext():
                calls.complete(*make())
            if losses.agreed(bool(lost)):
                if undo is not None:
                    undo()
                recovery.regroup()


def _look() -> None:
    if membership.has_lost():
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
