"""Elastic jobs in libraries that are built on Accelerate: each rank is, to Accelerate, a training of its own.

Accelerate's own training with several processes has a process group, which the loss of a rank ends.
"""

from __future__ import annotations

import os

import torch.distributed as dist

import trigram
from trigram.errors import MisuseError
from trigram.integrations import elastic_calls
from trigram.runtime import world

try:
    from accelerate.state import AcceleratorState, DistributedType, PartialState
except ImportError as e:
    raise ImportError(
        "trigram.integrations.accelerate_elastic needs Accelerate: pip install 'accelerate>=1.0'"
    ) from e

__all__ = ["start"]
_SAY_HOW_MANY = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
)  # fmt: skip
"""By these Accelerate sees that it is to make a process group."""


def start() -> None:
    """Enters the elastic job, and keeps Accelerate from making a process group.

    Call it at the start of the script, before ``TrainingArguments`` or an ``Accelerator`` is made. It calls
    ``trigram.init(elastic=True)`` unless that has been called. From then on ``$WORLD_SIZE`` and
    ``$LOCAL_RANK`` are not in this process's environment: ask :func:`trigram.world_size`.

    Raises:
        MisuseError: Accelerate has begun as one of several processes, or the job is not elastic.
    """
    if not trigram.is_initialized():
        trigram.init(elastic=True)
    if world.current().elastic is None:
        raise MisuseError("start: trigram.init was called without elastic=True; leave the call to start()")
    check_alone("start")
    if (device := elastic_calls.own_device()).type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    for name in _SAY_HOW_MANY:
        os.environ.pop(name, None)


def check_alone(who: str) -> None:
    """Raises if there is a process group, or Accelerate trains with several processes.

    Raises:
        MisuseError: See there.
    """
    kind = PartialState._shared_state.get("distributed_type", DistributedType.NO)
    if kind != DistributedType.NO or dist.is_initialized():
        raise MisuseError(
            f"{who}: there is a process group, which the loss of a rank would end; call "
            "trigram.integrations.transformers_elastic.start() at the start of the script, before "
            "TrainingArguments or an Accelerator is made"
        )


def follow_ranks() -> int:
    """Tells Accelerate this rank's place among those that train, -1 while it joins, and returns it. The first
    writes logs and checkpoints."""
    place = trigram.rank()
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared["process_index"] = shared["local_process_index"] = place
    return place
