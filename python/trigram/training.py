"""``with_bagua``: one line in an existing training script."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from trigram.algorithms import Trigram, find
from trigram.collectives import AnyGroup
from trigram.errors import MisuseError, UnsupportedError
from trigram.reducer import Reducer
from trigram.world import Group, current, resolve

Model = TypeVar("Model", bound=nn.Module)

_hooked: weakref.WeakKeyDictionary[nn.Module, tuple[str, Reducer | None]] = weakref.WeakKeyDictionary()


def with_bagua(
    model: Model,
    algorithm: str | Trigram | None = None,
    *,
    optimizer: Any = None,
    group: AnyGroup = None,
    bucket_mb: float = 25,
    sample_weight: Any = None,
    elastic: bool = False,
    **options: Any,
) -> Model:
    """Trains ``model`` data-parallel: call it where ``DistributedDataParallel(model)`` stood.

    The same module comes back, hooked; the keys of its ``state_dict`` do not change. Weights and
    buffers become those of rank 0. Copies and pickles of the model leave the hooks behind.

    Args:
        model: Its parameters are on the CPU and the same on all ranks, but for their values.
        algorithm: A name of :func:`trigram.algorithms`, a trigram written out, or a
            :class:`Trigram`. None: ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        optimizer: Needed by algorithms that act on it; none of this version does.
        group: The ranks that train it; None: all.
        bucket_mb: Size of a bucket of gradients, in MiB.
        sample_weight: Not available yet.
        elastic: Not available yet.
        **options: The algorithm's own; ``gradient_allreduce`` has none.

    Raises:
        UnsupportedError: The algorithm or an option is unknown; the message lists what there is.
        MismatchError: The models differ between ranks; all ranks raise it.
        MisuseError: The model is hooked already, or has nothing to train.
    """
    name, _ = find(algorithm)
    if options:
        raise UnsupportedError(f"with_bagua: {name} has no option {', '.join(sorted(options))}")
    if elastic or sample_weight is not None:
        raise UnsupportedError("with_bagua: elastic and sample_weight are not available yet")
    if optimizer is not None:
        raise UnsupportedError(f"with_bagua: {name} does not act on an optimizer; leave it out")
    if bucket_mb <= 0:
        raise MisuseError(f"with_bagua: bucket_mb={bucket_mb} is not positive")
    if model in _hooked:
        raise MisuseError("with_bagua: this model is hooked already")
    ranks = resolve(group)
    reducer = Reducer(model, ranks, int(bucket_mb * (1 << 20))) if ranks.size > 1 else None
    _hooked[model] = (name, reducer)
    return model


def _reducer(model: nn.Module, what: str) -> Reducer | None:
    try:
        return _hooked[model][1]
    except KeyError:
        raise MisuseError(f"{what}: call trigram.with_bagua on this model first") from None


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients accumulate locally inside; the next backward pass outside averages their sum."""
    reducer = _reducer(model, "no_sync")
    if reducer is None:
        yield
        return
    before, reducer.sync = reducer.sync, False
    try:
        yield
    finally:
        reducer.sync = before


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Training with unequal numbers of inputs per rank.

    A rank that leaves the block early goes on to take part in what the others need of it, with
    gradients of zero; averages are over all ranks. At the end all ranks get the weights and
    buffers of the rank that trained longest (optimizers keep their own state), as
    ``DistributedDataParallel.join`` does.
    """
    reducer = _reducer(model, "join")
    if reducer is None:
        yield
        return
    reducer.joining, reducer.forwards = True, 0
    try:
        yield
        reducer.shadow(model)
    finally:
        reducer.joining = False


def stats(of: nn.Module | Group | None = None) -> dict[str, Any]:
    """What was communicated so far.

    Args:
        of: A model given to :func:`with_bagua`, a group, or None for this process.

    Returns:
        For the process or a group: ``calls`` (collectives that ended well), ``direct_bytes``
        (read or written in peers' memory) and ``sent_bytes`` (payload sent, by world rank).
        For a model also ``algorithm``, ``world_size``, ``steps``, ``bytes_per_step`` (gradients given
        to collectives), ``bytes``, ``wait_seconds`` (backward done, averages not), ``overlap`` (share
        of communication hidden behind backward) and ``buckets``.
    """
    totals: dict[str, Any] = dict(current().engine.counters())
    if not isinstance(of, nn.Module):
        return totals
    reducer = _reducer(of, "stats")
    name = _hooked[of][0]
    size = reducer.group.size if reducer else 1
    own = (
        reducer.stats()
        if reducer
        else {"steps": 0, "bytes_per_step": 0, "bytes": 0, "wait_seconds": 0.0, "overlap": 0.0, "buckets": []}
    )
    return {"algorithm": name, "world_size": size, **own, **totals}
