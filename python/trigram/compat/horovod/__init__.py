"""Horovod's interface for PyTorch: ``import trigram.compat.horovod as hvd``.

Scripts for ``horovod.torch`` 0.28.1 run as they are, with these differences:

* Ranks make their calls in the same order. Horovod brings calls together by their names.
* ``DistributedOptimizer`` averages during ``backward()``, in buckets, and gives all ranks rank 0's weights
  when it is made. ``algorithm="decentralized"`` trains with any of Trigram's algorithms.
* ``join``, Adasum, ``elastic`` and the timeline raise an error that says what Trigram has instead.

docs/moving.md shows a script before and after.
"""

from __future__ import annotations

from typing import Any

from trigram.compat.horovod.basics import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
)
from trigram.compat.horovod.calls import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from trigram.compat.horovod.compression import Compression
from trigram.compat.horovod.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from trigram.compat.horovod.errors import HorovodInternalError
from trigram.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from trigram.compat.horovod.optimizer import DistributedOptimizer
from trigram.errors import UnsupportedError

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

_INSTEAD = {
    "join": "ranks with fewer batches train inside `with trigram.join(model):` with trigram.with_bagua",
    "elastic": "use trigram.with_bagua(model, optimizer=..., elastic=True), see docs/elastic.md",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm after torch.distributed.init_process_group('trigram')",
    "start_timeline": "set TRIGRAM_TIMELINE, or use torch.profiler, see docs/observing.md",
    "stop_timeline": "set TRIGRAM_TIMELINE, or use torch.profiler, see docs/observing.md",
}


def __getattr__(name: str) -> Any:
    """Names what there is in the place of what there is not."""
    if name in _INSTEAD:
        raise UnsupportedError(f"horovod: {name} is not supported; {_INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
