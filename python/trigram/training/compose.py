"""Composes an algorithm from its trigram: makes the hooks, the averages and the schedule for a model.

``who`` selects the ranks that average, ``what`` the codec, ``when`` the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.algorithms import compatibility, graphs
from trigram.algorithms.options import AlgorithmOptions
from trigram.algorithms.parse import COPIES
from trigram.algorithms.trigram import Algorithm
from trigram.averaging.groups import ModelGroups
from trigram.averaging.sparse import sparse_parameters
from trigram.codecs import find
from trigram.errors import MisuseError, UnsupportedError
from trigram.mixing.async_gossip import AsyncGossip
from trigram.mixing.central import Differences, Mean, Outer
from trigram.mixing.gossip import Choco, Edges, Mix, PushSum
from trigram.mixing.optimizer_state import OptimizerState
from trigram.mixing.outer_gossip import OuterGossip
from trigram.mixing.quorum import QuorumSteps
from trigram.mixing.share import Share
from trigram.mixing.step import AveragingStep
from trigram.training.gradient_sync import GradientSync
from trigram.training.gradients import compressors
from trigram.training.model_checks import AveragedOptimizer
from trigram.training.optimizer_kinds import check_state_dict, updates_values
from trigram.training.pace import default_fragments
from trigram.training.qadam import QAdam
from trigram.training.schedule import BackgroundSteps, EverySteps, StepSchedule
from trigram.training.sharded.elastic.copied_parts import CopiedParts
from trigram.training.sharded.recovery import Recovery
from trigram.training.sharded.updates import ShardedUpdates
from trigram.training.sharded.weights.gradient_buckets import ShardsCompressor
from trigram.training.step_hooks import StepHooks
from trigram.training.updating.fused_updates import FusedUpdates
from trigram.training.updating.shown_params import claim, disclaim
from trigram.training.weight_sync import WeightSync


def compose(
    model: nn.Module,
    groups: ModelGroups,
    algorithm: Algorithm,
    bucket_bytes: int,
    optimizer: Any,
    elastic: bool = False,
) -> StepHooks:
    """Installs the hooks of an algorithm on a model.

    Args:
        model: The module.
        groups: The model's process groups.
        algorithm: The algorithm.
        bucket_bytes: Size of a bucket of gradients in bytes.
        optimizer: The optimizer, for algorithms that use it; else None.
        elastic: The job is elastic.
    """
    if algorithm.options.sharded or algorithm.options.fused:
        claim(optimizer, model, algorithm.name)
        try:
            hooks = _compose(model, groups, algorithm, bucket_bytes, optimizer, elastic)
        except BaseException:
            disclaim(optimizer)
            raise
    else:
        hooks = _compose(model, groups, algorithm, bucket_bytes, optimizer, elastic)
    hooks.times.coded = algorithm.value.what != "full" or algorithm.average is not None
    return hooks


def _compose(
    model: nn.Module,
    groups: ModelGroups,
    algorithm: Algorithm,
    bucket_bytes: int,
    optimizer: Any,
    elastic: bool,
) -> StepHooks:
    options = algorithm.options
    if options.sharded:
        whole, divided = not updates_values(optimizer, options, algorithm.name), options.gradients == "shards"
        recovery = CopiedParts(groups, options.copies or COPIES) if elastic else Recovery()
        sharded = ShardedUpdates(
            model, groups, optimizer, whole, options.overlap, options.fused, divided, recovery
        )
        kind = ShardsCompressor(whole, options.fused) if divided else compressors.of(algorithm, optimizer)
        return GradientSync(model, groups, bucket_bytes, kind, sharded)
    if algorithm.gradients:
        updates = FusedUpdates(optimizer) if options.fused else None
        return GradientSync(model, groups, bucket_bytes, compressors.of(algorithm, optimizer), updates)
    make = lambda tensors: _schedule(tensors, groups, algorithm, optimizer)  # noqa: E731
    of_mean = options.second_moment == "mean"
    weights = WeightSync(model, groups, make, algorithm.in_step, of_mean)
    weights.times.asynchronous = algorithm.every is None
    if optimizer is not None and _averages_state(algorithm):
        weights.averaged = AveragedOptimizer(optimizer, f"{groups.name}: {type(model).__name__}")
    return weights


def warm(algorithm: Algorithm) -> compressors.GradientCompressor | None:
    """The compressor during an algorithm's warm-up: in full, with its robust aggregation if it has one."""
    rule = algorithm.aggregation
    return None if rule is None else compressors.make("full", AlgorithmOptions(), rule)


def check(algorithm: Algorithm, optimizer: Any, model: nn.Module) -> None:
    """Raises if the optimizer or the model does not fit the algorithm; sends nothing."""
    options = algorithm.options
    takes_real = {
        "state='sharded'": options.sharded,
        "fused=True": options.fused,
        "a robust aggregation": algorithm.aggregation is not None,
        "Adam's momentum": algorithm.value.carry == "momentum",
    }
    for name, p in model.named_parameters():
        reason = next((kind for kind, chosen in takes_real.items() if chosen and p.is_complex()), None)
        if reason is not None and p.requires_grad:
            raise UnsupportedError(
                f"{algorithm.name}: parameter {name} has dtype {p.dtype}, and {reason} takes real "
                "parameters; choose an algorithm without it, or keep the parameter as torch.view_as_real(p)"
            )
    if options.sharded or options.fused:
        updates_values(optimizer, options, algorithm.name)
    if options.sharded:
        check_state_dict(optimizer, algorithm.name)
    if algorithm.value.carry == "momentum":
        if not isinstance(optimizer, QAdam):
            raise MisuseError(f"{algorithm.name}: needs optimizer=trigram.QAdam(model.parameters(), ...)")
        if list(sparse_parameters(model)):
            compatibility.check(algorithm.name, {"QAdam's momentum", "modules with sparse=True"})
    elif options.momentum:
        if optimizer is None:
            raise MisuseError(
                f"{algorithm.name}: momentum= also needs optimizer=, to check that the optimizer has no "
                "momentum"
            )
        has_momentum = [k for g in optimizer.param_groups for k in ("momentum", "betas") if g.get(k)]
        if has_momentum:
            raise UnsupportedError(
                f"{algorithm.name}: momentum= together with an optimizer that has {has_momentum[0]} "
                "applies momentum twice and diverges; remove one of the two"
            )


def _averages_state(algorithm: Algorithm) -> bool:
    """Whether the algorithm can average the optimizer's state: central averages of full weights every h
    steps."""
    mean = algorithm.kind == "central" and algorithm.value.what == "full" and algorithm.in_step
    return mean and not algorithm.gradients and algorithm.step is None


def _schedule(
    tensors: list[list[torch.Tensor]], groups: ModelGroups, algorithm: Algorithm, optimizer: Any
) -> StepSchedule:
    """The schedule (``when``) of the averaging steps."""
    options = algorithm.options
    if algorithm.every is None:
        # A registered step may count on its calls being those of one averaging step after the other.
        parts = _fragments(tensors, options.fragments or (None if algorithm.step is None else 1))
        if algorithm.kind != "gossip" or algorithm.step is not None:
            each = [_steps(part, groups, algorithm) for part in parts]
            return BackgroundSteps(each, groups, options.staleness, options.script)
        graph = graphs.find(algorithm.graph, groups.size)
        codec = None if algorithm.value.what == "full" else find(algorithm.value.what, options.block)
        plain = codec is None and len(tensors) == 1
        weights = [
            AveragingStep([t for same in part for t in same], groups, None if plain else torch.float32)
            for part in parts
        ]
        return AsyncGossip(weights, groups, graph, codec, options.staleness, options.script)
    if options.quorum is not None:
        assert algorithm.every is not None
        one = AveragingStep([t for same in tensors for t in same], groups, torch.float32)
        one.exact = all(same[0].dtype != torch.float64 for same in tensors)
        one.heals = groups.sample_weight is not None
        return QuorumSteps(one, groups, algorithm.every, options.quorum, options.grace)
    fragments = [
        _steps(part, groups, algorithm) for part in _fragments(tensors, options.fragments, algorithm.every)
    ]
    if optimizer is not None and _averages_state(algorithm):
        fragments[0].append(OptimizerState(groups, optimizer))
    return EverySteps(fragments, groups, algorithm.every, options.overlap, options.due)


def _fragments(
    tensors: list[list[torch.Tensor]], asked: int | None, every: int = 0
) -> list[list[list[torch.Tensor]]]:
    """The weights in fragments of about equal size, in the model's order; each a list per dtype.

    Args:
        tensors: The weights, a list per dtype.
        asked: How many; None: as many as their size asks for, and the parameters allow.
        every: Training steps that their number must divide; 0: any number will do.
    """
    if asked is None:
        count = default_fragments(sum(t.numel() * t.element_size() for same in tensors for t in same))
    else:
        count = min(asked, 1 + sum(len(same) for same in tensors))  # one more than there can be
    if count == 1:
        return [tensors]
    fragments = _divided(tensors, count)
    if asked is None:
        return [fragment for fragment in fragments if fragment]
    if not all(fragments):
        most = next(
            few for few in range(count - 1, 0, -1) if every % few == 0 and all(_divided(tensors, few))
        )
        raise MisuseError(
            f"with_bagua: fragments={asked} leaves fragments without a parameter, because a parameter is "
            f"never divided and some are large; use fragments={most}"
        )
    return fragments


def _divided(tensors: list[list[torch.Tensor]], count: int) -> list[list[list[torch.Tensor]]]:
    """The weights in so many fragments, of which some may be empty."""
    fragments: list[list[list[torch.Tensor]]] = [[] for _ in range(count)]
    for same in tensors:
        parts: list[list[torch.Tensor]] = [[] for _ in range(count)]
        total, before = sum(t.numel() for t in same), 0
        for t in same:
            middle = before + t.numel() / 2
            parts[min(count - 1, int(count * middle / max(1, total)))].append(t)
            before += t.numel()
        for fragment, part in zip(fragments, parts, strict=True):
            if part:
                fragment.append(part)
    return fragments


def _steps(
    tensors: list[list[torch.Tensor]], groups: ModelGroups, algorithm: Algorithm
) -> list[AveragingStep]:
    """The averaging steps (``who`` and ``what``): one per dtype, or one for all dtypes in float32."""
    options, what = algorithm.options, algorithm.value.what
    all_tensors = [t for same in tensors for t in same]
    if algorithm.step is not None:
        steps: list[AveragingStep] = [algorithm.step(same, groups, **algorithm.arguments) for same in tensors]
        return steps
    if algorithm.kind == "push":
        return [PushSum(all_tensors, groups, graphs.find(f"push:{algorithm.graph}", groups.size))]
    if what.startswith("share"):
        return [Share(same, groups, float(what.partition(":")[2])) for same in tensors]
    power = int(what.partition(":")[2]) if what.startswith("powersgd") else None
    codec = find(what, options.block) if what != "full" and power is None else None
    outer = Outer(options.outer_lr, options.outer_momentum)
    if algorithm.kind == "central":
        if codec is None and power is None and outer == Outer():
            return [Mean(same, groups, algorithm.aggregation) for same in tensors]
        rule = algorithm.aggregation
        return [Differences(all_tensors, groups, outer, codec, power, rule, options.feedback)]
    graph = graphs.find(algorithm.graph, groups.size)
    if codec is None and outer != Outer():
        return [OuterGossip(all_tensors, groups, graph, outer)]
    if codec is None:
        return [Mix(same, groups, graph) for same in tensors]
    make = Edges if graph.changes else Choco
    return [make(all_tensors, groups, graph.closure(), codec, options.gamma)]
