"""The default algorithm: gradients averaged over all ranks, beside backward.

One backward pass: autograd hooks tell when a gradient is here; a bucket whose gradients are all
here, and whose predecessors have left, starts its AllReduce in the background; at the end of
backward the rest leaves and everything is awaited. So when ``loss.backward()`` returns, gradients
are averages, and clipping, scalers and optimizers work as if there were one process.

All ranks start the same AllReduces in the same order: the order of the buckets, which follows rank
0's first backward pass. A pass that fails on one rank is given up on all (``AbortedError``), so
that the next step starts clean everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trigram import collectives, flat, sparse
from trigram.buckets import Bucket, assign
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.world import Group, internal_group


class _LeftBehind:
    """What becomes of a hook in a copy of the model: nothing."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


class _Hook:
    """A hook that knows its reducer weakly, and stays behind when the model is copied or pickled."""

    def __init__(self, reducer: Reducer, method: str, *args: Any) -> None:
        self._reducer = weakref.ref(reducer)
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> None:
        reducer = self._reducer()
        if reducer is not None:
            getattr(reducer, self._method)(*self._args, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _LeftBehind()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _LeftBehind, ()


class Reducer:
    """Averages the gradients of one model.

    Args:
        model: The module; its parameters and buffers become those of the group's first rank.
        group: The ranks that train it.
        bucket_bytes: Size of a bucket.
    """

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int) -> None:
        self.model = weakref.ref(model)
        self.group = internal_group(group, "gradients")
        self.side = internal_group(group, "weights and buffers")
        self.bucket_bytes = bucket_bytes
        self.sync = True
        self.sync_buffers = True
        self.joining = False
        self.forwards = 0
        self.queued = False
        self.active = False
        self.calls = 0
        self.steps = 0
        self.waited = 0.0
        self.busy = 0.0
        self.order: list[int] | None = []
        self.handles: list[Any] = []
        self.buffers: list[flat.Flat] = []
        self._collect(model)
        _agree_on(model, self.side)
        flat.broadcast([*model.parameters(), *model.buffers()], 0, self.side)
        self._watch(model)

    # The parameters, and what is done with each.

    def _collect(self, model: nn.Module) -> None:
        """Finds the parameters that train, and deals them into buckets."""
        named = list(model.named_parameters())
        self.names = [n for n, _ in named]
        self.params = [p for _, p in named]
        for name, p in named:
            if p.requires_grad and not p.is_cpu:
                raise UnsupportedError(f"with_bagua: {name} is on {p.device}; this version trains on the CPU")
            if p.requires_grad and not torch.is_floating_point(p):
                raise UnsupportedError(
                    f"with_bagua: {name} is {p.dtype}; parameters that train are real floats"
                )
        self.trains = [p.requires_grad for p in self.params]
        rows = {id(p) for p in sparse.sparse_parameters(model)}
        self.rows = [i for i, p in enumerate(self.params) if self.trains[i] and id(p) in rows]
        self.dense = [i for i in range(len(self.params)) if self.trains[i] and i not in self.rows]
        if not self.dense and not self.rows:
            raise MisuseError("with_bagua: the model has no parameter that requires a gradient")
        # Backward reaches the last layers first; after it, the order is known.
        self._deal(self.dense[::-1])
        self.order = []

    def _deal(self, order: Sequence[int]) -> None:
        self.buckets = [Bucket(ix, self.params) for ix in assign(self.params, order, self.bucket_bytes)]
        self.place = {i: (b, k) for b in self.buckets for k, i in enumerate(b.params)}
        for i, (bucket, k) in self.place.items():
            old = self.params[i].grad
            if old is not None and not old.is_sparse:
                bucket.views[k].copy_(old)
                self.params[i].grad = bucket.views[k]

    def _watch(self, model: nn.Module) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = [
            self.params[i].register_post_accumulate_grad_hook(_Hook(self, "_on_gradient", i))
            for i in (*self.dense, *self.rows)
        ]
        self.handles.append(model.register_forward_pre_hook(_Hook(self, "_before_forward")))
        self.handles.append(model.register_forward_hook(_Hook(self, "_after_forward")))
        self.buffers = [flat.Flat(b) for b in flat.by_dtype(b for b in model.buffers() if b.numel()).values()]

    def close(self) -> None:
        """Leaves the model alone from now on."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # Forward.

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, _args: Any) -> None:
        if not (torch.is_grad_enabled() and model.training):
            return
        self.abandon()
        # As DistributedDataParallel: buffers follow rank 0, among uneven inputs the last rank
        # that still has any.
        src = max(self._roll_call(present=True)[0]) if self.joining else 0
        self._before_step(model, src)
        self.forwards += 1

    def _before_step(self, model: nn.Module, src: int) -> None:
        """What all ranks do together before a forward pass that trains."""
        if [p.requires_grad for p in self.params] != self.trains or len(self.params) != _count(model):
            self._collect(model)  # a layer was frozen, thawed or added
            self._watch(model)
        elif self.order is not None and self.steps:
            self._reorder()
        if self.sync_buffers:
            self._broadcast_buffers(model, src)
        # As DistributedDataParallel: buffers are synchronised before a pass that follows one
        # whose gradients were.
        self.sync_buffers = self.sync

    def _broadcast_buffers(self, model: nn.Module, src: int) -> None:
        with torch.no_grad():
            current = [b for b in model.buffers() if b.numel()]
            if [id(b) for b in current] != [id(t) for f in self.buffers for t in f.tensors]:
                self.buffers = [flat.Flat(b) for b in flat.by_dtype(current).values()]
            for buffers in self.buffers:
                buffers.broadcast(src, self.side)

    def _reorder(self) -> None:
        """Deals the buckets anew, in the order of rank 0's first backward pass."""
        assert self.order is not None
        rest = [i for i in reversed(self.dense) if i not in set(self.order)]
        order = torch.tensor(self.order + rest)
        collectives.broadcast(order, self.side.ranks[0], self.side)
        self.order = None
        if order.tolist() != [i for b in self.buckets for i in b.params]:
            self._deal(order.tolist())

    @torch.compiler.disable
    def _after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and self.sync):
            return
        # The outermost backward pass begins here: a pass inside of it (reentrant checkpointing)
        # must not be taken for the whole.
        for t in pytree.tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(_Hook(self, "_on_backward"))

    # Backward.

    def _on_backward(self, _grad: torch.Tensor) -> None:
        if self.sync and not self.active:
            self._begin()

    def _begin(self) -> None:
        self.active = True
        self.next = 0
        self.began = 0.0
        for bucket in self.buckets:
            bucket.begin()
        torch.autograd.Variable._execution_engine.queue_callback(_Hook(self, "_on_end"))

    @torch.no_grad()
    def _on_gradient(self, i: int, param: torch.Tensor) -> None:
        if not self.sync:
            return
        if not self.active:
            self._begin()
        if i in self.rows:
            return
        bucket, k = self.place[i]
        grad = param.grad
        if grad is None or grad.layout != torch.strided or grad.dtype != bucket.memory.dtype:
            what = "none" if grad is None else f"{grad.layout}, {grad.dtype}"
            raise UnsupportedError(
                f"{self.names[i]}: its gradient is {what}, where a dense {bucket.memory.dtype} was expected; "
                "sparse gradients need a module that says sparse=True, and a changed dtype a new with_bagua"
            )
        if bucket.work is not None:
            raise MisuseError(
                f"{self.names[i]} got a second gradient in one backward pass, after the first had been sent; "
                "use checkpoint(..., use_reentrant=False), or no_sync and a last pass"
            )
        bucket.pending.discard(k)
        if self.order is not None and i not in self.order:
            self.order.append(i)
        while self.next < len(self.buckets) and not self.buckets[self.next].pending:
            self._start(self.buckets[self.next])

    def _start(self, bucket: Bucket) -> None:
        if self.next == 0:
            self.began = time.perf_counter()
        bucket.start(self.params, self.group)
        self.next += 1

    @torch.no_grad()
    def _on_end(self) -> None:
        """Backward is over on this rank."""
        if not self.active:
            return
        for bucket in self.buckets[self.next :]:
            self._start(bucket)
        self._finish()
        for bucket in self.buckets:
            bucket.settle(self.params)
        for i in self.rows:
            sparse.average(self.params[i], self.names[i], self.side)
        self.steps += 1

    def _finish(self) -> None:
        """Awaits all AllReduces of this pass. The first error is raised once all have ended."""
        self.active = False
        self.calls += len(self.buckets)
        error: TrigramError | None = None
        waits = time.perf_counter()
        for bucket in self.buckets:
            if bucket.work is None:
                continue
            try:
                bucket.work.wait()
            except TrigramError as e:
                error = error or e
            bucket.work = None
        now = time.perf_counter()
        self.waited += now - waits
        self.busy += now - (self.began or waits)
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Gives up a backward pass that ended with an exception, on all ranks."""
        if not self.active:
            return
        through = self.calls + len(self.buckets)
        self.group.core.abort(through, f"rank {self.group.ranks[self.group.rank]} gave up its backward pass")
        with contextlib.suppress(TrigramError):  # that it was given up is what we said ourselves
            self._finish()

    # Uneven inputs.

    def _roll_call(self, present: bool) -> tuple[list[int], bool]:
        """The places that still have inputs, and whether they synchronise this step."""
        mine = torch.tensor([present, present and self.sync])
        everyone = torch.empty(self.side.size, 2, dtype=torch.bool)
        collectives.all_gather(everyone, mine, self.side)
        return everyone[:, 0].nonzero().flatten().tolist(), bool(everyone[:, 1].any())

    @torch.no_grad()
    def shadow(self, model: nn.Module) -> None:
        """Does what the others need of a rank that has run out of inputs, until all have."""
        self.abandon()
        while True:
            here, syncing = self._roll_call(present=False)
            if not here:
                break
            self.sync = syncing
            self._before_step(model, max(here))
            if syncing:
                self._shadow_backward()
            self.sync = True
        # The rank that trained longest has the model that counts; the last, if several did.
        counts = torch.empty(self.side.size, dtype=torch.int64)
        collectives.all_gather(counts, torch.tensor([self.forwards]), self.side)
        longest = int((counts == counts.max()).nonzero().max())
        flat.broadcast([*model.parameters(), *model.buffers()], longest, self.side)

    def _shadow_backward(self) -> None:
        kept = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        for bucket in self.buckets:
            bucket.begin()
        self.active, self.next, self.began = True, 0, 0.0
        try:
            self._on_end()
        finally:
            for p, grad in zip(self.params, kept, strict=True):
                p.grad = grad

    # What it did.

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        size = sum(b.nbytes for b in self.buckets)
        return {
            "steps": self.steps,
            "bytes_per_step": size,
            "bytes": size * self.steps,
            "wait_seconds": self.waited,
            "overlap": 1 - self.waited / self.busy if self.busy else 0.0,
            "buckets": [
                {"bytes": b.nbytes, "params": len(b.params), "dtype": str(b.memory.dtype)}
                for b in self.buckets
            ],
        }


def _count(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


def _agree_on(model: nn.Module, group: Group) -> None:
    """Refuses models that differ between ranks before a number of them is touched."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in tensors]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
    mine = torch.tensor([int.from_bytes(digest[:7], "big"), int.from_bytes(digest[7:14], "big"), len(lines)])
    everyone = torch.empty(group.size, 3, dtype=torch.int64)
    collectives.all_gather(everyone, mine, group)
    other = [group.ranks[r] for r in range(group.size) if not torch.equal(everyone[r], everyone[0])]
    if other:
        raise MismatchError(
            f"with_bagua: the model of rank(s) {', '.join(map(str, other))} differs from that of rank "
            f"{group.ranks[0]} in the names, shapes, dtypes or requires_grad of its parameters and buffers "
            f"({int(everyone[0, 2])} tensors on rank {group.ranks[0]}, {len(lines)} here)"
        )
