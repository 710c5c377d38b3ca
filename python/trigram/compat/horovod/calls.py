"""Horovod's collectives, each as a handle: ``synchronize`` waits for it.

Calls of one process set are made in the same order on all its ranks. A ``name`` is for errors, and two calls
under way must not have the same one. Averages of integers are rounded towards 0, as Horovod's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import Work
from trigram.compat.horovod import basics
from trigram.compat.horovod.basics import ProcessSet, global_process_set
from trigram.compat.horovod.errors import HorovodInternalError, errors
from trigram.errors import UnsupportedError
from trigram.runtime.group import Group
from trigram.runtime.job import Part, here
from trigram.runtime.records import all_gather_bytes
from trigram.runtime.world import resolve

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Sum: "sum", Min: "min", Max: "max", Product: "prod"}


class Handle:
    """A call under way.

    Args:
        works: Its collectives.
        finish: Makes the result when they have ended.
        name: Its name; None: it has none.

    Attributes:
        waited: Somebody has waited for it. Until then, or until it is dropped, no other call has its name.
    """

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], Any], name: str | None) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self.waited = False
        if name is not None:
            here().part(_UnderWay).handles[name] = self

    def done(self) -> bool:
        """Whether it has ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Waits until it has ended; returns the result."""
        self.waited = True  # also if it fails: another may have its name
        with errors():
            for work in self._works:
                work.wait()
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    __call__ = wait


class _UnderWay(Part):
    """The calls of a rank that have names."""

    def __init__(self) -> None:
        self.handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()


def _named(name: str | None) -> str | None:
    """Raises if another call that has the name is under way."""
    other = None if name is None else here().part(_UnderWay).handles.get(name)
    if other is not None and not other.waited:
        raise ValueError(
            f"Duplicate tensor name {name}: the call that has it is under way; synchronize it first, or give "
            "each call a name of its own"
        )
    return name


def poll(handle: Handle) -> bool:
    """Whether a call has ended, so that ``synchronize`` does not wait."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for a call; returns its result.

    Raises:
        HorovodInternalError: The call has failed.
    """
    return handle.wait()


def _scaled(t: torch.Tensor, factor: float) -> torch.Tensor:
    """``t`` times a factor, in ``t``'s dtype."""
    if factor == 1.0:
        return t
    return t * factor if t.is_floating_point() else (t.double() * factor).to(t.dtype)


def operator(op: int | None, average: bool | None) -> int:
    """The operator of an older form of the calls, which has ``average``."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        op = Average if average is None or average else Sum
    if op == Adasum:
        raise UnsupportedError("horovod: op=Adasum is not supported; use Average, or algorithm= of Trigram")
    if op != Average and op not in _OPS:
        raise ValueError(f"op={op} is unknown; use Average, Sum, Min, Max or Product")
    return op


def _how(op: int, t: torch.Tensor) -> tuple[str, bool]:
    """The engine's operator, and whether its result is still to be divided by the number of ranks."""
    if op != Average:
        return _OPS[op], False
    divides = not t.is_floating_point() and not t.is_complex()
    return ("sum" if divides else "avg"), divides


def _group(process_set: ProcessSet) -> Group:
    basics.rank()  # raises what scripts know, if there is no job
    return resolve(process_set.group)


def _reduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    group, name = _group(process_set), _named(name)
    works: list[Work | None] = []
    memory: list[torch.Tensor] = []
    with errors():
        for t, out in zip(tensors, outputs, strict=True):
            whole = out.detach()
            memory.append(whole if whole.is_contiguous() else torch.empty_like(whole).contiguous())
            if memory[-1].data_ptr() != t.data_ptr() or prescale != 1.0:
                memory[-1].copy_(_scaled(t.detach(), prescale))
            how, _ = _how(op, t)
            works.append(collectives.all_reduce(memory[-1], how, None, group, async_op=True))

    def finish() -> list[torch.Tensor]:
        for out, got in zip(outputs, memory, strict=True):
            if _how(op, got)[1]:
                got.copy_(got.div(group.size, rounding_mode="trunc"))
            if postscale != 1.0:
                got.copy_(_scaled(got, postscale))
            if got.data_ptr() != out.data_ptr():
                out.detach().copy_(got)
        return list(outputs)

    return Handle(works, finish, name)


def _first(handle: Handle) -> Handle:
    """The same call, whose result is the one tensor of its list."""
    finish = handle._finish
    assert finish is not None
    handle._finish = lambda: finish()[0]
    return handle


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduces a tensor over all ranks of a set, into a new tensor."""
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    how = operator(op, average)
    return _first(_reduce([tensor], [out], name, how, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`allreduce_async`, in place."""
    how = operator(op, average)
    return _first(_reduce([tensor], [tensor], name, how, prescale_factor, postscale_factor, process_set))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces a tensor over all ranks of a set, in place."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduces several tensors, into new ones."""
    outs = [torch.empty_like(t, memory_format=torch.contiguous_format, requires_grad=False) for t in tensors]
    how = operator(op, average)
    return _reduce(tensors, outs, name, how, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduces several tensors, in place."""
    how = operator(op, average)
    return _reduce(tensors, tensors, name, how, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces several tensors, in place."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Sums or averages a sparse tensor over all ranks of a set; the result is not coalesced."""
    group = _group(process_set)
    t = tensor.coalesce()
    indices = allgather_async(t.indices().t().contiguous(), None, process_set)
    values = allgather_async(t.values(), name, process_set)

    def finish() -> torch.Tensor:
        got = synchronize(values)
        got = got / group.size if op == Average else got
        return torch.sparse_coo_tensor(
            synchronize(indices).t(), got, t.size(), device=t.device, check_invariants=False
        )

    return Handle([], finish, None)


def _told(group: Group, mine: object, what: str) -> list[str]:
    """What all ranks say of their tensors: those that have others learn of it, and so do all."""
    with errors():
        return [each.decode() for each in all_gather_bytes(group, f"{what} {mine}".encode())]


def _rows(group: Group, tensors: Sequence[torch.Tensor], what: str) -> list[list[int]]:
    """By tensor the rows that each rank has of it; raises on all ranks if they differ in more."""
    mine = [(t.shape[0] if t.dim() else 1, tuple(t.shape[1:]), str(t.dtype), str(t.is_cpu)) for t in tensors]
    told = _told(group, "|".join("@".join(map(str, one)) for one in mine), what)
    unlike = {"|".join(part.partition("@")[2] for part in each.split("|")) for each in told}
    if len(unlike) > 1 or len({each.partition(" ")[0] for each in told}) > 1:
        each = ", ".join(f"rank {rank}: {text}" for rank, text in zip(group.ranks, told, strict=True))
        raise HorovodInternalError(f"{what}: the ranks give different tensors, or make other calls: {each}")
    rows = [
        [int(part.partition("@")[0].rpartition(" ")[2]) for part in each.split("|")] if tensors else []
        for each in told
    ]
    return [[row[k] for row in rows] for k in range(len(tensors))]


def _gathered(group: Group, tensors: Sequence[torch.Tensor]) -> tuple[list[Work | None], list[torch.Tensor]]:
    works: list[Work | None] = []
    outs: list[torch.Tensor] = []
    for t, rows in zip(tensors, _rows(group, tensors, "allgather"), strict=True):
        mine = t.detach().reshape(1) if not t.dim() else t.detach().contiguous()
        outs.append(torch.empty((sum(rows), *mine.shape[1:]), dtype=t.dtype, device=t.device))
        if outs[-1].numel():
            with errors():
                works.append(collectives.all_gather(outs[-1], mine, group, async_op=True, splits=rows))
    return works, outs


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenates the tensors of all ranks of a set along the first dimension, which may differ."""
    return _first(grouped_allgather_async([tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """The same for several tensors."""
    group, name = _group(process_set), _named(name)
    works, outs = _gathered(group, tensors)
    return Handle(works, lambda: outs, name)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """A copy of rank ``root_rank``'s tensor, on all ranks of a set; the rank is one of the job."""
    out = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(out, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`broadcast_async`, in place."""
    group, name = _group(process_set), _named(name)
    memory = tensor.detach()
    whole = memory if memory.is_contiguous() else memory.contiguous()
    with errors():
        work = collectives.broadcast(whole, root_rank, group, async_op=True)

    def finish() -> torch.Tensor:
        if whole.data_ptr() != memory.data_ptr():
            memory.copy_(whole)
        return tensor

    return Handle([work], finish, name)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives all ranks of a set rank ``root_rank``'s tensor, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Sends each rank of a set its rows. The result: the rows received, and from each rank how many.

    Args:
        tensor: The rows, in the order of the ranks.
        splits: How many rows each rank gets, integers; None: all the same number.
        name: See the module.
        process_set: The ranks.
    """
    group = _group(process_set)
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if not tensor.dim() or rows % group.size:
            raise ValueError(
                f"alltoall: {rows} rows cannot be divided equally among {group.size} ranks; pass splits"
            )
        given = torch.full((group.size,), rows // group.size, dtype=torch.int32, device="cpu")
    else:
        given = splits if isinstance(splits, torch.Tensor) else torch.tensor(list(splits), device="cpu")
        if given.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"alltoall: splits must be 32-bit or 64-bit integers, not {given.dtype}")
        if (
            given.dim() != 1
            or len(given) != group.size
            or int(given.sum()) != rows
            or bool((given < 0).any())
        ):
            raise ValueError(
                f"alltoall: splits={given.tolist()} must be {group.size} numbers of rows, {rows} together"
            )
    name = _named(name)
    mine = given.to("cpu", torch.int64)
    _rows(group, [tensor], "alltoall")
    received = torch.empty_like(mine)
    whole = tensor.detach().contiguous()
    with errors():
        collectives.all_to_all(received, mine, group=group)
        out = torch.empty((int(received.sum()), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        work = collectives.all_to_all(
            out, whole, received.tolist(), mine.tolist(), group=group, async_op=True
        )
    return Handle([work], lambda: (out, received.to(given.device, given.dtype)), name)


def _scattered(
    group: Group, tensors: Sequence[torch.Tensor], op: int, prescale: float
) -> tuple[list[Work | None], list[torch.Tensor]]:
    works: list[Work | None] = []
    outs: list[torch.Tensor] = []
    for t, rows in zip(tensors, _rows(group, tensors, "reducescatter"), strict=True):
        if len(set(rows)) > 1:
            raise HorovodInternalError(f"reducescatter: the ranks give different numbers of rows: {rows}")
        # The first ranks get one row more, if the number of ranks is no divisor.
        parts = [rows[0] // group.size + (r < rows[0] % group.size) for r in range(group.size)]
        outs.append(torch.empty((parts[group.rank], *t.shape[1:]), dtype=t.dtype, device=t.device))
        whole = _scaled(t.detach(), prescale).contiguous()
        if whole.numel():
            how, _ = _how(op, t)
            with errors():
                works.append(
                    collectives.reduce_scatter(outs[-1], whole, how, group, async_op=True, splits=parts)
                )
    return works, outs


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Averages or sums a tensor over all ranks of a set; each gets its rows of the result."""
    return _first(
        grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    )


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """The same for several tensors."""
    how = operator(op, None)
    if how not in (Average, Sum):
        raise ValueError("reducescatter: op must be Average or Sum")
    if any(not t.dim() for t in tensors):
        raise HorovodInternalError("reducescatter: a scalar has no rows to scatter")
    group, name = _group(process_set), _named(name)
    works, outs = _scattered(group, tensors, how, prescale_factor)

    def finish() -> list[torch.Tensor]:
        for out in outs:
            if _how(how, out)[1]:
                out.copy_(out.div(group.size, rounding_mode="trunc"))
            if postscale_factor != 1.0:
                out.copy_(_scaled(out, postscale_factor))
        return outs

    return Handle(works, finish, name)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of a set have called it."""
    group = _group(process_set)
    with errors():
        collectives.barrier(group)
