"""``no_sync`` and ``join``: blocks in which steps work differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import nn

from trigram.algorithms import compatibility
from trigram.errors import MisuseError, UnsupportedError
from trigram.model.wrapped import WrappedModel, lookup
from trigram.runtime import job
from trigram.steps.uneven_inputs import UnevenInputs
from trigram.training.idle_steps import without_inputs


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block gradients accumulate on this rank only; the next backward pass outside averages
    them.

    Args:
        model: A model given to :func:`trigram.with_bagua`.

    Raises:
        MisuseError: The model is not wrapped.
    """
    return _no_sync(lookup(model, "no_sync"))


@contextlib.contextmanager
def _no_sync(wrapped: WrappedModel) -> Iterator[None]:
    if wrapped.hooks is None:
        yield
        return
    before, wrapped.hooks.sync = wrapped.hooks.sync, False
    try:
        yield
    finally:
        wrapped.hooks.sync = before


def join(*models: nn.Module, throw_on_early_termination: bool = False) -> AbstractContextManager[None]:
    """Training with unequal numbers of inputs per rank.

    A rank that reaches the end of the block early takes part in the averages of the others until all ranks
    are there: with gradients of 0, or with the weights it has; averages are over all ranks. If the algorithm
    averages gradients, at the end all ranks get the weights and buffers of the rank that trained longest, as
    with ``DistributedDataParallel.join``, and if ranks have made unequal numbers of updates, also the state
    and the options of its optimizers. Asynchronous algorithms do not wait during the block; at its end all
    ranks wait for all.

    Args:
        *models: The models that are trained in the block, which all ranks call in the same order: write
            ``join(a, b)``, not one block in another. The same ranks train them.
        throw_on_early_termination: All ranks raise a ``MisuseError`` as soon as one of them has no more
            inputs.

    Raises:
        MisuseError: A model is not wrapped, the models are trained by different ranks, or one is in a block
            already.
        UnsupportedError: A model is elastic, its optimizer is sharded or fused, or
            ``throw_on_early_termination`` is used with an asynchronous algorithm; or, at the end of the
            block, the state of an optimizer cannot be sent.
    """
    if not models:
        raise MisuseError("join: pass the models that are trained in the block, as in trigram.join(model)")
    wrapped = [lookup(model, "join") for model in models]
    for one in wrapped:
        features: set[compatibility.Feature] = {"trigram.join"}
        if one.states is not None:
            features.add("elastic=True")
        if one.size > 1:
            features |= compatibility.features(one.algorithm)
        compatibility.check("join", features)
    if any(w.group.ranks != wrapped[0].group.ranks for w in wrapped) or len(set(map(id, wrapped))) < len(
        wrapped
    ):
        raise MisuseError("join: the models must be different ones, and trained by the same ranks")
    if throw_on_early_termination and any(_is_asynchronous(w) for w in wrapped):
        raise UnsupportedError(
            "join: throw_on_early_termination=True needs algorithms in which ranks wait for each other; an "
            "asynchronous rank does not know that another has no more inputs"
        )
    if any(w.hooks is not None and w.hooks.join is not None for w in wrapped):
        raise MisuseError("join: a model is in a join block already; write join(a, b) for several models")
    return _join(wrapped, throw_on_early_termination)


def _is_asynchronous(wrapped: WrappedModel) -> bool:
    return not wrapped.algorithm.in_step and not wrapped.warming


class _Blocks:
    """The blocks of this rank that are under way."""

    def __init__(self) -> None:
        self.open: list[UnevenInputs] = []


@contextlib.contextmanager
def _join(wrapped: Sequence[WrappedModel], throw: bool) -> Iterator[None]:
    models = [(w, w.model(), w.hooks) for w in wrapped]
    waiting = [
        (h, without_inputs(m, h))
        for w, m, h in models
        if m is not None and h is not None and not _is_asynchronous(w)
    ]
    block = UnevenInputs([trained for _, trained in waiting], throw) if waiting else None
    under_way = job.here().part(_Blocks).open
    if block is not None and under_way:
        raise MisuseError(
            "join: this rank is in another join block already, and the ranks would wait for each other at "
            "its end; write join(a, b) for several models"
        )
    if block is not None:
        under_way.append(block)
    for hooks, _ in waiting:
        hooks.join = block
    try:
        yield
        if block is not None:
            block.run_without_inputs()
        for w in wrapped:
            if w.hooks is not None and _is_asynchronous(w):
                w.hooks.drain()
    finally:
        if block is not None:
            under_way.remove(block)
        for hooks, trained in waiting:
            hooks.join = None
            trained.block_ends()
