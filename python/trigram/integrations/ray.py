"""Ray Train: ``TorchTrainer(train, torch_config=TrigramConfig())``.

The workers get a process group of the backend ``trigram``, on which :func:`trigram.with_bagua` and torch's
collectives work. With ``elastic=True`` they get an elastic job instead, and Ray replaces a failed worker
without stopping the others. Interface: Ray 2.60, ``train/torch/config.py`` and, for the replacement of single
workers, ``train/v2/torch/torchft_config.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import trigram
from trigram import backend
from trigram.elastic import recovery
from trigram.errors import UnsupportedError
from trigram.runtime import world

try:
    import ray
    from ray import train
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import (
        TorchConfigContextManager,
        _set_torch_distributed_env_vars,
        _TorchBackend,
    )
    from ray.util import get_node_ip_address
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as e:
    raise ImportError("trigram.integrations.ray needs Ray Train: pip install 'ray[train]>=2.60'") from e

__all__ = ["TrigramConfig", "await_workers"]


@dataclass
class TrigramConfig(TorchConfig):
    """What Ray sets up in the workers of a ``TorchTrainer``.

    Args:
        backend: The backend of torch's process group.
        init_method: As for ``TorchConfig``.
        timeout_s: As for ``TorchConfig``: the timeout of the process group, in seconds.
        elastic: True: no process group; the training function calls ``trigram.init(elastic=True)`` and passes
            ``elastic=`` to :func:`trigram.with_bagua`. When a worker fails, the others continue, Ray starts a
            worker in its place (``FailureConfig(max_failures=...)`` times at most), and that one joins them.
            At the end of the training function the workers wait for those that Ray starts again. Call
            :func:`await_workers` before ``ray.train.report``.

    Raises:
        UnsupportedError: This version of Ray has no replacement of single workers.
    """

    backend: str | None = "trigram"
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.elastic and not hasattr(_TorchBackend, "has_replica_groups"):
            raise UnsupportedError(
                f"TrigramConfig: elastic=True needs a Ray that replaces single workers (2.60), and this is "
                f"{ray.__version__}; without it all workers restart from the last checkpoint"
            )

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """What starts the workers."""
        return _ElasticBackend if self.elastic else _TrigramBackend

    @property
    def train_func_context(self) -> type[TorchConfigContextManager]:
        """Around the training function, in each worker."""
        return _ElasticContext if self.elastic else TorchConfigContextManager

    def to_dict(self) -> dict[str, Any]:
        """What Ray's state export shows."""
        return {**super().to_dict(), "elastic": self.elastic}


def await_workers(timeout: float = 600.0) -> None:
    """Waits until the workers that Ray starts again have joined this elastic job.

    Call it before ``ray.train.report``, which waits for all workers: a worker can join only while the others
    are in no call of Ray's. Afterwards all workers have the same weights, also one that joins after the last
    step. All workers call it after the same steps.

    Args:
        timeout: Seconds to wait.

    Raises:
        TimeoutError: Ray has not replaced the missing workers in time.
    """
    recovery.await_members(train.get_context().get_world_size(), timeout)


class _ElasticContext(TorchConfigContextManager):
    """A worker that has trained ends together with the others: Ray waits for all, and so must a late one."""

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        if kind is None and trigram.is_initialized() and world.current().elastic is not None:
            await_workers()
            trigram.shutdown()
        return bool(super().__exit__(kind, value, traceback))


class _TrigramBackend(_TorchBackend):
    """Ray's own, after the workers have been told of the backend."""

    def on_start(self, worker_group: Any, backend_config: TrigramConfig) -> None:
        worker_group.execute(backend.register)
        super().on_start(worker_group, backend_config)


class _ElasticBackend(_TorchBackend):
    """Tells workers the address of a store that outlives each of them; one worker is one replica group."""

    has_replica_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None

    def on_start(self, worker_group: Any, backend_config: TrigramConfig) -> None:
        if self._store is None or hasattr(worker_group, "get_replica_groups"):
            self._store = _start_store()  # all workers start: a store serves one elastic job
        address = ray.get(self._store.address.remote())
        worker_group.execute(_enter, *address)

    def on_shutdown(self, worker_group: Any, backend_config: TrigramConfig) -> None:
        """Nothing: there is no process group, and Ray ends the processes."""


def _start_store() -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(_Store).options(num_cpus=0, scheduling_strategy=here).remote()


class _Store:
    """A process with the store, beside Ray's controller."""

    def __init__(self) -> None:
        host = get_node_ip_address()
        self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)

    def address(self) -> tuple[str, int]:
        return self._store.host, self._store.port


def _enter(host: str, port: int) -> None:
    """In a worker: the environment of ``trigram.init``, as torchrun's agent sets it."""
    _set_torch_distributed_env_vars()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
