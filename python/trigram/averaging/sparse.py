"""Sparse gradients: everybody gets everybody's indices and values.

``nn.Embedding(sparse=True)`` makes gradients with few rows. Adding them as dense tensors would
move the whole table, so the rows are gathered instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.sample_weight import SampleWeight
from trigram.collectives.consistency import tell_all
from trigram.errors import UnsupportedError
from trigram.runtime.group import Group


def sparse_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters whose gradients are sparse, as their modules declare."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight


@torch.no_grad()
def average(param: torch.Tensor, name: str, group: Group, share: SampleWeight | None = None) -> None:
    """Replaces the sparse gradient of ``param`` by the average over the ranks, weighted by a share.

    Where no rank has a gradient, it stays as it is. The result is coalesced.
    """
    grad = param.grad
    if grad is not None and not grad.is_sparse:
        raise UnsupportedError(
            f"rank {group.ranks[group.rank]}: the gradient of {name} is dense, but its module has "
            "sparse=True; create the module with sparse=False"
        )
    mine = grad.coalesce() if grad is not None else None
    if mine is not None and share is not None:
        share.weigh(mine._values())
    # -1: no gradient at all, which is not the same as one without rows.
    sizes = [count for (count,) in tell_all([mine._nnz() if mine is not None else -1], group)]
    most = max(sizes)
    if most < 0:
        return
    width = param.shape[1:].numel()
    # Padded to the longest, so that all ranks make the same call.
    rows = torch.zeros(most, dtype=torch.int64, device=param.device)
    values = torch.zeros(most, width, dtype=param.dtype, device=param.device)
    if mine is not None:
        rows[: mine._nnz()] = mine.indices()[0]
        values[: mine._nnz()] = mine.values().reshape(-1, width)
    all_rows = rows.new_empty(group.size, most)
    all_values = values.new_empty(group.size, most, width)
    collectives.all_gather(all_rows, rows, group)
    collectives.all_gather(all_values, values, group)
    keep = [(r, n) for r, n in enumerate(sizes) if n > 0]
    indices = torch.cat([all_rows[r, :n] for r, n in keep]) if keep else rows[:0]
    data = torch.cat([all_values[r, :n] for r, n in keep]) if keep else values[:0]
    data = data.view(-1, *param.shape[1:]) / group.size
    if share is not None:
        share.settle(data)
    param.grad = torch.sparse_coo_tensor(indices[None], data, param.shape, check_invariants=False).coalesce()
