"""The trigrams that carry gradients, as communication hooks of ``DistributedDataParallel``.

Torch looks at the annotations of a hook: they are types here, not text."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trigram import codings
from trigram.algorithms import find
from trigram.average import Average, FullAverage
from trigram.buckets import Bucket
from trigram.carrier import Channels
from trigram.collectives import AnyGroup
from trigram.errors import UnsupportedError
from trigram.world import resolve


class HookState:
    """What a hook remembers: an average for each bucket, with its residuals."""

    def __init__(self, coding: codings.Coding, channels: Channels) -> None:
        self.coding, self.channels = coding, channels
        self.steps = 0
        self.averages: dict[tuple[int, int], tuple[Any, Average]] = {}
        # Second legs and waits, in the order of the buckets.
        self.thread = ThreadPoolExecutor(1, "trigram-ddp")

    def of(self, bucket: dist.GradBucket) -> tuple[Any, Average]:
        """The flat tensor of a bucket, and its average."""
        grads = bucket.buffer()
        key = (bucket.index(), grads.numel())
        if key not in self.averages:
            shapes = [g.detach() for g in bucket.gradients()]
            layout = self.coding.layout(grads.dtype, self.channels.size)
            made = Bucket(range(len(shapes)), shapes, layout)
            if layout is None:
                average: Average = FullAverage(made.memory, self.channels)
            else:
                average = self.coding.average(made, self.channels)
            self.averages[key] = (made, average)
        return self.averages[key]


def _hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    made, average = state.of(bucket)
    grads = bucket.gradients()
    torch._foreach_copy_(made.views, grads)
    average.start(state.steps)
    state.steps += bucket.is_last()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

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
    plan = find(algorithm, options)
    if plan.value.carry != "gradients" or plan.options.get("momentum"):
        raise UnsupportedError(
            f"ddp_hook: {algorithm} carries {plan.value.carry}, and a hook of DistributedDataParallel sees "
            "gradients alone; use trigram.with_bagua"
        )
    if plan.options.get("warmup_steps"):
        raise UnsupportedError("ddp_hook: has no warm-up; register the hook when it is over")
    channels = Channels(resolve(group))
    return HookState(codings.make(plan.value.what, plan.options.get("block"), plan.options), channels), _hook
