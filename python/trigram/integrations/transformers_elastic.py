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
from trigram.integrations.elastic_schedule import Paced, Plan, move, place
from trigram.runtime import job
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
_MADE = object()
"""In the place of the parts of a step whose pass is made."""
_OF_THIS_RANK = "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"
_SAME_CALLS = "all ranks train, evaluate and save at the same steps, and have the same callbacks"
_LOGGED = (
    "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen",
)  # fmt: skip
"""The Trainer's numbers since it began and has logged."""
_BY_PARTS = "training_step", "floating_point_ops", "_track_num_input_tokens"
"""What the Trainer calls with a batch, which here is that of a whole step, in parts."""
_DEALS = "get_train_dataloader", "_get_train_sampler"
"""What ElasticLoader takes the place of."""
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
            called a second time in the same job, or there are fewer samples than ranks.
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
        self._plan, self._follows = Plan(), _Follows(self)
        self._loader: ElasticLoader | None = None
        self._resumed: str | None = None
        self._writes_alone = False
        self._items = 1.0  # those by which the loss of this step is divided
        self._losses = [0.0, 0.0]  # since the last log: losses times their items, and items
        self._accumulated = 1
        self._stay: Any = None  # the job in which this has trained
        self._begun: Iterator[Any] | None = None  # on a rank that has joined: the loader, in its first step
        self.current_flos: Any = 0
        self.lr_scheduler: Any = None
        super().__init__(*args, **kwargs)
        # Before the callbacks that stop at the last step, which this one counts.
        self.callback_handler.callbacks.insert(0, self._follows)

    def create_accelerator_and_postprocess(self) -> None:
        """See the Trainer; checks the arguments, before a model is placed."""
        _check(self.args, type(self))
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
        self._check_samples()
        return _Steps(self._loader, own, a.gradient_accumulation_steps)

    def _check_samples(self) -> None:
        if self._loader is not None and len(self._loader) == 0:
            raise MisuseError(
                f"TrigramElasticTrainer: the dataset has fewer samples than the job has ranks "
                f"({trigram.world_size()}), so no step has one for each"
            )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """See the Trainer; where ``max_steps`` is given, as many epochs as it takes with any ranks."""
        epochs, *others = super().set_initial_training_values(args, dataloader)
        return (sys.maxsize if args.max_steps > 0 else epochs, *others)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See the Trainer; a rank that joins a running job has a newer state from the others."""
        if elastic_calls.is_late():
            resume_from_checkpoint = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _init_training_state(self, max_steps: int, steps: int, *args: Any, **kwargs: Any) -> Any:
        super()._init_training_state(max_steps, steps, *args, **kwargs)
        if self.args.max_steps > 0:
            self.state.num_train_epochs = math.ceil(max_steps / max(1, steps))
        return _ThisEpoch(self), 0

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """See the Trainer; then wraps the model, where a rank that is late joins and makes its first pass."""
        if self._stay is not None and not self._stay.over:
            raise MisuseError(
                "TrigramElasticTrainer: train has been called before, and ranks may join it at any step; for "
                "another training call trigram.shutdown() and start() first, on all ranks"
            )
        self._stay = job.here().stay
        self._plan = Plan(max_steps)
        model, train_dataloader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        scheduler = self.lr_scheduler
        if not isinstance(scheduler, (ReduceLROnPlateau, type(None))) and not self._is_ours(scheduler):
            self.lr_scheduler = self.callback_handler.lr_scheduler = Paced(scheduler)
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
        is_late = elastic_calls.is_late()
        trigram.with_bagua(
            self.accelerator.unwrap_model(model, keep_torch_compile=False),
            self.algorithm,
            optimizer=accelerate.plain(self.optimizer),
            elastic=[_TrainerState(self, self._follows), *(more if isinstance(more, Sequence) else [])],
            **options,
        )
        self._follow_ranks()
        if is_late:
            self._make_first_pass(model)
        return model, train_dataloader

    def _make_first_pass(self, model: nn.Module) -> None:
        """The state of the others is there when the first backward pass of a rank that joins has ended. So it
        makes that pass here, and its loop begins where the others are, with the update."""
        assert self._loader is not None
        batches = iter(self._loader)
        parts = next(batches)
        self._by_parts("training_step", model, parts, self._get_num_items_in_batch(parts, self.args.device))
        self._begun = batches
        self._losses = [0.0, 0.0]  # of weights that the job has not
        kept: Any = model

        def keeps_gradients(*_: Any, **__: Any) -> None:
            """Takes the place of the call before the loop."""
            vars(kept).pop("zero_grad")

        vars(kept)["zero_grad"] = keeps_gradients

    def _is_ours(self, scheduler: Any) -> bool:
        """Whether the Trainer has made it, as a function of the steps."""
        return self._created_lr_scheduler and isinstance(scheduler, LambdaLR)

    # An epoch, and its steps.

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **given: Any) -> None:
        """See the Trainer; ends when the samples do, whoever was lost or has joined."""
        loader, plan = self._loader, self._plan
        assert loader is not None
        self._check_samples()
        begun, self._begun = self._begun, None
        if begun is None and self._is_over():
            self.control.should_training_stop = True
            return
        batches = iter(loader) if begun is None else begun
        first = _MADE if begun is not None else next(batches, None)
        if first is None:  # it was over before this training went on, which the loader has found now
            plan.share = 0.0
            return
        resumed, self._resumed = self._resumed, None
        self._accumulated = self.args.gradient_accumulation_steps
        given |= {
            "steps_in_epoch": sys.maxsize,
            "num_update_steps_per_epoch": sys.maxsize,
            "resume_from_checkpoint": resumed,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": 0,
        }
        self.__dict__.update({name: partial(self._by_parts, name) for name in _BY_PARTS})
        try:
            super()._run_epoch(epoch=epoch, train_dataloader=chain([first], batches), **given)
        finally:
            for name in _BY_PARTS:
                self.__dict__.pop(name)
            self.restore_arguments()
        if self.control.should_training_stop:
            return
        self._plan.share = 0.0
        if loader.epoch == epoch:  # a callback has ended it
            loader.set_epoch(epoch + 1)

    def _is_over(self) -> bool:
        """Whether the training that goes on had ended."""
        assert self._loader is not None
        if self.args.max_steps > 0:
            return bool(self.state.global_step >= self.args.max_steps)
        return self._loader.epoch + self._plan.share > self.args.num_train_epochs - 1e-9

    def restore_arguments(self) -> None:
        """The Trainer's loop has seen that a step is one batch; all others see the arguments as they are."""
        self.args.gradient_accumulation_steps = self._accumulated

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The parts of the next step, as one batch."""
        parts = next(epoch_iterator, None)
        if parts is None:
            self.control.should_epoch_stop = True
            return [], None
        self.args.gradient_accumulation_steps = 1  # until `on_step_begin`
        return [parts], None if parts is _MADE else self._get_num_items_in_batch(parts, device)

    def _by_parts(self, name: str, *args: Any) -> Any:
        """Calls a method of the Trainer, or of a subclass, for each part of a step."""
        method = getattr(type(self), name)
        if name == "floating_point_ops":
            return 0 if args[0] is _MADE else sum(method(self, part) for part in args[0])
        if name == "_track_num_input_tokens":
            return self._count_tokens(method, () if args[0] is _MADE else args[0])
        model, parts, items = args
        if parts is _MADE:
            return torch.zeros((), device=self.args.device)
        *first, last = parts
        self._items = 1.0 if items is None else float(items)
        self.current_gradient_accumulation_steps = len(parts)
        with trigram.no_sync(self.model):
            losses = [method(self, model, part, items) for part in first]
        loss = sum(losses, method(self, model, last, items))
        value = float(loss)
        if self._items and (math.isfinite(value) or not self.args.logging_nan_inf_filter):
            self._losses[0] += value * self._items
            self._losses[1] += self._items
        return loss

    def _count_tokens(self, method: Any, parts: Sequence[Any]) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        seen = self.state.num_input_tokens_seen
        for part in parts:
            method(self, part)
        own = int(self.state.num_input_tokens_seen - seen)
        self.state.num_input_tokens_seen = seen + sum(self._of_all("num_input_tokens_seen", own))

    def step_is_over(self) -> None:
        """The update of a step is made: how much of the training is left, whoever was lost in it."""
        loader, plan, state, a = self._loader, self._plan, self.state, self.args
        assert loader is not None
        self._follow_ranks()
        left = loader.steps_left(after=True)
        if a.max_steps > 0:
            ahead = a.max_steps - state.global_step
        else:
            ahead = plan.ahead(left, a.num_train_epochs - loader.epoch - 1, len(loader))
            if state.global_step + ahead != state.max_steps:
                state.max_steps = state.global_step + ahead
                for bar in _bars(self):
                    if bar.training_bar is not None:
                        bar.training_bar.total = state.max_steps
        before = plan.whole
        plan.step(left, ahead)
        scheduler: Any = self.lr_scheduler
        if isinstance(scheduler, Paced):
            scheduler.due = plan.whole - before
        elif self._is_ours(scheduler):
            scheduler.last_epoch = place(plan.at - 1)  # `step` adds one

    def note_epoch(self) -> None:
        """After a step, for callbacks and logs."""
        assert self._loader is not None
        self.state.epoch = self._loader.epoch + self._plan.share

    # What ranks tell each other.

    def _of_all(self, what: str, value: Any) -> list[Any]:
        at = f"{what} after step {self.state.global_step}"
        told = elastic_calls.of_all("TrigramElasticTrainer", at, value, _SAME_CALLS)
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
            self._gather_loss(tr_loss)
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _gather_loss(self, tr_loss: torch.Tensor) -> None:
        """The mean over all items since the last log, as the Trainer has it: times the steps."""
        told = self._of_all("log the loss", self._losses)
        self._losses = [0.0, 0.0]
        items = sum(each[1] for each in told)
        mean = sum(each[0] for each in told) / items if items else 0.0
        tr_loss.fill_(mean * (self.state.global_step - self._globalstep_last_logged))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._gather_loss(self._tr_loss)
        return super()._finalize_training(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """See the Trainer; not at the start of a rank that has joined, whose others are in a step."""
        return {} if self._begun is not None else super()._evaluate(*args, **kwargs)

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

        def write(again: bool) -> Any:
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
            saved = {"loader": self._loader.state_dict(), "share": self._plan.share}
            torch.save(saved, Path(output_dir) / _FILE)

    def _go_on(self, checkpoint: str) -> None:
        """The place in the epoch and in the schedule, after the rest of a checkpoint has been loaded. How
        long the training is, this run's arguments and ranks say."""
        loader, plan, a = self._loader, self._plan, self.args
        assert loader is not None
        if (file := Path(checkpoint) / _FILE).exists():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            loader.load_state_dict(saved["loader"])
            plan.share = saved["share"]
        else:  # of another Trainer, which does not say which samples were used
            loader.set_epoch(int((self.state.epoch or 0.0) + 1e-6))
            logger.warning(
                "TrigramElasticTrainer: %s has no %s, so epoch %d begins anew",
                checkpoint,
                _FILE,
                loader.epoch,
            )
        done = self.state.global_step / a.max_steps if a.max_steps > 0 else 0.0
        if a.max_steps <= 0 and a.num_train_epochs > 0:
            done = (loader.epoch + plan.share) / a.num_train_epochs
        plan.go_on(done)
        if self._is_ours(self.lr_scheduler):
            move(self.lr_scheduler, plan.at)

    def follow_plan(self, plan: Mapping[str, Any], scheduler: Mapping[str, Any] | None) -> None:
        """Goes on with the job's plan, and its schedule, whose length does not change with the ranks."""
        planned, self._plan = self._plan.planned, Plan(**plan)
        if scheduler is None or self.lr_scheduler is None:
            return
        if self._created_lr_scheduler and planned != self._plan.planned:
            is_paced = isinstance(self.lr_scheduler, Paced)
            self.lr_scheduler = None
            made = self.create_scheduler(self._plan.planned)
            self.lr_scheduler = Paced(made) if is_paced else made
            self.callback_handler.lr_scheduler = self.lr_scheduler
        self.lr_scheduler.load_state_dict(dict(scheduler))
        if self._is_ours(self.lr_scheduler):  # a new one has begun with its first rate
            move(self.lr_scheduler, self._plan.at)


class TrigramElasticTrainer(TrigramElasticTrainerMixin, Trainer):
    """The Trainer of transformers in an elastic job, see :class:`TrigramElasticTrainerMixin`."""


class _Follows(TrainerCallback):  # type: ignore[misc]  # the library has no types without its extras
    """Comes before other callbacks, which find the job's numbers."""

    def __init__(self, trainer: TrigramElasticTrainerMixin) -> None:
        self.trainer = trainer
        self.logged: dict[str, Any] = {}
        """Of the rank that has sent its state; the Trainer sets these after this rank has joined."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.apply()

    def apply(self) -> None:
        """Goes on with the numbers of the rank that has sent its state."""
        given, self.logged = self.logged, {}
        for name, value in given.items():
            setattr(self.trainer, name, value)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.restore_arguments()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.step_is_over()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.note_epoch()


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
            "state": json.dumps({k: v for k, v in state.items() if k not in _OF_THIS_RANK}, default=_plain),
            "callbacks": json.dumps([each.state() for each in _stateful(t)], default=_plain),
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
        self._follows.logged = dict(state["logged"])  # the Trainer sets them after this
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
    """The training loader as the Trainer and its callbacks see it, who count batches of a rank."""

    def __init__(self, loader: ElasticLoader, plain: Any, batches: int) -> None:
        self._loader, self._plain, self._batches = loader, plain, batches
        self.dataset, self.batch_size = plain.dataset, plain.batch_size

    def __len__(self) -> int:
        return len(self._loader) * self._batches

    def __iter__(self) -> Iterator[Any]:
        """All batches, for a callback that looks at some."""
        return iter(self._plain)


class _ThisEpoch:
    """The epoch that the loader is in when the Trainer's loop begins, after a rank has joined."""

    def __init__(self, trainer: TrigramElasticTrainerMixin) -> None:
        self._trainer = trainer

    def __index__(self) -> int:
        loader = self._trainer._loader
        return 0 if loader is None else loader.epoch

    def __str__(self) -> str:
        return str(int(self))


def _check(args: Any, kind: type) -> None:
    """Refuses what needs a process group, or divides an epoch otherwise."""
    own = TrigramElasticTrainerMixin, TrigramElasticTrainer, Trainer
    for name in _DEALS:
        if changed := [c.__name__ for c in kind.__mro__ if c not in own and name in vars(c)]:
            raise UnsupportedError(
                f"TrigramElasticTrainer: {changed[0]}.{name} is not supported: an ElasticLoader of "
                "train_dataset deals the samples, so that each counts once"
            )
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


def _plain(value: Any) -> Any:
    """What JSON does not know, for ranks that join; the rank that sends it must not fail."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
