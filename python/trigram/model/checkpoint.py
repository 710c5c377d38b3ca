"""The state of an algorithm in a checkpoint."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed, ranks_that, ranks_unlike_first
from trigram.errors import MisuseError
from trigram.gradients.buckets import assign
from trigram.gradients.gradient_sync import GradientSync
from trigram.model.wrapped import WrappedModel, lookup
from trigram.steps.step_hooks import StepHooks
from trigram.training.weight_sync import WeightSync

_COMMON = ("agreed", "velocity", "centre")
"""The tensors of an averaging step's state that are the same on all ranks."""


def algorithm_state(model: nn.Module) -> dict[str, Any]:
    """The state of the algorithm (residuals, counters, ...), for ``torch.save``; all ranks call it, between
    steps.

    Each rank saves its state separately. Averaging steps under way are ended and applied first, so call
    ``model.state_dict()`` afterwards.

    Args:
        model: A model given to :func:`trigram.with_bagua`.
    """
    wrapped = lookup(model, "algorithm_state")
    if wrapped.tuner is not None:
        wrapped.tuner.pause()
    state: dict[str, Any] = {
        "algorithm": wrapped.algorithm.title,
        "trigram": _trigram(wrapped),
        "world_size": wrapped.size,
        "bucket_bytes": wrapped.bucket_bytes,
        "behind": wrapped.earlier_steps,
        "warming": wrapped.warming,
    }
    if wrapped.tuner is not None:
        state["auto"] = wrapped.tuner.saved()
    if wrapped.hooks is not None:
        wrapped.hooks.drain(between_steps=True)
        if isinstance(wrapped.hooks, GradientSync) and wrapped.states is None:
            wrapped.hooks.order.learn()  # of an elastic job in the next step, in which a rank may be lost
        state["carrier"] = copy.deepcopy(wrapped.hooks.state())
    if isinstance(wrapped.hooks, GradientSync) and wrapped.hooks.buckets.owed:
        state["owed"] = wrapped.hooks.buckets.owed_by_index()
    return state


def load_algorithm_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores the state that :func:`algorithm_state` returned; all ranks call it, between steps, after
    ``model.load_state_dict``.

    Every rank loads the state that the same rank saved. The algorithm may be written in another way (its
    name, or its trigram), and buckets may have another size; residuals are then moved to the new buckets. The
    number of ranks may differ if the state holds nothing that belongs to a rank, such as residuals; then any
    rank's state will do. All ranks check their states first: either all load, or none.

    Args:
        model: A model given to :func:`trigram.with_bagua`.
        state: What :func:`algorithm_state` returned.

    Raises:
        MisuseError: The state does not fit the model, its algorithm or the number of ranks; the message says
            what differs. All ranks raise it.
    """
    wrapped = lookup(model, "load_algorithm_state")
    if wrapped.tuner is not None:
        wrapped.tuner.resume(state)
    problem = _mismatch(wrapped, state)
    proceeds = not problem and wrapped.warming and not state["warming"]
    with _kept_weights(model, wrapped, proceeds):
        if isinstance(wrapped.hooks, WeightSync):
            # Before the states are compared: others may wait for this rank in an averaging step.
            wrapped.hooks.drain(between_steps=True)
        divided = "pieces" in state.get("carrier", ()) if not problem else False
        _agree(problem, problem or f"{state['algorithm']} {state['warming']} {divided}", wrapped.groups)
        if proceeds:
            wrapped.proceed()
    if wrapped.hooks is not None and "carrier" in state:
        try:
            if isinstance(wrapped.hooks, WeightSync) and _divides_otherwise(wrapped.hooks, state["carrier"]):
                _load_divided(model, wrapped, state, divided)
            else:
                _load(wrapped.hooks, state, wrapped.groups)
        except MisuseError:
            if proceeds:
                with _kept_weights(model, wrapped, proceeds):
                    wrapped.end()
                    wrapped.begin(model, wrapped.algorithm, wrapped.optimizer)
            raise
    wrapped.earlier_steps = state["behind"]


def _trigram(wrapped: WrappedModel) -> str:
    return f"{wrapped.algorithm.value} carrying {wrapped.algorithm.value.carry}"


def _mismatch(wrapped: WrappedModel, state: Any) -> str:
    """Why the state cannot belong to this model; empty if it may."""
    if not isinstance(state, dict) or not {"algorithm", "world_size", "behind", "warming"} <= state.keys():
        return "the argument is not what trigram.algorithm_state returned"
    title, size = wrapped.algorithm.title, wrapped.size
    if "trigram" in state:
        same = state["trigram"] == _trigram(wrapped)
    else:  # of an earlier version: "name (trigram)", or the trigram
        same = state["algorithm"].rpartition("(")[2].rstrip(")") == str(wrapped.algorithm.value)
    if not same:
        return (
            f"the state was saved by {state['algorithm']}, but this model uses {title}; use the same "
            "algorithm, or load only the weights, saved under trigram.consensus"
        )
    if state["warming"] and not wrapped.warming and wrapped.hooks is not None:
        return (
            "the state was saved in the warm-up, which has ended here; wrap the model anew (trigram.unwrap, "
            "trigram.with_bagua), then load the state"
        )
    if state["world_size"] != size:
        mine = wrapped.hooks.state() if wrapped.hooks is not None else {}
        owned = _of_one_rank(state.get("carrier", mine), "") or ("owed" if "owed" in state else "")
        if owned:
            return (
                f"the state was saved on {state['world_size']} ranks and holds what belongs to one of them "
                f"({owned}), but {size} ranks train this model; use {state['world_size']} ranks, or load "
                "only the weights, saved under trigram.consensus"
            )
    return ""


def _agree(problem: str, common: str, groups: ModelGroups | None) -> None:
    """Raises on all ranks if one of them has a problem, or if what must be common to their states is not."""
    others = ranks_that(bool(problem), groups.control) if groups is not None else []
    if problem:
        raise MisuseError(f"load_algorithm_state: {problem}")
    if others:
        raise MisuseError(
            f"load_algorithm_state: the state does not fit on rank(s) {listed(others)}, see the error there; "
            "no rank has loaded anything"
        )
    unlike = ranks_unlike_first(common, groups.control) if groups is not None else []
    if groups is not None and unlike:
        raise MisuseError(
            f"load_algorithm_state: rank(s) {listed(unlike)} were given a state of another training, or of "
            f"another moment, than rank {groups.control.ranks[0]}; each rank loads the state that it saved "
            "itself"
        )


@contextlib.contextmanager
def _kept_weights(model: nn.Module, wrapped: WrappedModel, proceeds: bool) -> Iterator[None]:
    """The weights and buffers do not change in the block, unless it raises: they were loaded before.

    Args:
        model: The model.
        wrapped: What trains it.
        proceeds: Whether the warm-up ends in the block.
    """
    changes = isinstance(wrapped.hooks, WeightSync) or proceeds
    tensors = [*model.parameters(), *model.buffers()] if changes and wrapped.hooks is not None else []
    with torch.no_grad():
        kept = [t.clone() for t in tensors]
        yield
        for t, was in zip(tensors, kept, strict=True):
            if not torch.equal(t, was):
                t.copy_(was)


def _load(hooks: StepHooks, state: dict[str, Any], groups: ModelGroups | None) -> None:
    """Loads the state of the hooks, after all ranks have checked theirs."""
    saved = state["carrier"]
    problem, layout, before = "", None, {}
    if isinstance(hooks, GradientSync) and "buckets" in saved:
        before = hooks.state()
        layout = hooks.buckets.bucket_bytes, hooks.buckets.order
        problem = _take_layout(hooks, saved, state.get("bucket_bytes", hooks.buckets.bucket_bytes))
    here, there = ({k: v for k, v in of.items() if k != "pieces"} for of in (hooks.state(), saved))
    problem = problem or _difference(here, there, "")
    try:
        _agree(problem, f"{saved.get('order')} {state.get('bucket_bytes')}", groups)
    except MisuseError:
        if layout is not None:
            _rebuild(hooks, *layout)
            hooks.load(before)
        raise
    hooks.load(saved)
    if isinstance(hooks, GradientSync):
        hooks.buckets.load_owed(state.get("owed", {}))
    if layout is not None and isinstance(hooks, GradientSync) and hooks.buckets.bucket_bytes != layout[0]:
        _rebuild(hooks, layout[0], hooks.buckets.order)


def _load_divided(model: nn.Module, wrapped: WrappedModel, state: dict[str, Any], divided: bool) -> None:
    """Loads a state of fragments that divide parameters, into hooks whose fragments do not, or the other way
    round: the hooks begin again with fragments like those."""
    algorithm, hooks = wrapped.algorithm, wrapped.hooks
    assert hooks is not None
    before = copy.deepcopy(hooks.state())
    weights = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

    def keep_weights() -> None:  # hooks that begin give all ranks those of one
        with torch.no_grad():
            coalesced.copy_all([t.detach() for t in (*model.parameters(), *model.buffers())], weights)

    try:
        wrapped.restart(replace(algorithm, options=replace(algorithm.options, pieces=divided)))
    except MisuseError:  # so many fragments of that kind are not to be had: the state is of another model
        assert wrapped.hooks is not None
        wrapped.hooks.load(before)
        keep_weights()
        _load(wrapped.hooks, state, wrapped.groups)
        return
    keep_weights()
    assert wrapped.hooks is not None
    try:
        _load(wrapped.hooks, state, wrapped.groups)
    except MisuseError:
        wrapped.restart(algorithm).load(before)
        keep_weights()
        raise


def _divides_otherwise(hooks: WeightSync, saved: dict[str, Any]) -> bool:
    """Whether a saved state has several fragments, which divide parameters and those here do not, or the
    other way round."""
    rounds = saved.get("rounds")
    if ("pieces" in saved) == ("pieces" in hooks.state()) or not isinstance(rounds, dict):
        return False
    parts = rounds.get("exchanges") or rounds.get("references") or ()
    return "pieces" in saved or len(parts) > 1


def _take_layout(hooks: GradientSync, saved: dict[str, Any], bucket_bytes: int) -> str:
    """Gives the buckets the order and size that they had when the state was saved; returns why it cannot."""
    order = saved["order"] or hooks.dense[::-1]
    if sorted(order) != sorted(hooks.dense):
        return (
            f"the state has {len(order)} parameters that were trained, but {len(hooks.dense)} are trained "
            "here, or others; set requires_grad as it was"
        )
    if len(assign(hooks.params, order, bucket_bytes)) != len(saved["buckets"]):
        return (
            f"the state has {len(saved['buckets'])} buckets, which does not follow from the sizes of the "
            "parameters here; use the same model and bucket_mb"
        )
    _rebuild(hooks, bucket_bytes, order)
    return ""


def _rebuild(hooks: StepHooks, bucket_bytes: int, order: list[int]) -> None:
    """Builds buckets of another size or order, unless they have it; residuals move with the parameters."""
    assert isinstance(hooks, GradientSync)
    hooks.buckets.bucket_bytes = bucket_bytes
    if [b.params for b in hooks.buckets] != assign(hooks.params, order, bucket_bytes):
        hooks.order.build(order)


def _of_one_rank(state: Any, at: str) -> str:
    """The place in a state of a tensor that belongs to one rank; empty if there is none."""
    if isinstance(state, torch.Tensor):
        return at.lstrip(".")
    if isinstance(state, dict):
        parts = [(f"{at}.{k}", v) for k, v in state.items() if k not in _COMMON or "buckets" in at]
    elif isinstance(state, list | tuple):
        parts = [(f"{at}[{k}]", v) for k, v in enumerate(state)]
    else:
        return ""
    return next((found for place, part in parts if (found := _of_one_rank(part, place))), "")


def _difference(mine: Any, saved: Any, at: str) -> str:
    """Why a saved state does not fit in place of this model's; empty if it does."""
    what = f"the state{at and f' at {at}'} does not fit: "
    if isinstance(mine, torch.Tensor) or isinstance(saved, torch.Tensor):
        here, there = (
            f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else f"{t!r}"
            for t in (mine, saved)
        )
        return (
            "" if here == there else f"{what}it is {there}, and {here} here; use the same model and options"
        )
    if isinstance(mine, dict) and isinstance(saved, dict):
        if all(isinstance(k, int) for k in (*mine, *saved)):
            return ""  # references by neighbour, made when they are needed
        if mine.keys() != saved.keys():
            return (
                f"{what}it has {', '.join(map(str, saved)) or 'nothing'}, and "
                f"{', '.join(map(str, mine)) or 'nothing'} is expected; use the same options"
            )
        parts = [(f"{at}.{k}", mine[k], saved[k]) for k in mine if k != "order"]
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple):
        if len(mine) != len(saved):
            return (
                f"{what}it has {len(saved)} parts, and {len(mine)} are expected; use the same model and "
                "options, such as fragments="
            )
        parts = [(f"{at}[{k}]", a, b) for k, (a, b) in enumerate(zip(mine, saved, strict=True))]
    else:
        return ""
    return next((found for place, one, other in parts if (found := _difference(one, other, place))), "")
