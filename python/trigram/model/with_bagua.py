"""``with_bagua``: one line in an existing training script; ``unwrap``, its inverse; and ``switch``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm, Trigram
from trigram.averaging.gradient_filter import GradientFilter
from trigram.collectives.consistency import listed, ranks_that
from trigram.elastic.places import counting
from trigram.errors import MismatchError, MisuseError, UnsupportedError
from trigram.model import methods, planned
from trigram.model.auto import Auto
from trigram.model.request import Request, check_copies, check_elastic, request
from trigram.model.shards import check_shards, collect, follow, give_back
from trigram.model.wrapped import WrappedModel, lookup, remove, wrapped_models
from trigram.plan import measuring, settle
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup
from trigram.training.compose import check
from trigram.training.options import Options, checked_filters, ignored_names
from trigram.training.weight_sync import WeightSync

Model = TypeVar("Model", bound=nn.Module)


def with_bagua(
    model: Model,
    algorithm: str | Trigram | None = None,
    *,
    optimizer: Any = None,
    group: AnyGroup = None,
    bucket_mb: float | None = None,
    sample_weight: Any = None,
    check_finite: bool = False,
    check_replicas: int = 0,
    broadcast_buffers: bool = True,
    ignore: Sequence[str] = (),
    filters: Sequence[GradientFilter] | None = (),
    elastic: bool | Sequence[Any] = False,
    plan: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Model:
    """Trains ``model`` data-parallel: call it instead of ``DistributedDataParallel(model)``.

    It installs hooks on the module and returns it; the keys of its ``state_dict`` do not change. All ranks
    get the weights and buffers of the group's first rank. Copies and pickles of the model have no hooks. All
    ranks of the group call it. It gives the module the methods ``no_sync()`` and ``join()``, unless its class
    has them.

    Under algorithms that average weights (gossip, local SGD, DiLoCo, all asynchronous ones) the ranks hold
    different weights between averaging steps: evaluate and save inside :func:`trigram.consensus`, or save
    :func:`trigram.consensus_state_dict`.

    Args:
        model: Its parameters are on one device, with the same names, shapes and dtypes on all ranks.
        algorithm: A name of :func:`trigram.algorithms`, a trigram written out, or a
            :class:`Trigram`. None: ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``. ``auto``,
            ``auto:close`` and ``auto:any`` choose while the model trains, see docs/planning.md.
        optimizer: Needed by ``qadam``, ``sharded`` and ``fused=True``; ``local_sgd`` averages its state too
            if it is given; the others ignore it.
        group: The ranks that train it: a :class:`trigram.Group`, a process group of torch or a DeviceMesh
            with one dimension; None: all.
        bucket_mb: Size of a bucket of gradients, in MiB; None: 4, or 25 for a model on GPUs. ``auto`` begins
            with it.
        sample_weight: How much this rank counts in averages, for example if batches are unequal: a number, or
            a callable that returns it and is called once per step, when backward begins. Averages are
            ``sum(w_i g_i) / sum(w_i)``. A rank with weight 0 contributes nothing, even if its gradients are
            NaN.
        check_finite: Each rank checks its gradients for NaN and infinity before it sends them; if one rank
            finds some, all ranks raise a ``CorruptError`` that names it. It costs one read of the gradients
            and a small message per step. Without it the mean becomes NaN on all ranks.
        check_replicas: Number of steps after which all ranks compare a hash of their weights; if one differs,
            all ranks raise a ``CorruptError`` that names it. 0: never.
        broadcast_buffers: Algorithms that average gradients give all ranks the first rank's buffers before
            each forward pass, like ``DistributedDataParallel``. False: each rank keeps its own.
        ignore: The names of parameters and buffers that trigram leaves alone: each rank keeps its own, from
            the start.
        filters: Look at this rank's gradients, or change them, before they are averaged, in this order: see
            :class:`trigram.averaging.GradientFilter`. For algorithms that average gradients.
        elastic: Training continues when ranks are lost, and ranks can join while it runs, see
            docs/elastic.md. It needs ``optimizer``, whose state a joining rank receives. True, or a sequence
            of other objects whose state it receives: schedulers, GradScalers, anything with ``state_dict``
            and ``load_state_dict``.
        plan: A plan.json of ``trigram plan``, the same on all ranks: its decision sets the algorithm, its
            options and the size of buckets, see docs/planning.md. None: ``$TRIGRAM_PLAN``, if ``algorithm``
            is None. Other options are given to its algorithm.
        **options: The options of the algorithm, see docs/algorithms.md. If the algorithm comes from
            ``$TRIGRAM_ALGORITHM``, options that it does not have are ignored, and rank 0 logs their names.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: The algorithm, an option or their combination is not supported; the message says
            why, and lists what is.
        ConfigError: The plan cannot be read.
        MismatchError: The models, or the plans, differ between ranks; all ranks raise it.
        MisuseError: Both ``algorithm`` and ``plan`` are given; or the model is hooked
            already, has no parameter to train, or has no parameter or buffer of
            a name in ``ignore``.
    """
    extras = Options(
        sample_weight,
        check_finite,
        check_replicas,
        broadcast_buffers,
        ignored_names(model, ignore),
        checked_filters(filters),
    )
    asked = request(
        model,
        algorithm,
        options,
        extras=extras,
        optimizer=optimizer,
        group=group,
        bucket_mb=bucket_mb,
        elastic=elastic,
        plan=plan,
    )
    if is_wrapped(model):
        raise MisuseError(
            "with_bagua: this model is hooked already; call trigram.switch to change its algorithm, or "
            "trigram.unwrap before it is wrapped again"
        )
    asked.check(model)
    check_shards(model, asked.algorithm)
    if (earlier := wrapped_models.get(model)) is not None:
        remove(earlier)  # of a job that has ended
    ranks = asked.ranks()
    _wrap(model, asked.among(ranks, model), ranks)
    return model


def _wrap(model: nn.Module, asked: Request, ranks: Group) -> None:
    """Installs the hooks; all ranks call it, and raise together."""
    elastic = asked.elastic is not False
    wrapped = wrapped_models[model] = WrappedModel(
        model,
        asked.algorithm,
        ranks,
        int(asked.bucket_mb * (1 << 20)),
        _used(asked.optimizer, asked.algorithm, elastic),
        asked.extras,
        asked.states,
        str(asked.automatic or ""),
    )
    if asked.automatic is not None:
        wrapped.tuner = Auto(wrapped, asked.automatic)
    methods.add(model)
    if asked.measured is not None and ranks.size > 1:
        measuring.Watch(model, ranks, asked.measured, planned.conclude)
    follow(model, elastic)
    collect(model)


def _used(optimizer: Any, algorithm: Algorithm, elastic: bool) -> Any:
    """The optimizer as far as the algorithm uses it. In an elastic job it is part of the training state,
    which most algorithms leave alone."""
    uses = algorithm.options.sharded or algorithm.value.carry == "momentum"
    return optimizer if uses or not elastic else None


def is_wrapped(model: nn.Module) -> bool:
    """Whether :func:`with_bagua` trains the model in the present job."""
    wrapped = wrapped_models.get(model)
    return wrapped is not None and not wrapped.stale


def unwrap(model: nn.Module) -> nn.Module:
    """Makes the model a plain module again; all ranks call it, between steps.

    Averaging steps under way are ended and applied first; weights that differ between ranks stay different,
    see :func:`trigram.consensus`. Then the hooks and the methods ``no_sync`` and ``join`` are removed.
    :func:`with_bagua` can wrap the model again. After ``trigram.shutdown`` it sends nothing.

    Args:
        model: A model given to :func:`with_bagua`, or a ``trigram.DistributedDataParallel``.

    Returns:
        The module: ``model``, or its ``module`` if it is a ``trigram.DistributedDataParallel``.

    Raises:
        MisuseError: The model is not wrapped, or is in a block of ``no_sync`` or ``join``.
        UnsupportedError: The model is elastic: other ranks may count on it.
    """
    wrapped = wrapped_models.get(model)
    if wrapped is None:
        raise MisuseError("unwrap: this model is not wrapped; call trigram.with_bagua on it first")
    if not wrapped.stale:
        if wrapped.states is not None:
            raise UnsupportedError(
                "unwrap: not supported for elastic models, because ranks may join at any step; call "
                "trigram.shutdown first, or end the script"
            )
        _check_outside_blocks(wrapped, "unwrap")
        if wrapped.hooks is not None:
            wrapped.hooks.abort_failed()
            wrapped.hooks.drain(between_steps=True)
            wrapped.hooks.release()
        give_back(model)
    module = wrapped.model()
    assert module is not None
    remove(wrapped)
    methods.remove(module)
    return module


def _check_outside_blocks(wrapped: WrappedModel, what: str) -> None:
    """Raises inside of ``no_sync`` and ``join``: the block would end on hooks that are no longer there."""
    hooks = wrapped.hooks
    if hooks is not None and (hooks.join is not None or not hooks.sync):
        raise MisuseError(
            f"{what}: the model is in a block of {'no_sync' if hooks.join is None else 'join'}; call it "
            "after the block, on all ranks"
        )


def switch(model: nn.Module, algorithm: str | Trigram, *, optimizer: Any = None, **options: Any) -> None:
    """Trains with another algorithm from the next step on; all ranks call it, between steps.

    If ranks hold different weights, they are averaged first. Where gradients are averaged from then on, all
    ranks also get the first rank's state of the optimizers that update the model, and their options: equal
    gradients must make equal updates. The state of the old algorithm (residuals, ...) is dropped.

    Args:
        model: A model given to :func:`with_bagua`.
        algorithm: See :func:`with_bagua`.
        optimizer: See :func:`with_bagua`.
        **options: The options of the new algorithm.

    Raises:
        UnsupportedError: See :func:`with_bagua`; the model then continues with the old algorithm.
        MismatchError: The ranks ask for different algorithms; the same.
        MisuseError: The model is not wrapped, or is in a block of ``no_sync`` or ``join``; or a rank is
            between its backward pass and its update, and gradients are averaged from now on.
    """
    wrapped = lookup(model, "switch")
    if settle.settings(algorithm, options) is not None:
        raise UnsupportedError(f"switch: algorithm={algorithm!r} begins with with_bagua; call it there")
    _check_outside_blocks(wrapped, "switch")
    if stays := sorted(options.keys() & _OF_MODEL):
        raise UnsupportedError(
            f"switch: {', '.join(stays)} is of with_bagua and stays as it is; call trigram.unwrap and "
            "trigram.with_bagua to change it"
        )
    chosen = find(algorithm, options)
    check(chosen, optimizer, model)
    check_shards(model, chosen)
    kept = chosen.options, wrapped.algorithm.options
    if wrapped.states is not None and any(of.sharded or of.fused for of in kept):
        raise UnsupportedError(
            "switch: an elastic job keeps a sharded optimizer, and gets none later, because ranks that join "
            "call with_bagua with one algorithm; choose it there"
        )
    if wrapped.states is not None:
        check_elastic(chosen)
    check_copies(chosen, wrapped.states is not None)
    elastic = wrapped.states is not None
    wrapped.extras.check(chosen, counting() if elastic else wrapped.size, elastic)
    if isinstance(wrapped.hooks, WeightSync):
        waiting = wrapped.hooks.tracker.awaits_update()
        wrapped.hooks.drain(between_steps=True)
        wrapped.agree(chosen, "")
        if chosen.gradients or chosen.options.warmup_steps:
            _check_updated(waiting, wrapped.hooks)
        wrapped.hooks.average(model)
        if chosen.gradients or chosen.options.warmup_steps:
            wrapped.hooks.equal_optimizers(model)
    elif wrapped.hooks is not None:
        wrapped.hooks.abort_failed()
        wrapped.agree(chosen, "")
        wrapped.hooks.release()
    before = wrapped.algorithm, wrapped.optimizer, wrapped.tuner, wrapped.settings
    warmed = not wrapped.warming
    wrapped.end()
    wrapped.tuner, wrapped.settings = None, ""
    try:
        wrapped.begin(model, chosen, _used(optimizer, chosen, elastic))
    except (MismatchError, MisuseError, UnsupportedError):
        # On all ranks: a script that goes on would train without averages, and nothing would tell.
        wrapped.end()
        algorithm_before, optimizer_before, wrapped.tuner, wrapped.settings = before
        wrapped.begin(model, algorithm_before, optimizer_before)
        if warmed and wrapped.warming:
            wrapped.proceed()
        raise
    collect(model)


_OF_MODEL = frozenset((with_bagua.__kwdefaults__ or {}).keys() - {"optimizer"})
"""What ``with_bagua`` takes beside the algorithm's options."""


def _check_updated(waiting: bool, hooks: WeightSync) -> None:
    """Raises on all ranks if the update that follows on one would use that rank's own gradients: no average
    of gradients would bring the ranks together again."""
    ranks = ranks_that(waiting, hooks.groups.control)
    if ranks:
        raise MisuseError(
            f"switch: rank(s) {listed(ranks)} have made a backward pass and no optimizer step after it; call "
            "switch after the step, or after zero_grad if the step is skipped"
        )
