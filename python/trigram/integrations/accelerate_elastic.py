"""Elastic jobs in Accelerate: ``ElasticAccelerator()`` in place of ``Accelerator()``.

Accelerate's own training with several processes has a process group, which the loss of a rank ends. Here each
rank is, to Accelerate, a training of its own. Interface: Accelerate 1.15, ``accelerator.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.data import ElasticLoader
from trigram.errors import MisuseError, UnsupportedError
from trigram.integrations import accelerate, elastic_calls
from trigram.runtime import world
from trigram.runtime.logs import logger

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from accelerate.utils import recursively_apply
except ImportError as e:
    raise ImportError(
        "trigram.integrations.accelerate_elastic needs Accelerate: pip install 'accelerate>=1.0'"
    ) from e

__all__ = ["ElasticAccelerator", "start"]
_SAY_HOW_MANY = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
)  # fmt: skip
"""By these Accelerate sees that it is to make a process group."""
_TAKEN = "TRIGRAM_TAKEN_"
"""With this before their names they stay in the environment."""
_SAME_CALLS = (
    "all ranks call gather, reduce, wait_for_everyone and save_state in the same order; a number that a rank "
    "has noted before it joined, such as an epoch, is old: ask loader.epoch after the loop over the loader"
)
_REDUCTIONS = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.sum(0) / len(t),
    "max": lambda t: t.amax(0),
    "none": None,
}


def start() -> None:
    """Enters the elastic job, and keeps Accelerate from making a process group.

    Call it at the start of the script, before ``TrainingArguments`` or an ``Accelerator`` is made;
    :class:`ElasticAccelerator` calls it. It calls ``trigram.init(elastic=True)`` unless that has been called.
    From then on ``$WORLD_SIZE`` and ``$LOCAL_RANK`` are not in this process's environment: ask
    :func:`trigram.world_size`.

    Raises:
        MisuseError: Accelerate has begun as one of several processes, or the job is not elastic.
    """
    if not trigram.is_initialized():
        for name in _SAY_HOW_MANY:  # of an earlier call, whose job has ended
            if (taken := os.environ.pop(_TAKEN + name, None)) is not None:
                os.environ[name] = taken
        trigram.init(elastic=True)
    if world.current().elastic is None:
        raise MisuseError("start: trigram.init was called without elastic=True; leave the call to start()")
    check_alone("start")
    if (device := elastic_calls.own_device()).type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    for name in _SAY_HOW_MANY:
        if (taken := os.environ.pop(name, None)) is not None:
            os.environ[_TAKEN + name] = taken


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


class ElasticAccelerator(Accelerator):  # type: ignore[misc]  # the library has no types of its own
    """Trains in an elastic job: ranks may be lost, leave and join while a script's own loop runs.

    The script is started once per rank, as by ``trigram run -n 4 --restarts 10 train.py``, and is the same on
    a rank that joins, which gets weights, optimizer, schedulers and the place in the epoch::

        accelerator = ElasticAccelerator()
        loader = ElasticLoader(dataset, batch_size=32)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        while loader.epoch < 10:
            for inputs, targets in loader:
                ...
            accelerator.save_state(f"after-{loader.epoch}")

    The state of the others is there when the first backward pass of a rank that joins has ended.
    ``gather``, ``reduce``, ``check_trigger`` and ``wait_for_everyone`` are of the ranks that train, and
    survive a loss, as :func:`trigram.elastic_all_gather` does. A ``DataLoader`` is for evaluation: each rank
    gets all of its batches, so ``gather_for_metrics`` returns what it is given. The lowest remaining rank is
    the main process. ``num_processes`` is 1: ask :func:`trigram.world_size`.

    Args:
        algorithm: As for :func:`trigram.with_bagua`, of those that average gradients; None:
            ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        options: The other arguments of :func:`trigram.with_bagua`; ``elastic`` names more objects with state.
        *args: The arguments of the Accelerator.
        **kwargs: Those too.

    Raises:
        MisuseError: There is a process group.
        UnsupportedError: It is to accumulate gradients, or shards or wraps models itself.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: str | Trigram | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        start()
        self.algorithm, self.options = algorithm, dict(options or {})
        self._writes_alone = False
        super().__init__(*args, **kwargs)
        follow_ranks()
        if self.gradient_accumulation_steps != 1:
            raise UnsupportedError(
                f"ElasticAccelerator: gradient_accumulation_steps={self.gradient_accumulation_steps} is not "
                "supported: a lost rank's samples of the batches before would be lost. Give ElasticLoader "
                "the samples of a whole step, and divide the batch under accelerator.no_sync(model)"
            )
        accelerate.check_kind(self)

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """See Accelerate; then wraps the models, where a rank that is late joins.

        Raises:
            MisuseError: A ``DataLoader`` shuffles, so it is for training; a model has no optimizer of its own
                among the objects; a loader or a scheduler comes without its model.
        """
        _check(objects)
        prepared = super().prepare(*objects, device_placement=device_placement)
        results = prepared if len(objects) > 1 else (prepared,)
        states = [each for each in results if _has_state(each)]
        for each in objects:
            if isinstance(each, ElasticLoader):
                self.register_for_checkpointing(each)
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        for each in results:
            if not isinstance(each, nn.Module):
                continue
            module = self.unwrap_model(each, keep_torch_compile=False)
            if not any(p.requires_grad for p in module.parameters()) or trigram.is_wrapped(module):
                continue
            options = dict(self.options)
            more = options.pop("elastic", ())
            trigram.with_bagua(
                module,
                self.algorithm,
                optimizer=accelerate.own_optimizer("ElasticAccelerator.prepare", module, optimizers),
                elastic=[_AcceleratorState(self), *states, *(more if more is not True else ())],
                **options,
            )
            states = []  # of the first model
        for each in optimizers:
            each.register_step_post_hook(_after_step)
        follow_ranks()
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """See Accelerate."""
        with trigram.no_sync(self.unwrap_model(model, keep_torch_compile=False)):
            yield

    # What ranks tell each other.

    def _of_all(self, what: str, value: Any) -> list[Any]:
        told = elastic_calls.of_all("ElasticAccelerator", what, value, _SAME_CALLS)
        if trigram.is_initialized():
            follow_ranks()
        return told

    def gather(self, tensor: Any) -> Any:
        """The tensors of the ranks that train, along the first dimension."""

        def gathered(t: torch.Tensor) -> torch.Tensor:
            t = t.detach()[None] if t.ndim == 0 else t.detach()
            return torch.cat(self._of_all(f"gather {list(t.shape[1:])}", t)).to(t.device)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What it is given: each rank evaluates all batches."""
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Of the ranks that train; ``scale`` has no effect, as on all devices but XLA."""
        if reduction not in _REDUCTIONS:
            raise MisuseError(f"reduce: reduction={reduction!r} is none of {', '.join(_REDUCTIONS)}")
        if (made := _REDUCTIONS[reduction]) is None:
            return tensor

        def reduced(t: torch.Tensor) -> torch.Tensor:
            told = self._of_all(f"reduce {reduction} {list(t.shape)}", t.detach())
            return made(torch.stack(told)).to(t.device)

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Ends when all ranks have called it."""
        if not self._writes_alone:
            self._of_all("wait_for_everyone", None)

    # Checkpoints.

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate; all ranks call it. The first saves; if it is lost meanwhile, the next one does."""

        def write() -> list[Any]:
            self._writes_alone = True
            try:
                where = super(ElasticAccelerator, self).save_state(output_dir, *args, **kwargs)
            finally:
                self._writes_alone = False
            return [os.fspath(where), self.project_configuration.iteration]

        what = f"save_state({'' if output_dir is None else os.fspath(output_dir)})"
        where, iteration = elastic_calls.by_first(self._of_all, what, lambda: self.is_main_process, write)
        self.project_configuration.iteration = iteration
        return where

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """See Accelerate; a rank that has just joined has a newer state from the others, and keeps it."""
        if elastic_calls.has_joined():
            logger.info("load_state: rank %d has joined, and keeps the state of the others", trigram.rank())
            return
        super().load_state(*args, **kwargs)


class _AcceleratorState:
    """What a rank that joins needs of the Accelerator, beside what it has prepared."""

    averages_gradients_only = True

    def __init__(self, accelerator: ElasticAccelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        a = self._accelerator
        return {
            "step": a.step,
            "iteration": a.project_configuration.iteration,
            "scaler": None if a.scaler is None else a.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        a = self._accelerator
        a.step, a.project_configuration.iteration = state["step"], state["iteration"]
        if a.scaler is not None and state["scaler"] is not None:
            a.scaler.load_state_dict(state["scaler"])


def _after_step(*_: Any) -> None:
    if trigram.is_initialized():  # this rank has not left
        follow_ranks()


def _check(objects: tuple[Any, ...]) -> None:
    for each in objects:
        if isinstance(each, DataLoader) and isinstance(each.sampler, RandomSampler):
            raise MisuseError(
                "ElasticAccelerator.prepare: a DataLoader that shuffles is for training, and all ranks would "
                "train on the same samples; make it a trigram.data.ElasticLoader(dataset, batch_size=...)"
            )
    has_model = any(isinstance(each, nn.Module) for each in objects)
    if not has_model and (alone := [type(each).__name__ for each in objects if _has_state(each)]):
        raise MisuseError(
            f"ElasticAccelerator.prepare: {', '.join(alone)} without a model: a rank that joins gets its "
            "state with the model's; prepare model, optimizer, loader and scheduler in one call"
        )


def _has_state(prepared: Any) -> bool:
    """Whether it is an ElasticLoader, or a scheduler, prepared or not."""
    is_schedule = hasattr(prepared, "get_last_lr") and hasattr(prepared, "load_state_dict")
    return isinstance(prepared, ElasticLoader) or is_schedule
