"""The sum of sparse tensors: each rank has its own indices, so all ranks gather all of them."""

from __future__ import annotations

from typing import Any

import torch

from trigram.backend.calls.arguments import SUM, reduce_op
from trigram.backend.calls.starting import Starting
from trigram.backend.handles.work import Work, handle
from trigram.collectives import calls
from trigram.errors import UnsupportedError


def all_reduce(group: Starting, t: torch.Tensor, opts: Any) -> Work:
    """Sums a sparse COO tensor over all ranks, in place.

    The call runs when it is made, also with ``async_op``: what is gathered second depends on the first.

    Raises:
        UnsupportedError: The layout is another one, or the operator is no sum.
    """
    if t.layout != torch.sparse_coo:
        raise UnsupportedError(f"all_reduce: the tensor has layout {t.layout}; pass t.to_dense()")
    if reduce_op(opts.reduceOp, "all_reduce") != (SUM, None):
        raise UnsupportedError("all_reduce: sparse tensors can be summed only; pass t.to_dense()")
    ours = group._group()
    mine = t.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = torch.empty(ours.size, dtype=torch.int64, device="cpu")
    calls.all_gather(counts, torch.tensor([values.shape[0]], device="cpu"), ours)
    lengths = counts.tolist()
    most = max(lengths)
    gathered = []
    for part in (indices.t().contiguous(), values):
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: part.shape[0]] = part
        everyone = part.new_empty((ours.size, most, *part.shape[1:]))
        calls.all_gather(everyone, padded, ours)
        gathered.append(torch.cat([everyone[r, :n] for r, n in enumerate(lengths)]))
    total = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], t.shape, device=t.device).coalesce()
    with torch.no_grad():
        t.copy_(total)
    return handle(group._callbacks, [t])
