"""The average of sparse gradients: an all-gather of row indices and values.

``nn.Embedding(sparse=True)`` produces gradients with few rows. An all-reduce of the dense gradient would send
the whole table, so the rows are gathered instead.
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
    """The parameters of modules created with ``sparse=True``, whose gradients are sparse."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight


@torch.no_grad()
def average(
    param: torch.Tensor,
    name: str,
    group: Group,
    sample_weight: SampleWeight | None = None,
    contributing: int | None = None,
    silent: bool = False,
) -> None:
    """Replaces the sparse gradient of ``param`` by its average over the ranks of ``group``.

    All ranks call it. If no rank has a gradient, ``param.grad`` does not change. The result is coalesced; the
    tensor that was ``param.grad`` before does not change.

    Args:
        param: The parameter; its gradient is a sparse COO tensor with one sparse dimension, or None.
        name: The name of the parameter, for error messages.
        group: The ranks that take part.
        sample_weight: This rank's weight; None: all ranks weigh the same.
        contributing: How many ranks the average is over; None: all of the group.
        silent: This rank contributes nothing, and gets the average. If there is none, it has no gradient.

    Raises:
        UnsupportedError: The gradient is dense.
    """
    grad = param.grad
    if grad is not None and not grad.is_sparse:
        raise UnsupportedError(
            f"rank {group.ranks[group.rank]}: the gradient of {name} is dense, but its module has "
            "sparse=True; create the module with sparse=False"
        )
    if silent:
        grad = param.grad = None
    mine = grad.coalesce() if grad is not None else None
    if mine is not None and sample_weight is not None:
        if mine is grad:
            mine = mine.clone()
        sample_weight.weigh(mine._values())
    # -1 means no gradient at all; 0 means a gradient without rows.
    sizes = [count for (count,) in tell_all([mine._nnz() if mine is not None else -1], group)]
    most = max(sizes)
    if most < 0:
        return
    width = param.shape[1:].numel()
    # Every rank pads to the largest row count, so that all ranks make the same call.
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
    data = data.view(-1, *param.shape[1:]) / (contributing or group.size)
    if sample_weight is not None:
        sample_weight.normalize(data)
    summed = torch.sparse_coo_tensor(
        indices[None], data, param.shape, check_invariants=False, device=data.device
    )
    param.grad = summed.coalesce()
