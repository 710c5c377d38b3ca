"""``with_bagua``: one line in an existing training script; ``unwrap``, its inverse; and ``switch``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from trigram.algorithms import compatibility
from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm, Trigram
from trigram.averaging.gradient_filter import GradientFilter
from trigram.averaging.sparse import sparse_parameters
from trigram.collectives.consistency import listed, ranks_that
from trigram.elastic import recovery
from trigram.errors import MismatchError, MisuseError, UnsupportedError
from trigram.model import methods, planned
from trigram.model.auto import Auto
from trigram.model.shards import collect, give_back
from trigram.model.wrapped import WrappedModel, lookup, remove, wrapped_models
from trigram.plan import measuring, settle
from trigram.plan.file import agreed
from trigram.runtime import logs
from trigram.runtime.group import Group
from trigram.runtime.weak import copied
from trigram.runtime.world import AnyGroup, resolve
from trigram.training import fidelity
from trigram.training.compose import check
from trigram.training.model_checks import check_modules
from trigram.training.options import Options, ignored_names
from trigram.training.weight_sync import WeightSync

Model = TypeVar("Model", bound=nn.Module)

BUCKET_MB = 4
"""Fewer bytes wait for the end of backward than with DDP's 25 (docs/benchmarks.md, "TCP between hosts")."""
BUCKET_MB_GPU = 25
"""As DDP: a call of NCCL costs more, and goes faster, than one on the CPU."""


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
    filters: Sequence[GradientFilter] = (),
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
    if (asked := measuring.wanted()) is not None:
        algorithm, bucket_mb, optimizer, plan = "local_sgd", None, None, None
        options = {**measuring.LEARN, "warmup_steps": asked.communicating}
        sample_weight, check_finite, check_replicas, filters = None, False, 0, ()
        if elastic is not False:
            raise UnsupportedError(
                "with_bagua: trigram plan cannot measure an elastic job; pass elastic=False"
            )
    if algorithm is not None and plan is not None:
        raise MisuseError("with_bagua: plan= names the algorithm; remove algorithm=, or plan=")
    if (decision := agreed(plan, group, uses=algorithm is None, asks=elastic is False)) is not None:
        algorithm, options = decision.algorithm, {**decision.options, **options}
        bucket_mb = decision.bucket_mb if bucket_mb is None else bucket_mb
    if (automatic := settle.settings(algorithm, options)) is not None:
        if elastic is not False:
            compatibility.check("with_bagua", {"elastic=True", "algorithm='auto'"})
        algorithm, options = DEFAULT, {}
    chosen = find(algorithm, options)
    if bucket_mb is None:
        bucket_mb = BUCKET_MB_GPU if any(p.is_cuda for p in model.parameters()) else BUCKET_MB
    if bucket_mb <= 0:
        raise MisuseError(f"with_bagua: bucket_mb={bucket_mb} must be greater than 0")
    if is_wrapped(model):
        raise MisuseError(
            "with_bagua: this model is hooked already; call trigram.switch to change its algorithm, or "
            "trigram.unwrap before it is wrapped again"
        )
    if (earlier := wrapped_models.get(model)) is not None:
        remove(earlier)  # of a job that has ended
    states = None
    if elastic is not False:
        states = _states(model, chosen, optimizer, group, elastic)
        if not chosen.options.sharded:
            optimizer = None
    _check_copies(chosen, states is not None)
    check(chosen, optimizer, model)
    names = ignored_names(model, ignore)
    extras = Options(sample_weight, check_finite, check_replicas, broadcast_buffers, names, _filters(filters))
    ranks = resolve(group)
    if chosen.from_environment:
        extras, unknown = extras.known_to(chosen, ranks.size)
        _warn_of(chosen.name, [*chosen.unknown, *unknown], ranks)
    if automatic is not None:
        _warn_of("auto", automatic.ignored, ranks)
    extras.check(chosen, ranks.size)
    features = compatibility.features(chosen) | extras.features() | _of_model(model, names)
    compatibility.check(f"algorithm {chosen.name!r}", features)
    check_modules(model, ranks.size if states is None else 2)  # more ranks may join an elastic job
    _check_shared(model, names)
    if asked is not None and (unfit := _unfit(model, names)):
        raise UnsupportedError(f"trigram plan: {unfit}")
    wrapped = wrapped_models[model] = WrappedModel(
        model,
        chosen,
        ranks,
        int(bucket_mb * (1 << 20)),
        optimizer,
        extras,
        states,
        str(automatic or ""),
    )
    if automatic is not None:
        wrapped.tuner = Auto(wrapped, automatic)
    methods.add(model)
    if asked is not None and ranks.size > 1:
        measuring.Watch(model, ranks, asked, planned.conclude)
    collect(model)
    return model


def _filters(given: Sequence[GradientFilter]) -> tuple[GradientFilter, ...]:
    """Raises if something else was given."""
    if isinstance(given, Sequence) and all(isinstance(one, GradientFilter) for one in given):
        return tuple(given)
    raise MisuseError(
        f"with_bagua: filters={given!r} must be a sequence of objects of subclasses of "
        "trigram.averaging.GradientFilter, such as [MyFilter()]"
    )


def _of_model(model: nn.Module, ignored: frozenset[str]) -> set[compatibility.Feature]:
    """What the model has that some features do not go with."""
    averaged = {id(p) for name, p in model.named_parameters() if name not in ignored}
    return {"modules with sparse=True"} if any(id(p) in averaged for p in sparse_parameters(model)) else set()


def _unfit(model: nn.Module, ignored: frozenset[str]) -> str:
    """Why ``trigram plan`` cannot predict this model; empty if it can."""
    trained = [p for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
    mine = {id(p) for p in trained}
    return measuring.unfit(trained, any(id(p) in mine for p in sparse_parameters(model)))


def _check_shared(model: nn.Module, ignored: frozenset[str]) -> None:
    """Raises if another wrapped model averages one of the parameters."""
    names = {id(p): n for n, p in model.named_parameters() if n not in ignored and p.requires_grad}
    for other, wrapped in copied(wrapped_models.items):
        hooks = wrapped.hooks
        if other is model or wrapped.stale or hooks is None:
            continue
        shared = [names[i] for i in names if i in hooks.param_ids]
        if shared:
            raise MisuseError(
                f"with_bagua: parameter {shared[0]} of {type(model).__name__} also belongs to the wrapped "
                f"model {type(other).__name__}, and its gradient would be averaged twice; wrap one module "
                "that holds both, such as nn.ModuleList([a, b]), or pass ignore=[...] for one of them"
            )


def _warn_of(chosen: str, unknown: Sequence[str], ranks: Group) -> None:
    """Logs, on the first rank, the options in code that the algorithm of the environment does not have."""
    if unknown and ranks.rank == 0:
        logs.warning(
            f"with_bagua: {chosen} (from TRIGRAM_ALGORITHM) has no option {', '.join(unknown)}; the "
            "script passes it for another algorithm, and it is ignored"
        )


def _check_copies(chosen: Algorithm, elastic: bool) -> None:
    """Raises if copies of a sharded optimizer's state are asked for in a job whose ranks do not change."""
    if chosen.options.copies is not None and not elastic:
        raise MisuseError(
            f"with_bagua: copies={chosen.options.copies} needs elastic=True, where ranks may be lost; "
            "remove copies="
        )


def _states(
    model: nn.Module, chosen: Algorithm, optimizer: Any, group: AnyGroup, wanted: bool | Sequence[Any]
) -> list[Any]:
    """Checks the arguments of an elastic model; returns the objects whose state a joining rank receives."""
    if optimizer is None:
        raise MisuseError(
            "with_bagua: elastic=True also needs optimizer=, because a joining rank receives the "
            "optimizer's state"
        )
    features = compatibility.features(chosen)
    features.add("elastic=True")
    if group is not None:
        features.add("group=")
    if fidelity.every():
        features.add("TRIGRAM_GRADIENTS")
    compatibility.check(f"algorithm {chosen.name!r}", features | _of_model(model, frozenset()))
    states = [optimizer, *(wanted if isinstance(wanted, Sequence) else ())]
    for s in states:
        if not hasattr(s, "state_dict") or not hasattr(s, "load_state_dict"):
            raise MisuseError(
                f"with_bagua: elastic: {type(s).__name__} has no state_dict and load_state_dict; pass only "
                "optimizers, schedulers and other objects that have both"
            )
    recovery.join_job()
    return states


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

    If ranks hold different weights, they are averaged first. The state of the old algorithm (residuals, ...)
    is dropped.

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
    chosen = find(algorithm, options)
    check(chosen, optimizer, model)
    kept = chosen.options, wrapped.algorithm.options
    if wrapped.states is not None and any(of.sharded or of.fused for of in kept):
        raise UnsupportedError(
            "switch: an elastic job keeps a sharded optimizer, and gets none later, because ranks that join "
            "call with_bagua with one algorithm; choose it there"
        )
    _check_copies(chosen, wrapped.states is not None)
    wrapped.extras.check(chosen, wrapped.size)
    if isinstance(wrapped.hooks, WeightSync):
        waiting = wrapped.hooks.awaits_update()
        wrapped.hooks.drain(between_steps=True)
        wrapped.agree(chosen, "")
        if chosen.gradients or chosen.options.warmup_steps:
            _check_updated(waiting, wrapped.hooks)
        wrapped.hooks.average(model)
    elif wrapped.hooks is not None:
        wrapped.hooks.abort_failed()
        wrapped.agree(chosen, "")
        wrapped.hooks.release()
    before = wrapped.algorithm, wrapped.optimizer, wrapped.tuner, wrapped.settings
    warmed = not wrapped.warming
    wrapped.end()
    wrapped.tuner, wrapped.settings = None, ""
    try:
        wrapped.begin(model, chosen, optimizer)
    except (MismatchError, MisuseError, UnsupportedError):
        # On all ranks: a script that goes on would train without averages, and nothing would tell.
        wrapped.end()
        algorithm_before, optimizer_before, wrapped.tuner, wrapped.settings = before
        wrapped.begin(model, algorithm_before, optimizer_before)
        if warmed and wrapped.warming:
            wrapped.proceed()
        raise
    collect(model)


def _check_updated(waiting: bool, hooks: WeightSync) -> None:
    """Raises on all ranks if the update that follows on one would use that rank's own gradients: no average
    of gradients would bring the ranks together again."""
    ranks = ranks_that(waiting, hooks.groups.control)
    if ranks:
        raise MisuseError(
            f"switch: rank(s) {listed(ranks)} have made a backward pass and no optimizer step after it; call "
            "switch after the step, or after zero_grad if the step is skipped"
        )
