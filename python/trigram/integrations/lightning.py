"""Lightning 2: ``Trainer(strategy="trigram")`` and ``Fabric(strategy="trigram")``.

Importing this module registers the names, and those of the strategies for elastic jobs. The strategies here
are Lightning's DDP strategy (launchers, samplers, process group) with :func:`trigram.with_bagua` in place of
``DistributedDataParallel``, and torch's collectives (metrics, barriers, objects) on the backend ``trigram``.
Interface: Lightning 2.6, ``lightning/pytorch/strategies/ddp.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.errors import MisuseError
from trigram.integrations import saved_state
from trigram.integrations.fabric_elastic import TrigramElasticFabricStrategy
from trigram.integrations.lightning_elastic import TrigramElasticStrategy
from trigram.integrations.lightning_ranks import NoSync

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as e:
    raise ImportError("trigram.integrations.lightning needs Lightning 2: pip install 'lightning>=2.4'") from e

__all__ = [
    "TrigramElasticFabricStrategy",
    "TrigramElasticStrategy",
    "TrigramFabricStrategy",
    "TrigramStrategy",
]


class _WithAlgorithm:
    """What both strategies have: the algorithm, and their names. It precedes Lightning's DDP strategy."""

    def __init__(
        self,
        algorithm: str | Trigram | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        process_group_backend: str = "trigram",
        **more: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, **more)  # type: ignore[call-arg]
        if others := self._ddp_kwargs:  # type: ignore[attr-defined]
            raise MisuseError(
                f"TrigramStrategy has no argument {', '.join(others)}; arguments of trigram.with_bagua go "
                "into options={...}, and those of DistributedDataParallel have no meaning here"
            )
        self._backward_sync_control = NoSync()
        self.algorithm = algorithm
        self.options = dict(options or {})
        saved_state.refuse_elastic(self.options, "Lightning")

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``trigram``, and ``trigram_spawn`` and ``trigram_fork``, which start processes like
        ``ddp_spawn`` and ``ddp_fork``."""
        for name, start_method in (
            ("trigram", "popen"),
            ("trigram_spawn", "spawn"),
            ("trigram_fork", "fork"),
        ):
            if name not in strategy_registry:
                what = f"Trigram's algorithms, with `start_method={start_method!r}`"
                strategy_registry.register(name, cls, description=what, start_method=start_method)


class TrigramStrategy(_WithAlgorithm, DDPStrategy):
    """Trains a LightningModule with one of Trigram's algorithms.

    Args:
        algorithm: As for :func:`trigram.with_bagua`; None: ``$TRIGRAM_ALGORITHM``, else
            ``gradient_allreduce``, whose weights are bit for bit those of ``strategy="ddp"`` on two ranks.
        options: The other arguments of :func:`trigram.with_bagua`, for instance ``{"bucket_mb": 4}``.
        process_group_backend: The backend of torch's process group.
        **more: The arguments of Lightning's ``DDPStrategy`` that do not concern ``DistributedDataParallel``,
            such as ``start_method`` and ``timeout``.

    All ranks of the ``Trainer`` train the module; Lightning divides the data among them, and gathers metrics
    and checkpoints from all. While it trains under an algorithm that averages weights, each rank validates
    its own weights. Checkpoints and the module after ``fit`` have the average. A checkpoint that can be
    resumed also has the algorithm's state of every rank, under the key ``trigram``.

    Raises:
        MisuseError: For arguments of ``DistributedDataParallel``, and for ``group`` in ``options``.
    """

    strategy_name = "trigram"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.options.get("group") is not None:
            raise MisuseError(
                "options: 'group': all ranks of Lightning's Trainer train a module; use Fabric or a loop of "
                "your own to train it on some"
            )
        self._validates = False

    def configure_ddp(self) -> None:
        """Does nothing: the module is wrapped when its optimizers are there, see :meth:`setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers, then wraps the module."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        if trigram.is_wrapped(module):
            trigram.unwrap(module)  # an earlier fit has ended with an exception
        options = dict(self.options)
        if len(self.optimizers) == 1:
            options.setdefault("optimizer", self.optimizers[0])
        trigram.with_bagua(module, self.algorithm, **options)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``training_step`` through the module's own call, in which the ranks meet before a pass."""
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    def on_validation_start(self) -> None:
        """See :meth:`validation_step`."""
        super().on_validation_start()
        self._validates = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """All ranks validate rank 0's buffers, as under ``DistributedDataParallel``, whose validation step
        broadcasts them. They do so from the first step on, when callbacks have put averaged weights and
        buffers into the module."""
        if not self._validates:
            self._validates = True
            self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    def _broadcast_buffers(self) -> None:
        module = self.lightning_module
        if module is None or not trigram.is_wrapped(module) or saved_state.weights_differ(module):
            return
        if self.options.get("broadcast_buffers", True):
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates gradients on this rank."""
        module = self.lightning_module
        assert module is not None
        with trigram.no_sync(module) if trigram.is_wrapped(module) else nullcontext():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, with the average of the weights. All ranks call it, as Lightning does."""
        module = self.lightning_module
        assert module is not None
        return saved_state.averaged_state(module, super().lightning_module_state_dict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Adds the algorithm's state of every rank, unless the checkpoint has weights only."""
        module = self.lightning_module
        if module is not None and trigram.is_wrapped(module) and "optimizer_states" in checkpoint:
            checkpoint[saved_state.KEY] = saved_state.gathered(module)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizers, then the algorithm's state if the checkpoint has one."""
        super().load_optimizer_state_dict(checkpoint)
        module = self.lightning_module
        if module is not None and trigram.is_wrapped(module) and saved_state.KEY in checkpoint:
            saved_state.load(module, checkpoint[saved_state.KEY])

    def on_train_end(self) -> None:
        """The module keeps the average of the weights, and is a plain module again."""
        module = self.lightning_module
        if module is not None:
            saved_state.finish(module)
        super().on_train_end()


class TrigramFabricStrategy(_WithAlgorithm, FabricDDPStrategy):  # type: ignore[misc]  # NoSync
    """The same for Fabric.

    Args:
        algorithm: As for :class:`TrigramStrategy`.
        options: As for :class:`TrigramStrategy`.
        process_group_backend: As for :class:`TrigramStrategy`.
        **more: As for :class:`TrigramStrategy`, for Fabric's ``DDPStrategy``.

    ``fabric.save`` writes the average of the weights. Save the algorithm's state yourself
    (:func:`trigram.algorithm_state`, on every rank) where training is to be resumed.
    """

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # not DDP's wrapper
        """Wraps a module that has something to train."""
        if any(p.requires_grad for p in module.parameters()):
            trigram.with_bagua(module, self.algorithm, **self.options)
        return module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state, with the average of the weights. All ranks call it, as ``fabric.save`` does."""
        return saved_state.averaged_state(module, partial(super().get_module_state_dict, module))


TrigramStrategy.register_strategies(StrategyRegistry)
TrigramFabricStrategy.register_strategies(STRATEGY_REGISTRY)
