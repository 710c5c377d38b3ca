"""The algorithms that average gradients, as communication hooks of ``DistributedDataParallel``.

PyTorch inspects the annotations of a hook, so this file does not postpone their evaluation."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trigram.algorithms.parse import find
from trigram.averaging.groups import ModelGroups
from trigram.errors import UnsupportedError
from trigram.gradients import compressors
from trigram.gradients.buckets import Bucket
from trigram.runtime import job
from trigram.runtime.world import AnyGroup, resolve
from trigram.training.options import Options


class HookState:
    """The state of a hook: an average with its residuals for each bucket of DDP."""

    def __init__(self, compressor: compressors.GradientCompressor, groups: ModelGroups) -> None:
        self.compressor, self.groups = compressor, groups
        self.steps = 0
        self.buckets: dict[int, tuple[list[int], Bucket]] = {}
        self.residuals: dict[int, dict[str, torch.Tensor]] = {}
        # Runs second phases and waits for averages, in the order of the buckets.
        self.thread = ThreadPoolExecutor(1, "trigram-ddp")
        self.job = job.here()

    def bucket_of(self, bucket: dist.GradBucket) -> Bucket:
        """Our bucket for a bucket of DDP. DDP rebuilds its buckets after the first step; residuals move
        along."""
        ids = [id(p) for p in bucket.parameters()]
        known = self.buckets.get(bucket.index())
        if known is not None and known[0] == ids:
            return known[1]
        if known is not None:
            for old_ids, old in self.buckets.values():
                old.average.fold()
                self.residuals |= dict(zip(old_ids, old.average.parts(old.views), strict=True))
            self.buckets.clear()
        grads = [g.detach() for g in bucket.gradients()]
        ours = self.compressor.bucket(range(len(grads)), grads, self.groups)
        for key, parts in zip(ids, ours.average.parts(ours.views), strict=True):
            for name, part in self.residuals.get(key, {}).items():
                parts[name].copy_(part)
        self.buckets[bucket.index()] = (ids, ours)
        return ours


def _hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with state.job.here():  # this may be a thread of autograd's
        return _average(state, bucket)


def _average(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    ours = state.bucket_of(bucket)
    average, grads = ours.average, bucket.gradients()
    if ours.gaps is not None:
        ours.memory.index_fill_(0, ours.gaps, 0)
    torch._foreach_copy_(ours.views, grads)
    average.start(state.steps)
    state.steps += bucket.is_last()
    # On a GPU the future records the events after which its result is ready.
    devices: list[Any] = [] if ours.memory.is_cpu else [ours.memory.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def finish() -> None:
        try:
            with state.job.here():
                average.wait()
            torch._foreach_copy_(grads, ours.views)
            future.set_result(bucket.buffer())
        except Exception as e:
            future.set_exception(e)  # type: ignore[arg-type]  # torch's stub is wrong

    state.thread.submit(finish)
    return future


def ddp_hook(algorithm: str, group: AnyGroup = None, **options: Any) -> tuple[HookState, Any]:
    """The state and hook for ``model.register_comm_hook(*trigram.ddp_hook("bytegrad"))``.

    Args:
        algorithm: An algorithm that averages gradients: gradient_allreduce, bytegrad, powersgd, topk,
            signsgd, or ``central/CODEC/sync``.
        group: The ranks that train the model; None: all.
        **options: The options of the algorithm, see docs/algorithms.md. ``warmup_steps`` must be 0,
            which is the default here: register the hook after the warm-up.

    Returns:
        The state and the hook, the two arguments of ``register_comm_hook``.

    Raises:
        UnsupportedError: The algorithm averages something else than gradients, or has a warm-up.
    """
    options.setdefault("warmup_steps", 0)
    if algorithm == "gradient_allreduce":
        options.pop("warmup_steps")
    chosen = find(algorithm, options)
    if chosen.value.carry != "gradients" or chosen.options.momentum:
        needs = "momentum correction" if chosen.options.momentum else chosen.value.carry
        raise UnsupportedError(
            f"ddp_hook: {algorithm} works on {needs}, but a communication hook of DistributedDataParallel "
            "receives only gradients; use trigram.with_bagua instead"
        )
    if chosen.options.warmup_steps:
        raise UnsupportedError(
            f"ddp_hook: warmup_steps={chosen.options.warmup_steps} is not supported; train these steps "
            "without the hook, then register it"
        )
    ranks = resolve(group)
    Options().check(chosen, ranks.size)
    groups = ModelGroups(ranks)
    return HookState(compressors.of(chosen, None), groups), _hook
