"""Equal optimizers on all ranks, where ranks average gradients from now on: with unequal moments, counts or
learning rates they would update equal weights differently.

After :func:`trigram.join` ranks with fewer inputs have made fewer updates, and all get the optimizers of the
rank that trained longest. After :func:`trigram.switch` from an average of weights each rank's moments are of
its own gradients, and all get those of the first rank.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.collectives import calls, coalesced, serialization
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all
from trigram.errors import MismatchError, UnsupportedError
from trigram.optimizers import optimizer_hooks
from trigram.optimizers.group_values import KERNELS, GroupValues
from trigram.runtime import logs

_PLAIN = (bool, int, float, str, tuple, type(None))


@torch.no_grad()
def share(params: Sequence[torch.Tensor], source: int, groups: ModelGroups, what: str, why: str) -> None:
    """Gives all ranks the state and the options of one rank's optimizers of a model, and the scale of its
    GradScaler; all ranks call it.

    Args:
        params: The model's parameters.
        source: The group rank that has them.
        groups: The model's process groups.
        what: The call, for errors.
        why: Why ranks may have others.

    Raises:
        UnsupportedError: On all ranks: a state cannot be sent.
    """
    group = groups.control
    place = {id(p): i for i, p in enumerate(params)}
    here: dict[_Key, list[Optimizer]] = {}
    for optimizer in sorted(optimizer_hooks.optimizers_of(set(place)), key=optimizer_hooks.last_step):
        here.setdefault(_key(optimizer, place), []).append(optimizer)
    told, tensors = torch.empty(0, dtype=torch.uint8, device="cpu"), list[torch.Tensor]()
    if group.rank == source:
        try:  # of equal ones, that which has stepped last
            told = serialization.pack(
                [_described(key, some[-1], place, tensors) for key, some in here.items()], what
            )
        except UnsupportedError as error:
            told, tensors = serialization.pack(str(error), what), []
    length = tell_all([told.numel()], group)[source][0]
    if group.rank != source:
        told = torch.empty(length, dtype=torch.uint8, device="cpu")
    calls.broadcast(told, group.ranks[source], group)
    found = serialization.unpack(told, group.ranks[source])
    if isinstance(found, str):
        raise UnsupportedError(
            f"{groups.name}: {what}: {why}, and the state of an optimizer of rank {group.ranks[source]} "
            f"cannot be sent to the others: {found}. Give all ranks its state_dict() before they go on"
        )
    if group.rank != source:
        for described in found:
            for _, _, apart in described["state"]:
                tensors += [
                    torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                    for _, dtype, shape in apart.values()
                ]
    coalesced.broadcast(tensors, source, group)
    _share_scaler(source, groups, what)
    if group.rank == source:
        return
    received = iter(tensors)
    for described in found:
        optimizers = here.get((described["class"], tuple(map(tuple, described["key"]))), [])
        if not optimizers:
            logs.warning(
                f"{groups.name}: {what}: this rank has no {described['class']} of the "
                f"parameters of that of rank {group.ranks[source]}; make the same optimizers on all ranks"
            )
        _follow(optimizers, described, params, received)


_Key = tuple[str, tuple[tuple[int, ...], ...]]


def _key(optimizer: Optimizer, place: dict[int, int]) -> _Key:
    """What tells an optimizer from others on all ranks: its class, and the model's parameters in its
    groups."""
    groups = tuple(tuple(place.get(id(p), -1) for p in g["params"]) for g in optimizer.param_groups)
    return type(optimizer).__name__, groups


def _described(
    key: _Key, optimizer: Optimizer, place: dict[int, int], tensors: list[torch.Tensor]
) -> dict[str, Any]:
    """An optimizer's state and options; the tensors of parameters' states are apart."""
    states: list[list[Any]] = []
    general: dict[str, Any] = {}
    for p, state in optimizer.state.items():
        if isinstance(p, str):
            general[p] = state
        if not isinstance(p, torch.Tensor) or id(p) not in place:
            continue
        plain, apart = {}, {}
        for name, value in state.items():
            if type(value) is torch.Tensor:
                tensors.append(value.detach().cpu().contiguous())
                dtype = str(value.dtype).removeprefix("torch.")
                apart[name] = value.device.type, dtype, list(value.shape)
            else:
                plain[name] = value
        states.append([place[id(p)], plain, apart])
    options = [{k: v for k, v in kept.items() if _is_plain(k, v)} for kept in GroupValues(optimizer).plain()]
    return {
        "class": key[0],
        "key": [list(k) for k in key[1]],
        "state": states,
        "general": general,
        "options": options,
    }


def _follow(
    optimizers: Sequence[Optimizer], described: dict[str, Any], params: Sequence[torch.Tensor], received: Any
) -> None:
    """Takes over a state and options. A parameter without state there has none here either."""
    for p in params:
        for optimizer in optimizers:
            optimizer.state.pop(p, None)
    for i, plain, apart in described["state"]:
        p, values = params[i], dict(plain)
        for name, (device, _, _) in apart.items():
            tensor = next(received)
            if tensor.shape == p.shape and tensor.dim():
                tensor = torch.empty_like(p, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
            values[name] = tensor if device == "cpu" else tensor.to(p.device)
        for optimizer in optimizers:
            optimizer.state[p] = copy.deepcopy(values)
    for optimizer in optimizers:
        optimizer.state.update(copy.deepcopy(described["general"]))
        for group, options in zip(optimizer.param_groups, described["options"], strict=True):
            for option, value in options.items():
                if isinstance(group.get(option), torch.Tensor):
                    group[option].fill_(value)  # a compiled step may hold it
                else:
                    group[option] = value


def _is_plain(option: str, value: Any) -> bool:
    """Whether an option is a value that all ranks must have; which kernel computes is of each rank."""
    return isinstance(value, _PLAIN) and option not in KERNELS


def _share_scaler(source: int, groups: ModelGroups, what: str) -> None:
    """Gives all ranks the scale of one rank's GradScaler: with unequal scales the mean of scaled gradients is
    no mean. It is found among the objects of the process, because nothing else leads to it."""
    group = groups.control
    found = gc.get_objects()
    scalers = [o for o in found if issubclass(type(o), torch.amp.GradScaler) and o.is_enabled()]
    counts = [count for (count,) in tell_all([len(scalers)], group)]
    if max(counts) == 0:
        return
    if counts != [1] * group.size:
        logs.warning(
            f"{groups.name}: {what}: ranks have {counts} GradScalers, so it is not known which belongs to "
            f"the model; give all ranks the state_dict() of that of rank {group.ranks[source]}"
        )
        return
    state = scalers[0].state_dict()
    values = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64, device="cpu")
    calls.broadcast(values, group.ranks[source], group)
    scale, tracker = values.tolist()
    scalers[0].load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})


def check_options(groups: ModelGroups, optimizer: Optimizer) -> None:
    """Raises on all ranks if the options of their optimizers differ, after a block in which some made fewer
    updates; all ranks call it."""
    plain = [{k: v for k, v in o.items() if _is_plain(k, v)} for o in GroupValues(optimizer).plain()]
    if other := ranks_unlike_first(repr(plain), groups.main):
        raise MismatchError(
            f"{groups.name}: after trigram.join, rank(s) {listed(other)} have other options in the groups of "
            f"{type(optimizer).__name__} (lr, ...) than rank {groups.main.ranks[0]}, and weights would "
            "differ: a scheduler that is stepped with each batch has made fewer steps where inputs ended "
            "earlier; step schedulers once per epoch, or give all ranks the scheduler.state_dict() of the "
            "rank with most inputs"
        )
