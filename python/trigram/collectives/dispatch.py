"""Hands a call whose arguments are checked to the engine, or to a route for GPU tensors, and waits for it.

:func:`start` is the way of all collectives, those of torch.distributed too (backend/calls). Only the
shortest, sums of plain tensors on the CPU, go past it.

In a compiled function this is no part of the graph: the engine is given addresses.
"""

from __future__ import annotations

import torch

from trigram import _core
from trigram.collectives.arguments import seconds
from trigram.collectives.work import Work
from trigram.errors import TrigramError, UnsupportedError
from trigram.gpu import device, routes
from trigram.runtime import dynamo, engine_codes, logs
from trigram.runtime.group import Group

_NO_MEMORY = (0, 0, 0, 0)
Memory = torch.Tensor | list[torch.Tensor]
"""One contiguous tensor, or several on the CPU that the engine takes for one, each where it is."""
Places = list[tuple[int, int]]
"""Addresses and bytes."""


def places(memory: Memory | None) -> Places:
    """Where memory is."""
    if memory is None:
        return []
    return [(t.data_ptr(), t.nbytes) for t in (memory if isinstance(memory, list) else [memory])]


def all_reduce_at_once(group: Group, t: object, op: int) -> bool:
    """Reduces a plain CPU tensor, which the engine reads itself: a short call takes less time than to read
    the tensor's attributes here.

    Returns:
        False if it is another kind of tensor, or the call is to be described in log lines; nothing has
        happened then.
    """
    if group.describe is not None:
        return False
    try:
        return group.core.all_reduce(t, op, group.timeout)
    except TrigramError as e:
        routes.abort(group, str(e))  # as below
        raise


def start(
    group: Group,
    asked: engine_codes.Asked,
    source: Memory | None,
    target: Memory | None,
    splits: engine_codes.Splits,
    limit: float | None,
    on_device: bool,
    background: bool,
) -> _core.Work | device.Call | None:
    """Starts a call, or runs it: the one way to the engine and to the routes, of the calls of this package
    and of torch.distributed's.

    Args:
        group: The ranks.
        asked: The collective, dtype, length, operator, schedule and root, in the engine's codes.
        source: What the call reads, contiguous; a list of tensors on the CPU counts as one.
        target: What it writes; the same object where it works in place.
        splits: The lengths of the ranks' parts sent and received; None: equal.
        limit: Seconds; None: no limit.
        on_device: The tensors take a route for GPUs, after the work on the current stream.
        background: On CPUs: return before it has ended.

    Returns:
        The call, whose tensors somebody must hold; None: it has ended.
    """
    if on_device:
        assert not isinstance(source, list) and not isinstance(target, list)
        return routes.start(group, asked, source, target, splits, limit)
    memory, lists = _NO_MEMORY, None
    if isinstance(source, list) or isinstance(target, list):
        lists = places(source), places(target)
    elif target is source:  # most calls are in place, and short
        if source is not None:
            address, nbytes = source.data_ptr(), source.nbytes
            memory = (address, nbytes, address, nbytes)
    else:
        given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
        memory = given + ((0, 0) if target is None else (target.data_ptr(), target.nbytes))
    if background:
        return group.core.start(asked, memory, limit, splits, lists)
    try:
        group.core.run(asked, memory, limit, splits, lists)
    except TrigramError as e:
        routes.abort(group, str(e))  # other ranks may have called it on GPU tensors, whose calls must end
        raise
    return None


def is_on_device(t: torch.Tensor, asked: engine_codes.Asked) -> bool:
    """Whether a call on this tensor takes a route for GPUs: whatever is asked, that of its device."""
    return not t.is_cpu


@dynamo.disable
def dispatch(
    group: Group,
    asked: engine_codes.Asked,
    source: Memory | None,
    target: Memory | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits = None,
    timeout: float | None = None,
) -> Work | None:
    """Makes a call; for the arguments see :func:`start`. On GPU tensors it returns, like `Work.wait`, when
    the call has ended, and raises its error; with TRIGRAM_GPU_WAIT=stream, at once.

    Args:
        group, asked, source, target, splits: As there.
        async_op: Return at once, with a :class:`Work`.
        what: The name of the call, for errors.
        timeout: Seconds; None: the group's.
    """
    limit = group.timeout if timeout is None else seconds(timeout, what)
    first = source if source is not None else target
    on_device = isinstance(first, torch.Tensor) and is_on_device(first, asked)
    if on_device and asked[4]:
        raise UnsupportedError(
            f"{what}: via applies to CPU tensors only; for GPU tensors set TRIGRAM_GPU_TRANSPORT"
        )
    outputs = target if isinstance(target, list) else () if target is None else (target,)
    for t in outputs:
        if t.requires_grad:
            torch.autograd.graph.increment_version(t)
    if async_op or on_device or group.describe is None:
        call = start(group, asked, source, target, splits, limit, on_device, async_op)
    else:
        with logs.waiting(what, group.describe):
            call = start(group, asked, source, target, splits, limit, on_device, async_op)
    if call is None:
        return None
    inputs = source if isinstance(source, list) else (source,)
    # Held until it has ended, also where Ctrl-C ends the wait.
    work = Work(call, (*inputs, *outputs), what, group.describe, len(outputs))
    if async_op:
        return work
    work.wait()
    return None


def dispatch_uneven_on_device(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor,
    target: torch.Tensor,
    async_op: bool,
    what: str,
    lengths: list[int],
    timeout: float | None,
) -> Work | None:
    """An all_gather or a reduce_scatter of unequal parts of GPU tensors, which the routes do in place."""
    if target.requires_grad:
        torch.autograd.graph.increment_version(target)
    source, target = source.detach(), target.detach()
    start = sum(lengths[: group.rank])
    if asked[0] == engine_codes.ALL_GATHER:
        own = target.view(-1)[start : start + lengths[group.rank]]
        if own.data_ptr() != source.data_ptr():
            own.copy_(source.view(-1))
        return dispatch(group, asked, target, target, async_op, what, (lengths, lengths), timeout)
    if async_op:
        raise UnsupportedError(f"{what}: splits with async_op work on CPU tensors only; leave async_op out")
    whole = source.clone()
    dispatch(group, asked, whole, whole, False, what, (lengths, lengths), timeout)
    target.view(-1).copy_(whole.view(-1)[start : start + lengths[group.rank]])
    return None
