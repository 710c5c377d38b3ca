"""Optimizers after :func:`trigram.join`: ranks with fewer inputs have made fewer updates, so their moments,
counts and learning rates are older. All ranks get those of the rank that trained longest; otherwise ranks
that average gradients would update equal weights differently from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.collectives import calls, coalesced, serialization
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all
from trigram.errors import MismatchError, UnsupportedError
from trigram.runtime import logs
from trigram.training import optimizer_hooks
from trigram.training.group_values import GroupValues

_PLAIN = (bool, int, float, str, tuple, type(None))


@torch.no_grad()
def share(params: Sequence[torch.Tensor], longest: int, groups: ModelGroups) -> None:
    """Gives all ranks the state and the options of one rank's optimizers of a model; all ranks call it.

    Args:
        params: The model's parameters.
        longest: The group rank that has them.
        groups: The model's process groups.
    """
    group = groups.control
    place = {id(p): i for i, p in enumerate(params)}
    here = {_key(o, place): o for o in optimizer_hooks.optimizers_of(set(place))}
    told, tensors = torch.empty(0, dtype=torch.uint8), list[torch.Tensor]()
    if group.rank == longest:
        try:
            told = serialization.pack([_described(key, o, place, tensors) for key, o in here.items()], "join")
        except UnsupportedError as error:
            told, tensors = serialization.pack(str(error), "join"), []
    length = tell_all([told.numel()], group)[longest][0]
    if group.rank != longest:
        told = torch.empty(length, dtype=torch.uint8)
    calls.broadcast(told, longest, group)
    found = serialization.unpack(told, group.ranks[longest])
    if isinstance(found, str):
        logs.warning(
            f"{groups.name}: join: the state of an optimizer cannot be sent, so that of ranks with fewer "
            f"inputs is older than that of rank {group.ranks[longest]}: {found}"
        )
        return
    for described in found:
        given = [v for _, state in described["state"] for v in state.values() if isinstance(v, list)]
        if group.rank != longest:
            tensors += [torch.empty(shape, dtype=getattr(torch, dtype)) for _, dtype, shape in given]
    coalesced.broadcast(tensors, longest, group)
    if group.rank == longest:
        return
    received = iter(tensors)
    for described in found:
        key = tuple(tuple(indices) for indices in described["key"])
        _follow(here.get(key), described, params, received, groups.name)


def _key(optimizer: Optimizer, place: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """What tells an optimizer from others on all ranks: the model's parameters in its groups."""
    return tuple(tuple(place.get(id(p), -1) for p in g["params"]) for g in optimizer.param_groups)


def _described(
    key: Any, optimizer: Optimizer, place: dict[int, int], tensors: list[torch.Tensor]
) -> dict[str, Any]:
    """An optimizer's state and options, with its tensors apart."""
    states = []
    for p, state in optimizer.state.items():
        if id(p) not in place:
            continue
        values: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors.append(value.detach().cpu().contiguous())
                dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
                values[name] = [value.device.type, dtype, shape]
            else:
                values[name] = value
        states.append([place[id(p)], values])
    options = [
        {k: v for k, v in kept.items() if isinstance(v, _PLAIN)} for kept in GroupValues(optimizer).plain()
    ]
    return {"key": [list(k) for k in key], "state": states, "options": options}


def _follow(
    optimizer: Optimizer | None,
    described: dict[str, Any],
    params: Sequence[torch.Tensor],
    received: Any,
    name: str,
) -> None:
    """Takes over a state and options; of an optimizer that this rank has not, only what was received."""
    if optimizer is None:
        logs.warning(
            f"{name}: join: this rank has no optimizer of the parameters that one has where training was "
            "longest; make the same optimizers on all ranks"
        )
    for i, values in described["state"]:
        p, new = params[i], {}
        for key, value in values.items():
            if isinstance(value, list):
                tensor = next(received)
                if tensor.shape == p.shape and tensor.dim():
                    tensor = torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
                new[key] = tensor if value[0] == "cpu" else tensor.to(p.device)
            else:
                new[key] = value
        if optimizer is not None:
            optimizer.state[p] = new
    for group, options in zip(
        optimizer.param_groups if optimizer is not None else (), described["options"], strict=False
    ):
        for option, value in options.items():
            if isinstance(group.get(option), torch.Tensor):
                group[option].fill_(value)  # a compiled step may hold it
            else:
                group[option] = value


def check_options(groups: ModelGroups, optimizer: Optimizer) -> None:
    """Raises on all ranks if the options of their optimizers differ, after a block in which some made fewer
    updates; all ranks call it."""
    plain = [{k: v for k, v in o.items() if isinstance(v, _PLAIN)} for o in GroupValues(optimizer).plain()]
    if other := ranks_unlike_first(repr(plain), groups.main):
        raise MismatchError(
            f"{groups.name}: after trigram.join, rank(s) {listed(other)} have other options in the groups of "
            f"{type(optimizer).__name__} (lr, ...) than rank {groups.main.ranks[0]}, and weights would "
            "differ: a scheduler that is stepped with each batch has made fewer steps where inputs ended "
            "earlier; step schedulers once per epoch, or give all ranks the scheduler.state_dict() of the "
            "rank with most inputs"
        )
