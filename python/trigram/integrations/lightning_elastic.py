"""Elastic jobs in Lightning 2: ``Trainer(strategy="trigram_elastic")``.

Lightning's own strategies for several ranks need a process group, which the loss of a rank ends. This one has
none: gradients travel through :func:`trigram.with_bagua`, metrics and decisions through
:func:`trigram.elastic_all_gather`, and both go on when ranks are lost. Interface: Lightning 2.6,
``lightning/pytorch/strategies/strategy.py``, ``loops/fit_loop.py`` and ``loops/training_epoch_loop.py``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import trigram
from trigram.data import ElasticLoader
from trigram.elastic.draining import Draining
from trigram.errors import MisuseError
from trigram.integrations import elastic_calls
from trigram.integrations.lightning_ranks import ElasticRanks

try:
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        GradientAccumulationScheduler,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as e:
    raise ImportError("trigram.integrations.lightning needs Lightning 2: pip install 'lightning>=2.4'") from e

_CHANGES = BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
_DECIDED = "_defer_save_until_validation", "_last_global_step_saved"
"""Of a ModelCheckpoint: what decides whether it saves, and is not in its state."""
_WHOLE = (
    "trigram_elastic: Trainer({}) is not supported: ElasticLoader deals the samples of whole steps and epochs"
)


class TrigramElasticStrategy(ElasticRanks, SingleDeviceStrategy):
    """Trains a LightningModule in an elastic job: ranks may be lost, and join, while ``fit`` runs.

    The script is started once per rank, as by ``trigram run -n 4 --restarts 10 train.py``, and is the same on
    a rank that joins. It gets weights, optimizer, schedulers, callbacks' states, and the place in the epoch::

        loader = trigram.data.ElasticLoader(dataset, batch_size=32)
        trainer = Trainer(strategy="trigram_elastic", max_epochs=10)
        trainer.fit(module, loader)

    Each rank validates all batches of its loader. ``self.log(..., sync_dist=True)``, ``EarlyStopping``,
    ``ModelCheckpoint`` and loggers work; what only rank 0 does, the lowest remaining rank does.

    Args:
        algorithm: As for :func:`trigram.with_bagua`, of those that average gradients.
        options: The other arguments of :func:`trigram.with_bagua`; ``elastic`` names more objects with state.
        device: Where the module is; None: the GPU ``$LOCAL_RANK``, or the CPU if there is none.
        **more: The arguments of Lightning's ``SingleDeviceStrategy``.

    Raises:
        MisuseError: The training loader is no ``ElasticLoader``, or an argument of the ``Trainer`` divides a
            step or an epoch: ``accumulate_grad_batches``, ``limit_train_batches``, ``overfit_batches``.
    """

    is_distributed = True  # so that Lightning's metrics are reduced
    same_calls = (
        "all ranks log the same metrics with sync_dist=True and have the same callbacks, and a metric that "
        "is logged in some batches of an epoch only is unknown to a rank that joins after them"
    )

    def __init__(self, *args: Any, **more: Any) -> None:
        self._trainer: Any = None
        self._asked_by_signal: Any = None
        super().__init__(*args, **more)

    # Beginning and end.

    def setup_environment(self) -> None:
        """Enters the job."""
        super().setup_environment()
        self.enter()
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(getattr(handler, "__self__", None), Draining):  # no handler of the script's own
            self._asked_by_signal = handler

    def setup(self, trainer: Any) -> None:
        """See Lightning's strategy; refuses what divides a step or an epoch."""
        if trainer.state.fn == TrainerFn.FITTING:
            _check(trainer)
        # ElasticLoader deals the samples for training, and each rank validates all.
        trainer._accelerator_connector.use_distributed_sampler = False
        self._trainer = trainer
        super().setup(trainer)

    def on_train_start(self) -> None:
        """SIGTERM asks this rank to leave, see :func:`trigram.drain`; Lightning would end it in this step."""
        if self._asked_by_signal is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._asked_by_signal)
            # One that came since Lightning has its handler has asked this rank to leave, too.
            self._trainer._signal_connector.received_sigterm = False
        super().on_train_start()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers, then wraps the module; a rank that is late joins here."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        if trigram.is_wrapped(module):
            raise MisuseError(
                "trigram_elastic: fit has been called on this module before, and ranks may join it at any "
                "step; call trigram.shutdown() first, on all ranks"
            )
        if len(self.optimizers) != 1:
            raise MisuseError(
                f"trigram_elastic: the module has {len(self.optimizers)} optimizers; one makes the step that "
                "counts or is made again"
            )
        options = dict(self.options)
        more = options.pop("elastic", None)
        states = [_TrainerState(self), *(more if isinstance(more, list | tuple) else [])]
        options.setdefault("optimizer", self.optimizers[0])
        trigram.with_bagua(module, self.algorithm, elastic=states, **options)
        self.follow_ranks()

    # The loop.

    def process_dataloader(self, dataloader: object) -> object:
        """The training loader has the loop know how many steps are left, which changes with the ranks."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        if not isinstance(dataloader, ElasticLoader):
            raise MisuseError(
                f"trigram_elastic: the training loader is a {type(dataloader).__name__}; make it a "
                "trigram.data.ElasticLoader(dataset, batch_size=...), which deals each sample to a rank that "
                "is there"
            )
        return _Counted(dataloader, self)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``training_step`` through the module's own call, in which the ranks meet before a pass."""
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step; then the loop knows what is left of the epoch, whoever was lost or has joined."""
        result = super().optimizer_step(*args, **kwargs)
        loop = self._trainer.fit_loop
        left = self._loader().steps_left(after=True)
        progress, fetcher = loop.epoch_loop.batch_progress, loop._data_fetcher
        progress.is_last_batch = fetcher.done = left == 0
        fetcher.length = fetcher.fetched + left
        loop.max_batches = progress.current.ready + left
        self.follow_ranks()
        return result

    def _loader(self) -> ElasticLoader:
        found = self._trainer.fit_loop._combined_loader.flattened
        if len(found) != 1:
            raise MisuseError(
                f"trigram_elastic: there are {len(found)} training loaders; make them one ElasticLoader, of "
                "a dataset that has the samples of all"
            )
        loader: ElasticLoader = found[0].loader
        return loader

    def before_batch(self) -> None:
        """The loop is about to get a batch."""
        if self._trainer.accumulate_grad_batches != 1:
            raise MisuseError(
                _WHOLE.format(f"accumulate_grad_batches={self._trainer.accumulate_grad_batches}")
            )
        loop = self._trainer.fit_loop
        left = self._loader().steps_left(after=False)
        loop._data_fetcher.length = loop._data_fetcher.fetched + 1 + left
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready + 1 + left
        if self._trainer.val_check_interval == 1.0:
            self._trainer.val_check_batch = float("inf")  # after the last batch, whichever that is

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """The first rank saves; if it is lost meanwhile, the next one saves again."""

        def write(again: bool) -> None:
            super(TrigramElasticStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)

        elastic_calls.by_first(self.of_all, "save_checkpoint", lambda: self.is_global_zero, write)


class _Counted:
    """An ElasticLoader as Lightning's loop reads it: without a step more to see that an epoch is over."""

    def __init__(self, loader: ElasticLoader, strategy: TrigramElasticStrategy) -> None:
        self.loader, self._strategy = loader, strategy

    def __len__(self) -> int:
        return len(self.loader) if trigram.is_initialized() else 0  # this rank has left

    def __iter__(self) -> Iterator[Any]:
        # The loop leaves an epoch after its last batch, before the loader has seen that it was the last.
        for _ in range(2):
            batches = 0
            for batch in self.loader:
                batches += 1
                self._strategy.before_batch()
                yield batch
            if batches:
                return

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class _TrainerState:
    """What a rank that joins needs of the Trainer, beside the module and its optimizer."""

    averages_gradients_only = True

    def __init__(self, strategy: TrigramElasticStrategy) -> None:
        self._strategy = strategy

    def state_dict(self) -> dict[str, Any]:
        strategy, trainer = self._strategy, self._strategy._trainer
        loop = trainer.fit_loop
        return {
            "loops": loop.state_dict(),
            "loader": [each.state_dict() for each in _loaders(loop)],
            "schedulers": [each.scheduler.state_dict() for each in strategy.lr_scheduler_configs],
            "precision": strategy.precision_plugin.state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "decided": [
                [getattr(each, name, None) for name in _DECIDED] for each in trainer.checkpoint_callbacks
            ],
            # As they were noted last: to compute them now would be calls to other ranks.
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "val_check_batch": trainer.val_check_batch,
            "should_stop": trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        strategy, trainer = self._strategy, self._strategy._trainer
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        _goes_on(loop)
        for loader, theirs in zip(_loaders(loop), state["loader"], strict=True):
            loader.load_state_dict(theirs)
        for each, theirs in zip(strategy.lr_scheduler_configs, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(theirs)
        strategy.precision_plugin.load_state_dict(state["precision"])
        for kept in trainer.checkpoint_callbacks:  # before its state, which it drops if the folder is another
            kept.dirpath = state["callbacks"].get(kept.state_key, {}).get("dirpath", kept.dirpath)
        call._call_callbacks_load_state_dict(trainer, state)
        for kept, decided in zip(trainer.checkpoint_callbacks, state["decided"], strict=True):
            for name, value in zip(_DECIDED, decided, strict=True):
                setattr(kept, name, value)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        trainer.val_check_batch, trainer.should_stop = state["val_check_batch"], state["should_stop"]


def _check(trainer: Any) -> None:
    """Refuses what divides a step or an epoch, or what a rank that joins could not follow."""
    for name, whole in (
        ("accumulate_grad_batches", 1),
        ("overfit_batches", 0.0),  # before what it sets
        ("limit_train_batches", 1.0),
    ):
        given = getattr(trainer, name)
        if (given != whole or type(given) is not type(whole)) and not trainer.fast_dev_run:
            raise MisuseError(_WHOLE.format(f"{name}={given}"))
    for each in trainer.callbacks:
        if isinstance(each, _CHANGES):
            raise MisuseError(
                f"trigram_elastic: {type(each).__name__} changes optimizers or schedulers while it trains, "
                "which a rank that joins later would not have; train without it"
            )


def _loaders(loop: Any) -> list[_Counted]:
    found = [] if loop._combined_loader is None else loop._combined_loader.flattened
    return [each for each in found if isinstance(each, _Counted)]


def _goes_on(loop: Any) -> None:
    """The loop is in the middle of a step, as is that of the rank that has sent its state: it does not
    restart."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _goes_on(inner)


TrigramElasticStrategy.register_strategies(StrategyRegistry)
