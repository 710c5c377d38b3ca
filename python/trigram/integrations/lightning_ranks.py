"""What both strategies for elastic jobs in Lightning share: who this rank is, and what ranks tell each other.

Interface: Lightning 2.6, ``lightning/fabric/strategies/strategy.py`` and
``lightning/pytorch/strategies/strategy.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.errors import MisuseError
from trigram.integrations import elastic_calls

try:
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.rank_zero import rank_zero_only
except ImportError as e:
    raise ImportError("trigram.integrations.lightning needs Lightning 2: pip install 'lightning>=2.4'") from e

_REDUCTIONS = {
    "mean": lambda t: t.float().mean(0) if not t.is_floating_point() else t.mean(0),
    "sum": lambda t: t.sum(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
}


class ElasticRanks:
    """It precedes Lightning's strategy for one device.

    Attributes:
        same_calls: What keeps ranks at the same calls, for errors.
    """

    strategy_name = "trigram_elastic"
    same_calls = ""
    _entered = False

    def __init__(
        self,
        algorithm: str | Trigram | None = None,
        options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        **more: Any,
    ) -> None:
        self.algorithm, self.options = algorithm, dict(options or {})
        super().__init__(device or elastic_calls.own_device(), **more)  # type: ignore[call-arg]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``trigram_elastic``."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="Elastic jobs of Trigram")

    @property
    def global_rank(self) -> int:
        """Its place among the ranks that train now; -1 while it joins."""
        return trigram.rank() if self._entered else int(os.environ.get("RANK", "0"))

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        """Lightning's own strategy sets it once; here it changes."""

    @property
    def world_size(self) -> int:
        """How many ranks train now."""
        return trigram.world_size() if self._entered else int(os.environ.get("WORLD_SIZE", "1"))

    @world_size.setter
    def world_size(self, size: int) -> None:
        """As for the rank."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes logs and checkpoints now."""
        return self.global_rank == 0

    def enter(self) -> None:
        """Enters the job, unless the script has."""
        if not trigram.is_initialized():
            trigram.init(elastic=True)
        self._entered = True
        self.follow_ranks()

    def follow_ranks(self) -> None:
        """Tells Lightning this rank's place among those that train now."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # set by Lightning alike

    # What ranks tell each other.

    def of_all(self, what: str, value: Any) -> list[Any]:
        """The values of the ranks that train; after this one has left, its own."""
        return elastic_calls.of_all(self.strategy_name, what, value, self.same_calls)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the ranks that train; the mean unless another operation is named."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        name = "mean" if name == "avg" else name
        if name not in _REDUCTIONS:
            raise MisuseError(f"trigram_elastic: reduce_op={reduce_op} is none of {', '.join(_REDUCTIONS)}")
        gathered = torch.stack(self.of_all(f"reduce {name} {list(tensor.shape)}", tensor.detach()))
        return _REDUCTIONS[name](gathered).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Of the ranks that train, along a new first dimension; without gradients."""
        return torch.stack(self.of_all(f"all_gather {list(tensor.shape)}", tensor.detach())).to(tensor.device)

    def barrier(self, name: str | None = None) -> None:
        """Ends when all ranks have called it."""
        self.of_all(f"barrier {name or ''}", None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of the lowest rank that trains."""
        sent = os.fspath(obj) if isinstance(obj, os.PathLike) else obj
        return self.of_all("broadcast", sent)[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or one does."""
        said = self.of_all("reduce_boolean_decision", bool(decision))
        return min(said) if all else max(said)


class NoSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: gradients are accumulated on this rank."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """A block in which they are."""
        return trigram.no_sync(module) if enabled and trigram.is_wrapped(module) else nullcontext()
