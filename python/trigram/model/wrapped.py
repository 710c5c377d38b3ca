"""A wrapped model: a module, its algorithm and its hooks; and the registry of all of them.

A model is wrapped in one job: after ``trigram.shutdown`` its groups are gone, and only ``unwrap`` and a new
``with_bagua`` make sense of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from trigram.algorithms.trigram import Algorithm
from trigram.averaging.groups import ModelGroups
from trigram.elastic import places, recovery
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.gradients.gradient_sync import GradientSync
from trigram.mixing.quorum.steps import QuorumSteps
from trigram.runtime import job, logs
from trigram.runtime.group import Group
from trigram.runtime.weak import copied
from trigram.steps import fidelity
from trigram.steps.elastic_model import ElasticModel
from trigram.steps.step_hooks import StepHooks, agree_on_algorithm
from trigram.training.compose import compose, warm
from trigram.training.dropped_models import release_dropped
from trigram.training.options import Options
from trigram.training.recoveries import recovery_of
from trigram.training.running_models import RunningModels
from trigram.training.weight_sync import WeightSync


class Tuner(Protocol):
    """Chooses the algorithm of a model while it trains: :class:`trigram.model.auto.Auto`."""

    def pause(self) -> None:
        """Suspends a trial until the next update, on all ranks: what is tried is not what was chosen."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps, for :meth:`resume`; the same on all ranks."""

    def resume(self, state: dict[str, Any]) -> None:
        """Ends a trial, and takes the algorithm of a saved state, if it may; all ranks call it."""

    def report(self) -> dict[str, Any]:
        """What ``stats`` says of it."""


class WrappedModel:
    """A model and its algorithm.

    Attributes:
        stay: In the job in which it was wrapped.
        algorithm: The algorithm with its options.
        hooks: The hooks on the model; None if one rank trains it alone, without filters.
        earlier_steps: Steps made with earlier algorithms.
        settings: More that all ranks must have alike, as text.
        tuner: Chooses the algorithm while the model trains; None: the script has chosen it.
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
        settings: str = "",
    ) -> None:
        self.settings = settings
        self.tuner: Tuner | None = None
        self.stay = job.here().stay
        self.extras = extras
        self.model = weakref.ref(model)
        self.bucket_bytes = bucket_bytes
        self.group = group
        self.earlier_steps = 0
        self.hooks: StepHooks | None = None
        self.alone = group.size == 1 and states is None
        self.groups = None if self.alone and not extras.filters else ModelGroups(group)
        self.states = states
        if self.groups is not None:
            self.groups.describe(_describes(weakref.ref(self)))
        if self.groups is not None and states is not None:
            self.groups.joining = places.is_newcomer()
            self.groups.source = places.first_place
        self.agree(chosen, settings)
        self.begin(model, chosen, optimizer)

    @property
    def stale(self) -> bool:
        """Whether the job in which the model was wrapped has ended."""
        return self.stay.over

    @property
    def size(self) -> int:
        """Ranks that train the model."""
        return self.group.size

    def agree(self, chosen: Algorithm, settings: str) -> None:
        """Raises a ``MismatchError`` on all ranks if they are to begin different algorithms."""
        looks = fidelity.every()
        if self.groups is not None and not self.groups.joining:
            seen = f", looks at gradients every {looks} steps" if looks else ""
            agree_on_algorithm(f"{chosen}{self.extras}{settings}{seen}", self.groups)

    def begin(self, model: nn.Module, chosen: Algorithm, optimizer: Any) -> None:
        """Starts an algorithm that was checked, and on which all ranks agree; first its warm-up if it has
        one."""
        self.algorithm, self.optimizer = chosen, optimizer
        if self.groups is None:
            return
        if self.states is None:  # ranks join an elastic job one by one
            release_dropped(self.groups)
        # After dropped models are released.
        others = job.here().part(RunningModels).models
        if chosen.options.quorum is not None and any(isinstance(h.schedule, QuorumSteps) for h in others):
            raise UnsupportedError(
                "with_bagua: another model has quorum=, and only one can: with two, a rank could wait for "
                "the first rank in one while that waits for it in the other; trigram.unwrap ends the other"
            )
        self.extras.bind(self.groups, chosen)
        self.groups.be_patient(not chosen.in_step)
        warmup = chosen.options.warmup_steps
        self.groups.use_helpers(
            chosen.gradients
            and chosen.value.what == "full"
            and not (chosen.graph or warmup or chosen.options.sharded)
        )
        if self.alone:  # for the filters; there is nobody to average with
            self.hooks = GradientSync(model, self.groups, self.bucket_bytes)
        elif warmup:
            self.hooks = GradientSync(model, self.groups, self.bucket_bytes, warm(chosen))
            self.hooks.warmup_end.follow(
                warmup, self.proceed if self.states is None else self._proceed_together
            )
        else:
            self.hooks = self._compose(model)
        self.hooks.times.earlier = self.earlier_steps
        if self.states is not None:
            title, warms = f"{chosen}{self.extras}", bool(warmup)
            part = ElasticModel(model, title, self.states, self.groups, recovery_of(self.hooks), self, warms)
            self.hooks.elastic = part
            try:
                recovery.add(part)
            except TrigramError:  # it has not begun, so nothing of it is to be ended
                self.hooks.close()
                if isinstance(self.hooks, WeightSync):
                    job.here().part(RunningModels).remove(self.hooks)
                recovery.withdraw()
                raise
            self.groups.joining = False
        if self.group.rank == 0:
            logs.info(self._line())

    def _line(self) -> str:
        """What the first rank logs at the start."""
        text = f"{self.algorithm.title} trains a model on {self.size} ranks"
        hooks = self.hooks
        if isinstance(hooks, GradientSync):
            sent, count = sum(b.average.sent for b in hooks.buckets), len(hooks.buckets)
            text += f"; {count} bucket{'s' if count > 1 else ''}, {sent} bytes sent per step and rank"
            if self.warming:
                text += f" in the warm-up of {hooks.warmup_end.limit} steps"
        if not self.algorithm.gradients:
            text += (
                "; the ranks' weights differ between averaging steps: evaluate and save them under "
                "trigram.consensus"
            )
        return text

    def _compose(self, model: nn.Module) -> StepHooks:
        assert self.groups is not None
        elastic = self.states is not None
        hooks = compose(model, self.groups, self.algorithm, self.bucket_bytes, self.optimizer, elastic)
        if not self.algorithm.in_step:
            assert isinstance(hooks, WeightSync)
            job.here().part(RunningModels).add(hooks, None if self.states is None else model)
        return hooks

    def end(self) -> None:
        """Removes the hooks; the caller has ended the averaging steps under way."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            self.earlier_steps += hooks.steps
            hooks.close()
            if isinstance(hooks, WeightSync):
                hooks.schedule.close()
                hooks.running.remove(hooks)

    def proceed(self) -> StepHooks:
        """Starts the algorithm after its warm-up."""
        model, before = self.model(), self.hooks
        assert model is not None and before is not None
        self.end()
        return self._begin_again(self._compose(model), before)

    def _proceed_together(self) -> StepHooks:
        """The same in an elastic job, whose ranks may be lost meanwhile, or join."""
        assert self.hooks is not None and isinstance(self.hooks.elastic, ElasticModel)
        self.hooks.elastic.end_warmup()
        return self.hooks

    def begin_after(self, steps: int) -> None:
        """On a rank that joins an elastic job: so many steps were made with earlier hooks."""
        self.earlier_steps = steps
        if self.hooks is not None:
            self.hooks.times.earlier = steps

    def restart(self, algorithm: Algorithm) -> StepHooks:
        """Begins the algorithm again with other options of the same, or as before if these do not fit the
        model, and raises then; the caller has ended the averaging steps under way."""
        model, before = self.model(), self.hooks
        assert model is not None and before is not None
        earlier, algorithm_before = self.earlier_steps, self.algorithm
        self.end()
        self.earlier_steps, self.algorithm = earlier, algorithm
        try:
            self.hooks = self._compose(model)
        except MisuseError:
            self.algorithm = algorithm_before
            self._begin_again(self._compose(model), before)
            raise
        return self._begin_again(self.hooks, before)

    def _begin_again(self, hooks: StepHooks, before: StepHooks) -> StepHooks:
        """These hooks take the place of others."""
        self.hooks = hooks
        self.hooks.sync, self.hooks.times.earlier = before.sync, self.earlier_steps
        if isinstance(before.elastic, ElasticModel):
            before.elastic.begins_again(recovery_of(self.hooks))
            self.hooks.elastic = before.elastic
        return self.hooks

    @property
    def warming(self) -> bool:
        """Whether the warm-up has not ended yet."""
        return isinstance(self.hooks, GradientSync) and self.hooks.warmup_end.is_ahead


def _describes(wrapped: weakref.ref[WrappedModel]) -> Callable[[], str]:
    """What log lines say about a model; it does not keep the model alive."""

    def say() -> str:
        now = wrapped()
        if now is None:
            return "a model that the script has dropped"
        steps = now.earlier_steps + (now.hooks.steps if now.hooks is not None else 0)
        return f"model {type(now.model()).__name__}, step {steps}"

    return say


wrapped_models: weakref.WeakKeyDictionary[nn.Module, WrappedModel] = weakref.WeakKeyDictionary()
"""The wrapped modules; a ``trigram.DistributedDataParallel`` and its module have the same entry."""


def lookup(model: nn.Module, what: str) -> WrappedModel:
    """What :func:`trigram.with_bagua` knows of a model.

    Args:
        model: The model.
        what: The call that asks, for the error message.

    Raises:
        MisuseError: The model is not wrapped, or was wrapped before ``trigram.shutdown``.
    """
    wrapped = wrapped_models.get(model)
    if wrapped is None:
        raise MisuseError(f"{what}: call trigram.with_bagua on this model first")
    if wrapped.stale:
        raise MisuseError(
            f"{what}: this model was wrapped in a job that trigram.shutdown has ended; call "
            "trigram.with_bagua on it again, or trigram.unwrap to use it without trigram"
        )
    return wrapped


def remove(wrapped: WrappedModel) -> None:
    """Removes the hooks and the entries of a wrapped model; sends nothing except goodbyes.

    The caller has ended the averaging steps under way, unless the model's job has ended.
    """
    if wrapped.stale and wrapped.hooks is not None:
        wrapped.hooks.close_without_calls()
        wrapped.hooks = None
    wrapped.end()
    for model in [m for m, w in copied(wrapped_models.items) if w is wrapped]:
        del wrapped_models[model]
