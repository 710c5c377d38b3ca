"""Elastic jobs in Lightning's Fabric: ``Fabric(strategy="trigram_elastic")``.

As in :mod:`trigram.integrations.lightning_elastic` there is no process group, which the loss of a rank would
end. Interface: Lightning 2.6, ``lightning/fabric/fabric.py`` and ``lightning/fabric/strategies/strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

import trigram
from trigram.errors import MisuseError
from trigram.integrations import elastic_calls, saved_state
from trigram.integrations.lightning_ranks import ElasticRanks, NoSync

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
except ImportError as e:
    raise ImportError("trigram.integrations.lightning needs Lightning 2: pip install 'lightning>=2.4'") from e


class TrigramElasticFabricStrategy(ElasticRanks, SingleDeviceStrategy):
    """Trains a module in an elastic job: ranks may be lost, leave and join while the script's loop runs.

    The script is started once per rank, as by ``trigram run -n 4 --restarts 10 train.py``, and is the same on
    a rank that joins. It gets weights, optimizer, scheduler, and what ``strategy.states`` has::

        fabric = Fabric(accelerator="cpu", strategy="trigram_elastic")
        fabric.launch()
        loader = ElasticLoader(dataset, batch_size=32)
        fabric.strategy.states.append(loader)
        model, optimizer = fabric.setup(model, optimizer)
        while loader.epoch < 10:
            for batch in loader:
                ...                     # as ever; fabric.backward(loss), optimizer.step()

    An ``ElasticLoader`` deals the samples itself, so it is not given to ``fabric.setup_dataloaders``; other
    loaders are, and each rank gets all of their batches. ``fabric.all_reduce``, ``all_gather``, ``barrier``
    and ``broadcast`` are of the ranks that train. What only rank 0 does, the lowest remaining rank does.

    Args:
        algorithm: As for :func:`trigram.with_bagua`.
        options: The other arguments of :func:`trigram.with_bagua`.
        device: Where the module is; None: the GPU ``$LOCAL_RANK``, or the CPU if there is none.
        **more: The arguments of Lightning's ``SingleDeviceStrategy``.

    Attributes:
        states: What else a rank that joins gets: objects with ``state_dict`` and ``load_state_dict``. The
            script adds them before ``fabric.setup``, the same on all ranks.

    Raises:
        MisuseError: By ``fabric.setup``: a module to train comes without its optimizer, or with several.
    """

    same_calls = (
        "all ranks make the same calls of Fabric in the same order; a number that a rank has noted before it "
        "joined, such as an epoch, is old: ask loader.epoch after the loop over the loader"
    )

    def __init__(self, *args: Any, **more: Any) -> None:
        self.states: list[Any] = []
        super().__init__(*args, **more)
        self._backward_sync_control = NoSync()

    def setup_environment(self) -> None:
        """Enters the job."""
        super().setup_environment()
        self.enter()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Wraps the module; a rank that is late joins here."""
        if len(optimizers) != 1:
            raise MisuseError(
                f"trigram_elastic: fabric.setup was given {len(optimizers)} optimizers; one makes the step "
                "that counts or is made again"
            )
        self.enter()
        options = dict(self.options)
        more = options.pop("elastic", None)
        states = [*self.states, *(more if isinstance(more, list | tuple) else [])]
        states += [] if scheduler is None else [scheduler]
        options.setdefault("optimizer", optimizers[0])
        trigram.with_bagua(module, self.algorithm, elastic=states or True, **options)
        self.follow_ranks()
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Takes a module that is not trained."""
        if any(p.requires_grad for p in module.parameters()):
            raise MisuseError(
                "trigram_elastic: a rank that joins gets a module with its optimizer; give both to one call: "
                "fabric.setup(model, optimizer)"
            )
        return module

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step; then Lightning knows this rank's place, whoever was lost or has joined."""
        result = super().optimizer_step(*args, **kwargs)
        self.follow_ranks()
        return result

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state, with the average of the weights. All ranks call it, as ``fabric.save`` does."""
        return saved_state.averaged_state(module, partial(super().get_module_state_dict, module))

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """The first rank saves; if it is lost meanwhile, the next one saves again."""
        kept = self._convert_stateful_objects_in_state(state, filter or {})

        def write(again: bool) -> None:
            self.checkpoint_io.save_checkpoint(checkpoint=kept, path=path, storage_options=storage_options)

        elastic_calls.by_first(self.of_all, "save_checkpoint", lambda: self.is_global_zero, write)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the ranks that train."""
        return self.reduce(tensor, group, reduce_op)


TrigramElasticFabricStrategy.register_strategies(STRATEGY_REGISTRY)
