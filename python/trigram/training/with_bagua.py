"""``with_bagua``: one line in an existing training script."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from trigram import collectives
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm, Trigram
from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.averaging.sparse import sparse_parameters
from trigram.collectives.consistency import same_everywhere
from trigram.elastic import recovery
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.runtime import world
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup, current, resolve
from trigram.training.compose import check, compose, warm
from trigram.training.gradient_sync import GradientSync
from trigram.training.options import Options
from trigram.training.step_hooks import StepHooks, agree_on_algorithm
from trigram.training.weight_sync import WeightSync, running

Model = TypeVar("Model", bound=nn.Module)


class WrappedModel:
    """A model and its algorithm.

    Attributes:
        chosen: The algorithm.
        hooks: What hooks the model; None in a world of one.
        behind: Steps that earlier algorithms made.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: Algorithm,
        group: Group,
        bucket_bytes: int,
        optimizer: Any,
        extras: Options,
        states: Sequence[Any] | None = None,
    ) -> None:
        self.extras = extras
        self.model = weakref.ref(model)
        self.bucket_bytes = bucket_bytes
        self.group = group
        self.behind = 0
        self.hooks: StepHooks | None = None
        self.groups = ModelGroups(group) if group.size > 1 or states is not None else None
        self.states = states
        if self.groups is not None and states is not None:
            self.groups.joining = recovery.is_newcomer()
        self.begin(model, chosen, optimizer)

    @property
    def size(self) -> int:
        """Ranks that train the model."""
        return self.group.size

    def begin(self, model: nn.Module, chosen: Algorithm, optimizer: Any) -> None:
        """The algorithm from now on, after its warm-up."""
        check(chosen, optimizer)
        self.algorithm, self.optimizer = chosen, optimizer
        if self.groups is None:
            return
        if not self.groups.joining:
            agree_on_algorithm(f"{chosen}{self.extras}", self.groups)
        self.extras.bind(self.groups, chosen)
        warmup = chosen.options.get("warmup_steps", 0)
        self.groups.use_helpers(
            chosen.gradients and chosen.value.what == "full" and not chosen.graph and not warmup
        )
        if warmup:
            self.hooks = GradientSync(model, self.groups, self.bucket_bytes, warm(chosen))
            self.hooks.limit, self.hooks.successor = warmup, self.proceed
        else:
            self.hooks = self._compose(model)
        if self.states is not None:
            hooks = self.hooks
            part = recovery.ElasticModel(model, f"{chosen}{self.extras}", self.states, self.groups, hooks)
            hooks.elastic = part
            recovery.add(part)
            self.groups.joining = False

    def _compose(self, model: nn.Module) -> StepHooks:
        assert self.groups is not None
        hooks = compose(model, self.groups, self.algorithm, self.bucket_bytes, self.optimizer)
        if self.algorithm.every is None:
            assert isinstance(hooks, WeightSync)
            running[hooks] = None if self.states is None else model
        return hooks

    def end(self) -> None:
        """No algorithm any more; what is under way has been ended."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            self.behind += hooks.steps
            hooks.close()
            if isinstance(hooks, WeightSync):
                hooks.schedule.close()
                running.pop(hooks, None)

    def proceed(self) -> StepHooks:
        """The warm-up is over."""
        model = self.model()
        assert model is not None
        sync = self.hooks.sync if self.hooks else True
        self.end()
        self.hooks = self._compose(model)
        self.hooks.sync = sync
        return self.hooks

    @property
    def warming(self) -> bool:
        """Whether the warm-up is still on."""
        return self.hooks is not None and self.hooks.successor is not None


_models: weakref.WeakKeyDictionary[nn.Module, WrappedModel] = weakref.WeakKeyDictionary()


def with_bagua(
    model: Model,
    algorithm: str | Trigram | None = None,
    *,
    optimizer: Any = None,
    group: AnyGroup = None,
    bucket_mb: float = 25,
    sample_weight: Any = None,
    check_finite: bool = False,
    check_replicas: int = 0,
    elastic: bool | Sequence[Any] = False,
    **options: Any,
) -> Model:
    """Trains ``model`` data-parallel: call it where ``DistributedDataParallel(model)`` stood.

    The same module comes back, hooked; the keys of its ``state_dict`` do not change. WeightSync and
    buffers become those of rank 0. Copies and pickles of the model leave the hooks behind.

    Args:
        model: Its parameters are on one device and the same on all ranks, but for their values.
        algorithm: A name of :func:`trigram.algorithms`, a trigram written out, or a
            :class:`Trigram`. None: ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        optimizer: Needed by ``qadam``; ``local_sgd`` averages its state too if it is given.
        group: The ranks that train it; None: all.
        bucket_mb: Size of a bucket of gradients, in MiB.
        sample_weight: How much this rank counts in averages, as where batches are unequal: a number, or
            what is called for one once per step, when backward begins. Averages are
            ``sum(w_i g_i) / sum(w_i)``. A rank that weighs 0 adds nothing, whatever its gradients are.
        check_finite: Each rank looks at its gradients before they leave, and where one has NaN or
            infinity all raise a ``CorruptError`` that names it. Costs a pass over the gradients and a
            small message per step; without it nobody looks, and the mean is NaN on all ranks.
        check_replicas: Every so many steps all ranks compare a hash of their weights, and where one differs
            all raise a ``CorruptError`` that names it. 0: never.
        elastic: The training goes on when ranks are lost, and ranks may enter while it runs, see
            docs/elastic.md. It needs ``optimizer``, whose state a newcomer gets. True, or what else a
            newcomer needs: schedulers, scalers, anything with ``state_dict`` and ``load_state_dict``.
        **options: The algorithm's own, see docs/algorithms.md.

    Raises:
        UnsupportedError: The algorithm, an option or their combination is not possible; the message
            says why, and what there is.
        MismatchError: The models differ between ranks; all ranks raise it.
        MisuseError: The model is hooked already, or has nothing to train.
    """
    chosen = find(algorithm, options)
    if bucket_mb <= 0:
        raise MisuseError(f"with_bagua: bucket_mb={bucket_mb} must be greater than 0")
    if model in _models:
        raise MisuseError(
            "with_bagua: this model is hooked already; call trigram.switch to change its algorithm"
        )
    states = None
    if elastic is not False:
        states = _states(model, chosen, optimizer, group, elastic)
        optimizer = None
    check(chosen, optimizer)
    extras, ranks = Options(sample_weight, check_finite, check_replicas), resolve(group)
    extras.check(chosen, ranks.size)
    _models[model] = WrappedModel(model, chosen, ranks, int(bucket_mb * (1 << 20)), optimizer, extras, states)
    return model


def _states(
    model: nn.Module, chosen: Algorithm, optimizer: Any, group: AnyGroup, wanted: bool | Sequence[Any]
) -> list[Any]:
    """What a newcomer of an elastic wrapped gets beside the weights."""
    if optimizer is None:
        raise MisuseError(
            "with_bagua: elastic=True also needs optimizer=, because a joining rank receives the "
            "optimizer's state"
        )
    if group is not None:
        raise UnsupportedError("with_bagua: elastic=True trains on all ranks of the job; remove group=")
    if chosen.value.carry == "momentum" or chosen.options.get("warmup_steps"):
        raise UnsupportedError(
            f"with_bagua: elastic=True does not support {chosen.name}, which has a warm-up; choose an "
            "algorithm without warm-up"
        )
    if list(sparse_parameters(model)):
        raise UnsupportedError(
            "with_bagua: elastic=True does not support modules with sparse=True; create them with "
            "sparse=False"
        )
    states = [optimizer, *(wanted if isinstance(wanted, Sequence) else ())]
    for s in states:
        if not hasattr(s, "state_dict") or not hasattr(s, "load_state_dict"):
            raise MisuseError(
                f"with_bagua: elastic: {type(s).__name__} has no state_dict and load_state_dict; pass only "
                "optimizers, schedulers and other objects that have both"
            )
    recovery.join_job()
    return states


def _wrapped(model: nn.Module, what: str) -> WrappedModel:
    try:
        return _models[model]
    except KeyError:
        raise MisuseError(f"{what}: call trigram.with_bagua on this model first") from None


def switch(model: nn.Module, algorithm: str | Trigram, *, optimizer: Any = None, **options: Any) -> None:
    """Goes on with another algorithm from the next step; all ranks call it, between steps.

    Where ranks hold different weights they first get the average. What the old algorithm remembered
    is dropped.

    Args:
        model: A model given to :func:`with_bagua`.
        algorithm: See :func:`with_bagua`.
        optimizer: See :func:`with_bagua`.
        **options: The new algorithm's.
    """
    wrapped = _wrapped(model, "switch")
    chosen = find(algorithm, options)
    check(chosen, optimizer)
    wrapped.extras.check(chosen, wrapped.size)
    if isinstance(wrapped.hooks, WeightSync):
        wrapped.hooks.average(model)
    elif wrapped.hooks is not None:
        wrapped.hooks.abort_pass()
    wrapped.end()
    wrapped.begin(model, chosen, optimizer)


class Consensus:
    """The average weights, for as long as a ``with`` block lasts, or for good."""

    def __init__(self, model: nn.Module, replicas: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._model = model
        self._replicas = replicas

    def __enter__(self) -> nn.Module:
        return self._model

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for t, was in self._replicas:
            t.copy_(was)


@torch.no_grad()
def consensus(model: nn.Module, timeout: float | None = 300.0) -> Consensus:
    """Gives all ranks the average weights and the average of floating-point buffers.

    All ranks call it. Used as ``with trigram.consensus(model):``, each rank's own come back at the
    end; called plainly, they do not. Where weights are the same on all ranks only buffers change.

    Args:
        model: A model given to :func:`with_bagua`.
        timeout: Seconds to wait for the other ranks.

    Raises:
        TimeoutError: Ranks did not call it; the message names them.
    """
    wrapped = _wrapped(model, "consensus")
    hooks = wrapped.hooks
    if hooks is None:
        return Consensus(model, [])
    if isinstance(hooks, WeightSync):
        hooks.drain(timeout)
        own = [p.detach() for p in model.parameters()]
    else:
        hooks.abort_pass()
        _await_all(hooks, timeout)
        weights = [p.detach() for p in model.parameters()]
        # An average of equals may differ from them in the last bit.
        own = [] if same_everywhere(weights, hooks.groups.control) else weights
    tensors = [*own, *(b for b in model.buffers() if b.numel())]
    replicas = [(t, t.clone()) for t in tensors]
    mean_of(tensors, hooks.groups)
    return Consensus(model, replicas)


def _await_all(hooks: StepHooks, timeout: float | None) -> None:
    side = hooks.groups.control
    before, side.timeout = side.timeout, timeout if timeout is not None else side.timeout
    try:
        collectives.barrier(side)
    finally:
        side.timeout = before


def algorithm_state(model: nn.Module) -> dict[str, Any]:
    """Everything the algorithm remembers, for ``torch.save``; all ranks call it, between steps.

    Each rank saves its own. StepSchedule under way are ended and applied first, so take
    ``model.state_dict()`` after it.
    """
    wrapped = _wrapped(model, "algorithm_state")
    state: dict[str, Any] = {
        "algorithm": wrapped.algorithm.title,
        "world_size": wrapped.size,
        "behind": wrapped.behind,
        "warming": wrapped.warming,
    }
    if wrapped.hooks is not None:
        wrapped.hooks.drain()
        state["hooks"] = copy.deepcopy(wrapped.hooks.state())
    return state


def load_algorithm_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Goes on where :func:`algorithm_state` was called; after ``model.load_state_dict``.

    Every rank loads what the same rank saved.

    Raises:
        MisuseError: It is another algorithm's, or another number of ranks saved it.
    """
    wrapped = _wrapped(model, "load_algorithm_state")
    if (state["algorithm"], state["world_size"]) != (wrapped.algorithm.title, wrapped.size):
        raise MisuseError(
            f"load_algorithm_state: the state was saved by {state['algorithm']} on {state['world_size']} "
            f"ranks, but this model uses {wrapped.algorithm.title} on {wrapped.size}; use the same "
            "algorithm and number of ranks, or load only the weights, saved under trigram.consensus"
        )
    if wrapped.warming and not state["warming"]:
        wrapped.proceed()
    wrapped.behind = state["behind"]
    if wrapped.hooks is not None:
        wrapped.hooks.load(state["hooks"])


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """GradientSync accumulate locally inside; the next backward pass outside is a step again."""
    wrapped = _wrapped(model, "no_sync")
    if wrapped.hooks is None:
        yield
        return
    before, wrapped.hooks.sync = wrapped.hooks.sync, False
    try:
        yield
    finally:
        wrapped.hooks.sync = before


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Training with unequal numbers of inputs per rank.

    A rank that leaves the block early goes on to take part in what the others need of it: with
    gradients of zero, or with the weights it has; averages are over all ranks. Where gradients are
    averaged, at the end all ranks get the weights and buffers of the rank that trained longest
    (optimizers keep their own state), as ``DistributedDataParallel.join`` does. Asynchronous
    algorithms need no help during the block; at its end all wait for all.
    """
    wrapped = _wrapped(model, "join")
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
    wrapped.hooks.joining, wrapped.hooks.forwards = True, 0
    try:
        yield
        wrapped.hooks.shadow(model)
    finally:
        wrapped.hooks.joining = False


def stats(of: nn.Module | Group | None = None) -> dict[str, Any]:
    """What was communicated so far.

    Args:
        of: A model given to :func:`with_bagua`, a group, or None for this process.

    Returns:
        For the process or a group: ``calls`` (collectives that ended well), ``direct_bytes``
        (read or written in peers' memory), ``sent_bytes`` (payload sent, by world rank), ``engine_seconds``
        (processor time of the engine's thread; synchronous calls take the caller's) and ``rates``
        (what each rank's link carries in bytes per second, as the shares of large AllReduces between
        hosts follow it; empty while nobody knows).
        ``waited_for`` has the seconds that this rank's callers slept for each world rank: the largest is
        the straggler.
        For a model also ``algorithm``, ``world_size``, ``ranks`` (those that train it now), ``steps``,
        ``bytes`` and ``bytes_per_step`` (what a rank has to send, by
        the formulas of docs/algorithms.md), ``wait_seconds``; where
        gradients are carried ``overlap`` (share of communication hidden behind backward) and
        ``buckets``; where weights are, ``rounds`` and ``waits`` (rounds that staleness waited for);
        ``suspects`` (by world rank, the rounds in which a robust average left out what the rank sent,
        because it was not finite).
    """
    totals: dict[str, Any] = dict(current().engine.counters())
    if not isinstance(of, nn.Module):
        group = of or current().group
        return {**totals, "rates": group.core.rates() if group.rank >= 0 else []}
    wrapped = _wrapped(of, "stats")
    totals["rates"] = wrapped.groups.main.core.rates() if wrapped.groups else []
    own: dict[str, Any] = {"steps": 0, "bytes_per_step": 0, "bytes": 0, "wait_seconds": 0.0, "overlap": 0.0}
    own |= {"buckets": [], "rounds": 0, "waits": 0}
    own["suspects"] = dict(wrapped.groups.non_finite_senders.counts) if wrapped.groups else {}
    if wrapped.hooks is not None:
        own |= wrapped.hooks.stats()
    own["steps"] += wrapped.behind
    return {
        "algorithm": wrapped.algorithm.name,
        "world_size": wrapped.size,
        "ranks": list(wrapped.group.ranks),
        **own,
        **totals,
    }


def _finish() -> None:
    """The process leaves: asynchronous rounds end well on all ranks, unless this one has failed."""
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    for hooks in list(running):
        if failed is None:
            with contextlib.suppress(TrigramError):
                hooks.drain()
    running.clear()


world.at_exit.insert(0, _finish)
