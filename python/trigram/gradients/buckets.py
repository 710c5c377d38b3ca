"""Buckets of gradients: one coalesced tensor each, in registered memory; the gradients are views into it.

If gradients are sent in full, a bucket ends with one flag per parameter: 1 if this rank has a gradient, 0 if
backward did not reach the parameter. The flags are averaged with the gradients, so every rank knows which
parameters no rank used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

from trigram import _core
from trigram.averaging.average import Average
from trigram.collectives import coalesced
from trigram.errors import MisuseError
from trigram.observe import spans
from trigram.runtime.memory import empty

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket: small, so that communication starts early (as DDP does)."""


class Bucket:
    """Parameters of one dtype whose gradients are averaged together.

    Args:
        indices: The indices of the parameters in ``params``.
        params: All parameters of the model.
        length: From the number of gradient values to the number of values of the bucket; None: the gradients
            and one flag for each.

    Attributes:
        params: The indices of the parameters, in the order of their gradients in the memory.
        tensors: The parameters.
        memory: The coalesced tensor: one-dimensional, of the parameters' dtype and device; complex gradients
            are pairs in it.
        views: The gradient of each parameter, as a view into ``memory``. Scripts never see these.
        grads: The same for the parameters. A script may give such a tensor other memory
            (``p.grad.data = ...``, ``model.to(memory_format=...)``), and each counts its own writes.
        flags: One per parameter; None if they are sent separately.
        values: ``memory`` without the flags.
        unused: Positions of parameters that this rank did not use in this backward pass.
        by_nobody: Of those, the ones that no rank used in the last pass.
        left: Those of them that a script has left the averages of an earlier pass.
        held: Those whose residual the average holds back.
        average: The average that the bucket uses.
        sent: Whether the bucket was sent in this backward pass.
        backup: A copy of ``memory`` with this rank's gradients; elastic jobs only.
        calls: The collectives that :meth:`Average.start` makes.
        in_turn: So many buckets may be under way at a time.
    """

    average: Average
    calls = 1
    in_turn: int = sys.maxsize
    keeps_gradients = True
    """Whether the parameters' gradients are views into ``memory``."""

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[torch.Tensor],
        length: Callable[[int], int] | None = None,
    ) -> None:
        self.params = list(indices)
        chosen = [params[i] for i in indices]
        self.tensors = tuple(chosen)
        dtype, device = chosen[0].dtype.to_real(), chosen[0].device
        at, total = coalesced.offsets(chosen, dtype)
        whole = total + len(chosen) if length is None else length(total)
        self.memory = empty(whole, dtype=dtype, device=device)
        self.memory.zero_()
        self.views = [coalesced.view_like(self.memory, a, p) for a, p in zip(at, chosen, strict=True)]
        self.grads = [view.data for view in self.views]
        self._addresses = [view.data_ptr() for view in self.views]
        self.permuted = [k for k, p in enumerate(chosen) if coalesced.is_permuted(p)]
        self.flags = self.memory[total:] if length is None else None
        self.values = self.memory if length is not None else self.memory[:total]
        self.nbytes = self.memory.nbytes
        # The padding between and after the gradients, which decoding may leave nonzero.
        used = torch.zeros(whole, dtype=torch.bool, device=device)
        for a, p in zip(at, chosen, strict=True):
            used[a : a + p.numel()] = True
        self.gaps = (~used).nonzero().flatten() if length is not None else None
        self.unused: list[int] = []
        self.by_nobody: list[int] = []
        self.held: list[int] = []
        self.left: list[int] = []
        self._left: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.sent = False
        self.backup: torch.Tensor | None = None
        self.span: spans.Span | None = None  # of its average under way, if anybody looks
        self.outside: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What refers to the gradients if no script does: see `is_kept_by_script`.
        self._references: list[int] = []
        self._storage_references = 0

    @property
    def mean(self) -> torch.Tensor:
        """The averages when the pass has ended, or this rank's part of them."""
        return self.values

    def ready(self) -> None:
        """Called once when the bucket's average has been made."""
        self._references = [sys.getrefcount(self.grads[k]) for k in range(len(self.grads))]

    def begin(self) -> None:
        """Resets the bucket at the start of a backward pass."""
        self.unused = []
        self._left = []
        self.sent = False

    def grad(self, k: int) -> torch.Tensor:
        """The gradient that the parameter at position ``k`` gets: a view into ``memory``."""
        if self.grads[k].data_ptr() != self._addresses[k]:
            self.grads[k] = self.views[k].data
        return self.grads[k]

    def end_span(self) -> None:
        """The average has ended, or was aborted."""
        span, self.span = self.span, None
        spans.end(span)

    def is_held_by_script(self) -> bool:
        """Whether a script refers to views of ``memory``."""
        own = _references_of_a_parameter()
        given = [own * (p.grad is grad) for p, grad in zip(self.tensors, self.grads, strict=True)]
        alone = [n + more for n, more in zip(self._references, given, strict=False)]
        return any(sys.getrefcount(self.grads[k]) > n for k, n in enumerate(alone)) or (
            0 < self._storage_references < self._count_storage_references()
        )

    def is_kept_by_script(self, params: Sequence[torch.Tensor], param: int | None = None) -> bool:
        """Whether a script holds gradients of an earlier pass that are no longer those of the parameters, or
        gradients that are no views of ``memory`` and get more added in this pass.

        Args:
            params: All parameters of the model.
            param: The index of the one whose gradient has arrived; autograd refers to it.
        """
        # Nothing may refer to the gradients here while references to them are counted.
        others = [
            k
            for k, i in enumerate(self.params)
            if params[i].grad is None or params[i].grad is not self.grad(k)
        ]
        return bool(others) and (
            any(sys.getrefcount(self.grads[k]) > self._references[k] for k in others)
            or 0 < self._storage_references < self._count_storage_references()
            or any(_is_held(params[i]) for k in others if (i := self.params[k]) != param)
        )

    def _count_storage_references(self) -> int:
        return _references_to(self.memory.untyped_storage())

    def collect(self, params: Sequence[torch.Tensor], copies: bool = False) -> None:
        """Collects the gradients in ``memory`` when no more will arrive in this backward pass.

        A gradient may be a view into ``memory`` already, or be in memory that autograd allocated (after
        ``set_to_none``), or be missing because this rank did not use the parameter. It may also be the
        average of an earlier pass that a script has left there: it counts with the others' gradients, but
        only if some rank has one (:meth:`assign`), as in DDP.

        Args:
            params: All parameters of the model.
            copies: The parameters keep the memory that autograd has allocated; :meth:`assign` copies the
                averages to it.
        """
        to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, i in enumerate(self.params):
            grad, view = params[i].grad, self.views[k]
            if grad is None:
                view.zero_()
                self.unused.append(k)
            elif grad.data_ptr() != self._addresses[k]:
                to_copy.append((view, grad))
                if not copies:
                    params[i].grad = self.grad(k)
        self.unused += self.left
        self.held = list(self.unused)
        self.average.hold([self.views[k] for k in self.held])
        if to_copy:
            # One fused copy for all gradients outside the bucket.
            torch._foreach_copy_([v for v, _ in to_copy], [g for _, g in to_copy])
        self.outside = to_copy if copies else []
        left = [(k, params[self.params[k]].grad) for k in self.left]
        self._left = [(k, grad, grad.clone()) for k, grad in left if grad is not None]
        self.sent = True
        if self.gaps is not None:
            self.memory.index_fill_(0, self.gaps, 0)
        if self.flags is not None:
            self.flags.fill_(1)
            for k in self.unused:
                self.flags[k] = 0

    def assign(self, params: Sequence[torch.Tensor], used: torch.Tensor | None) -> None:
        """After the average: assigns the gradient of parameters that only other ranks used, and copies
        averages to gradients outside of ``memory``; parameters that nobody used keep their residual and
        their gradient.

        Args:
            params: All parameters of the model.
            used: For each parameter of this bucket, nonzero if any rank used it; None: take ``flags``.

        Raises:
            MisuseError: A gradient has disappeared in the backward pass.
        """
        flags = self.flags if used is None else used
        assert flags is not None
        if any(params[i].grad is None for k, i in enumerate(self.params) if k not in self.unused):
            raise MisuseError(
                "a hook of the script has set the gradient of a parameter to None during backward(), before "
                "it was averaged; update weights after backward(), or use an algorithm that averages weights "
                "(local_sgd, decentralized)"
            )
        if not self._storage_references:  # the average has made all of its views now
            self._storage_references = self._count_storage_references()
        if self.outside:
            torch._foreach_copy_([g for _, g in self.outside], [v for v, _ in self.outside])
            self.outside = []
        self.by_nobody = []
        if not self.unused:
            return
        anybody = [flag > 0 for flag in flags.tolist()]
        self.by_nobody = [k for k in self.unused if not anybody[k]]
        for k in self.unused:
            if anybody[k] and params[self.params[k]].grad is None:
                params[self.params[k]].grad = self.grad(k)
        for k, grad, before in self._left:
            if not anybody[k]:
                grad.copy_(before)
        self._left = []
        self.average.settle([not anybody[k] for k in self.held])

    def give_strides(self, params: Sequence[torch.Tensor]) -> None:
        """Gives averages the strides of their parameters, as autograd does, where views of the bucket have
        other ones: torch's optimizers with ``fused=True`` take memory for memory."""
        for k in self.permuted:
            p = params[self.params[k]]
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p, requires_grad=False).copy_(p.grad)


def _references_to(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)  # not in all releases of torch
    return 0 if count is None else int(count(storage._cdata))


def _is_held(param: torch.Tensor) -> bool:
    """Whether a script refers to a parameter's gradient, or to memory that it is part of."""
    if type(param.grad) is not torch.Tensor or param.grad.layout != torch.strided:
        return False
    references = sys.getrefcount(param.grad), _references_to(param.grad.untyped_storage())
    return any(now > alone for now, alone in zip(references, _references_of_nobody(), strict=True))


@functools.cache
def _references_of_a_parameter() -> int:
    """How often Python counts a parameter that has a tensor as its gradient: not in all releases of torch."""
    param, grad = torch.zeros(1, device="cpu", requires_grad=True), torch.zeros(1, device="cpu")
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


@functools.cache
def _references_of_nobody() -> tuple[int, int]:
    """The references to the gradient of a parameter, and to its memory, as this module counts them."""
    param = torch.zeros(1, device="cpu", requires_grad=True)
    param.grad = torch.zeros(1, device="cpu")
    return sys.getrefcount(param.grad), _references_to(param.grad.untyped_storage())


def assign(params: Sequence[torch.Tensor], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Assigns parameters to buckets in the order in which backward computes their gradients.

    Args:
        params: All parameters.
        order: The indices of the parameters that are averaged, in that order.
        bucket_bytes: The size in bytes from which on a bucket is full.

    Returns:
        The indices of each bucket, buckets in the order in which they fill.
    """
    kinds = {dtype: k for k, dtype in enumerate({params[i].dtype: None for i in order})}
    gradients = [(kinds[params[i].dtype], params[i].nbytes) for i in order]
    units = _core.assign_units(gradients, FIRST_BUCKET, bucket_bytes)
    return [[order[k] for k in unit] for unit in units]
