"""The libraries that `trigram bench` can measure.

Each prepares an operation as a function without arguments, so that the timed loop contains
nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor

import trigram
from trigram.cli.operations import REDUCTIONS, Case

Call = Callable[[], object]
VIAS = ("shared", "ring", "tree", "recursive_doubling", "scatter_gather")


class Unavailable(Exception):
    """A library is missing or does not support the operation; the text says why, and what to do."""


class Library(Protocol):
    """A library to measure."""

    name: str
    transport: str

    def prepare(self, case: Case) -> Call:
        """The operation on the buffers of the case, as a function without arguments.

        Raises:
            Unavailable: The library does not support the operation.
        """
        ...


class Trigram:
    """This library."""

    def __init__(self, transport: str, via: str | None, name: str = "trigram") -> None:
        self.name = name
        self.transport = transport
        self.via = via

    def prepare(self, case: Case) -> Call:
        """See `Library`."""
        t, out, op = case.t, case.out, case.op
        match case.operation:
            case "all_reduce":
                return partial(trigram.all_reduce, t, op, via=self.via)
            case "reduce":
                return partial(trigram.reduce, t, 0, op)
            case "broadcast":
                return partial(trigram.broadcast, t, 0)
            case "all_gather":
                return partial(trigram.all_gather, out, t)
            case "reduce_scatter":
                return partial(trigram.reduce_scatter, out, t, op)
            case "all_to_all":
                return partial(trigram.all_to_all, out, t)
            case "send_recv":
                return ping_pong(case, t, out, trigram.send, trigram.recv)
            case "gossip":
                parts = out.split(t.numel()) if case.neighbours else ()
                send, recv = partial(trigram.send, async_op=True), partial(trigram.recv, async_op=True)
                return swap_with_neighbours(case, t, parts, send, recv)
            case _:
                return trigram.barrier


class Gloo:
    """The CPU backend of torch.distributed, in a separate process group."""

    name = "gloo"
    transport = "tcp"
    OPS: ClassVar[dict[str, Any]] = {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "prod": dist.ReduceOp.PRODUCT,
        "band": dist.ReduceOp.BAND,
        "bor": dist.ReduceOp.BOR,
        "bxor": dist.ReduceOp.BXOR,
    }

    def __init__(self) -> None:
        dist.init_process_group(self.name)
        # torch 2.13 renamed these two and warns about the old names.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def prepare(self, case: Case) -> Call:
        """See `Library`."""
        t, out = case.t, case.out
        if case.operation in REDUCTIONS and case.op not in self.OPS:
            raise Unavailable(f"{self.name} does not support the reduction {case.op}")
        op = self.OPS.get(case.op, dist.ReduceOp.SUM)
        match case.operation:
            case "all_reduce":
                return partial(dist.all_reduce, t, op)
            case "reduce":
                return partial(dist.reduce, t, 0, op)
            case "broadcast":
                return partial(dist.broadcast, t, 0)
            case "all_gather":
                return partial(self._all_gather, out, t)
            case "reduce_scatter":
                return partial(self._reduce_scatter, out, t, op)
            case "all_to_all":
                return partial(dist.all_to_all_single, out, t)
            case "send_recv":
                return ping_pong(case, t, out, dist.send, dist.recv)
            case "gossip":
                parts = out.split(t.numel()) if case.neighbours else ()
                return swap_with_neighbours(case, t, parts, dist.isend, dist.irecv)
            case _:
                return dist.barrier


class Nccl(Gloo):
    """The GPU backend of torch.distributed."""

    name = "nccl"
    transport = "nccl"
    OPS: ClassVar[dict[str, Any]] = {
        **{name: op for name, op in Gloo.OPS.items() if name not in ("band", "bor", "bxor")},
        "avg": dist.ReduceOp.AVG,
    }

    def prepare(self, case: Case) -> Call:
        """See `Library`."""
        if case.operation != "gossip":
            return super().prepare(case)
        # In one batch: single calls would wait for each other on the stream that they share.
        parts = case.out.split(case.t.numel()) if case.neighbours else ()
        ops = [dist.P2POp(dist.irecv, p, o) for p, o in zip(parts, case.neighbours, strict=True)]
        ops += [dist.P2POp(dist.isend, case.t, o) for o in case.neighbours]
        return lambda: [w.wait() for w in dist.batch_isend_irecv(ops)] if ops else None


class Mpi:
    """The MPI library of mpiexec, through mpi4py."""

    name = "mpi"
    transport = "auto"
    TYPES: ClassVar = {
        "float32": "FLOAT",
        "float64": "DOUBLE",
        "int8": "INT8_T",
        "uint8": "UINT8_T",
        "int32": "INT32_T",
        "int64": "INT64_T",
    }

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise Unavailable(
                "mpi: mpi4py is not installed: pip install mpi4py, then run under mpiexec"
            ) from error
        if MPI.COMM_WORLD.size != int(os.environ["WORLD_SIZE"]):
            raise Unavailable(
                f"mpi: mpi4py sees {MPI.COMM_WORLD.size} of {os.environ['WORLD_SIZE']} ranks: run mpiexec -n "
                "RANKS trigram bench ..., with mpi4py for the MPI of this mpiexec"
            )
        self.mpi: Any = MPI

    def prepare(self, case: Case) -> Call:
        """See `Library`."""
        mpi, comm, t, out = self.mpi, self.mpi.COMM_WORLD, self._spec(case.t), self._spec(case.out)
        op = getattr(mpi, case.op.upper(), None)
        if case.operation in REDUCTIONS and op is None:
            raise Unavailable(f"mpi does not support the reduction {case.op}")
        match case.operation:
            case "all_reduce":
                return partial(comm.Allreduce, mpi.IN_PLACE, t, op)
            case "reduce":
                root = case.rank == 0
                return partial(comm.Reduce, mpi.IN_PLACE if root else t, t if root else None, op, 0)
            case "broadcast":
                return partial(comm.Bcast, t, 0)
            case "all_gather":
                return partial(comm.Allgather, t, out)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, t, out, op)
            case "all_to_all":
                return partial(comm.Alltoall, t, out)
            case "send_recv":
                return ping_pong(case, t, out, comm.Send, comm.Recv)
            case "gossip":
                parts = (
                    [self._spec(part) for part in case.out.split(case.t.numel())] if case.neighbours else ()
                )
                return swap_with_neighbours(case, t, parts, comm.Isend, comm.Irecv)
            case _:
                return comm.Barrier

    def _spec(self, t: Tensor) -> list[Any]:
        name = str(t.dtype).removeprefix("torch.")
        if name not in self.TYPES:
            raise Unavailable(f"mpi does not support the dtype {name}")
        # No count: mpi4py takes the buffer's, divided among the ranks where the operation splits or gathers.
        return [self.mpi.buffer.fromaddress(t.data_ptr(), t.nbytes), getattr(self.mpi, self.TYPES[name])]


def ping_pong(
    case: Case, t: Any, out: Any, send: Callable[[Any, int], object], recv: Callable[[Any, int], object]
) -> Call:
    """A round trip between this rank and its partner; the even rank sends first."""
    other = case.partner
    if other is None:
        return lambda: None

    def ping() -> None:
        send(t, other)
        recv(out, other)

    def pong() -> None:
        recv(out, other)
        send(t, other)

    return ping if case.rank < other else pong


def swap_with_neighbours(
    case: Case, t: Any, parts: Sequence[Any], send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]
) -> Call:
    """Sends a tensor to each neighbour and receives one from each, all at the same time."""
    receives = list(zip(parts, case.neighbours, strict=True))

    def run() -> None:
        works = [recv(part, other) for part, other in receives]
        works += [send(t, other) for other in case.neighbours]
        for work in works:
            work.wait()

    return run


def open_libraries(
    against: Sequence[str], transport: str, via: str | None
) -> tuple[list[Library], list[str]]:
    """Starts trigram and the libraries to compare with.

    Args:
        against: Any of "gloo", "mpi" and "nccl".
        transport: The transport that trigram uses, for the report.
        via: The all_reduce schedule of trigram; None: the default; "all": the default and each.

    Returns:
        The libraries, trigram first, and for each library that is missing the reason.
    """
    makers: dict[str, Callable[[], Library]] = {"gloo": Gloo, "mpi": Mpi, "nccl": Nccl}
    libraries: list[Library] = [Trigram(transport, None if via == "all" else via)]
    if via == "all":
        libraries += [Trigram(transport, each, each) for each in VIAS]
    missing: list[str] = []
    # trigram comes last: it then uses the store of torch.distributed instead of a second one.
    for name in against:
        try:
            libraries.append(makers[name]())
        except Unavailable as reason:
            missing.append(str(reason))
    trigram.init()
    return libraries, missing
