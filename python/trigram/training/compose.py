"""From a trigram to what hooks a model: who, what and when put together.

The eight corners and their relatives are all here, in one page: a codec or a graph is looked up by
name, and timing decides which rounds run it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.algorithms import graphs
from trigram.algorithms.names import Plan
from trigram.codecs.codec import find
from trigram.errors import MisuseError, UnsupportedError
from trigram.mixing.async_gossip import Pairs
from trigram.mixing.gossip import Choco, Edges, Mix, PushSum
from trigram.mixing.optimizer_state import OptimizerState
from trigram.mixing.step import Differences, Exchange, Mean, Outer
from trigram.training import compressors as codings
from trigram.training.gradient_sync import Gradients
from trigram.training.qadam import QAdam
from trigram.training.step_hooks import Carrier, Channels
from trigram.training.weight_sync import Background, InStep, Rounds, Weights


def compose(model: nn.Module, channels: Channels, plan: Plan, bucket_bytes: int, optimizer: Any) -> Carrier:
    """Hooks a model with an algorithm.

    Args:
        model: The module.
        channels: Where to talk.
        plan: The algorithm.
        bucket_bytes: Size of a bucket of gradients.
        optimizer: For those that act on it.
    """
    if plan.gradients:
        return Gradients(model, channels, bucket_bytes, _coding(plan, optimizer))
    make = lambda tensors: _rounds(tensors, channels, plan, optimizer)  # noqa: E731
    return Weights(model, channels, make, plan.every is not None)


def warm(plan: Plan) -> codings.Coding | None:
    """How gradients travel during an algorithm's warm-up: in full, by its robust rule if it has one."""
    return None if plan.rule is None else codings.make("full", None, {}, plan.rule)


def check(plan: Plan, optimizer: Any) -> None:
    """Refuses an optimizer that does not fit an algorithm, before anything is begun."""
    what, options = plan.value.what, plan.options
    if plan.value.carry == "momentum":
        if not isinstance(optimizer, QAdam):
            raise MisuseError(f"{plan.name}: needs optimizer=trigram.QAdam(model.parameters(), ...)")
    elif options.get("momentum"):
        if optimizer is None:
            raise MisuseError(
                f"{plan.name}: momentum= needs optimizer=, to see that it has no momentum of its own"
            )
        own = [k for g in optimizer.param_groups for k in ("momentum", "betas") if g.get(k)]
        if own:
            raise UnsupportedError(
                f"{plan.name}: momentum= beside an optimizer with {own[0]} diverges (momentum of momentum); "
                "use one of them"
            )
    elif optimizer is not None and not _averages_state(plan):
        raise UnsupportedError(f"{plan.name}: {what} does not act on an optimizer; leave optimizer= out")


def _averages_state(plan: Plan) -> bool:
    """Averages of weights every h steps may average what the optimizer remembers too."""
    mean = plan.kind == "central" and plan.value.what == "full" and plan.every is not None
    return mean and not plan.gradients and plan.exchange is None


def _coding(plan: Plan, optimizer: Any) -> codings.Coding:
    block = plan.options.get("block")
    if plan.value.carry == "momentum":
        return codings.Momenta(optimizer, plan.options["bits"], block)
    return codings.make(plan.value.what, block, plan.options, plan.rule)


def _rounds(tensors: list[list[torch.Tensor]], channels: Channels, plan: Plan, optimizer: Any) -> Rounds:
    """Timing, over exchanges."""
    options = plan.options
    if plan.every is None and plan.kind == "gossip" and plan.exchange is None:
        together = [t for same in tensors for t in same]
        graph = graphs.find(plan.graph, channels.size)
        codec = None if plan.value.what == "full" else find(plan.value.what, options.get("block"))
        plain = codec is None and len(tensors) == 1
        flat = Exchange(together, channels, None if plain else torch.float32)
        return Pairs(flat, channels, graph, codec, options["staleness"], options["script"])
    exchanges = _exchanges(tensors, channels, plan)
    if plan.every is None:
        return Background(exchanges, channels, options["staleness"], options["script"])
    if optimizer is not None and _averages_state(plan):
        exchanges.append(OptimizerState(channels, optimizer))
    return InStep(exchanges, channels, plan.every, options["overlap"])


def _exchanges(tensors: list[list[torch.Tensor]], channels: Channels, plan: Plan) -> list[Exchange]:
    """Who and what: one exchange for each dtype, or one for all where differences are in float32."""
    options, what = plan.options, plan.value.what
    together = [t for same in tensors for t in same]
    if plan.exchange is not None:
        timing = ("overlap", "warmup_steps", "script", "staleness", "outer_lr", "outer_momentum")
        own = {k: v for k, v in options.items() if k not in timing}
        made: list[Exchange] = [plan.exchange(same, channels, **own) for same in tensors]
        return made
    if plan.kind == "push":
        return [PushSum(together, channels, graphs.find(f"push:{plan.graph}", channels.size))]
    power = int(what.partition(":")[2]) if what.startswith("powersgd") else None
    codec = find(what, options.get("block")) if what != "full" and power is None else None
    if plan.kind == "central":
        outer = Outer(options["outer_lr"], options["outer_momentum"])
        if codec is None and power is None and outer == Outer():
            return [Mean(same, channels, plan.rule) for same in tensors]
        return [Differences(together, channels, outer, codec, power, plan.rule)]
    graph = graphs.find(plan.graph, channels.size)
    if codec is None:
        return [Mix(same, channels, graph) for same in tensors]
    make = Edges if graph.changes else Choco
    return [make(together, channels, graph.closure(), codec, options["gamma"])]
