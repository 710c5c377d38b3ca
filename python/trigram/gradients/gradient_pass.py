"""The averages of one backward pass.

A pass begins with its first gradient. The average of each bucket starts when its gradients are there and the
buckets before it were sent. At the end the remaining buckets are sent and all averages are awaited. A pass
that fails is aborted on all ranks, or made again from a backup in an elastic job: that is another pass.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from trigram import _core
from trigram.averaging import sparse
from trigram.averaging.gradient_filter import GradientFilter
from trigram.averaging.groups import ModelGroups
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.gpu import routes
from trigram.gradients import filters
from trigram.gradients.backup import GradientBackup
from trigram.gradients.bucket_set import BucketSet
from trigram.gradients.buckets import Bucket
from trigram.gradients.in_parts import ShardedGradient
from trigram.gradients.local import LocalGradients
from trigram.gradients.probe import GradientProbe
from trigram.observe import spans, steps
from trigram.steps.elasticity import Elasticity
from trigram.steps.fidelity import Fidelity
from trigram.steps.parameters import Parameters
from trigram.steps.passes import Passes
from trigram.steps.uneven_inputs import UnevenInputs


class Updating(Protocol):
    """Who updates the weights, as a pass calls it: :class:`trigram.gradients.updating.updates.Updates`."""

    fusing: bool
    moves_parameters: bool

    def begin_updates(self, param: int | None) -> None:
        """The pass begins."""

    def before_average(self, bucket: Bucket) -> None:
        """An average is about to start."""

    def update_ready(self) -> None:
        """Averages may have ended."""

    def averaged(self, k: int) -> None:
        """The ``k``-th bucket has its average."""

    def count_calls(self) -> int:
        """Its own calls."""

    def pass_failed(self, aborted: bool) -> None:
        """The pass has failed."""

    def pass_interrupted(self) -> None:
        """Ctrl-C has ended the wait."""


class Averaged(Protocol):
    """A model's hooks, as a pass needs them.

    Attributes:
        sparse: The indices of the parameters whose gradients are in no bucket.
        since: Passes completed since one has failed on this rank.
        since_update: Passes since the last update.
        busy: Seconds from the beginning of the first average to the end of the last.
        waited: Those of them that backward was over.
        bytes: Bytes that averages have sent.
    """

    groups: ModelGroups
    buckets: BucketSet
    pipeline: _core.Pipeline
    passes: Passes
    elastic: Elasticity
    local: LocalGradients
    backup: GradientBackup
    earlier: dict[int, torch.Tensor | None]
    probe: GradientProbe | None
    fidelity: Fidelity | None
    join: UnevenInputs | None
    times: steps.StepTimes
    parameters: Parameters
    sparse: list[int]
    since: int
    since_update: int
    busy: float
    waited: float
    bytes: int

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """The model's parameters."""

    @property
    def updates(self) -> Updating:
        """Who updates the weights, and when."""

    def count_anew(self) -> None:
        """A pass has failed on this rank."""


class GradientPass:
    """The averages of one backward pass of a model.

    Args:
        hooks: The model's hooks. The pass does not keep them: they end with the model.
        idle: This rank has no inputs, inside ``trigram.join``, and contributes zeros.
        redoing: The pass is made again: the gradients are those of the backup.

    Attributes:
        filters: What the gradients of the pass go through, in order.
        calls: The numbers of its first calls in the groups ``main`` and ``second_phase``.
    """

    def __init__(self, hooks: Averaged, idle: bool = False, redoing: bool = False) -> None:
        self._hooks = weakref.ref(hooks)
        self.idle, self.redoing = idle, redoing
        self.groups, self.buckets, self.pipeline = hooks.groups, hooks.buckets, hooks.pipeline
        self.filters: list[GradientFilter] = []
        self._kept_after = 0  # so many filters come before the backup
        self._reaches = False  # backward says which parameters this pass has reached
        self._began = 0.0
        self._failure: TrigramError | None = None  # of a call that was made while gradients came
        self.calls = self.groups.main.core.next(), self.groups.second_phase.core.next()

    @property
    def hooks(self) -> Averaged:
        """The model's hooks."""
        hooks = self._hooks()
        assert hooks is not None
        return hooks

    @property
    def sent(self) -> int:
        """How many buckets were sent."""
        return self.pipeline.started

    # The beginning.

    def begin(self, param: int | None) -> None:
        """Begins with the gradient of parameter ``param``, an index; None: with those that are there."""
        hooks, weight = self.hooks, self.groups.sample_weight
        hooks.updates.begin_updates(param)
        self._check_once(param)
        self._number_calls()
        self._begin_pipeline()
        hooks.backup.clear()
        if not self.redoing:
            silent = hooks.elastic.newcomer or hooks.elastic.is_idle
            hooks.earlier = self._earlier_averages(param) if silent else {}
        self.filters = self._ordered_filters()
        # A rank that has joined has no earlier averages: in elastic jobs all that is there counts.
        self._reaches = param is not None and not hooks.updates.fusing and not hooks.elastic.can_redo
        for bucket in self.buckets:
            bucket.begin()
        if hooks.fidelity is not None:
            hooks.fidelity.begin(hooks.since, comparable=hooks.join is None and weight is None)
        if weight is not None:
            idle = self.idle or hooks.elastic.newcomer
            weight.begin_backward(idle, self.redoing, not hooks.elastic.is_idle)
        # Last: those of the script may raise, and then the calls that were made here are aborted.
        for passed in self.filters:
            passed.pass_begins()

    def _earlier_averages(self, param: int | None) -> dict[int, torch.Tensor | None]:
        """By index, the gradients before this pass that all ranks have; None: this rank has added its own to
        one, as it has to ``param``, with which the pass begins."""
        hooks, kept = self.hooks, {}
        for p, view in self.buckets.placed():
            i = hooks.parameters.index[id(p)]
            if p.grad is not None and hooks.local.has_average(p.grad, i, view):
                added = i == param or id(p) in hooks.local.accumulated
                kept[i] = None if added else p.grad.detach().clone()
        return kept

    def _check_once(self, param: int | None) -> None:
        """Raises if gradients of this pass are added to what a compressor has made of those of another."""
        hooks, holds = self.hooks, self.buckets.compressor.once
        if holds is None or not hooks.since_update or self.redoing:
            return
        before = [p.grad for i, p in enumerate(hooks.params) if i != param and p.grad is not None]
        if any(bool(g.any()) for g in before):
            raise MisuseError(
                f"{self.groups.name}: a second backward pass before the optimizer's step adds to gradients "
                f"that hold {holds} since the first; run all backward passes but the last under "
                "trigram.no_sync, or call zero_grad() between them if the update is skipped"
            )

    def _number_calls(self) -> None:
        """Numbers this pass's calls, so that a rank that makes more passes than others for one update, or
        fewer updates, is found when its pass meets theirs; so is one whose pass has failed so late that the
        others have completed it. Ranks without inputs make no updates, and ranks that join have made none:
        with these, nothing is numbered."""
        hooks = self.hooks
        comparable = hooks.join is None and not hooks.elastic.can_redo
        counter = hooks.since and 1 + (hooks.since - 1) % 0xFF  # 0 only after a failure, or at the beginning
        number = counter << 8 | 1 + hooks.since_update % 0xFF
        self.groups.main.core.set_pass(number if comparable else 0)

    def _begin_pipeline(self) -> None:
        """No gradient is there. What looks at each of them wants to be told of each."""
        hooks, phases = self.hooks, self.buckets.have_phases
        # Nothing notes the ends of calls on GPUs.
        told_of_all = (
            hooks.probe is not None or hooks.updates.fusing or (phases and not self.buckets.are_on_cpu)
        )
        self.pipeline.begin(None if told_of_all else hooks.passes.task, phases)

    def _ordered_filters(self) -> list[GradientFilter]:
        """What the gradients go through, in order; only what this model asks for. The averages go the way
        back."""
        hooks, groups, weight = self.hooks, self.groups, self.groups.sample_weight
        elastic = hooks.elastic
        found: list[GradientFilter] = []
        # The script's own come first: to the others, what they leave is what backward has computed. A rank
        # that contributes nothing has no gradients.
        if not (self.idle or elastic.newcomer):
            found += [filters.OfScript(own, self.redoing) for own in groups.filters]
        # These look at what this rank has computed, before anything is made of it.
        if hooks.probe is not None:
            found.append(hooks.probe)
        if hooks.fidelity is not None:
            found.append(filters.Compared(hooks.fidelity))
        # Before the check, which is to find nothing in what does not count; and before the algorithm, whose
        # residuals must not get a NaN.
        nothing = filters.Nothing(hooks.params, hooks.earlier)
        if elastic.newcomer:
            found.append(nothing)
        if weight is not None and not elastic.is_idle:
            found.append(filters.Silent(weight))
        if groups.non_finite_check is not None:
            elsewhere = [] if self._is_silent else [hooks.params[i] for i in hooks.sparse]
            found.append(filters.Finite(groups.non_finite_check, elsewhere, weight, elastic.is_idle))
        # Averages that are repeated begin here, from what the backup has: all that follows is made again.
        self._kept_after = len(found)
        if elastic.can_redo:
            found.append(filters.Through(partial(hooks.backup.keep, params=hooks.params)))
        # After the backup: if a rank is lost, a spare takes its place with the gradients that it has.
        if elastic.is_idle:
            found.append(nothing)
        # With sample weights, ranks that contribute nothing weigh nothing.
        if elastic.silent and weight is None:
            found.append(filters.Counted(groups.size, len(elastic.silent)))
        found.append(filters.Through(partial(self.buckets.compressor.before_send, params=hooks.params)))
        # A momentum is of the gradients as they are, so weights come after it.
        if weight is not None:
            found.append(filters.Weighed(weight))
        # Last: an average has held it back as it was sent.
        if self.buckets.owed:
            found.append(filters.Through(self.buckets.repay, self.buckets.repaid))
        return found

    # Gradients.

    def gradient(self, i: int) -> None:
        """Parameter ``i`` has its gradient: starts averages of buckets that are complete."""
        hooks = self.hooks
        starts = self.pipeline.arrive(i)
        if starts is None:
            name = hooks.parameters.names[i]
            raise MisuseError(
                f"{self.groups.name}: {name} received a second gradient in one backward pass, "
                "after the first was sent; use checkpoint(..., use_reentrant=False), or run all backward "
                "passes but the last under trigram.no_sync"
            )
        if hooks.probe is not None:
            hooks.probe.ready(i)
        try:
            while starts and self.pipeline.next_full() is not None and not self._failure:
                self._start(self.buckets[self.sent])
            self.groups.line.advance()
            hooks.updates.update_ready()
        except TrigramError as e:
            if not hooks.elastic.can_redo:
                raise explained(e, self.groups.name) from e
            self._failure = e  # at the end of the pass the remaining ranks repeat the averages

    def _start(self, bucket: Bucket) -> None:
        """Starts the average of the next bucket."""
        hooks = self.hooks
        hooks.updates.before_average(bucket)
        if self.sent == 0:
            self._began = time.perf_counter()
        self._complete(bucket, self.sent)
        for passed in self.filters:
            passed.before(bucket)
        name = partial("bucket {}".format, self.sent)  # without references to the model's hooks
        bucket.span = spans.begin("", lambda: f"{name()} {getattr(bucket.average, 'name', 'average')}")
        bucket.average.around = partial(spans.naming, self.groups.second_phase, name)
        with spans.naming(self.groups.main, name):
            bucket.average.start(hooks.since)
        self.buckets.compressor.after_send(bucket)
        self.pipeline.start()

    def _complete(self, bucket: Bucket, unit: int) -> None:
        """No more gradients of the bucket, the ``unit``-th, are awaited."""
        hooks, missing = self.hooks, self.pipeline.missing(unit)
        self._check(bucket, missing)
        missed = [(k, bucket.params[k]) for k in missing] if self._reaches else []
        bucket.left = [k for k, i in missed if hooks.local.is_average(hooks.params[i], i, bucket.views[k])]
        bucket.collect(hooks.params, self.buckets.copies)

    def _check(self, bucket: Bucket, missing: Sequence[int]) -> None:
        """Raises if a gradient that has come is none that can be averaged; ``missing``: those that have not.

        What rests of an earlier pass in parts is made whole.
        """
        hooks, absent = self.hooks, set(missing)
        for k, i in enumerate(bucket.params):
            param = hooks.params[i]
            grad = param.grad
            if isinstance(grad, ShardedGradient):
                grad = param.grad = grad.of_this_rank()
            if k in absent:
                continue
            name = hooks.parameters.names[i]
            if grad is None:
                raise MisuseError(
                    f"{self.groups.name}: a hook of the script has set the gradient of {name} to None "
                    "during backward(), before it was averaged; update weights after backward(), or use "
                    "an algorithm that averages weights (local_sgd, decentralized)"
                )
            if grad.layout != torch.strided or grad.dtype != param.dtype:
                raise UnsupportedError(
                    f"{self.groups.name}: the gradient of {name} is {grad.layout}, {grad.dtype}, "
                    f"but a dense {param.dtype} tensor is expected; create modules with sparse gradients "
                    "with sparse=True, and change a parameter's dtype before with_bagua"
                )
            if grad.requires_grad:
                raise UnsupportedError(
                    f"{self.groups.name}: backward(create_graph=True) is not supported, because averaged "
                    "gradients have no graph; use torch.autograd.grad(..., create_graph=True) for the terms "
                    "that need one, and backward() for the loss"
                )

    # The end.

    def send_rest(self) -> None:
        """Sends the buckets that were not sent yet and awaits all; then the gradients are averages."""
        try:
            self._send_rest()
        except TrigramError:
            if self.hooks.elastic.can_redo:
                self._keep_rest()
            raise

    def _keep_rest(self) -> None:
        """The pass may be made again: the gradients that were not sent go through the script's filters too,
        and are kept as they leave them."""
        for unit in range(self.sent, len(self.buckets)):
            bucket = self.buckets[unit]
            if bucket.params[0] not in self.hooks.backup.gradients:  # else it failed as it was sent
                self._complete(bucket, unit)
                for passed in self.filters[: self._kept_after + 1]:
                    passed.before(bucket)

    def _send_rest(self) -> None:
        hooks = self.hooks
        failure, self._failure = self._failure, None
        if failure is not None:
            self.finish(f"a collective of this pass failed: {failure}")
            raise explained(failure, self.groups.name)
        for bucket in self.buckets[self.sent :]:
            self._start(bucket)
            self.groups.line.advance()
        self.finish()
        for passed in reversed(self.filters):
            passed.averaged(self.buckets)
        hooks.bytes += sum(b.average.sent for b in self.buckets)
        for bucket, used in self.buckets.with_flags() if not hooks.updates.fusing else ():
            bucket.assign(hooks.params, used)
            for passed in self.filters:
                passed.after(bucket)
            if not hooks.updates.moves_parameters:
                bucket.give_strides(hooks.params)
        for i in hooks.sparse:
            self._average_sparse(hooks.params[i], i)

    def _average_sparse(self, param: torch.Tensor, i: int) -> None:
        """What filters do for buckets, for a gradient in none."""
        groups, elastic = self.groups, self.hooks.elastic
        if elastic.can_redo:
            self.hooks.backup.keep_sparse(param, i)
        weight = groups.sample_weight
        counted = groups.size - (len(elastic.silent) if weight is None else 0)
        name = self.hooks.parameters.names[i]
        sparse.average(param, name, groups.control, weight, counted, self._is_silent)

    @property
    def _is_silent(self) -> bool:
        """Whether this rank contributes nothing to the pass."""
        return self.hooks.elastic.newcomer or self.hooks.elastic.is_idle

    def end(self) -> None:
        """The pass is over on all ranks, and counts."""
        for passed in self.filters:
            passed.pass_ends()

    def finish(self, failed: str | None = None) -> None:
        """Awaits all averages, then raises the first error if there was one.

        With ``failed``, the reason of a failure, it aborts the pass and only waits until its calls have
        ended. An aborted pass makes no more calls, so that all ranks count the same number of calls.
        """
        hooks, counts = self.hooks, self.call_counts()
        error: Exception | None = None
        before = hooks.times.enter(steps.WAIT)
        waits = time.perf_counter()
        flags = None
        if failed is not None:
            self.abort_calls(counts, failed)
        try:
            if failed is None and self.sent == len(self.buckets):
                flags = self.buckets.reduce_flags()
            for k, bucket in enumerate(self.buckets if failed is None else []):
                bucket.average.wait()
                bucket.end_span()
                self.groups.line.advance()
                hooks.updates.averaged(k)
            if flags is not None:
                flags.wait()
        except Exception as e:  # of a call, or of the script's own average
            error = e
            self.abort_calls(counts, f"a collective of this pass failed: {e}")
        except BaseException:
            hooks.updates.pass_interrupted()
            raise
        if failed is not None or error is not None:
            ends: list[Callable[[], object]] = [b.average.await_end for b in self.buckets if b.sent]
            ends += [flags.wait] if flags is not None else []
            ends += [self.groups.sample_weight.await_end] if self.groups.sample_weight is not None else []
            for end in ends:
                with contextlib.suppress(TrigramError):
                    end()
            hooks.count_anew()
        self.groups.main.core.set_pass(0)
        hooks.times.enter(before)
        for bucket in self.buckets:
            bucket.end_span()
        hooks.passes.active = False
        now = time.perf_counter()
        hooks.waited += now - waits
        hooks.busy += now - (self._began or waits)
        if failed is not None or error is not None:
            hooks.updates.pass_failed(aborted=failed is not None)
        if error is not None:
            raise explained(error, self.groups.name)

    # Failures.

    def call_counts(self) -> list[int]:
        """The number of calls in the groups ``main`` and ``second_phase`` when this pass has ended."""
        first, second = (a + b for a, b in zip(self.calls, self.buckets.calls(), strict=True))
        return [first, second + self.hooks.updates.count_calls()]

    def abort_calls(self, counts: list[int], why: str) -> None:
        """Aborts all calls of this pass on all ranks; the next call has the same number on all of them."""
        why = f"{self.groups.name} aborted its backward pass: {why}"
        self.groups.line.clear()  # first: while this rank waits for their ends, it must start no call
        self.groups.main.core.abort(counts[0], why)
        routes.abort(self.groups.main, why)
        if counts[1] > self.calls[1]:
            self.groups.second_phase.core.abort(counts[1], why)
            routes.abort(self.groups.second_phase, why)
        if self.groups.everyone is not None:  # the commit of this pass, in which other places wait
            self.groups.everyone.core.abort(self.groups.everyone.core.next() + 1, why)
        if self.groups.levels is not None:
            self.groups.levels.abort(why)
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.abort(why)

    def abort(self) -> None:
        """Aborts the pass, on all ranks: it has raised an exception on this one."""
        self.finish("it raised an exception; see the log of that rank")
        # The averages of sent buckets went on after the exception, possibly after a zero_grad of the script:
        # the memory now holds neither gradients nor averages.
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.sent:
                    bucket.memory.zero_()


def explained(error: Exception, name: str) -> Exception:
    """The error of a pass; if ranks made different calls, with what a script may have done."""
    if not isinstance(error, MismatchError):
        return error
    return MismatchError(
        f"{name}: the ranks average different gradients in this backward pass. Either parameters were "
        "frozen, replaced, added or loaded on some ranks only, or some ranks have made more backward passes "
        "for an update than others, skipped an update that others made, left the loop, or called models in "
        "another order; do the same on all ranks, or use trigram.join where ranks have different numbers of "
        "batches. If a pass has raised an exception on one rank only, the others may have completed it "
        "(their counters differ then), and weights differ: "
        f"load a checkpoint on all ranks ({error})"
    )
