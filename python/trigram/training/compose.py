"""Composes an algorithm from its trigram: makes the hooks, the averages and the schedule for a model.

``who`` selects the ranks that average, ``what`` the codec, ``when`` the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
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
from trigram.collectives.coalesced import now
from trigram.errors import MisuseError, UnsupportedError
from trigram.gradients import compressors
from trigram.gradients.gradient_sync import GradientSync
from trigram.gradients.updating.fused_updates import FusedUpdates
from trigram.gradients.updating.shown_params import claim, disclaim
from trigram.mixing.async_gossip.scripted import ScriptedGossip
from trigram.mixing.async_gossip.steps import AsyncGossip
from trigram.mixing.central import Differences, Mean, Outer
from trigram.mixing.gossip import Choco, Edges, Mix, PushSum
from trigram.mixing.optimizer_state import OptimizerState
from trigram.mixing.outer_gossip import OuterGossip
from trigram.mixing.quorum.average import MeanOfWeights, Rule
from trigram.mixing.quorum.steps import QuorumSteps
from trigram.mixing.share import Share
from trigram.mixing.step import AveragingStep
from trigram.optimizers.optimizer_kinds import check_state_dict, updates_values
from trigram.optimizers.qadam import QAdam
from trigram.sharded.elastic.copied_parts import CopiedParts
from trigram.sharded.recovery import Recovery
from trigram.sharded.updates import ShardedUpdates
from trigram.sharded.weights.gradient_buckets import ShardsCompressor
from trigram.steps.step_hooks import StepHooks
from trigram.training.fragments import Fragment, divide
from trigram.training.model_checks import AveragedOptimizer
from trigram.training.schedule import BackgroundSteps, EverySteps, StepSchedule
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
    pieces = options.pieces and (algorithm.step is None or _takes_pieces(algorithm.step))
    make = lambda weights, pieces: _schedule(weights, pieces, groups, algorithm, optimizer)  # noqa: E731
    of_mean = options.second_moment == "mean"
    weights = WeightSync(model, groups, make, algorithm.in_step, of_mean, pieces)
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
    if isinstance(optimizer, Sequence | Mapping | Set):
        raise MisuseError(
            f"{algorithm.name}: optimizer= takes one optimizer, not a {type(optimizer).__name__}; with "
            "several, pass none, or the one whose state is to be averaged or divided"
        )
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
    weights: Fragment, pieces: bool, groups: ModelGroups, algorithm: Algorithm, optimizer: Any
) -> StepSchedule:
    """The schedule (``when``) of the averaging steps; ``pieces``: parameters may be divided."""
    options = algorithm.options
    if algorithm.every is None:
        # A registered step may count on its calls being those of one averaging step after the other.
        parts = divide(weights, options.fragments or (None if algorithm.step is None else 1), 0, pieces)
        if algorithm.kind != "gossip" or algorithm.step is not None:
            each = [_steps(part, groups, algorithm) for part in parts]
            return BackgroundSteps(each, groups, options.staleness, options.script)
        graph = graphs.find(algorithm.graph, groups.size)
        codec = None if algorithm.value.what == "full" else find(algorithm.value.what, options.block)
        dtype = None if codec is None and len(weights) == 1 else torch.float32
        snapshots = [AveragingStep([p for same in part for p in same], groups, dtype) for part in parts]
        if options.script is not None:
            return ScriptedGossip(snapshots, groups, graph, codec, options.script)
        return AsyncGossip(snapshots, groups, graph, codec, options.staleness)
    if options.quorum is not None:
        assert algorithm.every is not None
        outer = Outer(options.outer_lr, options.outer_momentum)
        several: list[Rule] = []
        for part in divide(weights, options.fragments, algorithm.every, pieces):
            flat = [p for same in part for p in same]
            mean = outer == Outer()
            several.append(MeanOfWeights(flat, groups) if mean else Differences(flat, groups, outer))
        return QuorumSteps(several, groups, algorithm.every, options.quorum, options.grace, options.overlap)
    parts = divide(weights, options.fragments, algorithm.every, pieces)
    fragments = [_steps(part, groups, algorithm) for part in parts]
    if optimizer is not None and _averages_state(algorithm):
        fragments[0].append(OptimizerState(groups, optimizer))
    return EverySteps(fragments, groups, algorithm.every, options.overlap, options.due)


def _takes_pieces(step: Callable[..., Any]) -> bool:
    return getattr(step, "takes_pieces", False)


def _steps(fragment: Fragment, groups: ModelGroups, algorithm: Algorithm) -> list[AveragingStep]:
    """The averaging steps (``who`` and ``what``): one per dtype, or one for all dtypes in float32."""
    options, what = algorithm.options, algorithm.value.what
    step = algorithm.step
    if step is not None:  # of a user, whose class may look at its tensors
        given = [same if _takes_pieces(step) else now(same) for same in fragment]
        return [step(same, groups, **algorithm.arguments) for same in given]
    parts = [part for same in fragment for part in same]
    if algorithm.kind == "push":
        return [PushSum(parts, groups, graphs.find(f"push:{algorithm.graph}", groups.size))]
    if what.startswith("share"):
        return [Share(same, groups, float(what.partition(":")[2])) for same in fragment]
    power = int(what.partition(":")[2]) if what.startswith("powersgd") else None
    codec = find(what, options.block) if what != "full" and power is None else None
    outer = Outer(options.outer_lr, options.outer_momentum)
    if algorithm.kind == "central":
        if codec is None and power is None and outer == Outer():
            return [Mean(same, groups, algorithm.aggregation) for same in fragment]
        rule = algorithm.aggregation
        return [Differences(parts, groups, outer, codec, power, rule, options.feedback)]
    graph = graphs.find(algorithm.graph, groups.size)
    if codec is None and outer != Outer():
        return [OuterGossip(parts, groups, graph, outer)]
    if codec is None:
        return [Mix(same, groups, graph) for same in fragment]
    make = Edges if graph.changes else Choco
    return [make(parts, groups, graph.closure(), codec, options.gamma)]
