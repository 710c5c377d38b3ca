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

from trigram.algorithms.names import Plan, Trigram, find
from trigram.averaging.sparse import sparse_parameters
from trigram.collectives.calls import AnyGroup
from trigram.elastic import recovery as elastic_jobs
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.mixing.step import mean_of, same_everywhere
from trigram.runtime import world
from trigram.runtime.world import Group, current, resolve
from trigram.training.compose import check, compose, warm
from trigram.training.gradient_sync import Gradients
from trigram.training.options import Terms
from trigram.training.step_hooks import Carrier, Channels, agree_on_algorithm
from trigram.training.weight_sync import Weights, running

Model = TypeVar("Model", bound=nn.Module)


class Job:
    """A model and its algorithm.

    Attributes:
        plan: The algorithm.
        carrier: What hooks the model; None in a world of one.
        behind: Steps that earlier algorithms made.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        bucket_bytes: int,
        optimizer: Any,
        terms: Terms,
        states: Sequence[Any] | None = None,
    ) -> None:
        self.terms = terms
        self.model = weakref.ref(model)
        self.bucket_bytes = bucket_bytes
        self.group = group
        self.behind = 0
        self.carrier: Carrier | None = None
        self.channels = Channels(group) if group.size > 1 or states is not None else None
        self.states = states
        if self.channels is not None and states is not None:
            self.channels.entering = elastic_jobs.is_newcomer()
        self.begin(model, plan, optimizer)

    @property
    def size(self) -> int:
        """Ranks that train the model."""
        return self.group.size

    def begin(self, model: nn.Module, plan: Plan, optimizer: Any) -> None:
        """The algorithm from now on, after its warm-up."""
        check(plan, optimizer)
        self.plan, self.optimizer = plan, optimizer
        if self.channels is None:
            return
        if not self.channels.entering:
            agree_on_algorithm(f"{plan}{self.terms}", self.channels)
        self.terms.bind(self.channels, plan)
        warmup = plan.options.get("warmup_steps", 0)
        self.channels.aid(plan.gradients and plan.value.what == "full" and not plan.graph and not warmup)
        if warmup:
            self.carrier = Gradients(model, self.channels, self.bucket_bytes, warm(plan))
            self.carrier.limit, self.carrier.successor = warmup, self.proceed
        else:
            self.carrier = self._compose(model)
        if self.states is not None:
            carrier = self.carrier
            carrier.elastic = elastic_jobs.Part(
                model, f"{plan}{self.terms}", self.states, self.channels, carrier
            )
            elastic_jobs.add(carrier.elastic)
            self.channels.entering = False

    def _compose(self, model: nn.Module) -> Carrier:
        assert self.channels is not None
        carrier = compose(model, self.channels, self.plan, self.bucket_bytes, self.optimizer)
        if self.plan.every is None:
            assert isinstance(carrier, Weights)
            running[carrier] = None if self.states is None else model
        return carrier

    def end(self) -> None:
        """No algorithm any more; what is under way has been ended."""
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            self.behind += carrier.steps
            carrier.close()
            if isinstance(carrier, Weights):
                carrier.rounds.close()
                running.pop(carrier, None)

    def proceed(self) -> Carrier:
        """The warm-up is over."""
        model = self.model()
        assert model is not None
        sync = self.carrier.sync if self.carrier else True
        self.end()
        self.carrier = self._compose(model)
        self.carrier.sync = sync
        return self.carrier

    @property
    def warming(self) -> bool:
        """Whether the warm-up is still on."""
        return self.carrier is not None and self.carrier.successor is not None


_hooked: weakref.WeakKeyDictionary[nn.Module, Job] = weakref.WeakKeyDictionary()


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

    The same module comes back, hooked; the keys of its ``state_dict`` do not change. Weights and
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
    plan = find(algorithm, options)
    if bucket_mb <= 0:
        raise MisuseError(f"with_bagua: bucket_mb={bucket_mb} is not positive")
    if model in _hooked:
        raise MisuseError("with_bagua: this model is hooked already; trigram.switch changes its algorithm")
    states = None
    if elastic is not False:
        states = _states(model, plan, optimizer, group, elastic)
        optimizer = None
    check(plan, optimizer)
    terms, ranks = Terms(sample_weight, check_finite, check_replicas), resolve(group)
    terms.check(plan, ranks.size)
    _hooked[model] = Job(model, plan, ranks, int(bucket_mb * (1 << 20)), optimizer, terms, states)
    return model


def _states(
    model: nn.Module, plan: Plan, optimizer: Any, group: AnyGroup, wanted: bool | Sequence[Any]
) -> list[Any]:
    """What a newcomer of an elastic job gets beside the weights."""
    if optimizer is None:
        raise MisuseError("with_bagua: elastic=True needs optimizer=, whose state a rank that enters gets")
    if group is not None:
        raise UnsupportedError("with_bagua: elastic models are trained by all ranks; leave group= out")
    if plan.value.carry == "momentum" or plan.options.get("warmup_steps"):
        raise UnsupportedError(f"with_bagua: {plan.name} cannot be elastic yet; choose one without warm-up")
    if list(sparse_parameters(model)):
        raise UnsupportedError("with_bagua: modules that say sparse=True cannot be elastic yet")
    states = [optimizer, *(wanted if isinstance(wanted, Sequence) else ())]
    for s in states:
        if not hasattr(s, "state_dict") or not hasattr(s, "load_state_dict"):
            raise MisuseError(
                f"with_bagua: elastic: a {type(s).__name__} has no state_dict and load_state_dict"
            )
    elastic_jobs.join_job()
    return states


def _job(model: nn.Module, what: str) -> Job:
    try:
        return _hooked[model]
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
    job = _job(model, "switch")
    plan = find(algorithm, options)
    check(plan, optimizer)
    job.terms.check(plan, job.size)
    if isinstance(job.carrier, Weights):
        job.carrier.average(model)
    elif job.carrier is not None:
        job.carrier.abandon()
    job.end()
    job.begin(model, plan, optimizer)


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
    job = _job(model, "consensus")
    carrier = job.carrier
    if carrier is None:
        return Consensus(model, [])
    if isinstance(carrier, Weights):
        carrier.drain(timeout)
        own = [p.detach() for p in model.parameters()]
    else:
        carrier.abandon()
        _await_all(carrier, timeout)
        weights = [p.detach() for p in model.parameters()]
        # An average of equals may differ from them in the last bit.
        own = [] if same_everywhere(weights, carrier.channels) else weights
    tensors = [*own, *(b for b in model.buffers() if b.numel())]
    replicas = [(t, t.clone()) for t in tensors]
    mean_of(tensors, carrier.channels)
    return Consensus(model, replicas)


def _await_all(carrier: Carrier, timeout: float | None) -> None:
    from trigram.collectives import calls as collectives

    side = carrier.channels.side
    before, side.timeout = side.timeout, timeout if timeout is not None else side.timeout
    try:
        collectives.barrier(side)
    finally:
        side.timeout = before


def algorithm_state(model: nn.Module) -> dict[str, Any]:
    """Everything the algorithm remembers, for ``torch.save``; all ranks call it, between steps.

    Each rank saves its own. Rounds under way are ended and applied first, so take
    ``model.state_dict()`` after it.
    """
    job = _job(model, "algorithm_state")
    state: dict[str, Any] = {
        "algorithm": job.plan.title,
        "world_size": job.size,
        "behind": job.behind,
        "warming": job.warming,
    }
    if job.carrier is not None:
        job.carrier.drain()
        state["carrier"] = copy.deepcopy(job.carrier.state())
    return state


def load_algorithm_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Goes on where :func:`algorithm_state` was called; after ``model.load_state_dict``.

    Every rank loads what the same rank saved.

    Raises:
        MisuseError: It is another algorithm's, or another number of ranks saved it.
    """
    job = _job(model, "load_algorithm_state")
    if (state["algorithm"], state["world_size"]) != (job.plan.title, job.size):
        raise MisuseError(
            f"load_algorithm_state: the state is of {state['algorithm']} with {state['world_size']} ranks, "
            f"this is {job.plan.title} with {job.size}; take trigram.consensus weights to go on with another"
        )
    if job.warming and not state["warming"]:
        job.proceed()
    job.behind = state["behind"]
    if job.carrier is not None:
        job.carrier.load(state["carrier"])


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients accumulate locally inside; the next backward pass outside is a step again."""
    job = _job(model, "no_sync")
    if job.carrier is None:
        yield
        return
    before, job.carrier.sync = job.carrier.sync, False
    try:
        yield
    finally:
        job.carrier.sync = before


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Training with unequal numbers of inputs per rank.

    A rank that leaves the block early goes on to take part in what the others need of it: with
    gradients of zero, or with the weights it has; averages are over all ranks. Where gradients are
    averaged, at the end all ranks get the weights and buffers of the rank that trained longest
    (optimizers keep their own state), as ``DistributedDataParallel.join`` does. Asynchronous
    algorithms need no help during the block; at its end all wait for all.
    """
    job = _job(model, "join")
    if job.carrier is None:
        yield
        return
    if job.states is not None:
        raise UnsupportedError("join: an elastic job has no uneven inputs; a rank that is through leaves")
    if job.plan.every is None and not job.warming:
        yield
        job.carrier.drain()
        return
    job.carrier.joining, job.carrier.forwards = True, 0
    try:
        yield
        job.carrier.shadow(model)
    finally:
        job.carrier.joining = False


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
    job = _job(of, "stats")
    totals["rates"] = job.channels.first.core.rates() if job.channels else []
    own: dict[str, Any] = {"steps": 0, "bytes_per_step": 0, "bytes": 0, "wait_seconds": 0.0, "overlap": 0.0}
    own |= {"buckets": [], "rounds": 0, "waits": 0}
    own["suspects"] = dict(job.channels.suspects.counts) if job.channels else {}
    if job.carrier is not None:
        own |= job.carrier.stats()
    own["steps"] += job.behind
    return {
        "algorithm": job.plan.name,
        "world_size": job.size,
        "ranks": list(job.group.ranks),
        **own,
        **totals,
    }


def _finish() -> None:
    """The process leaves: asynchronous rounds end well on all ranks, unless this one has failed."""
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    for carrier in list(running):
        if failed is None:
            with contextlib.suppress(TrigramError):
                carrier.drain()
    running.clear()


world.at_exit.insert(0, _finish)
