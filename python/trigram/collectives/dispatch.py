"""Hands a call whose arguments are checked to the engine, or to a route for GPU tensors, and waits for it.

In a compiled function this is no part of the graph: the engine is given addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.collectives.arguments import seconds
from trigram.collectives.work import Work
from trigram.errors import TrigramError, UnsupportedError
from trigram.gpu import routes
from trigram.runtime import dynamo, engine_codes, logs
from trigram.runtime.group import Group

_NO_MEMORY = (0, 0, 0, 0)


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


@dynamo.disable
def dispatch(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits = None,
    timeout: float | None = None,
) -> Work | None:
    """Makes a call on one tensor or two.

    Args:
        group: The ranks.
        asked: The collective, dtype, length, operator, schedule and root, in the engine's codes.
        source: What the call reads.
        target: What it writes; the same tensor where it works in place.
        async_op: Return at once, with a :class:`Work`.
        what: The name of the call, for errors.
        splits: The lengths of the ranks' parts sent and received; None: equal.
        timeout: Seconds; None: the group's.
    """
    limit = group.timeout if timeout is None else seconds(timeout, what)
    if (tensor := source if source is not None else target) is not None and not tensor.is_cpu:
        return _on_device(group, asked, source, target, async_op, what, splits, limit)
    if target is source and source is not None:  # most calls are in place, and short
        address, nbytes = source.data_ptr(), source.nbytes
        memory = (address, nbytes, address, nbytes)
    else:
        given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
        memory = given + ((0, 0) if target is None else (target.data_ptr(), target.nbytes))
    if target is not None and target.requires_grad:
        torch.autograd.graph.increment_version(target)
    core = group.core
    if async_op:
        return Work(core.start(asked, memory, limit, splits), (source, target), what, group.describe)
    try:
        if group.describe is None:
            core.run(asked, memory, limit, splits)
        else:
            with logs.waiting(what, group.describe):
                core.run(asked, memory, limit, splits)
    except TrigramError as e:
        routes.abort(group, str(e))  # other ranks may have called it on GPU tensors, whose calls must end
        raise
    return None


@dynamo.disable
def dispatch_lists(
    group: Group,
    asked: engine_codes.Asked,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    async_op: bool,
    what: str,
    splits: engine_codes.Splits,
    timeout: float | None,
) -> Work | None:
    """As :func:`dispatch`, where the engine takes each list of CPU tensors for one tensor."""
    limit = group.timeout if timeout is None else seconds(timeout, what)
    lists = (
        [(t.data_ptr(), t.nbytes) for t in sources],
        [(t.data_ptr(), t.nbytes) for t in targets],
    )
    for t in targets:
        if t.requires_grad:
            torch.autograd.graph.increment_version(t)
    if async_op:
        core = group.core.start(asked, _NO_MEMORY, limit, splits, lists)
        return Work(core, (*sources, *targets), what, group.describe, len(targets))
    try:
        if group.describe is None:
            group.core.run(asked, _NO_MEMORY, limit, splits, lists)
        else:
            with logs.waiting(what, group.describe):
                group.core.run(asked, _NO_MEMORY, limit, splits, lists)
    except TrigramError as e:
        routes.abort(group, str(e))
        raise
    return None


def _on_device(
    group: Group,
    asked: engine_codes.Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    async_op: bool,
    what: str,
    splits: engine_codes.Splits,
    limit: float | None,
) -> Work | None:
    """The same for GPU tensors, after the work on the current stream. Like `Work.wait`, it returns when the
    call has ended, and raises its error; with TRIGRAM_GPU_WAIT=stream, at once."""
    if asked[4]:
        raise UnsupportedError(
            f"{what}: via applies to CPU tensors only; for GPU tensors set TRIGRAM_GPU_TRANSPORT"
        )
    if target is not None and target.requires_grad:
        torch.autograd.graph.increment_version(target)
    # Held until it has ended, also where Ctrl-C ends the wait.
    work = Work(
        routes.start(group, asked, source, target, splits, limit), (source, target), what, group.describe
    )
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
