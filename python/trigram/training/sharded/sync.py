"""Averages gradients during backward, and divides the optimizer's state among the ranks (ZeRO,
arXiv 1910.02054).

When the optimizer steps, each rank updates its part of each bucket of weights; then the parts are gathered,
so that all ranks hold all weights. See docs/sharding.md, and docs/adr/0029 for the reasons.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import listed, ranks_unlike_first
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.observe import spans, steps
from trigram.runtime import world
from trigram.runtime.group import Group
from trigram.runtime.weak_hook import WeakHook
from trigram.training import optimizer_hooks
from trigram.training.buckets import assign
from trigram.training.compressors import GradientCompressor
from trigram.training.gradient_sync import GradientSync
from trigram.training.group_values import GroupValues
from trigram.training.sharded.gradient_buckets import ShardsCompressor, layouts
from trigram.training.sharded.one_pass import OnePass
from trigram.training.sharded.optimizer import ShardedOptimizer, Slice
from trigram.training.sharded.other_methods import OtherMethods
from trigram.training.sharded.weight_buckets import Layout, WeightBucket, allot, divide, flat
from trigram.training.sharded_gradient import ShardedGradient
from trigram.training.shown_params import disclaim


class ShardedSync(GradientSync):
    """Averages the gradients of one model, and gives each rank a part of the optimizer's work.

    Args:
        model: The module.
        groups: The model's process groups.
        bucket_bytes: The size of a bucket in bytes.
        compressor: Chooses how gradients are averaged; a :class:`ShardsCompressor` divides them.
        optimizer: The script's optimizer.
        whole: Whether it needs whole parameters.
        overlap: The gather is awaited in the next forward pass instead of in ``step``.

    Attributes:
        shards: The optimizer with its buckets of weights, none before the first update.
        gathers: The gathers under way.
        lent: Whether an algorithm averages this rank's parts of the weights between replicas.
        owed: Whether parts that were lent have been updated, and not collected since.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        compressor: GradientCompressor,
        optimizer: Optimizer,
        whole: bool = False,
        overlap: bool = False,
    ) -> None:
        self.optimizer, self.overlap = optimizer, overlap
        self.shards = ShardedOptimizer(optimizer, whole)
        self.gathers: list[tuple[WeightBucket, collectives.Work]] = []
        self.gathered = self.updates = 0
        self.lent = self.owed = False
        self.loads = [0] * groups.size
        self.remaining: list[int] = []  # by bucket of weights, parameters that a fused pass has yet to update
        self.bucket_of: dict[int, int] = {}  # by id() of a parameter, in a fused pass
        self.one_pass = OnePass(optimizer, groups)
        self.at_once = False  # whether this pass computes means, updates and weights in one pass over memory
        self.job = world.job()
        self.divides_gradients = isinstance(compressor, ShardsCompressor)
        check_memory(model, groups.ignored)
        self._check_optimizer(model)
        super().__init__(model, groups, bucket_bytes, compressor)
        if self.divides_gradients:
            self._check_all_updated(optimizer_hooks.parameters_of(optimizer))
        stepped = optimizer.register_step_post_hook(WeakHook(self, "_stepped"))
        # Before the script's own hooks, which may save a checkpoint.
        optimizer._optimizer_step_post_hooks.move_to_end(stepped.id, last=False)  # type: ignore[attr-defined]
        self.optimizer_handles: list[Any] = [
            OtherMethods(optimizer, self),
            stepped,
            optimizer.register_step_pre_hook(_OutlivedJob(self.job)),
            optimizer.register_state_dict_pre_hook(WeakHook(self, "_before_state_dict")),
            optimizer.register_state_dict_post_hook(WeakHook(self, "_after_state_dict")),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, "_before_load_optimizer")),
            optimizer.register_load_state_dict_post_hook(WeakHook(self, "_after_load_optimizer")),
        ]

    def _check_optimizer(self, model: nn.Module) -> None:
        """Raises if the optimizer is not one of the model's parameters."""
        mine = optimizer_hooks.parameters_of(self.optimizer)
        trained = [p for p in model.parameters() if p.requires_grad]
        if trained and not any(id(p) in mine for p in trained):
            raise MisuseError(
                f"sharded: optimizer= ({type(self.optimizer).__name__}) has none of the parameters of "
                f"{type(model).__name__} that train; pass the optimizer that updates them"
            )
        if any(isinstance(p, torch.Tensor) and id(p) not in mine for p in self.optimizer.state):
            raise MisuseError(
                f"sharded: optimizer= ({type(self.optimizer).__name__}) holds state that was sharded before, "
                "in a job that has ended or for another model; make a new optimizer, and load a state that "
                "was saved"
            )

    # Gradients of which each rank keeps a part.

    def find_parameters(self, model: nn.Module) -> None:
        """See :class:`GradientSync`. Where gradients are divided, buckets keep their first order: slices
        would have to move."""
        super().find_parameters(model)
        self.param_ids |= set(self.shards.places)  # the optimizer may update them after they are frozen
        if self.divides_gradients:
            self.order = None

    @property
    def before_passes(self) -> Group:
        """See :class:`GradientSync`. A step and a ``state_dict`` are calls in this group too, so a rank that
        makes them alone meets the others there, and no rank waits."""
        return self.groups.main

    def _apply_options(self) -> None:
        if not self.divides_gradients:
            super()._apply_options()
            return
        sample_weight, self.groups.sample_weight = self.groups.sample_weight, None
        try:
            super()._apply_options()
        finally:
            self.groups.sample_weight = sample_weight
        if sample_weight is not None:
            factor = sample_weight.factor()
            for bucket in self.buckets:
                bucket.part.mul_(factor)  # type: ignore[attr-defined]

    # Updates inside backward.

    def begin_fused(self, param: int | None) -> bool:
        """See :class:`FusedBuckets`; the first update divides the weights."""
        fuses = self._begin_fused(param)
        usable = fuses and self.fidelity is None
        self.at_once = (
            self.one_pass.begin(self.buckets, self.shards, usable) if self.fused is not None else False
        )
        return fuses

    def _begin_fused(self, param: int | None) -> bool:
        if not super().begin_fused(param):
            return False
        self._prepare()
        if self._missing(optimizer_hooks.parameters_of(self.optimizer)) or (
            self.divides_gradients and layouts(self.buckets) != self.layouts
        ):
            return False  # the next update divides them
        arrive = {id(self.params[i]) for i in self.buckets.place}
        self.remaining = [sum(id(p) in arrive for p in b.params) for b in self.shards.buckets]
        self.bucket_of = {id(p): k for k, b in enumerate(self.shards.buckets) for p in b.params}
        return True

    def update(self, params: Sequence[torch.Tensor]) -> None:
        """Steps this rank's slices of some parameters; gathers the buckets of weights that are complete."""
        assert self.fused is not None
        if self.at_once:
            self._update_at_once()
            return
        self.shards.enter(self._gradient, lambda p: True, self.fused.in_groups(params))
        try:
            self.fused.update()
        finally:
            self.shards.leave()
        complete = []
        for p in params:
            k = self.bucket_of.get(id(p))
            if k is not None:
                if p.grad is not None:
                    increment_version(p)
                self.remaining[k] -= 1
                if self.remaining[k] == 0:
                    complete.append(k)
        for k in sorted(complete):
            self.remaining[k] = -1
            self._gather(k, self.groups.second_phase)

    def _update_at_once(self) -> None:
        """Updates the bucket that has landed; all ranks get its weights."""
        assert self.fused is not None
        k = self.landed - 1
        self.fused.count()
        started = self.one_pass.start(k, self.buckets[k], self.shards)
        if started is not None:
            self.gathers.append(started)
            self.gathered += started[0].sent
            self.remaining[self.shards.buckets.index(started[0])] = -1

    def land_ready(self) -> None:
        """See :class:`FusedBuckets`. Updates at once begin when backward has ended: where all cores compute,
        there is no idle time before."""
        if not self.at_once:
            super().land_ready()

    def _call_counts(self) -> list[int]:
        first, second = super()._call_counts()
        return [first, second + (sum(n != 0 for n in self.remaining) if self.fusing else 0)]

    def _finish(self, failed: str | None = None) -> None:
        """See :class:`GradientSync`; gathers of a pass that fails end with it."""
        try:
            super()._finish(failed)
        except BaseException:
            self._end_gathers()
            raise
        if failed is not None:
            self._end_gathers()

    def _end_gathers(self) -> None:
        gathers, self.gathers = self.gathers, []
        for _, work in gathers:
            with contextlib.suppress(TrigramError):
                work.wait()

    def show_rest(self, updated: set[int]) -> None:
        """See :class:`FusedBuckets`."""
        self.shards.enter(self._gradient, lambda p: id(p) not in updated)

    def end(self) -> None:
        """See :class:`GradientSync`; the weights that were updated are there, unless they may come later."""
        super().end()
        if not self.overlap:
            self.drain()

    # Hooks.

    def watch(self, model: nn.Module) -> None:
        """Hooks the model; also where weights are read, if gathers may be under way then."""
        super().watch(model)
        if self.overlap:
            for module in model.modules():
                if type(module) is not nn.Sequential and not isinstance(module, torch.jit.ScriptModule):
                    self.handles.append(
                        module.register_forward_pre_hook(WeakHook(self, "drain", None), prepend=True)
                    )
                self.handles.append(module.register_state_dict_pre_hook(WeakHook(self, "drain", None)))
        if self.lent:
            self.handles += [
                model.register_forward_pre_hook(WeakHook(self, "_check_collected"), prepend=True),
                model.register_state_dict_pre_hook(WeakHook(self, "_check_collected")),
            ]

    def release(self) -> None:
        """Puts the optimizer's state together again on all ranks, which all call it, and leaves it alone."""
        if self.owed:
            self.collect()
        self.drain()
        self.shards.leave()
        if self.shards.places:
            self._put_together()
        super().release()
        self.lent = False
        self._let_go()

    def abandon(self) -> None:
        """See :class:`StepHooks`. An optimizer that has lost state goes on refusing to step."""
        super().abandon()
        self.shards.leave()
        kept = self.shards.forget()
        if any(state for _, state in kept):
            self.optimizer.state.update(kept)
        else:
            self._let_go()

    def _let_go(self) -> None:
        disclaim(self.optimizer)
        self.shards.release()
        for handle in self.optimizer_handles:
            handle.remove()

    # Updates.

    def before_update(self, mine: set[int]) -> None:
        """See :meth:`GradientSync.before_update`; then the slices take the place of the parameters."""
        self.shards.leave()  # after a step that has raised an exception
        super().before_update(mine)
        optimizer = self.updating[-1]() if self.updating else None
        own = optimizer_hooks.parameters_of(self.optimizer)
        if optimizer is not self.optimizer:
            if mine & own:
                name = next(n for n, p in zip(self.names, self.params, strict=True) if id(p) in mine & own)
                raise MisuseError(
                    f"{self.groups.name}: {type(optimizer).__name__}.step updates {name}, which the "
                    f"optimizer= of with_bagua ({type(self.optimizer).__name__}) updates in slices; step "
                    "that optimizer itself, without another optimizer around it"
                )
            return
        self.updates += 1
        self._check_options()
        if self.shards.entered:  # the rest after an update in backward
            return
        self._check_collected()
        self.drain()
        with torch.no_grad():
            self._follow(own)
        self.shards.enter(self._gradient, lambda p: True)

    def _follow(self, own: set[int]) -> None:
        """Divides parameters that the optimizer updates and that are not divided yet."""
        self._prepare()
        if self.divides_gradients:
            self._follow_buckets(own)
            return
        missing = self._missing(own)
        if not missing:
            return
        self._check_not_lent()
        if self.order is not None and self.steps and not (self.shards.places or self.elastic.can_redo):
            self._reorder()  # slices never move: take the order of the gradients before they are made
            missing = self._missing(own)
        self._divide(self._lay_out(assign(self.params, missing, self.buckets.bucket_bytes), self.loads))

    def _lay_out(self, buckets: Sequence[Sequence[int]], loads: list[int]) -> list[Layout]:
        """How buckets of these parameters are divided; ``loads``: see :func:`allot`."""
        return [
            allot(self.params, indices, loads)
            if self.shards.whole
            else divide(self.params, indices, len(loads))
            for indices in buckets
        ]

    def _divide(self, wanted: Sequence[Layout]) -> None:
        """Moves parameters into buckets of weights, and divides them; all ranks call it."""
        self._agree("optimizer.step()", f"{wanted}\n{self.shards.outline()}")
        for layout in wanted:
            self._add(layout)
        self.shards.cut()
        if self.fused is not None:
            self.one_pass.agree()

    def _add(self, layout: Layout) -> None:
        """Moves the parameters of a bucket there."""
        self.shards.add(WeightBucket(self.params, layout, self.groups.size), self.groups.rank)

    def _prepare(self) -> None:
        """Takes back what a script, or a call that has raised an exception, has put elsewhere: state and
        values of parameters that are divided."""
        self.shards.separate()
        if self.shards.places:
            self.shards.cut()
        self.shards.hold({id(p): n for n, p in zip(self.names, self.params, strict=True)})

    def _follow_buckets(self, own: set[int]) -> None:
        """Divides the weights as the buckets of gradients are divided; anew if these have changed."""
        wanted = layouts(self.buckets)
        if wanted == self.layouts and all(
            id(self.params[i]) in self.shards.places for i in self.buckets.place
        ):
            return
        self._check_not_lent()
        self._check_all_updated(own)
        if self.shards.places:
            self._put_together()
            self.shards = ShardedOptimizer(self.optimizer, self.shards.whole)
        self._divide(wanted)

    @property
    def layouts(self) -> list[Layout]:
        """How the weights are divided."""
        return [b.layout for b in self.shards.buckets]

    def _check_all_updated(self, own: set[int]) -> None:
        for i in self.buckets.place:
            if id(self.params[i]) not in own and self.params[i].numel():
                raise MisuseError(
                    f"sharded: parameter {self.names[i]} trains, and the optimizer= of with_bagua does not "
                    "update it; with gradients='shards' no rank has its whole gradient: add it to the "
                    "optimizer, set requires_grad=False, or use gradients='full'"
                )

    def _put_together(self) -> None:
        self._join()
        self.shards.keep_joined()

    def _join(self) -> None:
        """Puts the state of whole parameters in place of that of slices. Its first call meets the next
        average of a rank that does not make it, and all raise."""
        try:
            self.shards.join(self.shards.gathered(self.groups.main))
        except TrigramError as e:
            raise explained(e, self.groups.name, "optimizer.state_dict()") from e

    def _missing(self, own: set[int]) -> list[int]:
        return [
            i
            for bucket in self.buckets
            for i in bucket.params
            if id(self.params[i]) in own
            and id(self.params[i]) not in self.shards.places
            and self.params[i].numel()
        ]

    def _gradient(self, piece: Slice) -> torch.Tensor | None:
        param = piece.param
        grad = param.grad
        if isinstance(grad, ShardedGradient):
            part = grad.part
            if part is None or not piece.whole:
                return part
            return part.as_strided(piece.view.shape, piece.view.stride())
        if grad is None or piece.whole:
            return grad
        return flat(grad, piece.view)[piece.start : piece.stop]

    @torch.compiler.disable  # a script may compile the optimizer's step
    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, *args: Any) -> None:
        """The optimizer has stepped: collects the weights."""
        running = sum(o() is optimizer for o in self.updating)
        if not self.shards.entered or running > 1:  # nothing to update, or a step of its class inside its own
            return
        self.shards.leave()
        if self.lent:
            self.owed = True
            return
        updated = self.fused.updated if self.fused is not None and self.fusing else set()
        # Slices have changed the parameters' memory, of which autograd does not know.
        for p, _, _ in self.shards.places.values():
            if p.grad is not None and id(p) not in updated:
                increment_version(p)
        self._gather_all(updated)

    def _gather_all(self, updated: set[int]) -> None:
        """Collects the buckets of weights, but for those of which all parameters are in ``updated``."""
        for k, bucket in enumerate(self.shards.buckets):
            if any(id(p) not in updated for p in bucket.params):
                self._gather(k, self.groups.main)
        if not self.overlap:
            self.drain()

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """See :class:`GradientSync`; the optimizer has seen whole parameters."""
        super().closure_ignored(mine, optimizer)
        if mine & optimizer_hooks.parameters_of(self.optimizer):
            raise MisuseError(
                f"{self.groups.name}: {optimizer}.step(closure) has not called the closure, so it has "
                "updated whole parameters instead of this rank's slices; call step() without a closure"
            )

    def _gather(self, k: int, group: Group) -> None:
        """Starts to collect a bucket of weights."""
        bucket = self.shards.buckets[k]
        with spans.naming(group, partial(_name, k)):
            self.gathers.append((bucket, bucket.gather(group)))
        self.gathered += bucket.sent

    def drain(self, timeout: float | None = None, *_: Any, between_steps: bool = False) -> None:
        """Waits until all weights are there."""
        gathers, self.gathers = self.gathers, []
        if not gathers:
            return
        before, began = self.times.enter(steps.WAIT), time.perf_counter()
        error: TrigramError | None = None
        for bucket, work in gathers:
            try:
                work.wait(None if timeout is None else max(began + timeout - time.perf_counter(), 0.0))
            except TrigramError as e:
                error = error or e
                if not work.is_completed():
                    self.gathers.append((bucket, work))
                elif self.at_once and self.fused is not None:
                    self.fused.broken = True  # some values may be updated, and others not
        self.waited += time.perf_counter() - began
        self.times.enter(before)
        if error is not None:
            raise explained(error, self.groups.name, "optimizer.step()")

    # Averages between replicas, each of which is sharded.

    @torch.no_grad()
    def lend(self) -> list[torch.Tensor]:
        """This rank's parts of the weights that train, for an algorithm that averages them between replicas.

        From now on the weights are collected by :meth:`collect`, after such an average, and not in ``step``.
        All ranks call it, between steps.
        """
        if self.fused is not None:
            raise UnsupportedError(
                f"{self.groups.name}: local_shards of a model with fused=True: its weights are collected in "
                "backward, before they could be averaged; remove fused=True"
            )
        self._between_steps("local_shards")
        self._follow(optimizer_hooks.parameters_of(self.optimizer))
        for name, p in zip(self.names, self.params, strict=True):
            if p.requires_grad and p.numel() and id(p) not in self.shards.places:
                raise UnsupportedError(
                    f"{self.groups.name}: local_shards: parameter {name} trains, and the optimizer= of "
                    "with_bagua does not update it; add it to that optimizer, or set requires_grad=False"
                )
        model = self.model()
        assert model is not None
        self.lent = True
        self.watch(model)
        return [part for b in self.shards.buckets if (part := b.part(self.groups.rank)).numel()]

    @torch.no_grad()
    def collect(self) -> None:
        """Collects the weights from the parts that were lent; all ranks call it."""
        self.owed = False
        for bucket in self.shards.buckets:
            for p in bucket.params:
                increment_version(p)
        self._gather_all(set())

    def _check_collected(self, *_: Any) -> None:
        if self.owed:
            raise MisuseError(
                f"{self.groups.name}: optimizer.step() has updated this rank's part of the weights, and the "
                "other ranks have not got it; call trigram.step(shards) after each update, on all ranks, "
                "with what trigram.local_shards has returned"
            )

    def _check_not_lent(self) -> None:
        if self.lent:
            raise MisuseError(
                f"{self.groups.name}: the parameters that train, or the order in which they lie in memory, "
                "have changed since trigram.local_shards(model); call trigram.unwrap on the shards and the "
                "model, and wrap both again"
            )

    # Reads and writes of weights outside of forward.

    @torch.no_grad()
    def swap(self, call: str, method: Callable[[], Any]) -> Any:
        """A method of the optimizer that may exchange the weights: it sees this rank's slices."""
        if not self.shards.places or self.shards.entered:
            return method()
        self._check_job(call)
        self._between_steps(call)
        self._prepare()
        before = GroupValues(self.optimizer)
        self.shards.enter(lambda piece: None, lambda p: True)
        try:
            found = method()
        finally:
            self.shards.leave()
        notes_it = all("train_mode" in g for g in self.optimizer.param_groups)
        if not (notes_it and before.same()):  # the weights may be others
            self.collect()
        return found

    def abort_failed(self, timeout: float | None = None) -> None:
        """See :class:`StepHooks`; between steps, it also ends gathers and a step that has raised an
        exception."""
        optimizer_hooks.forget_failed(self)
        if self.in_backward:
            return  # gathers of this pass are awaited at its end, when all ranks have started theirs
        if self.active:
            super().abort_failed()  # before anything is awaited that the other ranks have aborted
        if self.shards.entered and not self.updating:
            # The script may have reset gradients since: those of the slices, which it found in the groups.
            self.shards.leave()
            for p in self.shards.parameters():
                p.grad = None
        self.drain(timeout)
        super().abort_failed()

    def begin(self, param: int | None) -> None:
        """See :class:`GradientSync`."""
        self._check_collected()
        self.drain()
        super().begin(param)

    def _before_load(self, *_: Any) -> None:
        self.drain()
        super()._before_load()

    # The optimizer's state.

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self.shards.places:
            self._check_job("optimizer.state_dict()")
            self._between_steps("state_dict()")
            self.shards.cut()
            self._join()

    def _after_state_dict(self, *_: Any) -> None:
        self.shards.separate()

    def _before_load_optimizer(self, *_: Any) -> None:
        if self.shards.places:
            self._check_job("optimizer.load_state_dict()")
            self._between_steps("load_state_dict()")

    def _after_load_optimizer(self, *_: Any) -> None:
        if self.shards.places:
            self._agree("optimizer.load_state_dict()", self.shards.outline(loaded=True))
            self.shards.cut()

    def _between_steps(self, call: str) -> None:
        """Ends what has failed; raises inside of a step."""
        self.abort_failed()
        self.shards.separate()
        if self.shards.entered:
            raise MisuseError(
                f"{self.groups.name}: {call} of a sharded optimizer inside its step(); call it after the step"
            )

    def _agree(self, call: str, text: str) -> None:
        """Raises on all ranks if they hold different texts, or if some ranks do not make this call: it meets
        their next average."""
        try:
            other = ranks_unlike_first(text, self.groups.main)
        except TrigramError as e:
            raise explained(e, self.groups.name, call) from e
        if other:
            raise MismatchError(
                f"{self.groups.name}: {call}: rank(s) {listed(other)} have another optimizer state, other "
                "parameters in the optimizer, or parameters in another memory format than rank "
                f"{self.groups.main.ranks[0]}; load the same checkpoint and make the same changes on all "
                "ranks"
            )

    def _check_options(self) -> None:
        """Raises on all ranks if they update their parts with different options; rarely: in steps 1, 2, 4,
        and so on."""
        if self.updates.bit_count() != 1:
            return
        try:
            other = ranks_unlike_first(self._options(), self.groups.main)
        except TrigramError as e:
            raise explained(e, self.groups.name, "optimizer.step()") from e
        if other:
            raise MismatchError(
                f"{self.groups.name}: optimizer.step(): rank(s) {listed(other)} have other options in the "
                f"optimizer's groups (lr, ...) than rank {self.groups.main.ranks[0]}, and would update their "
                "part of the weights with these; give schedulers the same values on all ranks, such as the "
                "mean of the loss"
            )

    def _options(self) -> str:
        """The options in the optimizer's groups that are plain values."""
        plain = (bool, int, float, str, tuple, type(None))
        groups = GroupValues(self.optimizer).plain()
        return repr([{k: v for k, v in options.items() if isinstance(v, plain)} for options in groups])

    def _check_job(self, call: str) -> None:
        if self.job != world.job():
            raise MisuseError(_outlived(call))

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        found = super().stats()
        own = sum(s.stop - s.start for s in self.shards.slices.values())
        found["bytes"] += self.gathered
        found["bytes_per_step"] = found["bytes"] // self.steps if self.steps else 0
        return {**found, "sharded_values": own, "one_pass_updates": self.one_pass.updates}


def _name(k: int) -> str:
    return f"weights {k}"


class _OutlivedJob:
    """Before a step: raises if the job in which the optimizer was sharded has ended."""

    def __init__(self, job: object) -> None:
        self.job = job

    @torch.compiler.disable
    def __call__(self, *_: Any) -> None:
        """See the class."""
        if self.job != world.job():
            raise MisuseError(_outlived("optimizer.step()"))


def _outlived(call: str) -> str:
    return (
        f"sharded: {call}: trigram.shutdown has ended the job whose ranks hold the other parts of this "
        "optimizer's state; save optimizer.state_dict() before, or call trigram.unwrap(model) on all ranks"
    )


def explained(error: TrigramError, name: str, call: str) -> TrigramError:
    """If ranks made different calls: what a script may have done."""
    if not isinstance(error, MismatchError):
        return error
    return MismatchError(
        f"{name}: {call} of a sharded optimizer is a call of all ranks, and some of them are elsewhere in "
        f"the script; make it on all ranks, and save its result on one ({error})"
    )


def check_memory(model: nn.Module, ignored: frozenset[str]) -> None:
    """Raises if a parameter that trains shares memory with another tensor of the model: its values move.

    Raises:
        UnsupportedError: The message names both.
    """
    ranges: list[tuple[int, int, str, bool]] = []
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.numel() and not t.is_meta and t.layout == torch.strided:
            end = t.data_ptr() + (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * (
                t.element_size()
            )
            ranges.append((t.data_ptr(), end, name, t.requires_grad and name not in ignored))
    ranges.sort()
    furthest: tuple[int, str, bool] | None = None
    for start, stop, label, trains in ranges:
        if furthest is not None and start < furthest[0] and (trains or furthest[2]):
            raise UnsupportedError(
                f"sharded: {label} and {furthest[1]} share memory, which would end when parameters move into "
                "buckets; make them one parameter (ties are kept), or copies"
            )
        if furthest is None or stop > furthest[0]:
            furthest = stop, label, trains
