"""GradientSync in buckets: flat registered memory, and the gradients views into it.

Where gradients travel in full, a bucket ends with one flag per parameter: 1 where this rank has a
gradient, 0 where backward did not reach the parameter. The flags are averaged with the gradients,
at no cost worth measuring, so every rank knows which parameters nobody used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trigram.averaging.average import Average
from trigram.collectives import coalesced
from trigram.runtime.memory import empty

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket: small, so that communication starts early (as DDP does)."""


class Bucket:
    """Parameters of one dtype whose gradients travel together.

    Args:
        indices: Which parameters.
        params: All parameters.
        length: The length of the memory in elements, from what the gradients take; None: the
            gradients and one flag for each.

    Attributes:
        params: Indices of the parameters, in the order of their places.
        views: Each parameter's gradient, in the bucket's memory.
        flags: One per parameter, or None where they travel apart.
        values: The memory without them.
        pending: Parameters whose gradient is not here yet in this backward.
        unused: Those that this rank did not use.
        average: How its mean is made.
        begun: Whether it has left in this backward.
        spare: Where an elastic job keeps what this rank gave.
    """

    average: Average

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.Tensor],
        length: Callable[[int], int] | None = None,
    ) -> None:
        self.params = list(indices)
        chosen = [params[i] for i in indices]
        at, total = coalesced.offsets(chosen)
        whole = total + len(chosen) if length is None else length(total)
        device = chosen[0].device
        self.memory = empty(whole, dtype=chosen[0].dtype, device=device)
        self.memory.zero_()
        self.views = [coalesced.view_like(self.memory, a, p) for a, p in zip(at, chosen, strict=True)]
        self.flags = self.memory[total:] if length is None else None
        self.values = self.memory if length is not None else self.memory[:total]
        self.nbytes = self.memory.nbytes
        # Between and after the gradients: a codec's means may leave something there.
        used = torch.zeros(whole, dtype=torch.bool, device=device)
        for a, p in zip(at, chosen, strict=True):
            used[a : a + p.numel()] = True
        self.gaps = (~used).nonzero().flatten() if length is not None else None
        self.pending: set[int] = set()
        self.unused: list[int] = []
        self.begun = False
        self.spare: torch.Tensor | None = None

    def begin(self) -> None:
        """A backward pass begins: no gradient is here yet."""
        self.pending = set(range(len(self.params)))
        self.unused = []
        self.begun = False

    def collect(self, params: Sequence[torch.Tensor]) -> None:
        """All gradients that will come are here: bring them to their places.

        A gradient may lie in its place already, in memory of its own that autograd made (after
        ``set_to_none``), or be missing: then this rank did not use the parameter.
        """
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, i in enumerate(self.params):
            grad, view = params[i].grad, self.views[k]
            if grad is None:
                view.zero_()
                self.unused.append(k)
            elif grad.data_ptr() != view.data_ptr():
                fresh.append((view, grad))
                params[i].grad = view
        if fresh:
            # One fused copy for all that lie elsewhere.
            torch._foreach_copy_([v for v, _ in fresh], [g for _, g in fresh])
        self.pending = set()
        self.begun = True
        if self.gaps is not None:
            self.memory.index_fill_(0, self.gaps, 0)
        if self.flags is not None:
            self.flags.fill_(1)
            for k in self.unused:
                self.flags[k] = 0

    def settle(self, params: Sequence[torch.Tensor], used: torch.Tensor | None) -> None:
        """The averages are here: parameters that only others used get theirs too.

        Args:
            params: All parameters.
            used: Whether anybody used each of this bucket's; None: its own flags tell.
        """
        flags = self.flags if used is None else used
        assert flags is not None
        for k in self.unused:
            if flags[k] > 0:
                params[self.params[k]].grad = self.views[k]


def assign(params: Sequence[torch.Tensor], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Deals parameters into buckets in the order in which their gradients come.

    Args:
        params: All parameters.
        order: Indices of those that take part.
        bucket_bytes: Size at which a bucket is full.

    Returns:
        Indices by bucket, buckets in the order in which they fill.
    """
    full: list[list[int]] = []
    open_: dict[torch.dtype, tuple[list[int], int]] = {}
    for i in order:
        p = params[i]
        indices, size = open_.pop(p.dtype, ([], 0))
        indices.append(i)
        size += p.nbytes
        if size >= (min(FIRST_BUCKET, bucket_bytes) if not full else bucket_bytes):
            full.append(indices)
        else:
            open_[p.dtype] = (indices, size)
    rest = sorted((indices for indices, _ in open_.values()), key=lambda ix: order.index(ix[-1]))
    return full + rest
