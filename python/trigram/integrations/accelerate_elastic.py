"""Elastic jobs in Accelerate: ``ElasticAccelerator()`` in place of ``Accelerator()``.

Accelerate's own training with several processes has a process group, which the loss of a rank ends. Here each
rank is, to Accelerate, a training of its own. Interface: Accelerate 1.15, ``accelerator.py``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.data import ElasticLoader
from trigram.errors import MismatchError, MisuseError, UnsupportedError
from trigram.integrations import accelerate, elastic_calls
from trigram.runtime import world
from trigram.runtime.logs import logger

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from accelerate.utils import recursively_apply, send_to_device
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
    "has noted before it joined, such as an epoch, is old: ask loader.epoch after the loop over the loader, "
    "and accelerator.steps"
)
_SAME_RATES = "prepare the scheduler, of a length that is the same on a rank that joins: len(loader) is not"
_REDUCTIONS = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.sum(0) / len(t),
    "max": lambda t: t.amax(0),
    "none": None,
}


def start(**options: Any) -> None:
    """Enters the elastic job, and keeps Accelerate from making a process group.

    Call it at the start of the script, before ``TrainingArguments`` or an ``Accelerator`` is made;
    :class:`ElasticAccelerator` calls it. It calls ``trigram.init(elastic=True)`` unless that has been called.
    From then on ``$WORLD_SIZE`` and ``$LOCAL_RANK`` are not in this process's environment: ask
    :func:`trigram.world_size`.

    Args:
        options: More arguments of :func:`trigram.init`, such as ``op_timeout``: for so long do ranks wait
            while one of them writes a checkpoint.

    Raises:
        MisuseError: Accelerate has begun as one of several processes, or the job is not elastic, or there are
            options for a job that has begun.
    """
    if trigram.is_initialized():
        if options:
            raise MisuseError(f"start: the job has begun; pass {', '.join(options)} to trigram.init")
    else:
        for name in _SAY_HOW_MANY:  # of an earlier call, whose job has ended
            if (taken := os.environ.pop(_TAKEN + name, None)) is not None:
                os.environ[name] = taken
        trigram.init(elastic=True, **options)
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
    the main process. ``num_processes`` is 1: ask :func:`trigram.world_size`. What is registered for
    checkpointing is part of what a rank that joins gets.

    Args:
        algorithm: As for :func:`trigram.with_bagua`, of those that average gradients; None:
            ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        options: The other arguments of :func:`trigram.with_bagua`; ``elastic`` names more objects with state.
        *args: The arguments of the Accelerator.
        **kwargs: Those too.

    Attributes:
        steps: Updates of the job, also those that were made before this rank joined.

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
        self.steps = 0
        self._writes_alone = False
        self._rates: Callable[[], list[float]] | None = None
        self._is_late = False  # has joined, and its rates have not been compared yet
        self._known: tuple[list[int] | None, int] = (None, 0)  # the ranks, and the steps since they changed
        self._tracked: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # as for `init_trackers`
        super().__init__(*args, **kwargs)
        follow_ranks()
        _check_whole_steps(self.gradient_state.num_steps)
        accelerate.check_kind(self)

    @property
    def gradient_accumulation_steps(self) -> int:
        """1: a step is whole, see the class."""
        return 1

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        _check_whole_steps(steps)

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """See Accelerate; then wraps the models, where a rank that is late joins.

        Raises:
            MisuseError: A ``DataLoader`` shuffles, so it is for training; a model has no optimizer of its own
                among the objects; a loader or a scheduler comes without its model.
        """
        _check(objects)
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        models = [each for each in objects if isinstance(each, nn.Module) and _is_to_be_wrapped(each)]
        who = "ElasticAccelerator.prepare"
        own = {id(each): accelerate.own_optimizer(who, each, optimizers) for each in models}
        prepared = super().prepare(*objects, device_placement=device_placement)
        results = prepared if len(objects) > 1 else (prepared,)
        states = [each for each in results if _has_state(each)]
        if own and not any(isinstance(each, _Count) for each in self._custom_objects):
            self.register_for_checkpointing(_Count(self))
        for each in objects:
            if isinstance(each, ElasticLoader) and each not in self._custom_objects:
                self.register_for_checkpointing(each)
                if self.device_placement:
                    each.place = partial(send_to_device, device=self.device, non_blocking=self.non_blocking)
        for each, made in zip(objects, results, strict=True):
            if id(each) not in own:
                continue
            is_late, options = elastic_calls.is_late(), dict(self.options)
            more = options.pop("elastic", ())
            trigram.with_bagua(
                self.unwrap_model(made, keep_torch_compile=False),
                self.algorithm,
                optimizer=own[id(each)],
                elastic=[_AcceleratorState(self), *states, *(more if more is not True else ())],
                **options,
            )
            self._is_late |= is_late
            states = []  # of the first model
            self._rates = partial(_rates_of, own[id(each)])
            own[id(each)].register_step_post_hook(lambda *_: self._after_step())
        follow_ranks()
        return prepared

    def _after_step(self) -> None:
        self.steps += 1
        if not trigram.is_initialized():  # this rank has left
            return
        follow_ranks()
        ranks, since = self._known
        self._known = (now := list(world.training())), (since + 1 if now == ranks else 0)
        if self._known[1] == 1:  # what a rank that has joined does by itself, it has done once
            self._compare_rates()

    def _compare_rates(self) -> None:
        """A rank that has joined with another schedule ends, and the others go on without it."""
        assert self._rates is not None
        mine, self._is_late = [self._rates(), self._is_late], False
        told = elastic_calls.of_all("ElasticAccelerator", "optimizer.step", mine, _SAME_CALLS)
        right = [rates for rates, is_late in told if not is_late] or [rates for rates, _ in told]
        if any(rates != right[0] for rates in right) or (mine[1] and mine[0] != right[0]):
            raise MismatchError(
                f"ElasticAccelerator: rank {world.current().rank} has learning rates {mine[0]}, and others "
                f"{next(rates for rates in right if rates != mine[0])}; {_SAME_RATES}"
            )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """See Accelerate."""
        with trigram.no_sync(self.unwrap_model(model, keep_torch_compile=False)):
            yield

    # Who does what.

    def on_main_process(self, function: Any = None) -> Any:
        """See Accelerate; who that is, it asks at each call."""
        return self._where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """See Accelerate; on the job's main process."""
        return self._where(lambda: self.is_main_process, function)

    def on_last_process(self, function: Any) -> Any:
        """See Accelerate."""
        return self._where(lambda: trigram.rank() == trigram.world_size() - 1, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """See Accelerate; the place among those that train."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return self._where(lambda: trigram.rank() == process_index, function)

    @staticmethod
    def _where(is_here: Callable[[], bool], function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return call

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """See Accelerate; all ranks call it."""
        if not self.is_main_process:
            self._of_all("main_process_first", None)
        try:
            yield
        finally:  # the others wait, also where the script goes on after an error
            if self.is_main_process:
                self._of_all("main_process_first", None)

    local_main_process_first = main_process_first

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """See Accelerate; on the main process, and later where another rank becomes that."""
        self._tracked = args, kwargs
        self._start_trackers()

    def _start_trackers(self) -> bool:
        if self.is_main_process and not self.trackers and self._tracked is not None:
            super().init_trackers(*self._tracked[0], **self._tracked[1])
        return bool(self.is_main_process)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """See Accelerate; on the main process."""
        if self._start_trackers():
            super().log(*args, **kwargs)

    def get_tracker(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate; on the main process."""
        self._start_trackers()
        return super().get_tracker(*args, **kwargs)

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

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """See Accelerate; to the most that a rank that trains has."""

        def padded(t: torch.Tensor) -> torch.Tensor:
            if not -t.ndim <= dim < t.ndim:
                return t
            most = max(self._of_all("pad_across_processes", t.shape[dim]))
            size = list(t.shape)
            size[dim] = most
            result = t.new_full(size, pad_index)
            begin = most - t.shape[dim] if pad_first else 0
            result.narrow(dim, begin, t.shape[dim]).copy_(t)
            return result

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See Accelerate; an ElasticLoader knows its place.

        Raises:
            MisuseError: It is one.
        """
        if isinstance(dataloader, ElasticLoader):
            raise MisuseError("skip_first_batches: an ElasticLoader goes on at its place after load_state")
        return super().skip_first_batches(dataloader, num_batches)

    def wait_for_everyone(self) -> None:
        """Ends when all ranks have called it."""
        if not self._writes_alone:
            self._of_all("wait_for_everyone", None)

    # Checkpoints.

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate; all ranks call it. The first saves; if it is lost meanwhile, the next one does."""

        def write(again: bool) -> list[Any]:
            self._writes_alone = True
            try:
                if again and self.project_configuration.automatic_checkpoint_naming:
                    written = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
                    shutil.rmtree(written, ignore_errors=True)  # in part, by the rank that was lost
                where = super(ElasticAccelerator, self).save_state(output_dir, *args, **kwargs)
            finally:
                self._writes_alone = False
            return [os.fspath(where), self.project_configuration.iteration]

        what = f"save_state({'' if output_dir is None else os.fspath(output_dir)})"
        made = elastic_calls.by_first(self._of_all, what, lambda: self.is_main_process, write)
        if made is None:  # this rank has no part in it
            return output_dir
        self.project_configuration.iteration = made[1]
        return made[0]

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
            "objects": [each.state_dict() for each in self._objects()],
            "iteration": a.project_configuration.iteration,
            "scaler": None if a.scaler is None else a.scaler.state_dict(),
        }

    def _objects(self) -> list[Any]:
        """What the script has registered for checkpointing."""
        return [each for each in self._accelerator._custom_objects if not isinstance(each, ElasticLoader)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        a = self._accelerator
        a.project_configuration.iteration = state["iteration"]
        objects = self._objects()
        if len(objects) != len(state["objects"]):
            raise MismatchError(
                f"ElasticAccelerator: this rank has {len(objects)} objects that were registered for "
                f"checkpointing, and the job {len(state['objects'])}; register the same before the first step"
            )
        for each, theirs in zip(objects, state["objects"], strict=True):
            each.load_state_dict(theirs)
        if a.scaler is not None and state["scaler"] is not None:
            a.scaler.load_state_dict(state["scaler"])


class _Count:
    """The number of updates, in a checkpoint."""

    def __init__(self, accelerator: ElasticAccelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._accelerator.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.steps = state["steps"]


def _check(objects: tuple[Any, ...]) -> None:
    for each in objects:
        if isinstance(each, DataLoader) and not _is_in_order(each):
            raise MisuseError(
                "ElasticAccelerator.prepare: a DataLoader that does not go through its dataset in order may "
                "be for training, and all ranks would train on the same samples; make it a trigram.data."
                "ElasticLoader(dataset, batch_size=...), or leave it out of prepare if it is for evaluation"
            )
    has_model = any(isinstance(each, nn.Module) for each in objects)
    if not has_model and (alone := [type(each).__name__ for each in objects if _has_state(each)]):
        raise MisuseError(
            f"ElasticAccelerator.prepare: {', '.join(alone)} without a model: a rank that joins gets its "
            "state with the model's; prepare model, optimizer, loader and scheduler in one call"
        )


def _is_in_order(loader: DataLoader[Any]) -> bool:
    return type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) in (
        BatchSampler,
        type(None),
    )


def _is_to_be_wrapped(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters()) and not trigram.is_wrapped(model)


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _check_whole_steps(accumulated: int) -> None:
    if accumulated != 1:
        raise UnsupportedError(
            f"ElasticAccelerator: gradient_accumulation_steps={accumulated} is not supported: a lost rank's "
            "samples of the batches before would be lost. Give ElasticLoader the samples of a whole step, "
            "and divide the batch under accelerator.no_sync(model)"
        )


def _has_state(prepared: Any) -> bool:
    """Whether it is an ElasticLoader, or a scheduler, prepared or not."""
    is_schedule = hasattr(prepared, "get_last_lr") and hasattr(prepared, "load_state_dict")
    return isinstance(prepared, ElasticLoader) or is_schedule
