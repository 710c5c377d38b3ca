"""The weights that an optimizer updates, in buckets of which each rank has a part: how they are divided and
followed when a script changes them, and how all ranks get all of them again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.errors import MisuseError, TrigramError
from trigram.observe import steps
from trigram.runtime.group import Group
from trigram.runtime.weak_hook import WeakHook
from trigram.training import optimizer_hooks
from trigram.training.buckets import assign
from trigram.training.compressors import GradientCompressor
from trigram.training.gradient_sync import GradientSync
from trigram.training.sharded.agreement import agree, explained
from trigram.training.sharded.gathers import Gathers
from trigram.training.sharded.gradient_buckets import ShardsCompressor, layouts
from trigram.training.sharded.optimizer import ShardedOptimizer
from trigram.training.sharded.refusals import check_memory, check_optimizer
from trigram.training.sharded.weight_buckets import Layout, WeightBucket, allot, divide


class DividedWeights(GradientSync):
    """Averages the gradients of one model, whose weights are divided.

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
        loads: Values that each rank has in buckets of whole parameters.
        divides_gradients: Whether each rank keeps a part of the gradients.
    """

    moves_parameters = True

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        bucket_bytes: int,
        compressor: GradientCompressor,
        optimizer: Optimizer,
        whole: bool,
        overlap: bool,
    ) -> None:
        self.optimizer, self.overlap = optimizer, overlap
        self.shards = ShardedOptimizer(optimizer, whole)
        self.gathers = Gathers()
        self.loads = [0] * groups.size
        self.divides_gradients = isinstance(compressor, ShardsCompressor)
        check_memory(model, groups.ignored)
        check_optimizer(model, optimizer)
        super().__init__(model, groups, bucket_bytes, compressor)
        if self.divides_gradients:
            self._check_all_updated(optimizer_hooks.parameters_of(optimizer))

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

    # Gradients of which each rank keeps a part.

    def find_parameters(self, model: nn.Module) -> None:
        """See :class:`GradientSync`. Where gradients are divided, buckets keep their first order: slices
        would have to move."""
        super().find_parameters(model)
        self.param_ids |= set(self.shards.places)  # the optimizer may update them after they are frozen
        if self.divides_gradients:
            self.pipeline.learn(False)

    @property
    def before_passes(self) -> Group:
        """See :class:`GradientSync`. A step and a ``state_dict`` are calls in this group too, so a rank that
        makes them alone meets the others there, and no rank waits."""
        return self.groups.main

    # How weights are divided.

    def _follow(self, own: set[int]) -> None:
        """Divides parameters that the optimizer updates and that are not divided yet."""
        self._prepare()
        if self.divides_gradients:
            self._follow_buckets(own)
            return
        missing = self._missing(own)
        if not missing:
            return
        self._before_moving()
        if not (self.shards.places or self.elastic.can_redo):
            self.learn_order()  # slices never move: take the order of the gradients before they are made
            missing = self._missing(own)
        self._divide(self._lay_out(assign(self.params, missing, self.buckets.bucket_bytes), self.loads))

    def _before_moving(self) -> None:
        """Parameters are about to move to other memory."""

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
        agree(self.groups, "optimizer.step()", f"{wanted}\n{self.shards.outline()}")
        for layout in wanted:
            self._add(layout)
        self.shards.cut()

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
        self._before_moving()
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

    def _missing(self, own: set[int]) -> list[int]:
        return [
            i
            for bucket in self.buckets
            for i in bucket.params
            if id(self.params[i]) in own
            and id(self.params[i]) not in self.shards.places
            and self.params[i].numel()
        ]

    # The state of whole parameters.

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

    def _between_steps(self, call: str) -> None:
        """Ends what has failed; raises inside of a step."""
        self.abort_failed()
        self.shards.separate()
        if self.shards.entered:
            raise MisuseError(
                f"{self.groups.name}: {call} of a sharded optimizer inside its step(); call it after the step"
            )

    # All ranks get all weights.

    def _gathers(self, updated: set[int]) -> int:
        """The calls of :meth:`_gather_all`."""
        return sum(_is_left(bucket, updated) for bucket in self.shards.buckets)

    def _gather(self, k: int, group: Group) -> None:
        """Starts to collect a bucket of weights."""
        self.gathers.start(k, self.shards.buckets[k], group)

    def _gather_all(self, updated: set[int]) -> None:
        """Collects the buckets of weights, but for those of which all parameters are in ``updated``."""
        for k, bucket in enumerate(self.shards.buckets):
            if _is_left(bucket, updated):
                self._gather(k, self.groups.main)
        if not self.overlap:
            self.drain()

    @torch.no_grad()
    def collect(self) -> None:
        """Collects the weights from the parts, which others than the optimizer have changed, and waits for
        them; all ranks call it."""
        for bucket in self.shards.buckets:
            for p in bucket.params:
                increment_version(p)
        self._gather_all(set())
        self.drain()

    def drain(self, timeout: float | None = None, *_: Any, between_steps: bool = False) -> None:
        """Waits until all weights are there."""
        if not self.gathers.under_way:
            return
        before, began = self.times.enter(steps.WAIT), time.perf_counter()
        error, failed = self.gathers.wait(timeout)
        self.waited += time.perf_counter() - began
        self.times.enter(before)
        if failed:
            self._gather_failed()
        if error is not None:
            raise explained(error, self.groups.name, "optimizer.step()")

    def _gather_failed(self) -> None:
        """A gather has failed: this rank has not got all weights."""

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        found = super().stats()
        own = sum(s.stop - s.start for s in self.shards.slices.values())
        found["bytes"] += self.gathers.sent
        found["bytes_per_step"] = found["bytes"] // self.steps if self.steps else 0
        return {**found, "sharded_values": own}


def _is_left(bucket: WeightBucket, updated: set[int]) -> bool:
    """Whether a step updates some of a bucket's parameters that backward has not."""
    return any(id(p) not in updated for p in bucket.params)
