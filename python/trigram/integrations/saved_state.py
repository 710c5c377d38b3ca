"""What the integrations share: average weights and the algorithm's states, for evaluation and checkpoints.

One rank writes the checkpoint, with the states of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trigram
from trigram.errors import MisuseError, UnsupportedError
from trigram.model.wrapped import lookup

KEY = "trigram"
"""Under which the states are in a checkpoint."""


def weights_differ(model: nn.Module) -> bool:
    """Whether a model is wrapped and has other weights on each rank between averaging steps. Where it has
    not, rank 0's weights and buffers are saved as they are, as those of ``DistributedDataParallel`` are."""
    return trigram.is_wrapped(model) and not lookup(model, "weights_differ").algorithm.gradients


def averaged(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside the block the model has the average of the weights. All ranks call it, between steps."""
    return trigram.consensus(model) if weights_differ(model) else nullcontext()


def averaged_state(model: nn.Module, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``state_dict()`` returns, with the average of the weights. All ranks call it, between steps."""
    if not weights_differ(model):
        return state_dict()
    with averaged(model):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state_dict().items()}


def refuse_elastic(options: Mapping[str, Any], library: str) -> None:
    """Raises if a model is to be elastic in a library whose process group has a fixed number of ranks.

    Raises:
        UnsupportedError: ``options`` has ``elastic``.
    """
    if options.get("elastic", False) is not False:
        raise UnsupportedError(
            f"elastic: not supported under {library}, whose process group has a fixed number of ranks; use a "
            'loop of your own, Lightning\'s Trainer(strategy="trigram_elastic"), '
            "ElasticAccelerator, TrigramElasticTrainer, or Ray Train with TrigramConfig(elastic=True)"
        )


def finish(model: nn.Module) -> None:
    """Makes a wrapped model a plain one with the average of the weights. All ranks call it, between steps."""
    if not trigram.is_wrapped(model):
        return
    if weights_differ(model):
        trigram.consensus(model)
    trigram.unwrap(model)


def gathered(model: nn.Module) -> list[dict[str, Any]] | None:
    """The states of all ranks, on rank 0; None on the others. All ranks call it, between steps.

    Rank 0 needs memory for them: nothing for algorithms that keep no tensors, up to the size of the model
    from each rank for those that keep residuals.
    """
    mine = trigram.algorithm_state(model)
    if not dist.is_initialized():  # one process trains alone
        return [mine]
    states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, states, dst=0)
    return states


def load(model: nn.Module, states: list[dict[str, Any]]) -> None:
    """Gives each rank its state; all ranks call it, after the weights have been loaded.

    Raises:
        MisuseError: The states do not fit the model, its algorithm or the number of ranks.
    """
    if not isinstance(states, list) or not states:
        raise MisuseError("the algorithm's states in this checkpoint are not those of a Trigram training")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # With another number of ranks any state will do, or load_algorithm_state says why none does.
    trigram.load_algorithm_state(model, states[rank if len(states) == size else 0])
