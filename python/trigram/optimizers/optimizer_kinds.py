"""Whether the update of an optimizer can be divided, and how: by values, by parameters, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.algorithms.options import AlgorithmOptions
from trigram.errors import MisuseError, UnsupportedError
from trigram.optimizers import optimizer_trial

_NAMES = "SGD Adam AdamW Adagrad Adamax Adadelta RMSprop Rprop NAdam RAdam ASGD"
ELEMENTWISE = tuple(_NAMES.split())
"""Classes of ``torch.optim`` whose update of a value depends only on its own gradient and state."""
WHOLE = ("Muon", "Adafactor")
"""Those that need whole parameters."""


def updates_values(optimizer: Any, options: AlgorithmOptions, name: str) -> bool:
    """Whether an optimizer may be given slices of parameters; False: only whole parameters.

    What torch has is known. Others are tried, see :mod:`trigram.optimizers.optimizer_trial`, so that an
    update that cannot be divided is an error and not another training.

    Args:
        optimizer: The script's optimizer.
        options: The algorithm's; ``elementwise``: what the script says; None: what is known or found.
        name: The algorithm, for error messages.

    Raises:
        MisuseError: It is no optimizer of torch, or is not what the script says.
        UnsupportedError: It can be neither sharded nor fused.
    """
    if not isinstance(optimizer, Optimizer):
        raise MisuseError(
            f"{name}: state='sharded' and fused=True need optimizer=, the torch.optim.Optimizer of the "
            f"model's parameters; it is {type(optimizer).__name__ if optimizer is not None else None}"
        )
    kind, elementwise = type(optimizer), options.elementwise
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{name}: {kind.__name__} computes with all parameters at once, so it can be neither sharded nor "
            "fused"
        )
    if any(g.get("differentiable") for g in optimizer.param_groups):
        raise UnsupportedError(
            f"{name}: optimizers with differentiable=True can be neither sharded nor fused"
        )
    if kind.__module__.startswith("torch.optim") and kind.__name__ in (*ELEMENTWISE, *WHOLE):
        values = kind.__name__ in ELEMENTWISE
    else:
        found = optimizer_trial.found(optimizer)
        if found is None and elementwise is None:
            raise UnsupportedError(
                f"{name}: it is not known whether {kind.__name__} may be given slices of parameters, and its "
                "steps cannot be tried: they need a closure, or random numbers; pass elementwise=True if the "
                "update of a value depends on its own gradient and state alone, or elementwise=False if it "
                "depends on no other parameter"
            )
        if found is None:
            return bool(elementwise)
        if not found.whole:
            raise UnsupportedError(
                f"{name}: {kind.__name__} can be neither sharded nor fused: its update of a parameter "
                "depends on other parameters too, such as by a norm of all gradients or a learning rate that "
                "is found from them; clip with trigram.clip_grad_norm_ instead, where this is an option of it"
            )
        if options.sharded and not found.sent:
            raise UnsupportedError(
                f"{name}: {kind.__name__} cannot be sharded: its state has objects other than tensors "
                "and numbers, which no state_dict could collect"
            )
        if options.fused and not found.fused:
            raise UnsupportedError(
                f"{name}: {kind.__name__} cannot be fused: it counts its steps, and a step for each bucket "
                "is more than one; remove fused=True"
            )
        values = found.values and not _knows_parameters(optimizer)
    if elementwise and not values:
        raise MisuseError(
            f"{name}: elementwise=True, but {kind.__name__} updates slices of parameters otherwise than "
            "whole parameters; remove elementwise=True"
        )
    return values if elementwise is None else elementwise


def _knows_parameters(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a table of parameters, or of their ``id()``, besides its groups and state: it
    would not find slices there."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def found(value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in own
        if isinstance(value, int):
            return value in own
        if depth and isinstance(value, Mapping):
            return any(found(of, depth - 1) for pair in value.items() for of in pair)
        if depth and isinstance(value, list | tuple | set | frozenset):
            return any(found(of, depth - 1) for of in value)
        return False

    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state") and not name.startswith("_optimizer_")
    }
    options = [{name: of for name, of in g.items() if name != "params"} for g in optimizer.param_groups]
    return found(attributes, 3) or found(options, 4)


def check_state_dict(optimizer: Optimizer, name: str) -> None:
    """Raises if ``optimizer.state_dict`` would have the state of this rank's slices only.

    Raises:
        UnsupportedError: It calls no hooks, as those of optimizers around another one.
    """
    kind = type(optimizer)
    if kind.state_dict is Optimizer.state_dict:
        return
    called: list[bool] = []
    hooks = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
    kept = {h: vars(optimizer).get(h) for h in hooks}
    vars(optimizer).update(
        {hooks[0]: OrderedDict({0: lambda _: called.append(True)}), hooks[1]: OrderedDict()}
    )
    try:
        optimizer.state_dict()
    finally:
        vars(optimizer).update(kept)
    if not called or None in kept.values():
        raise UnsupportedError(
            f"{name}: {kind.__name__} has a state_dict of its own, which would hold the state of this rank's "
            "slices only; use an optimizer whose state_dict calls that of torch.optim.Optimizer"
        )
