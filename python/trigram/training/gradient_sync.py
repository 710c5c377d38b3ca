"""GradientSync averaged over all ranks, beside backward.

One backward pass: autograd hooks tell when a gradient is here; a bucket whose gradients are all
here, and whose predecessors have left, starts to be averaged in the background; at the end of
backward the rest leaves and everything is awaited. So when ``loss.backward()`` returns, gradients
are averages, and clipping, scalers and optimizers work as if there were one process.

All ranks start the same collectives in the same order: the order of the buckets, which follows rank
0's first backward pass. A pass that fails on one rank is given up on all (``AbortedError``), so
that the next step starts clean everywhere. *How* a bucket becomes its mean is an
:class:`trigram.average.Average`; what is done to it before is the ``prepare`` of a
:class:`trigram.coding.GradientCompressor`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trigram import collectives
from trigram.averaging import sparse
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import check_replicas
from trigram.elastic.recovery import ElasticModel
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.gpu import routes
from trigram.training.buckets import Bucket, assign
from trigram.training.compressors import GradientCompressor
from trigram.training.gradient_backup import GradientBackup
from trigram.training.step_hooks import StepHooks
from trigram.training.weak_hook import WeakHook


class GradientSync(StepHooks):
    """Averages the gradients of one model.

    Args:
        model: The module.
        groups: Where to talk.
        bucket_bytes: Size of a bucket.
        coding: What travels; None: the gradients in full.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        coding: GradientCompressor | None = None,
    ) -> None:
        self.compressor = coding or GradientCompressor()
        self.bucket_bytes = bucket_bytes
        self.sync_buffers = True
        self.busy = 0.0
        self.idle = False
        self.order: list[int] | None = []
        self.buckets: list[Bucket] = []
        self.backup = GradientBackup()
        self.broken: TrigramError | None = None
        self.kept_parts = True
        self.redoing = False
        super().__init__(model, groups)

    # The parameters, and what is done with each.

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train, and deals them into buckets."""
        super().find_parameters(model)
        rows = {id(p) for p in sparse.sparse_parameters(model)}
        self.rows = [i for i, p in enumerate(self.params) if self.trains[i] and id(p) in rows]
        self.dense = [i for i in range(len(self.params)) if self.trains[i] and i not in self.rows]
        if not self.dense and not self.rows:
            raise MisuseError(
                "with_bagua: the model has no parameter that requires a gradient; set requires_grad=True on "
                "at least one"
            )
        # Backward reaches the last layers first; after it, the order is known.
        self.buckets = []
        self._deal(self.dense[::-1])
        self.order = []

    def _deal(self, order: Sequence[int]) -> None:
        if self.kept_parts:
            for bucket in self.buckets:
                bucket.average.fold()
        kept = {i: parts for b in self.buckets for i, parts in self._parts(b)} if self.kept_parts else {}
        self.buckets = []
        for indices in assign(self.params, order, self.bucket_bytes):
            layout = self.compressor.layout(self.params[indices[0]], self.groups)
            bucket = Bucket(indices, self.params, layout)
            if layout is None:
                bucket.average = FullAverage(bucket.memory, self.groups)
            else:
                bucket.average = self.compressor.average(bucket, self.groups)
            for i, parts in self._parts(bucket):
                for name, part in kept.get(i, {}).items():
                    parts[name].copy_(part)
            self.buckets.append(bucket)
        self.place = {i: (b, k) for b in self.buckets for k, i in enumerate(b.params)}
        for i, (bucket, k) in self.place.items():
            old = self.params[i].grad
            if old is not None and not old.is_sparse:
                bucket.views[k].copy_(old)
                self.params[i].grad = bucket.views[k]
        count = sum(len(b.params) for b in self.buckets if b.flags is None)
        self.flags = torch.zeros(count, dtype=torch.uint8) if count else None
        # Buckets in the order of their second legs.
        self.twofold = [b for b in self.buckets if b.average.calls]

    def _parts(self, bucket: Bucket) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """What is remembered of each parameter: it moves with the parameter."""
        of_average, of_coding = bucket.average.parts(bucket.views), self._compressor_parts(bucket)
        for i, a, b in zip(bucket.params, of_average, of_coding, strict=True):
            yield i, {**a, **b}

    def watch(self, model: nn.Module) -> None:
        """Hooks the model and its parameters."""
        super().watch(model)
        self.handles += [
            self.params[i].register_post_accumulate_grad_hook(WeakHook(self, "_on_gradient", i))
            for i in (*self.dense, *self.rows)
        ]
        self.buffers = coalesced.of_buffers(model)

    # Forward.

    def before_step(self, model: nn.Module, src: int) -> None:
        """What all ranks do together before a forward pass that trains."""
        self.elastic.before_step(lambda first: self._before_step(model, first), src)

    def _before_step(self, model: nn.Module, src: int) -> None:
        every = self.groups.check_replicas
        joining = self.elastic.newcomers  # their weights are on their way
        if every and self.steps % every == 0 and self.sync_buffers and self.steps and not joining:
            check_replicas(model.parameters(), self.groups.control, self.steps)
        if self.has_changed(model):
            self.find_parameters(model)  # a layer was frozen, thawed or added
            self.watch(model)
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
                self.buffers = coalesced.of_buffers(model)
            for buffers in self.buffers:
                buffers.broadcast(src, self.groups.control)

    def _reorder(self) -> None:
        """Deals the buckets anew, in the order of rank 0's first backward pass."""
        assert self.order is not None
        rest = [i for i in reversed(self.dense) if i not in set(self.order)]
        order = torch.tensor(self.order + rest, dtype=torch.int64)
        collectives.broadcast(order, self.groups.control.ranks[0], self.groups.control)
        self.order = None
        if order.tolist() != [i for b in self.buckets for i in b.params]:
            self._deal(order.tolist())

    # Backward.

    def begin(self) -> None:
        """No gradient is here yet."""
        self.calls = self.groups.main.core.next(), self.groups.second_phase.core.next()
        self.next = 0
        self.second = 0
        self.began = 0.0
        self.backup.clear()
        for bucket in self.buckets:
            bucket.begin()
        if self.groups.non_finite_check is not None:
            self.groups.non_finite_check.begin()
        if self.groups.sample_weight is not None:
            idle = self.idle or self.elastic.newcomer
            self.groups.sample_weight.begin_backward(idle, self.redoing)

    def weight(self) -> float | None:
        """This rank's weight in the averages of this pass; None: all ranks weigh alike."""
        return None if self.groups.sample_weight is None else self.groups.sample_weight.mine

    @torch.no_grad()
    def _on_gradient(self, i: int, param: torch.Tensor) -> None:
        if not self.sync:
            return
        if not self.active:
            self.enter()
        if i in self.rows:
            return
        bucket, k = self.place[i]
        grad = param.grad
        if grad is None or grad.layout != torch.strided or grad.dtype != bucket.memory.dtype:
            what = "missing" if grad is None else f"{grad.layout}, {grad.dtype}"
            raise UnsupportedError(
                f"{self.groups.name}: the gradient of {self.names[i]} is {what}, but a dense "
                f"{bucket.memory.dtype} tensor is expected; create modules with sparse gradients with "
                "sparse=True, and change a parameter's dtype before with_bagua"
            )
        if bucket.sent:
            raise MisuseError(
                f"{self.groups.name}: {self.names[i]} received a second gradient in one backward pass, "
                "after the first was sent; use checkpoint(..., use_reentrant=False), or run all backward "
                "passes but the last under trigram.no_sync"
            )
        bucket.pending.discard(k)
        if self.order is not None and i not in self.order:
            self.order.append(i)
        try:
            while self.next < len(self.buckets) and not self.buckets[self.next].pending and not self.broken:
                self._start(self.buckets[self.next])
            self._advance()
        except TrigramError as e:
            if not self.elastic.can_redo:
                raise
            self.broken = e  # the pass goes on to its end, where all who live do this again

    def _start(self, bucket: Bucket) -> None:
        if self.next == 0:
            self.began = time.perf_counter()
        bucket.collect(self.params)
        if self.elastic.newcomer:
            bucket.memory.zero_()
            bucket.unused = list(range(len(bucket.params)))
        weights = self.groups.sample_weight
        if weights is not None and weights.mine == 0.0:
            bucket.values.zero_()  # whatever it was: a compressor must not remember a NaN of it
        elif self.groups.non_finite_check is not None:
            self.groups.non_finite_check.check(bucket.values)
        if self.elastic.can_redo:
            self.backup.keep(bucket, self.params)
        self.compressor.before_send(bucket, self.params)
        if weights is not None:
            weights.weigh(bucket.values)
        bucket.average.start(self.steps)
        self.compressor.after_send(bucket)
        self.next += 1

    def _advance(self) -> None:
        """Second legs begin in the order of the buckets too."""
        while (
            self.second < len(self.twofold)
            and self.twofold[self.second].sent
            and self.twofold[self.second].average.advance()
        ):
            self.second += 1

    def end(self) -> None:
        """Backward is over on this rank: the rest leaves, and everything is awaited."""
        self.elastic.complete(self)
        self.steps += 1

    def send_rest(self) -> None:
        """What has not left yet leaves, and everything is awaited; then gradients are averages."""
        broken, self.broken = self.broken, None
        if broken is not None:
            self._finish(f"a collective of this pass failed: {broken}")
            raise broken
        for bucket in self.buckets[self.next :]:
            self._start(bucket)
            self._advance()
        self._finish()
        self._settle_terms()
        self.bytes += sum(b.average.sent for b in self.buckets)
        at = 0
        for bucket in self.buckets:
            used = None
            if bucket.flags is None:
                assert self.flags is not None
                used = self.flags[at : at + len(bucket.params)]
                at += len(bucket.params)
            if self.elastic.newcomers and self.groups.sample_weight is None:
                n = self.groups.size
                bucket.memory.mul_(n / (n - len(self.elastic.newcomers)))  # newcomers contributed nothing
            bucket.assign_unused(self.params, used)
        for i in self.rows:
            sparse.average(self.params[i], self.names[i], self.groups.control, self.groups.sample_weight)

    # Elastic jobs.

    def again(self) -> None:
        """The pass under way begins anew, with the gradients that this rank had."""
        self.backup.restore(self.params)
        self.broken = None
        self.active = self.redoing = True
        self.begin()
        self.redoing = False

    def meta(self) -> dict[str, Any]:
        """What a newcomer must know at once."""
        order = [i for b in self.buckets for i in b.params]
        return {"order": order, "steps": self.steps}

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Goes on in a new world; residuals begin anew there."""
        if part.newcomer:
            self.steps = meta["steps"]
        for bucket in self.buckets:
            with contextlib.suppress(TrigramError):
                bucket.average.await_end()
        self.kept_parts = False
        self._deal(meta["order"])
        self.kept_parts = True
        self.order = None

    def _settle_terms(self) -> None:
        """Raises on all ranks where one sent what is not finite, if that is looked at; weighs means."""
        sample_weight, non_finite_check = self.groups.sample_weight, self.groups.non_finite_check
        if non_finite_check is not None:
            for i in self.rows if self.weight() != 0.0 else ():
                grad = self.params[i].grad
                non_finite_check.check(
                    grad._values() if grad is not None and grad.is_sparse else torch.empty(0)
                )
            non_finite_check.raise_if_any()
        if sample_weight is not None:
            for bucket in self.buckets:
                sample_weight.normalize(bucket.values)
            sample_weight.factor()

    def _share_flags(self) -> collectives.Work | None:
        """Who used what, where the buckets do not carry it."""
        if self.flags is None:
            return None
        self.flags.fill_(1)
        at = 0
        for bucket in self.buckets:
            if bucket.flags is None:
                for k in bucket.unused:
                    self.flags[at + k] = 0
                at += len(bucket.params)
        return collectives.all_reduce(self.flags, "max", None, self.groups.main, async_op=True)

    def _through(self) -> list[int]:
        """How many calls both groups have seen when this pass is over."""
        calls = (len(self.buckets) + (self.flags is not None), sum(b.average.calls for b in self.twofold))
        return [a + b for a, b in zip(self.calls, calls, strict=True)]

    def _finish(self, failed: str | None = None) -> None:
        """Awaits all of this pass; after a failure, only its end. The first error is raised then.

        Nothing of a pass that was given up is called any more: all ranks count alike.
        """
        through = self._through()
        error: TrigramError | None = None
        waits = time.perf_counter()
        flags = None
        if failed is not None:
            self._abort_calls(through, failed)
        try:
            if failed is None and self.next == len(self.buckets):
                flags = self._share_flags()
            for bucket in self.buckets if failed is None else []:
                bucket.average.wait()
                self._advance()
            if flags is not None:
                flags.wait()
        except TrigramError as e:
            error = e
            self._abort_calls(through, "a collective of this pass failed")
        if failed is not None or error is not None:
            ends: list[Callable[[], object]] = [b.average.await_end for b in self.buckets if b.sent]
            ends += [flags.wait] if flags is not None else []
            ends += [self.groups.sample_weight.await_end] if self.groups.sample_weight is not None else []
            for end in ends:
                with contextlib.suppress(TrigramError):
                    end()
        self.active = False
        now = time.perf_counter()
        self.waited += now - waits
        self.busy += now - (self.began or waits)
        if error is not None:
            raise error

    def _abort_calls(self, through: list[int], why: str) -> None:
        """What is left of this pass is skipped, on all ranks, so that all count alike."""
        why = f"{self.groups.name} aborted its backward pass: {why}"
        self.groups.main.core.abort(through[0], why)
        routes.abort(self.groups.main, why)
        if self.twofold:
            self.groups.second_phase.core.abort(through[1], why)
            routes.abort(self.groups.second_phase, why)
        if self.groups.levels is not None:
            self.groups.levels.abort(why)
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.abort(why)

    def abort_pass(self) -> None:
        """Gives up a backward pass that ended with an exception, on all ranks."""
        if not self.active:
            return
        self._finish("it raised an exception; see the log of that rank")
        # What had left went on changing these gradients after the exception, and beneath a
        # zero_grad that the loop may have done since: what they hold now is nobody's gradient.
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.sent:
                    bucket.memory.zero_()

    def shadow_step(self) -> None:
        """A step with gradients of zero."""
        kept = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self.active = self.idle = True
        try:
            self.begin()
            self.end()
        finally:
            self.idle = False
            for p, grad in zip(self.params, kept, strict=True):
                p.grad = grad

    # What it remembers.

    def state(self) -> dict[str, Any]:
        """The buckets' order, residuals, and what the coding keeps."""
        return {
            **super().state(),
            "order": None if self.order is not None else [i for b in self.buckets for i in b.params],
            "buckets": [(b.average.state(), self._compressor_parts(b)) for b in self.buckets],
        }

    def _compressor_parts(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        return self.compressor.parts(bucket) if bucket.flags is None else [{} for _ in bucket.params]

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        if state["order"] is not None:
            self._deal(state["order"])
            self.order = None
        for bucket, (average, parts) in zip(self.buckets, state["buckets"], strict=True):
            bucket.average.load(average)
            for mine, saved in zip(self._compressor_parts(bucket), parts, strict=True):
                for name, part in mine.items():
                    part.copy_(saved[name])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        return {
            **super().stats(),
            "overlap": 1 - self.waited / self.busy if self.busy else 0.0,
            "buckets": [
                {"bytes": b.nbytes, "params": len(b.params), "dtype": str(b.memory.dtype)}
                for b in self.buckets
            ],
        }
