"""Averages the gradients of a model over all ranks during backward, step after step.

In a backward pass, autograd hooks report each gradient when it is computed, and buckets of gradients are
averaged meanwhile (``gradient_pass.py``). So when ``loss.backward()`` returns, the gradients are averages,
and gradient clipping, GradScaler and optimizers work as in one process. Here is what lasts longer than a
pass: the parameters and their buckets, which a script may change, and the counters.

All ranks start the same collectives in the same order: the order of the buckets, which is that of the
gradients in rank 0's first backward pass. If a pass fails on one rank, all ranks abort it (``AbortedError``),
so that the next step starts in the same state on all ranks. An ``Average`` averages a bucket; a
``GradientCompressor`` chooses it and changes the gradients before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.averaging import sparse
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import check_replicas, unequal
from trigram.errors import MismatchError, MisuseError, TrigramError
from trigram.gradients import in_parts
from trigram.gradients.backup import GradientBackup
from trigram.gradients.bucket_order import BucketOrder
from trigram.gradients.bucket_set import BucketSet
from trigram.gradients.compressors import GradientCompressor
from trigram.gradients.gradient_pass import GradientPass, explained
from trigram.gradients.local import LocalGradients
from trigram.gradients.probe import GradientProbe
from trigram.gradients.updating.updates import Updates
from trigram.optimizers import optimizer_hooks, shared_optimizers
from trigram.runtime.group import Group
from trigram.steps.buffer_broadcast import BufferBroadcast
from trigram.steps.model_changes import agree_on_change
from trigram.steps.passes import PassMethod, inside_backward
from trigram.steps.step_hooks import StepHooks
from trigram.steps.update_watch import UntrainedPasses
from trigram.steps.warmup_end import WarmupEnd


class GradientSync(StepHooks):
    """Averages the gradients of one model.

    Args:
        model: The module.
        groups: The model's process groups.
        bucket_bytes: The size of a bucket in bytes.
        compressor: Chooses how gradients are averaged; None: in full.
        updates: Who updates the weights, and when; None: the script's optimizer, when the script says.

    Attributes:
        buckets: The buckets of gradients.
        this_pass: The backward pass under way, or the last.
        probe: Told of gradients, while somebody looks.
        order: Builds the buckets.
        earlier: By index, the gradients before this pass that all have, on a rank that contributes nothing to
            it; None: what the pass makes of it.
        at_boundary: Called once per pass when it is prepared, on all ranks; it may change the buckets.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        compressor: GradientCompressor | None = None,
        updates: Updates | None = None,
    ) -> None:
        self.updates = updates or Updates()
        self.updates.attach(self)
        self.buckets = BucketSet(groups, bucket_bytes, compressor or GradientCompressor())
        self.buffers = BufferBroadcast(groups)
        self.warmup_end = WarmupEnd()
        self.busy = 0.0
        self.order = BucketOrder(self)
        self.since_update = 0  # since the last update
        self.since = 0  # passes completed since one has failed on this rank
        self.since_fewer: int | None = None  # updates since some ranks made fewer, in ``trigram.join``
        self.backup = GradientBackup()
        self.earlier: dict[int, torch.Tensor | None] = {}
        self.probe: GradientProbe | None = None
        self.at_boundary: Callable[[], object] | None = None
        self.untrained = UntrainedPasses(
            f"{groups.name}: the weights of {type(model).__name__}",
            ", in which gradients are averaged (torch.autograd.grad is none): call backward(), or assign the "
            "gradients to p.grad and call an optimizer; if every rank makes the same changes, run these "
            "passes under trigram.no_sync",
        )
        self.local = LocalGradients(())
        super().__init__(model, groups)
        self.local = LocalGradients(self.params)
        self.this_pass = GradientPass(self)
        try:
            self.updates.begin()
        except BaseException:
            self.close()  # whoever keeps the error keeps these hooks
            raise

    def watch(self, model: nn.Module) -> None:
        """See :class:`StepHooks`."""
        super().watch(model)
        self.passes.handles += self.updates.watch(model)

    # Parameters and buckets.

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train, and assigns them to buckets."""
        super().find_parameters(model)
        sparse_ids = {id(p) for p in sparse.sparse_parameters(model)}
        trained = [i for i, trains in enumerate(self.parameters.trains) if trains]
        self.sparse = [i for i in trained if id(self.params[i]) in sparse_ids]
        self.dense = [i for i in trained if i not in self.sparse]
        self.order.begin_anew()
        self.updates.parameters_found()

    def close(self) -> None:
        """See :class:`StepHooks`."""
        super().close()
        self.buckets.keep_for_script()
        self.buckets.compressor.end()

    # Before a pass.

    def forward_begins(self, model: nn.Module) -> None:
        """Raises if weights change again and again without a backward pass: nothing averages them."""
        if not self.sync or not model.training:
            return
        self.untrained.forward(self.steps, self.params)

    @property
    def before_passes(self) -> Group:
        """The group of the calls that all ranks make between passes."""
        return self.updates.before_passes

    def before_pass(self, model: nn.Module, in_backward: bool) -> None:
        """Checks and broadcasts; all ranks do it once per pass."""
        # Like DistributedDataParallel: rank 0's buffers count; inside ``join``, those of the last rank that
        # still has inputs.
        src = max(self.join.announce(self)) if self.join is not None else 0
        self.elastic.before_step(lambda first: self.prepare_pass(model, first, in_backward), src)

    def prepare_pass(self, model: nn.Module, src: int, in_backward: bool) -> None:
        """See :meth:`before_pass`; ``src``: the group rank whose buffers all ranks get."""
        every = self.groups.check_replicas
        # Who joins has not received its weights yet, and who has no inputs makes no updates.
        behind = self.elastic.newcomers or (self.join is not None and self.join.is_uneven)
        if every and self.since % every == 0 and self.since and not behind:
            check_replicas(self.groups.averaged(model), self.before_passes, self.steps)
        if not self._follow_changes(model, in_backward):
            self.order.learn()
        if self.at_boundary is not None:
            self.at_boundary()
        if self.groups.broadcast_buffers:
            self.buffers.send(model, src, self.before_passes, in_backward)

    def _follow_changes(self, model: nn.Module, in_backward: bool) -> bool:
        """Follows a script that has replaced, added or loaded parameters; True if it has found them anew."""
        loaded, other = self.parameters.were_loaded(self.has_failed), self.parameters.were_replaced(model)
        if not (loaded or other):
            return False
        new = self.parameters.new(model)
        if new and in_backward:
            raise MisuseError(
                f"{self.groups.name}: parameters of {type(model).__name__} were added or replaced, and the "
                "model was not called since; call trigram.step(model) after such a change, on all ranks, so "
                "that all ranks get the same values"
            )
        try:
            agree_on_change(self.parameters.tensors(model), self.groups)
        except TrigramError as e:
            raise explained(e, self.groups.name) from e
        if loaded and unequal(self.params, self.before_passes):
            raise MismatchError(
                f"{self.groups.name}: the weights of {type(model).__name__} differ between the ranks after "
                "load_state_dict; load the same checkpoint on all ranks"
            )
        coalesced.broadcast(new, self.groups.source(), self.before_passes)
        if other:
            self.find_parameters(model)
            if in_backward:  # hooks must not be removed while one of them runs
                self.passes.watch_parameters()
            else:
                self.watch(model)
        return other

    def user_step(self) -> None:
        """Follows changes of the model; gradients need no boundary."""
        self.abort_failed()
        model = self.model()
        if model is not None and self.end_warmup() is None:
            with torch.no_grad():
                self._follow_changes(model, in_backward=False)

    # Backward.

    def begin(self, param: int | None) -> None:
        """See :class:`StepHooks`."""
        self.begin_pass(param)

    def begin_pass(self, param: int | None, idle: bool = False, redoing: bool = False) -> None:
        """Begins a pass, with the parameters and buckets that it needs; see :class:`GradientPass`."""
        self.updates.pass_begins()  # what it raises is of a step before: no rank makes this pass
        try:
            self._prepare(param)
        except BaseException:
            self.this_pass = GradientPass(self, idle, redoing)  # which is aborted, and not the one before
            raise
        # What follows may raise, and then all ranks abort this pass.
        self.this_pass = GradientPass(self, idle, redoing)
        self.this_pass.begin(param)

    def _prepare(self, param: int | None) -> None:
        """Before a pass begins: buckets are those of the parameters that train."""
        self.warmup_end.begin_pass(self)
        if self.parameters.train_otherwise():
            model = self.model()
            assert model is not None
            self.find_parameters(model)
            self.passes.watch_parameters()
        elif not self.buckets.copies and any(b.is_kept_by_script(self.params, param) for b in self.buckets):
            # The script still holds gradients: this pass must neither overwrite them nor leave them behind.
            self.groups.copies_gradients = True
            self.order.build(self.buckets.order)

    def count_anew(self) -> None:
        """A pass has failed on this rank, and others may have completed it: calls that all ranks make in
        certain passes, and the seeds of codecs, follow from a number that is the same again when the others
        have failed too, which they do in the next pass at the latest. In elastic jobs it is repeated."""
        if not self.elastic.can_redo:
            self.since = 0
            self.has_failed = True
            self.updates.counted_anew()

    def local_gradient(self, param: torch.Tensor) -> None:
        """Gradients that only this rank has; see :meth:`before_update`."""
        self.local.accumulated.add(id(param))

    def gradient(self, i: int, param: torch.Tensor) -> None:
        """See :meth:`GradientPass.gradient`."""
        self.this_pass.gradient(i)

    def end(self) -> None:
        """Ends the backward pass: sends the remaining buckets and awaits all averages."""
        self.elastic.complete(self)
        self.this_pass.end()
        self.steps += 1
        self.since_update += 1
        self.since += 1
        self.has_failed = False
        self.local.pass_ended()
        self.buffers.write_late()
        if self.buckets.copies:
            self.local.averages_are(self.params)
        self.updates.pass_ends()

    # Elastic jobs.

    def send_rest(self) -> None:
        """See :meth:`GradientPass.send_rest`."""
        self.this_pass.send_rest()

    def again(self) -> None:
        """Makes this pass again from the backup of this rank's gradients."""
        self.backup.restore(self.params)
        self.passes.active = True
        self.begin_pass(None, self.this_pass.idle, redoing=True)

    def abort_pass(self) -> None:
        """Aborts, on all ranks, a backward pass that raised an exception."""
        if not self.passes.active:
            return
        self.passes.clear()
        self.this_pass.abort()

    def abort_failed(self, timeout: float | None = None) -> None:
        """See :class:`StepHooks`; between steps, it also ends what an optimizer's step has left."""
        optimizer_hooks.forget_failed(self)
        self.updates.step_failed()
        if self.passes.in_backward:
            return  # what updates of this pass wait for is awaited at its end
        if self.passes.active:
            super().abort_failed(timeout)  # before anything is awaited that the other ranks have aborted
        self.updates.settle(timeout)
        super().abort_failed(timeout)

    def drain(self, timeout: float | None = None, *, between_steps: bool = False) -> None:
        """See :class:`StepHooks`."""
        self.updates.drain(timeout)

    def release(self) -> None:
        """See :class:`StepHooks`."""
        self.updates.release()
        in_parts.drop(self.params)

    def close_without_calls(self) -> None:
        """See :class:`StepHooks`."""
        super().close_without_calls()
        self.updates.close_without_calls()
        in_parts.drop(self.params)

    def _before_load(self, *_: Any) -> None:
        """See :class:`StepHooks`. An update that only some ranks have made is made up for."""
        self.updates.before_load()
        self.since_update = 0
        super()._before_load()

    # Updates.

    waits_for_closure = True

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """Raises if an optimizer that did not call its closure has used gradients of this rank only, or has
        updated what the ranks have divided."""
        if self.local.any(self.buckets.placed(), self.params, mine):
            raise MisuseError(
                f"{self.groups.name}: {optimizer}.step(closure) has not called the closure, and updated the "
                "weights with the gradients of this rank only; call step() without a closure"
            )
        self.updates.closure_ignored(mine, optimizer)

    def before_update(self, mine: set[int]) -> None:
        """Averages gradients that no backward pass has averaged: those that a script has assigned, and those
        that were accumulated in ``no_sync`` only.

        Raises:
            MisuseError: Inside backward or inside ``no_sync``, where the update would be of this rank only.
        """
        self.updates.step_begins()
        self._average_local(mine)
        self.updates.step_has_gradients(mine)

    def _average_local(self, mine: set[int]) -> None:
        """See :meth:`before_update`."""
        self.abort_failed()
        if inside_backward():
            self.passes.begin_in_backward(None)  # so that this error aborts the pass on all ranks
            raise MisuseError(
                f"{self.groups.name}: an optimizer stepped inside backward(), before its gradients were "
                "averaged; call optimizer.step() after backward(), or use an algorithm that averages weights "
                "(local_sgd, decentralized)"
            )
        if self.since_fewer is not None and self.join is None and self.updating:
            self.since_fewer += 1
            if self.since_fewer.bit_count() == 1 and (optimizer := self.updating[-1]()) is not None:
                shared_optimizers.check_options(self.groups, optimizer)
        if not self.local.any(self.buckets.placed(), self.params, mine):
            return
        if not self.sync:
            raise MisuseError(
                f"{self.groups.name}: optimizer.step() inside no_sync would update the weights with the "
                "gradients of this rank only; leave no_sync for the last backward pass before the update"
            )
        with torch.no_grad():
            if self.local.averaged and not self.local.accumulated:
                self.local.average_changed(self.buckets, mine, self.groups)
            else:
                self.passes.begin(None)
                self.passes.end()

    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """Ends the warm-up when optimizers have updated all parameters that have gradients."""
        self.has_updated(mine)
        if self.updating:
            return
        if self.steps > 1 and self.warmup_end.covers(self.params):  # after one step not all are known
            self.end_warmup()

    def has_updated(self, mine: set[int]) -> None:
        """Optimizers have updated the parameters with these ``id()``; ends no warm-up."""
        self.warmup_end.updated(mine)
        if not self.updating:
            self.since_update = 0
            self.local.updated(self.params, mine)

    def end_warmup(self, trains: bool = True) -> PassMethod | None:
        """See :class:`StepHooks`. In an elastic job all ranks end it together, at the same place. What is
        called in evaluation mode may be so on one rank only, and one that has joined does not know before
        its second step which optimizers there are."""
        if self.elastic.can_redo and (self.elastic.admitted or self.elastic.newcomer or not trains):
            return None
        return self.warmup_end.end(self)

    # State.

    def state(self) -> dict[str, Any]:
        """The order of the buckets, the residuals, and the state of the compressor."""
        return {
            **super().state(),
            "order": None if self.pipeline.order is not None else self.buckets.order,
            "buckets": self.buckets.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        self.abort_failed()
        super().load(state)
        self.since = self.steps
        self.updates.state_loaded()
        if state["order"] is not None:
            self.order.build(state["order"])
            self.order.is_known(state["order"])
        self.buckets.load(state["buckets"])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        counters = {
            **super().stats(),
            "overlap": 1 - self.waited / self.busy if self.busy else 0.0,
            "buckets": [
                {"bytes": b.nbytes, "params": len(b.params), "dtype": str(b.memory.dtype)}
                for b in self.buckets
            ],
        }
        return self.updates.stats(counters)
