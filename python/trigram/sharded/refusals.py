"""Models and optimizers that cannot be sharded: refused before anything is divided."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.errors import MisuseError, UnsupportedError
from trigram.optimizers import optimizer_hooks


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises if the optimizer is not one of the model's parameters, or was sharded before.

    Raises:
        MisuseError: The message names both.
    """
    mine = optimizer_hooks.parameters_of(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and not any(id(p) in mine for p in trained):
        raise MisuseError(
            f"sharded: optimizer= ({type(optimizer).__name__}) has none of the parameters of "
            f"{type(model).__name__} that train; pass the optimizer that updates them"
        )
    if any(isinstance(p, torch.Tensor) and id(p) not in mine for p in optimizer.state):
        raise MisuseError(
            f"sharded: optimizer= ({type(optimizer).__name__}) holds state that was sharded before, "
            "in a job that has ended or for another model; make a new optimizer, and load a state that "
            "was saved"
        )


def check_memory(model: nn.Module, ignored: frozenset[str]) -> None:
    """Raises if a parameter that trains shares memory with another tensor of the model: its values move.

    Raises:
        UnsupportedError: The message names both.
    """
    ranges: list[tuple[int, int, str, bool]] = []
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.numel() and not t.is_meta and t.layout == torch.strided:
            end = t.data_ptr() + (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * (
                t.element_size()
            )
            ranges.append((t.data_ptr(), end, name, t.requires_grad and name not in ignored))
    ranges.sort()
    furthest: tuple[int, str, bool] | None = None
    for start, stop, label, trains in ranges:
        if furthest is not None and start < furthest[0] and (trains or furthest[2]):
            raise UnsupportedError(
                f"sharded: {label} and {furthest[1]} share memory, which would end when parameters move into "
                "buckets; make them one parameter (ties are kept), or copies"
            )
        if furthest is None or stop > furthest[0]:
            furthest = stop, label, trains
