"""``no_sync`` and ``join``: blocks in which steps work differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import nn

from trigram.errors import UnsupportedError
from trigram.model.wrapped import WrappedModel, lookup
from trigram.training.uneven_inputs import UnevenInputs


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


def join(model: nn.Module) -> AbstractContextManager[None]:
    """Training with unequal numbers of inputs per rank.

    A rank that reaches the end of the block early takes part in the averages of the others until all ranks
    are there: with gradients of 0, or with the weights it has; averages are over all ranks. If the algorithm
    averages gradients, at the end all ranks get the weights and buffers of the rank that trained longest, as
    with ``DistributedDataParallel.join``; optimizers are not changed. Asynchronous algorithms do not wait
    during the block; at its end all ranks wait for all.
    """
    return _join(model, lookup(model, "join"))


@contextlib.contextmanager
def _join(model: nn.Module, wrapped: WrappedModel) -> Iterator[None]:
    if wrapped.hooks is None:
        yield
        return
    if wrapped.states is not None:
        raise UnsupportedError(
            "join: not supported for elastic models; a rank that has no more inputs ends its script, and the "
            "others continue without it"
        )
    if wrapped.algorithm.every is None and not wrapped.warming:
        yield
        wrapped.hooks.drain()
        return
    hooks = wrapped.hooks
    hooks.join = UnevenInputs([(model, hooks)], throw=False)
    try:
        yield
        hooks.join.run_without_inputs()
    finally:
        hooks.join = None
