"""The trigrams that carry gradients, as communication hooks of ``DistributedDataParallel``.

Torch looks at the annotations of a hook: they are types here, not text."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trigram.algorithms.parse import find
from trigram.averaging.full import FullAverage
from trigram.averaging.groups import ModelGroups
from trigram.errors import UnsupportedError
from trigram.runtime.world import AnyGroup, resolve
from trigram.training import compressors
from trigram.training.buckets import Bucket
from trigram.training.options import Options


class HookState:
    """What a hook remembers: an average for each bucket, with its residuals."""

    def __init__(self, coding: compressors.GradientCompressor, groups: ModelGroups) -> None:
        self.compressor, self.groups = coding, groups
        self.steps = 0
        self.buckets: dict[int, tuple[list[int], Bucket]] = {}
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        # Second legs and waits, in the order of the buckets.
        self.thread = ThreadPoolExecutor(1, "trigram-ddp")

    def of(self, bucket: dist.GradBucket) -> Bucket:
        """Our side of a bucket. After its first step torch deals parameters anew; residuals move along."""
        ids = [id(p) for p in bucket.parameters()]
        known = self.buckets.get(bucket.index())
        if known is not None and known[0] == ids:
            return known[1]
        if known is not None:
            for old_ids, old in self.buckets.values():
                old.average.fold()
                self.kept |= dict(zip(old_ids, old.average.parts(old.views), strict=True))
            self.buckets.clear()
        grads = [g.detach() for g in bucket.gradients()]
        layout = self.compressor.layout(grads[0], self.groups)
        made = Bucket(range(len(grads)), grads, layout)
        made.average = (
            FullAverage(made.memory, self.groups)
            if layout is None
            else self.compressor.average(made, self.groups)
        )
        for key, parts in zip(ids, made.average.parts(made.views), strict=True):
            for name, part in self.kept.get(key, {}).items():
                parts[name].copy_(part)
        self.buckets[bucket.index()] = (ids, made)
        return made


def _hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    made = state.of(bucket)
    average, grads = made.average, bucket.gradients()
    if made.gaps is not None:
        made.memory.index_fill_(0, made.gaps, 0)
    torch._foreach_copy_(made.views, grads)
    average.start(state.steps)
    state.steps += bucket.is_last()
    # On a GPU the future carries the events that its result is ready by.
    devices: list[Any] = [] if made.memory.is_cpu else [made.memory.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def finish() -> None:
        try:
            average.wait()
            torch._foreach_copy_(grads, made.views)
            future.set_result(bucket.buffer())
        except Exception as e:
            future.set_exception(e)  # type: ignore[arg-type]  # torch's stub is wrong

    state.thread.submit(finish)
    return future


def ddp_hook(algorithm: str, group: AnyGroup = None, **options: Any) -> tuple[HookState, Any]:
    """A trigram for ``model.register_comm_hook(*trigram.ddp_hook("bytegrad"))``.

    Args:
        algorithm: One that carries gradients: gradient_allreduce, bytegrad, powersgd, topk, signsgd,
            or ``central/CODEC/sync``.
        group: The ranks of the model; None: all.
        **options: The algorithm's. There is no warm-up here: register the hook when it is over.

    Raises:
        UnsupportedError: It carries something else.
    """
    options.setdefault("warmup_steps", 0)
    if algorithm == "gradient_allreduce":
        options.pop("warmup_steps")
    chosen = find(algorithm, options)
    if chosen.value.carry != "gradients" or chosen.options.get("momentum"):
        raise UnsupportedError(
            f"ddp_hook: {algorithm} carries {chosen.value.carry}, and a hook of DistributedDataParallel sees "
            "gradients alone; use trigram.with_bagua"
        )
    if chosen.options.get("warmup_steps"):
        raise UnsupportedError("ddp_hook: has no warm-up; register the hook when it is over")
    ranks = resolve(group)
    Options().check(chosen, ranks.size)
    groups = ModelGroups(ranks)
    coding = compressors.make(
        chosen.value.what, chosen.options.get("block"), chosen.options, chosen.aggregation
    )
    return HookState(coding, groups), _hook
