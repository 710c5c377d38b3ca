"""Objects, parameters and states of optimizers, from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from trigram.compat.horovod import calls
from trigram.compat.horovod.basics import ProcessSet, global_process_set, rank
from trigram.compat.horovod.errors import errors
from trigram.runtime.records import all_gather_bytes, broadcast_bytes


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives all ranks rank ``root_rank``'s tensors, in place.

    Args:
        params: A ``state_dict()``, ``named_parameters()`` or a list of parameters; the same on all ranks.
        root_rank: The rank.
    """
    if isinstance(params, dict):
        tensors = [params[name] for name in sorted(params)]
    elif isinstance(params, Sequence) or hasattr(params, "__next__"):
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = [calls.broadcast_async_(t, root_rank) for t in tensors if isinstance(t, torch.Tensor)]
    for handle in handles:
        calls.synchronize(handle)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Gives all ranks the state and the options of rank ``root_rank``'s optimizer.

    Args:
        optimizer: The optimizer, of the same parameters on all ranks.
        root_rank: The rank.
        model: Not needed here.

    Raises:
        ValueError: It is ``torch.optim.LBFGS``, as with Horovod.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:  # Horovod makes a step then, and leaves gradients of zero
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank ``root_rank``'s object, on all ranks of a set, by pickle: ranks of a job trust each other."""
    group = calls._group(process_set)
    data = pickle.dumps(obj) if rank() == root_rank else b""
    with errors():
        data = broadcast_bytes(group, data, group.group_rank(root_rank, "broadcast_object"))
    return obj if rank() == root_rank else pickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of a set, in their order, by pickle."""
    with errors():
        return [pickle.loads(each) for each in all_gather_bytes(calls._group(process_set), pickle.dumps(obj))]
