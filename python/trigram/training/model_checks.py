"""Modules and optimizers that would train wrong without a word under data parallelism."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trigram.errors import UnsupportedError
from trigram.runtime import logs


def check_modules(model: nn.Module, size: int) -> None:
    """Raises if a module of the model needs something that this job has not.

    Args:
        model: The module; its submodules are looked at too.
        size: The number of ranks that train it.

    Raises:
        UnsupportedError: The model is a ``torch.jit.ScriptModule``. Or it has a ``SyncBatchNorm``, there are
            several ranks, and no process group of torch through which it could exchange its statistics: it
            would use those of this rank's batch.
    """
    if size > 1 and isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            "with_bagua: the model is a torch.jit.ScriptModule, which supports no hooks; "
            "train the module that was scripted, with torch.compile if it must be fast"
        )
    if size == 1 or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"with_bagua: module {name or 'itself'} is a SyncBatchNorm, which averages its statistics "
                "through torch's process group, but there is none with several ranks, so it would use the "
                "batch of each rank alone; call torch.distributed.init_process_group on all ranks before "
                "with_bagua, or use BatchNorm"
            )


class AveragedOptimizer:
    """The optimizer whose state is averaged with the weights of a model.

    Args:
        optimizer: The ``optimizer=`` of ``with_bagua``. It is not kept.
        title: Names the algorithm and the model.
    """

    def __init__(self, optimizer: Optimizer, title: str) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = weakref.ref(optimizer)
        self._title = title

    def check(self, optimizer: Optimizer) -> None:
        """Warns, once, of another one that updates the model: its state is not averaged."""
        if self._optimizer is None:
            return
        given = self._optimizer()
        # Wrappers of an optimizer have its groups.
        if given is None or given.param_groups is not optimizer.param_groups:
            logs.warning(
                f"{self._title} was updated by a {type(optimizer).__name__} that is not the optimizer= of "
                "with_bagua, so its state is not averaged; call trigram.unwrap(model) and with_bagua again, "
                "with the new optimizer"
            )
            self._optimizer = None
