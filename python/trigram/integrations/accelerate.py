"""Accelerate: ``prepare(accelerator, model, optimizer, loader)`` in place of ``accelerator.prepare``.

The script keeps its loop: ``accumulate``, ``no_sync``, ``backward``, ``clip_grad_norm_``, ``save_state`` and
``load_state`` work as before. Interface: Accelerate 1.15, ``accelerator.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.errors import MisuseError, UnsupportedError
from trigram.integrations import saved_state

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DDPCommunicationHookType, DistributedType
except ImportError as e:
    raise ImportError(
        "trigram.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.0'"
    ) from e

__all__ = ["prepare"]
_WRAPPED_BY_ACCELERATE = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}
"""The kinds of training in which Accelerate itself shards or wraps a model."""
_bridged: weakref.WeakSet[Accelerator] = weakref.WeakSet()


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    algorithm: str | Trigram | None = None,
    device_placement: Sequence[bool | None] | None = None,
    **options: Any,
) -> Any:
    """Does what ``accelerator.prepare(*objects)`` does, with :func:`trigram.with_bagua` in place of
    ``DistributedDataParallel``.

    A prepared model is the module itself (``accelerator.unwrap_model`` returns it too). With the default
    algorithm its weights are bit for bit those that Accelerate trains over gloo on two ranks.
    ``accelerator.save_state``, ``save_model`` and ``get_state_dict``, which all ranks call, have the average
    of the weights; ``save_state`` also has the algorithm's state of every rank, which ``load_state``
    restores.

    Args:
        accelerator: The accelerator of the script.
        *objects: Models, optimizers, data loaders and schedulers, as for ``accelerator.prepare``.
        algorithm: As for :func:`trigram.with_bagua`; None: ``$TRIGRAM_ALGORITHM``, else
            ``gradient_allreduce``.
        device_placement: As for ``accelerator.prepare``.
        **options: The other arguments of :func:`trigram.with_bagua`, for every model. ``optimizer`` is the
            optimizer among the objects that has the model's parameters, ``bucket_mb`` and
            ``broadcast_buffers`` are those of ``DistributedDataParallelKwargs``, unless they are given.

    Returns:
        The prepared objects, in the same order; the object itself if there is one.

    Raises:
        UnsupportedError: The accelerator shards or wraps models itself (FSDP, DeepSpeed, ...), or has a
            communication hook.
        MisuseError: Accelerate and Trigram see different numbers of processes; and see
            :func:`trigram.with_bagua`.
    """
    optimizers = [o for o in objects if isinstance(o, Optimizer)]
    placements = list(device_placement or [None] * len(objects))
    if len(placements) != len(objects):
        raise MisuseError(
            f"prepare: device_placement has {len(placements)} values for {len(objects)} objects"
        )
    result, others = list(objects), []
    for place, obj in enumerate(objects):
        if isinstance(obj, nn.Module):
            result[place] = prepare_model(
                accelerator, obj, algorithm, optimizers, device_placement=placements[place], **options
            )
        else:
            others.append(place)
    if others:
        placed = [placements[i] for i in others] if device_placement is not None else None
        prepared = accelerator.prepare(*(objects[i] for i in others), device_placement=placed)
        for place, obj in zip(others, prepared if len(others) > 1 else [prepared], strict=True):
            result[place] = obj
    return tuple(result) if len(result) > 1 else result[0]


def prepare_model(
    accelerator: Accelerator,
    model: nn.Module,
    algorithm: str | Trigram | None = None,
    optimizers: Sequence[Optimizer] = (),
    *,
    device_placement: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepares one model: device, mixed precision and compilation by Accelerate, then ``with_bagua``.

    Args:
        accelerator: See :func:`prepare`.
        model: The model; one that is wrapped already stays as it is.
        algorithm: See :func:`prepare`.
        optimizers: Those among which the model's own is.
        device_placement: As for ``accelerator.prepare_model``.
        **options: See :func:`prepare`.
    """
    _check(accelerator)
    saved_state.refuse_elastic(options, "Accelerate")
    prepared: nn.Module = accelerator.prepare_model(
        model, device_placement=device_placement, evaluation_mode=True
    )
    module = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    if trigram.is_wrapped(module) or not any(p.requires_grad for p in module.parameters()):
        return prepared
    own = [o for o in optimizers if _has_parameters_of(o, module)]
    if len(own) == 1:
        options.setdefault("optimizer", plain(own[0]))
    if (given := accelerator.ddp_handler) is not None:
        options.setdefault("bucket_mb", given.bucket_cap_mb)
        options.setdefault("broadcast_buffers", given.broadcast_buffers)
    trigram.with_bagua(module, algorithm, **options)
    _bridge(accelerator)
    return prepared


def check_kind(accelerator: Accelerator) -> None:
    """Raises where Accelerate itself wraps models.

    Raises:
        UnsupportedError: See :func:`prepare`.
    """
    kind = DistributedType(accelerator.distributed_type).name
    kind = "a parallelism_config" if accelerator.parallelism_config else kind
    if kind in _WRAPPED_BY_ACCELERATE or accelerator.parallelism_config:
        raise UnsupportedError(
            f"prepare: this accelerator trains with {kind}, which shards or wraps models itself; use "
            "accelerator.prepare, or an accelerator without a plugin"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        raise UnsupportedError(
            f"prepare: comm_hook={hook} of DistributedDataParallelKwargs has no effect here; pass "
            "algorithm=, for example 'central/f16/sync' or 'powersgd'"
        )


def _check(accelerator: Accelerator) -> None:
    check_kind(accelerator)
    if accelerator.num_processes != trigram.world_size():
        raise MisuseError(
            f"prepare: Accelerate counts {accelerator.num_processes} process(es) and Trigram "
            f"{trigram.world_size()}, so ranks would train on the same data; on hosts without GPUs pass "
            "cpu=True to Accelerator, or set ACCELERATE_USE_CPU=true"
        )


def own_optimizer(who: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer:
    """The optimizer among these that has the model's parameters, itself.

    Raises:
        MisuseError: There is none, or there are several.
    """
    own = [plain(each) for each in optimizers if _has_parameters_of(each, model)]
    if len(own) != 1:
        raise MisuseError(
            f"{who}: {type(model).__name__} has {len(own)} optimizers among the objects; pass the one that "
            "has its parameters in the same call"
        )
    return own[0]


def plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where Accelerate has prepared it."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _has_parameters_of(optimizer: Optimizer, module: nn.Module) -> bool:
    mine = {id(p) for p in module.parameters()}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _bridge(accelerator: Accelerator) -> None:
    """What ``accelerator`` saves has the average of the weights, and the algorithms' states; once."""
    if accelerator in _bridged:
        return
    _bridged.add(accelerator)
    theirs = accelerator.get_state_dict

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        module = accelerator.unwrap_model(model, keep_torch_compile=False)
        return saved_state.averaged_state(module, partial(theirs, model, unwrap))

    accelerator.get_state_dict = get_state_dict
    accelerator.register_for_checkpointing(_AlgorithmStates(accelerator))


class _AlgorithmStates:
    """The algorithms' states as an object that Accelerate saves and loads, after the weights."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def _models(self) -> list[nn.Module]:
        return [m for m in self._accelerator._models if trigram.is_wrapped(m)]

    def state_dict(self) -> dict[str, Any]:
        return {saved_state.KEY: [saved_state.gathered(m) for m in self._models()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        models, saved = self._models(), state[saved_state.KEY]
        if len(models) != len(saved):
            raise MisuseError(
                f"load_state: the checkpoint has the algorithm's state of {len(saved)} model(s), but "
                f"{len(models)} are trained here; prepare the same models"
            )
        for model, states in zip(models, saved, strict=True):
            saved_state.load(model, states)
