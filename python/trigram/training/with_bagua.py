"""``with_bagua``: one line in an existing training script."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from trigram.runtime import exit_status, world
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup, current, resolve
from trigram.training.compose import check, compose, warm
from trigram.training.dropped_models import release_dropped
from trigram.training.gradient_sync import GradientSync
from trigram.training.model_checks import check_modules
from trigram.training.options import Options
from trigram.training.step_hooks import StepHooks, agree_on_algorithm
from trigram.training.weight_sync import WeightSync, running

Model = TypeVar("Model", bound=nn.Module)


class WrappedModel:
    """A model and its algorithm.

    Attributes:
        algorithm: The algorithm with its options.
        hooks: The hooks on the model; None if one rank trains it alone.
        earlier_steps: Steps made with earlier algorithms.
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
        self.earlier_steps = 0
        self.hooks: StepHooks | None = None
        self.groups = ModelGroups(group) if group.size > 1 or states is not None else None
        self.states = states
        if self.groups is not None:
            self.groups.describe(_describes(weakref.ref(self)))
        if self.groups is not None and states is not None:
            self.groups.joining = recovery.is_newcomer()
        self.begin(model, chosen, optimizer)

    @property
    def size(self) -> int:
        """Ranks that train the model."""
        return self.group.size

    def begin(self, model: nn.Module, chosen: Algorithm, optimizer: Any) -> None:
        """Starts an algorithm, first its warm-up if it has one."""
        check(chosen, optimizer)
        self.algorithm, self.optimizer = chosen, optimizer
        if self.groups is None:
            return
        if not self.groups.joining:
            agree_on_algorithm(f"{chosen}{self.extras}", self.groups)
        if self.states is None:  # ranks join an elastic job one by one
            release_dropped(self.groups)
        self.extras.bind(self.groups, chosen)
        self.groups.be_patient(chosen.every is None)
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
            exit_status.watch()
            running[hooks] = None if self.states is None else model
        return hooks

    def end(self) -> None:
        """Removes the hooks; the caller has ended the averaging steps under way."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            self.earlier_steps += hooks.steps
            hooks.close()
            if isinstance(hooks, WeightSync):
                hooks.schedule.close()
                running.pop(hooks, None)

    def proceed(self) -> StepHooks:
        """Starts the algorithm after its warm-up."""
        model = self.model()
        assert model is not None
        sync = self.hooks.sync if self.hooks else True
        self.end()
        self.hooks = self._compose(model)
        self.hooks.sync = sync
        return self.hooks

    @property
    def warming(self) -> bool:
        """Whether the warm-up has not ended yet."""
        return self.hooks is not None and self.hooks.successor is not None


def _describes(wrapped: weakref.ref[WrappedModel]) -> Callable[[], str]:
    """What log lines say about a model; it does not keep the model alive."""

    def say() -> str:
        now = wrapped()
        if now is None:
            return "a model that the script has dropped"
        steps = now.earlier_steps + (now.hooks.steps if now.hooks is not None else 0)
        return f"model {type(now.model()).__name__}, step {steps}"

    return say


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
    """Trains ``model`` data-parallel: call it instead of ``DistributedDataParallel(model)``.

    It installs hooks on the module and returns it; the keys of its ``state_dict`` do not change. All ranks
    get the weights and buffers of the group's first rank. Copies and pickles of the model have no hooks. All
    ranks of the group call it.

    Args:
        model: Its parameters are on one device, with the same names, shapes and dtypes on all ranks.
        algorithm: A name of :func:`trigram.algorithms`, a trigram written out, or a
            :class:`Trigram`. None: ``$TRIGRAM_ALGORITHM``, else ``gradient_allreduce``.
        optimizer: Needed by ``qadam``; ``local_sgd`` averages its state too if it is given.
        group: The ranks that train it; None: all.
        bucket_mb: Size of a bucket of gradients, in MiB.
        sample_weight: How much this rank counts in averages, for example if batches are unequal: a number, or
            a callable that returns it and is called once per step, when backward begins. Averages are
            ``sum(w_i g_i) / sum(w_i)``. A rank with weight 0 contributes nothing, even if its gradients are
            NaN.
        check_finite: Each rank checks its gradients for NaN and infinity before it sends them; if one rank
            finds some, all ranks raise a ``CorruptError`` that names it. It costs one read of the gradients
            and a small message per step. Without it the mean becomes NaN on all ranks.
        check_replicas: Number of steps after which all ranks compare a hash of their weights; if one differs,
            all ranks raise a ``CorruptError`` that names it. 0: never.
        elastic: Training continues when ranks are lost, and ranks can join while it runs, see
            docs/elastic.md. It needs ``optimizer``, whose state a joining rank receives. True, or a sequence
            of other objects whose state it receives: schedulers, GradScalers, anything with ``state_dict``
            and ``load_state_dict``.
        **options: The options of the algorithm, see docs/algorithms.md.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: The algorithm, an option or their combination is not supported; the message says
        why,
            and lists what is.
        MismatchError: The models differ between ranks; all ranks raise it.
        MisuseError: The model is hooked already, or has no parameter to train.
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
    check_modules(model, ranks.size if states is None else 2)  # more ranks may join an elastic job
    _models[model] = WrappedModel(model, chosen, ranks, int(bucket_mb * (1 << 20)), optimizer, extras, states)
    return model


def _states(
    model: nn.Module, chosen: Algorithm, optimizer: Any, group: AnyGroup, wanted: bool | Sequence[Any]
) -> list[Any]:
    """Checks the arguments of an elastic model; returns the objects whose state a joining rank receives."""
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
    """The averaged weights: inside a ``with`` block, or permanently without one."""

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

    All ranks call it. With ``with trigram.consensus(model):``, the weights and buffers of each rank are
    restored at the end of the block; without ``with``, the averages stay. If the weights are the same on all
    ranks, only buffers change.

    Args:
        model: A model given to :func:`with_bagua`.
        timeout: Seconds to wait for the other ranks.

    Raises:
        TimeoutError: Some ranks did not call it in time; the message names them.
    """
    wrapped = _wrapped(model, "consensus")
    hooks = wrapped.hooks
    if hooks is None:
        return Consensus(model, [])
    if isinstance(hooks, WeightSync):
        hooks.drain(timeout)
        counters = [p.detach() for p in model.parameters()]
    else:
        hooks.abort_pass()
        _await_all(hooks, timeout)
        weights = [p.detach() for p in model.parameters()]
        # The average of equal values may differ from them in the last bit.
        counters = [] if same_everywhere(weights, hooks.groups.control) else weights
    tensors = [*counters, *(b for b in model.buffers() if b.numel())]
    replicas = [(t, t.clone()) for t in tensors]
    mean_of(tensors, hooks.groups)
    return Consensus(model, replicas)


def _await_all(hooks: StepHooks, timeout: float | None) -> None:
    control = hooks.groups.control
    before, control.timeout = control.timeout, timeout if timeout is not None else control.timeout
    try:
        collectives.barrier(control)
    finally:
        control.timeout = before


def algorithm_state(model: nn.Module) -> dict[str, Any]:
    """The state of the algorithm (residuals, counters, ...), for ``torch.save``; all ranks call it, between
    steps.

    Each rank saves its state separately. Averaging steps under way are ended and applied first, so call
    ``model.state_dict()`` afterwards.
    """
    wrapped = _wrapped(model, "algorithm_state")
    state: dict[str, Any] = {
        "algorithm": wrapped.algorithm.title,
        "world_size": wrapped.size,
        "behind": wrapped.earlier_steps,
        "warming": wrapped.warming,
    }
    if wrapped.hooks is not None:
        wrapped.hooks.drain()
        state["carrier"] = copy.deepcopy(wrapped.hooks.state())
    return state


def load_algorithm_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores the state that :func:`algorithm_state` returned; call it after ``model.load_state_dict``.

    Every rank loads the state that the same rank saved.

    Raises:
        MisuseError: A different algorithm or a different number of ranks saved the state.
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
    wrapped.earlier_steps = state["behind"]
    if wrapped.hooks is not None:
        wrapped.hooks.load(state["carrier"])


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside the block gradients accumulate on this rank only; the next backward pass outside averages
    them."""
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

    A rank that reaches the end of the block early takes part in the averages of the others until all ranks
    are
    there: with gradients of 0, or with the weights it has; averages are over all ranks. If the algorithm
        averages
    gradients, at the end all ranks get the weights and buffers of the rank that trained longest, as with
    ``DistributedDataParallel.join``; optimizers are not changed. Asynchronous algorithms do not wait during
    the block; at its end all ranks wait for all.
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
        wrapped.hooks.run_without_inputs(model)
    finally:
        wrapped.hooks.joining = False


def stats(of: nn.Module | Group | None = None) -> dict[str, Any]:
    """Counters of the communication so far.

    Args:
        of: A model given to :func:`with_bagua`, a group, or None for this process.

    Returns:
        For the process or a group: ``calls`` (collectives that ended without error), ``direct_bytes`` (bytes
        read or written in peers' memory), ``sent_bytes`` (payload bytes sent, by world rank),
        ``engine_seconds`` (processor time of the engine's thread; blocking calls run on the caller's thread
        instead), ``rates`` (bytes per second of each rank's link, which set the shard sizes of large
        all-reduces between hosts; empty until they are measured) and ``waited_for`` (seconds that this rank's
        callers waited for each world rank; the largest value shows the straggler).
        For a model also ``algorithm``, ``world_size``, ``ranks`` (world ranks that train it now), ``steps``,
        ``bytes`` and ``bytes_per_step`` (what a rank has to send, by the formulas of docs/algorithms.md) and
        ``wait_seconds``. If gradients are averaged: ``overlap`` (fraction of the communication time hidden
        behind backward) and ``buckets``. If weights are averaged: ``rounds`` (averaging steps) and ``waits``
        (those that staleness waited for). ``suspects``: by world rank, the averaging steps in which a robust
        average left out the rank, because it sent NaN, infinity or undecodable values.
    """
    totals: dict[str, Any] = dict(current().engine.counters())
    if not isinstance(of, nn.Module):
        group = of or current().group
        return {**totals, "rates": group.core.rates() if group.rank >= 0 else []}
    wrapped = _wrapped(of, "stats")
    totals["rates"] = wrapped.groups.main.core.rates() if wrapped.groups else []
    counters: dict[str, Any] = {
        "steps": 0,
        "bytes_per_step": 0,
        "bytes": 0,
        "wait_seconds": 0.0,
        "overlap": 0.0,
    }
    counters |= {"buckets": [], "rounds": 0, "waits": 0}
    counters["suspects"] = dict(wrapped.groups.non_finite_senders.counts) if wrapped.groups else {}
    if wrapped.hooks is not None:
        counters |= wrapped.hooks.stats()
    counters["steps"] += wrapped.earlier_steps
    return {
        "algorithm": wrapped.algorithm.name,
        "world_size": wrapped.size,
        "ranks": list(wrapped.group.ranks),
        **counters,
        **totals,
    }


def _finish() -> None:
    """At exit: ends asynchronous algorithms together with all ranks, unless this process failed."""
    failed = exit_status.has_failed()
    for hooks in list(running):
        if not failed:
            with contextlib.suppress(TrigramError):
                hooks.drain()
    running.clear()


world.at_exit.insert(0, _finish)
