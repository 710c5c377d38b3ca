"""What a script asks of ``with_bagua``: what its arguments, a plan and the environment come to, and whether
it is possible."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trigram.algorithms import compatibility
from trigram.algorithms.names import DEFAULT
from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm, Trigram
from trigram.averaging.sparse import sparse_parameters
from trigram.elastic import places, recovery
from trigram.errors import MisuseError, UnsupportedError
from trigram.model.wrapped import wrapped_models
from trigram.plan import measuring, settle
from trigram.plan.file import agreed
from trigram.runtime import logs
from trigram.runtime.group import Group
from trigram.runtime.weak import copied
from trigram.runtime.world import AnyGroup, resolve
from trigram.steps import fidelity
from trigram.training.compose import check
from trigram.training.model_checks import check_modules
from trigram.training.options import Options

BUCKET_MB = 4
"""Fewer bytes wait for the end of backward than with DDP's 25 (docs/benchmarks.md, "TCP between hosts")."""
BUCKET_MB_GPU = 25
"""As DDP: a call of NCCL costs more, and goes faster, than one on the CPU."""


@dataclass(frozen=True)
class Request:
    """How a model is to be trained.

    Attributes:
        algorithm: The algorithm and its options.
        extras: The options that belong to no algorithm.
        optimizer: The script's; None: it gave none.
        group: The ranks that train the model, as the script gave them.
        bucket_mb: The size of a bucket, in MiB.
        elastic: As the script gave it: False, True, or what belongs to the training state.
        automatic: How the algorithm is chosen while the model trains; None: it is ``algorithm``.
        measured: What ``trigram plan`` measures, in place of a training; None: it trains.
    """

    algorithm: Algorithm
    extras: Options
    optimizer: Any
    group: AnyGroup
    bucket_mb: float
    elastic: bool | Sequence[Any]
    automatic: settle.Settings | None
    measured: measuring.Wanted | None

    @property
    def states(self) -> list[Any] | None:
        """The objects whose state a joining rank receives; None: the job is not elastic."""
        if self.elastic is False:
            return None
        return [self.optimizer, *(self.elastic if isinstance(self.elastic, Sequence) else ())]

    def check(self, model: nn.Module) -> None:
        """Raises what this rank can know alone; sends nothing, and joins no job."""
        if self.bucket_mb <= 0:
            raise MisuseError(f"with_bagua: bucket_mb={self.bucket_mb} must be greater than 0")
        if self.elastic is not False:
            self._check_elastic(model)
        check_copies(self.algorithm, self.elastic is not False)
        check(self.algorithm, self.optimizer, model)

    def _check_elastic(self, model: nn.Module) -> None:
        if self.optimizer is None:
            raise MisuseError(
                "with_bagua: elastic=True also needs optimizer=, because a joining rank receives the "
                "optimizer's state"
            )
        features = compatibility.features(self.algorithm) | _of_model(model, frozenset())
        features.add("elastic=True")
        if self.algorithm.options.sharded:
            features.add("state='sharded' with elastic=True")
        if self.group is not None:
            features.add("group=")
        if fidelity.every():
            features.add("TRIGRAM_GRADIENTS")
        compatibility.check(f"algorithm {self.algorithm.name!r}", features)
        for s in self.states or ():
            if getattr(s, "averages_gradients_only", False) and not self.algorithm.gradients:
                raise UnsupportedError(
                    f"with_bagua: {type(s).__name__} deals samples step by step, and under "
                    f"{self.algorithm.name!r} the ranks need not be at the same one when the membership "
                    "changes; use an algorithm that averages gradients, or a sampler of your own"
                )
            if not hasattr(s, "state_dict") or not hasattr(s, "load_state_dict"):
                raise MisuseError(
                    f"with_bagua: elastic: {type(s).__name__} has no state_dict and load_state_dict; pass "
                    "only optimizers, schedulers and other objects that have both"
                )

    def ranks(self) -> Group:
        """The ranks that train the model; a rank that is late for its elastic job joins it."""
        if self.elastic is not False:
            recovery.enter_job()
            check_elastic(self.algorithm)  # before this rank joins as a spare
            recovery.join_job()
            if self.group is None:
                return places.training_group()
        return resolve(self.group)

    def among(self, ranks: Group, model: nn.Module) -> Request:
        """The request without what an algorithm of the environment does not support, which the first rank
        logs. Raises what depends on the ranks, or on other models of this one; sends nothing."""
        chosen, extras = self.algorithm, self.extras
        if chosen.from_environment:
            extras, unknown = extras.known_to(chosen, ranks.size)
            _warn_of(chosen.name, [*chosen.unknown, *unknown], ranks)
        if self.automatic is not None:
            _warn_of("auto", self.automatic.ignored, ranks)
        elastic = self.elastic is not False
        extras.check(chosen, places.counting() if elastic else ranks.size, elastic)
        features = compatibility.features(chosen) | extras.features() | _of_model(model, extras.ignore)
        compatibility.check(f"algorithm {chosen.name!r}", features)
        if self.elastic is not False:
            check_elastic(chosen)  # with the spares that it has found there
        # More ranks may join an elastic job.
        check_modules(model, ranks.size if self.elastic is False else 2)
        _check_shared(model, extras.ignore)
        if self.measured is not None and (unfit := _unfit(model, extras.ignore)):
            raise UnsupportedError(f"trigram plan: {unfit}")
        return dataclasses.replace(self, extras=extras)


def request(
    model: nn.Module,
    algorithm: str | Trigram | None,
    options: dict[str, Any],
    *,
    extras: Options,
    optimizer: Any,
    group: AnyGroup,
    bucket_mb: float | None,
    elastic: bool | Sequence[Any],
    plan: str | os.PathLike[str] | None,
) -> Request:
    """Makes a request of the arguments of :func:`trigram.with_bagua`: in their place a plan decides, or the
    environment, or ``trigram plan``, which measures the script. All ranks compare their plans.

    Raises:
        UnsupportedError, ConfigError, MismatchError, MisuseError: See there.
    """
    if (measured := measuring.wanted()) is not None:
        if elastic is not False:
            raise UnsupportedError(
                "with_bagua: trigram plan cannot measure an elastic job; pass elastic=False"
            )
        algorithm, bucket_mb, optimizer, plan = "local_sgd", None, None, None
        options = {**measuring.LEARN, "warmup_steps": measured.communicating}
        extras = Options(broadcast_buffers=extras.broadcast_buffers, ignore=extras.ignore)
    if algorithm is not None and plan is not None:
        raise MisuseError("with_bagua: plan= names the algorithm; remove algorithm=, or plan=")
    if (decision := agreed(plan, group, uses=algorithm is None, asks=elastic is False)) is not None:
        algorithm, options = decision.algorithm, {**decision.options, **options}
        bucket_mb = decision.bucket_mb if bucket_mb is None else bucket_mb
    if (automatic := settle.settings(algorithm, options)) is not None:
        if elastic is not False:
            compatibility.check("with_bagua", {"elastic=True", "algorithm='auto'"})
        algorithm, options = DEFAULT, {}
    if bucket_mb is None:
        bucket_mb = BUCKET_MB_GPU if any(p.is_cuda for p in model.parameters()) else BUCKET_MB
    return Request(
        find(algorithm, options), extras, optimizer, group, bucket_mb, elastic, automatic, measured
    )


def check_elastic(chosen: Algorithm) -> None:
    """Raises if an algorithm does not go with this elastic job, as far as this rank knows its spares."""
    features = compatibility.features(chosen)
    features.add("elastic=True")
    if places.has_spares():
        features.add("init(spare=True)")
    if places.replica_size() > 1:
        features.add("init(replica_size=)")
    compatibility.check(f"algorithm {chosen.name!r}", features)


def check_copies(chosen: Algorithm, elastic: bool) -> None:
    """Raises if copies of a sharded optimizer's state are asked for in a job whose ranks do not change."""
    if chosen.options.copies is not None and not elastic:
        raise MisuseError(
            f"with_bagua: copies={chosen.options.copies} needs elastic=True, where ranks may be lost; "
            "remove copies="
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
        shared = [names[i] for i in names if i in hooks.parameters.ids]
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
