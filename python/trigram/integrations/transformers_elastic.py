"""Elastic jobs in the Trainer of transformers: ``TrigramElasticTrainer`` in place of ``Trainer``.

The Trainer trains as it does in one process, without a process group, which the loss of a rank would end.
Gradients travel through :func:`trigram.with_bagua`, losses, metrics and checkpoints' ends through
:func:`trigram.elastic_all_gather`, and both go on when ranks are lost. Interface: transformers 5.23,
``trainer.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.data import ElasticLoader
from trigram.errors import MisuseError, UnsupportedError
from trigram.integrations import accelerate, accelerate_elastic, elastic_calls
from trigram.integrations.accelerate_elastic import start
from trigram.runtime.logs import logger

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState, ProgressCallback
    from transformers.trainer_utils import seed_worker
except ImportError as e:
    raise ImportError(
        "trigram.integrations.transformers_elastic needs transformers: pip install 'transformers>=5' "
        "accelerate"
    ) from e

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object

__all__ = ["TrigramElasticTrainer", "TrigramElasticTrainerMixin", "start"]
_FILE = "trigram_elastic.pt"
"""What of a job is in none of the Trainer's own files, in a checkpoint's folder."""
_OF_THIS_RANK = "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"
_SAME_CALLS = "all ranks train, evaluate and save at the same steps, and have the same callbacks"
_LOGGED = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip
"""The Trainer's sums since it has logged."""
_OF_DDP = {"bucket_mb": "ddp_bucket_cap_mb", "broadcast_buffers": "ddp_broadcast_buffers"}
_REFUSED: dict[str, tuple[Any, str]] = {
    "auto_find_batch_size": (False, "the batch size of the ranks has to be the same"),
    "dataloader_drop_last": (False, "the last step of an epoch is smaller, and has all samples"),
    "deepspeed": (None, "it has a process group"),
    "fsdp": (False, "it has a process group"),
    "parallelism_config": (None, "it has a process group"),
    "save_on_each_node": (False, "the lowest remaining rank saves"),
}


class TrigramElasticTrainerMixin(_Mixed):
    """Trains in an elastic job: ranks may be lost, leave and join while ``train`` runs.

    The script is started once per rank, as by ``trigram run -n 4 --restarts 10 train.py``, and is the same on
    a rank that joins, which gets weights, optimizer, scheduler, callbacks' states and the place in the
    epoch::

        transformers_elastic.start()  # before TrainingArguments
        args = TrainingArguments(...)
        TrigramElasticTrainer(model, args, train_dataset=dataset).train()

    ``class MyTrainer(TrigramElasticTrainerMixin, SFTTrainer)`` makes another Trainer elastic.

    Each sample counts once per epoch, see :class:`trigram.data.ElasticLoader`; ``max_steps`` counts steps of
    the job, and a learning rate follows the share of the training that is done. Each rank evaluates the whole
    set; its metrics are those of the lowest remaining rank, which also writes logs and checkpoints.

    Args:
        algorithm: As for :func:`trigram.with_bagua`, of those that average gradients; None:
            ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        options: The other arguments of :func:`trigram.with_bagua`; ``elastic`` names more objects with state.
        *args: The arguments of the Trainer.
        **kwargs: Those too.

    Raises:
        MisuseError: :func:`start` has not been called before ``TrainingArguments`` was made, or ``train`` is
            called for this model a second time.
        UnsupportedError: An argument needs a process group, or divides an epoch otherwise.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: str | Trigram | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.algorithm, self.options = algorithm, dict(options or {})
        self._plan, self._follows = _Plan(), _Follows(self)
        self._loader: ElasticLoader | None = None
        self._resumed: str | None = None
        self._writes_alone = False
        self._items = 1.0  # those by which the loss of this step is divided
        self.epoch_now = 0.0
        self.current_flos: Any = 0
        self.lr_scheduler: Any = None
        super().__init__(*args, **kwargs)
        # Before the callbacks that stop at the last step, which this one counts.
        self.callback_handler.callbacks.insert(0, self._follows)

    def create_accelerator_and_postprocess(self) -> None:
        """See the Trainer; checks the arguments, before a model is placed."""
        _check(self.args)
        device = self.args.distributed_state.device
        if device.type == "cuda":  # the Trainer of one process would take all GPUs
            self.args._n_gpu = 1
            self.args.__dict__["_setup_devices"] = device
            torch.cuda.set_device(device)
        super().create_accelerator_and_postprocess()
        self._follow_ranks()

    # Beginning.

    def get_train_dataloader(self) -> Any:
        """The steps of the job, as the Trainer counts them."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        a = self.args
        # The Trainer's own loader removes columns; its sampler is of no use here.
        own = self._get_dataloader(self.train_dataset, "Training", self._train_batch_size)
        options = {} if a.dataloader_num_workers == 0 else {"prefetch_factor": a.dataloader_prefetch_factor}
        self._loader = ElasticLoader(
            own.dataset,
            self._train_batch_size * a.gradient_accumulation_steps,
            shuffle=a.train_sampling_strategy == "random",
            seed=a.seed if a.data_seed is None else a.data_seed,
            collate_fn=_Parts(own.collate_fn, self._train_batch_size),
            num_workers=a.dataloader_num_workers,
            pin_memory=a.dataloader_pin_memory,
            persistent_workers=a.dataloader_persistent_workers,
            multiprocessing_context=a.dataloader_multiprocessing_context,
            worker_init_fn=partial(seed_worker, num_workers=a.dataloader_num_workers, rank=trigram.rank()),
            **options,
        )
        return _Steps(self._loader, own.dataset, self._train_batch_size, a.gradient_accumulation_steps)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """See the Trainer; where ``max_steps`` is given, as many epochs as it takes with any ranks."""
        epochs, *others = super().set_initial_training_values(args, dataloader)
        return (sys.maxsize if args.max_steps > 0 else epochs, *others)

    def _init_training_state(self, max_steps: int, steps: int, *args: Any, **kwargs: Any) -> Any:
        super()._init_training_state(max_steps, steps, *args, **kwargs)
        return 0, 0  # the loader knows which epoch it is

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """See the Trainer; then wraps the model, where a rank that is late joins."""
        if trigram.is_wrapped(self.model):
            raise MisuseError(
                "TrigramElasticTrainer: train has been called for this model before, and ranks may join it "
                "at any step; call trigram.shutdown() first, on all ranks"
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._plan.planned = max_steps
        self._resumed = resume_from_checkpoint
        if resume_from_checkpoint is not None:
            self._go_on(resume_from_checkpoint)
        options = dict(self.options)
        more = options.pop("elastic", None)
        counts_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.args.average_tokens_across_devices and counts_items:
            options.setdefault("sample_weight", lambda: self._items)
        for ours, theirs in _OF_DDP.items():
            if (given := getattr(self.args, theirs)) is not None:
                options.setdefault(ours, given)
        trigram.with_bagua(
            self.accelerator.unwrap_model(prepared[0], keep_torch_compile=False),
            self.algorithm,
            optimizer=accelerate.plain(self.optimizer),
            elastic=[_TrainerState(self, self._follows), *(more if isinstance(more, Sequence) else [])],
            **options,
        )
        self._follow_ranks()
        return prepared

    # An epoch, and its steps.

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **given: Any) -> None:
        """See the Trainer; ends when the samples do, whoever was lost or has joined."""
        loader = self._loader
        assert loader is not None
        if epoch < loader.epoch:  # it was over before this rank joined, or went on
            return
        if epoch > loader.epoch:  # a callback has stopped the one before
            loader.set_epoch(epoch)
            self._plan.made = 0
        batches = iter(loader)
        if (first := next(batches, None)) is None:
            return  # it was over then as well, which the loader has found now
        resumed, self._resumed = self._resumed, None
        given |= {
            "steps_in_epoch": sys.maxsize,
            "num_update_steps_per_epoch": sys.maxsize,
            "resume_from_checkpoint": resumed,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": 0,
        }
        accumulated = self.args.gradient_accumulation_steps
        # A step of the Trainer's loop is one of the job, whose parts `training_step` takes one by one: the
        # last steps of an epoch have fewer.
        self.args.gradient_accumulation_steps = 1
        try:
            super()._run_epoch(epoch=epoch, train_dataloader=chain([first], batches), **given)
        finally:
            self.args.gradient_accumulation_steps = accumulated

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The parts of the next step, as one batch."""
        parts = next(epoch_iterator, None)
        if parts is None:
            self.control.should_epoch_stop = True
            return [], None
        items = self._get_num_items_in_batch(parts, device)
        self._items = 1.0 if items is None else float(items)
        return [parts], items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """See the Trainer; of all parts of a step."""
        *first, last = inputs
        self.current_gradient_accumulation_steps = len(inputs)
        with trigram.no_sync(self.model):
            losses = [
                super(TrigramElasticTrainerMixin, self).training_step(model, p, num_items_in_batch)
                for p in first
            ]
        return sum(losses, super().training_step(model, last, num_items_in_batch))

    def floating_point_ops(self, inputs: Any) -> int:
        """See the Trainer; of all parts of a step."""
        return sum(super(TrigramElasticTrainerMixin, self).floating_point_ops(part) for part in inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        seen = self.state.num_input_tokens_seen
        for part in inputs:
            super()._track_num_input_tokens(part)
        own = int(self.state.num_input_tokens_seen - seen)
        self.state.num_input_tokens_seen = seen + sum(self._of_all("num_input_tokens_seen", own))

    def step_is_over(self) -> None:
        """The update of a step is made: how much of the training is left, whoever was lost in it."""
        loader, plan, state, a = self._loader, self._plan, self.state, self.args
        assert loader is not None
        self._follow_ranks()
        left = loader.steps_left(after=True)
        plan.made += 1
        self.epoch_now = loader.epoch + plan.made / (plan.made + left)
        if a.max_steps > 0:
            ahead = max(1, state.max_steps - state.global_step)
        else:
            later = a.num_train_epochs - loader.epoch - 1  # epochs
            this = left if later >= 0 else _whole((1 + later) * (plan.made + left)) - plan.made
            ahead = 1 + max(0, this) + max(0, _whole(later * len(loader)))
            if state.global_step + ahead != state.max_steps:
                self._total_has_changed(state.global_step + ahead)
        plan.at += (plan.planned - plan.at) / ahead
        if left == 0:
            plan.made = 0
        scheduler: Any = self.lr_scheduler
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = _number(plan.at - 1)  # type: ignore[assignment]  # `step` adds one

    def _total_has_changed(self, steps: int) -> None:
        self.state.max_steps = steps
        if not isinstance(self.lr_scheduler, (LambdaLR, ReduceLROnPlateau, type(None))):
            logger.warning(
                "TrigramElasticTrainer: with other ranks the training has %d steps; %s counts steps as they "
                "were planned, and ends too early or too late",
                steps,
                type(self.lr_scheduler).__name__,
            )
        for bar in _bars(self):
            if bar.training_bar is not None:
                bar.training_bar.total = steps

    # What ranks tell each other.

    def _of_all(self, what: str, value: Any) -> list[Any]:
        told = elastic_calls.of_all("TrigramElasticTrainer", what, value, _SAME_CALLS)
        self._follow_ranks()
        return told

    def _follow_ranks(self) -> None:
        """Who writes logs and checkpoints."""
        if not trigram.is_initialized():  # this rank has left
            return
        is_first = accelerate_elastic.follow_ranks() == 0
        if (state := getattr(self, "state", None)) is None:
            return
        takes_over = is_first and not state.is_world_process_zero and self.is_in_train
        state.is_local_process_zero = state.is_world_process_zero = is_first
        if takes_over:
            for bar in _bars(self):
                if bar.training_bar is None:
                    bar.on_train_begin(self.args, state, self.control)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            losses = self._of_all("log the loss", float(tr_loss))
            tr_loss.fill_(sum(losses) / len(losses))
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def store_flos(self) -> None:
        """See the Trainer; of all ranks."""
        if not self._writes_alone:
            self.current_flos = sum(self._of_all("store_flos", float(self.current_flos)))
            super().store_flos()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See the Trainer; the metrics are those of the first rank, so that all decide alike by them."""
        output = super().evaluation_loop(*args, **kwargs)
        if not trigram.is_wrapped(self.model):
            return output
        return output._replace(metrics=self._of_all("evaluation", output.metrics)[0])

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The first rank saves; if it is lost meanwhile, the next one saves again."""
        self.store_flos()

        def write() -> Any:
            self._writes_alone = True
            try:
                super(TrigramElasticTrainerMixin, self)._save_checkpoint(model, trial)
            finally:
                self._writes_alone = False
            return self.state.best_model_checkpoint

        self.state.best_model_checkpoint = elastic_calls.by_first(
            self._of_all, "save a checkpoint", self.is_world_process_zero, write
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._loader is not None:
            saved = {"loader": self._loader.state_dict(), "plan": dataclasses.asdict(self._plan)}
            torch.save(saved, Path(output_dir) / _FILE)

    def _go_on(self, checkpoint: str) -> None:
        """The place in the epoch and in the schedule, after the rest of a checkpoint has been loaded."""
        assert self._loader is not None
        if (file := Path(checkpoint) / _FILE).exists():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            self._loader.load_state_dict(saved["loader"])
            self.follow_plan(saved["plan"], self.lr_scheduler.state_dict())
            return
        # A checkpoint of another Trainer does not say which samples were used.
        self._loader.set_epoch(int(self.state.epoch or 0))
        self._plan.at = float(self.state.global_step)
        logger.warning(
            "TrigramElasticTrainer: %s has no %s, so the epoch %d begins anew", checkpoint, _FILE,
            self._loader.epoch,
        )  # fmt: skip

    def follow_plan(self, plan: Mapping[str, Any], scheduler: Mapping[str, Any] | None) -> None:
        """Goes on with the job's plan, and its schedule, whose length does not change with the ranks."""
        planned, self._plan = self._plan.planned, _Plan(**plan)
        if scheduler is None or self.lr_scheduler is None:
            return
        if self._created_lr_scheduler and planned != self._plan.planned:
            self.lr_scheduler = None
            self.lr_scheduler = self.create_scheduler(self._plan.planned)
            self.callback_handler.lr_scheduler = self.lr_scheduler
        self.lr_scheduler.load_state_dict(dict(scheduler))
        if isinstance(self.lr_scheduler, LambdaLR):  # a new one has begun with its first rate
            groups = accelerate.plain(self.optimizer).param_groups
            for group, rate in zip(groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


class TrigramElasticTrainer(TrigramElasticTrainerMixin, Trainer):
    """The Trainer of transformers in an elastic job, see :class:`TrigramElasticTrainerMixin`."""


@dataclasses.dataclass
class _Plan:
    """How far the training is.

    Attributes:
        planned: The steps that it would have with the ranks of its start, by which rates are scheduled.
        at: As many of those are done, in share.
        made: Steps made in this epoch.
    """

    planned: int = 0
    at: float = 0.0
    made: int = 0


class _Follows(TrainerCallback):  # type: ignore[misc]  # the library has no types without its extras
    """Comes before other callbacks, which find the job's numbers."""

    def __init__(self, trainer: TrigramElasticTrainerMixin) -> None:
        self.trainer = trainer
        self.logged: dict[str, Any] = {}
        """Of the rank that has sent its state; the Trainer sets these after this rank has joined."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.apply()

    def apply(self) -> None:
        """Goes on with the sums of losses of the rank that has sent its state."""
        given, self.logged = self.logged, {}
        for name, value in given.items():
            on_device = isinstance(value, torch.Tensor)
            setattr(self.trainer, name, value.to(self.trainer.args.device) if on_device else value)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.step_is_over()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        state.epoch = self.trainer.epoch_now


class _TrainerState:
    """What a rank that joins needs of the Trainer, beside the model and its optimizer."""

    averages_gradients_only = True

    def __init__(self, trainer: TrigramElasticTrainerMixin, follows: _Follows) -> None:
        self._trainer, self._follows = trainer, follows

    def state_dict(self) -> dict[str, Any]:
        t = self._trainer
        state = dataclasses.asdict(t.state)
        scheduler, scaler = t.lr_scheduler, t.accelerator.scaler
        return {
            # As the Trainer saves it.
            "state": json.dumps({k: v for k, v in state.items() if k not in _OF_THIS_RANK}),
            "callbacks": json.dumps([each.state() for each in _stateful(t)]),
            "logged": {name: getattr(t, name, None) for name in _LOGGED},
            "plan": dataclasses.asdict(t._plan),
            "loader": None if t._loader is None else t._loader.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        t = self._trainer
        for name, value in json.loads(state["state"]).items():
            setattr(t.state, name, value)
        for each, theirs in zip(_stateful(t), json.loads(state["callbacks"]), strict=True):
            for name, value in theirs.get("attributes", {}).items():
                setattr(each, name, value)
        self._follows.logged = dict(state["logged"])
        if hasattr(t, "_tr_loss"):
            self._follows.apply()
        if t._loader is not None and state["loader"] is not None:
            t._loader.load_state_dict(state["loader"])
        t.follow_plan(state["plan"], state["scheduler"])
        if t.accelerator.scaler is not None and state["scaler"] is not None:
            t.accelerator.scaler.load_state_dict(state["scaler"])


class _Parts:
    """Collates the samples of a step as the batches that are accumulated in it."""

    def __init__(self, collate: Any, size: int) -> None:
        self.collate, self.size = collate, size

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self.collate(samples[i : i + self.size]) for i in range(0, len(samples), self.size)]


class _Steps:
    """The training loader as the Trainer and its callbacks count it: in batches."""

    def __init__(self, loader: ElasticLoader, dataset: Any, batch_size: int, batches: int) -> None:
        self._loader, self.dataset, self.batch_size, self._batches = loader, dataset, batch_size, batches

    def __len__(self) -> int:
        return len(self._loader) * self._batches


def _check(args: Any) -> None:
    """Refuses what needs a process group, or divides an epoch otherwise."""
    accelerate_elastic.check_alone("TrigramElasticTrainer")
    if not trigram.is_initialized():
        raise MisuseError(
            "TrigramElasticTrainer: this process has not entered a job; call "
            "trigram.integrations.transformers_elastic.start() before TrainingArguments"
        )
    for name, (plain, why) in _REFUSED.items():
        if (given := getattr(args, name, plain)) and given != plain:
            raise UnsupportedError(f"TrigramElasticTrainer: {name}={given!r} is not supported: {why}")
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise UnsupportedError(
            f"TrigramElasticTrainer: train_sampling_strategy={args.train_sampling_strategy!r} is not "
            "supported: ElasticLoader deals samples at random or in their order"
        )


def _stateful(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


def _bars(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback)]


def _whole(steps: float) -> int:
    """Rounded up, but for what is an error of rounding."""
    return math.ceil(steps - 1e-6)


def _number(at: float) -> float:
    """As the schedulers count it, who compare it with integers."""
    return int(at) if at == int(at) else at
