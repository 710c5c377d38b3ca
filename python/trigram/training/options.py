"""The options of ``with_bagua`` that do not belong to an algorithm, and which algorithms support them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from trigram.algorithms import compatibility
from trigram.algorithms.trigram import Algorithm
from trigram.averaging.gradient_filter import GradientFilter
from trigram.averaging.groups import ModelGroups
from trigram.averaging.non_finite import NonFiniteCheck
from trigram.averaging.sample_weight import SampleWeight
from trigram.errors import MisuseError, UnsupportedError
from trigram.runtime import logs
from trigram.runtime.signatures import misfit


@dataclass(frozen=True)
class Options:
    """The options of one model; see :func:`trigram.with_bagua`."""

    sample_weight: float | Callable[[], float] | None = None
    check_finite: bool = False
    check_replicas: int = 0
    broadcast_buffers: bool = True
    ignore: frozenset[str] = frozenset()
    filters: tuple[GradientFilter, ...] = ()

    def __str__(self) -> str:
        weighted = ", sample_weight" if self.sample_weight is not None else ""
        replicas = f", check_replicas={self.check_replicas}" if self.check_replicas else ""
        buffers = "" if self.broadcast_buffers else ", broadcast_buffers=False"
        ignored = f", ignore={sorted(self.ignore)}" if self.ignore else ""
        if self.filters:
            ignored += f", filters=[{', '.join(type(f).__name__ for f in self.filters)}]"
        return weighted + (", check_finite" if self.check_finite else "") + replicas + buffers + ignored

    def known_to(self, algorithm: Algorithm, size: int) -> tuple[Options, list[str]]:
        """The options without those that the algorithm does not support, and the names of these. Filters are
        never left out: what they keep from other ranks (by noise, say) would be sent."""
        Options().check(algorithm, size)
        kept, unknown = self, []
        for field in (f for f in fields(Options) if f.name != "filters"):
            try:
                only: Any = {field.name: getattr(self, field.name)}
                replace(Options(), **only).check(algorithm, size)
            except UnsupportedError:
                default: Any = {field.name: field.default}
                kept = replace(kept, **default)
                unknown.append(field.name)
        return kept, unknown

    def check(self, algorithm: Algorithm, size: int, elastic: bool = False) -> None:
        """Raises if the algorithm does not support an option on ``size`` ranks; sends nothing.

        Args:
            algorithm: The algorithm.
            size: How many ranks there are now.
            elastic: There may be more.
        """
        rule = algorithm.aggregation
        if rule is not None and 1 < size < rule.least():
            raise UnsupportedError(
                f"{algorithm.name}: {algorithm.value.who} leaves out the {rule.parameter:g} largest and the "
                f"{rule.parameter:g} smallest values, so it needs at least {rule.least()} ranks; there are "
                f"{size}"
            )
        if not elastic and 1 < size < (quorum := algorithm.options.quorum or 1):
            raise UnsupportedError(f"{algorithm.name}: quorum={quorum} needs as many ranks; there are {size}")
        if self.check_replicas < 0:
            raise MisuseError(
                f"with_bagua: check_replicas={self.check_replicas} must be a number of steps, or 0 for no "
                "checks"
            )
        weight = self.sample_weight
        if not (weight is None or callable(weight) or isinstance(weight, int | float)):
            raise MisuseError(
                f"with_bagua: sample_weight={weight!r} must be a number or a callable that returns one"
            )
        wanted = compatibility.features(algorithm) | self.features()
        compatibility.check(algorithm.name, wanted)

    def features(self) -> set[compatibility.Feature]:
        """Those that are asked for."""
        asked: dict[compatibility.Feature, bool] = {
            "sample_weight=": self.sample_weight is not None,
            "check_finite=True": self.check_finite,
            "check_replicas=": self.check_replicas > 0,
            "filters=": bool(self.filters),
        }
        return {feature for feature, wanted in asked.items() if wanted}

    def bind(self, groups: ModelGroups, algorithm: Algorithm) -> None:
        """Sets the options in the model's process groups, after all ranks have agreed on them."""
        groups.aggregation = algorithm.aggregation
        groups.check_replicas = self.check_replicas
        groups.broadcast_buffers = self.broadcast_buffers
        groups.ignored = self.ignore
        groups.filters = self.filters
        if self.sample_weight is not None and groups.sample_weight is None:
            groups.sample_weight = SampleWeight(self.sample_weight, groups.group)
        if self.check_finite and groups.non_finite_check is None:
            groups.non_finite_check = NonFiniteCheck(groups.control)


def ignored_names(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """The given names of parameters and buffers, with the other names of the same tensors.

    Raises:
        MisuseError: The model has no parameter or buffer of a name; the message lists names that are near.
    """
    if isinstance(names, str):
        raise MisuseError(f"with_bagua: ignore={names!r} must be a sequence of names, such as [{names!r}]")
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name in names:
        if name not in found:
            near = difflib.get_close_matches(str(name), found, n=5, cutoff=0.4) or list(found)[:5]
            raise MisuseError(
                f"with_bagua: ignore: the model has no parameter or buffer {name!r}; near matches: "
                f"{', '.join(near) or 'none'}"
            )
    tensors = {id(found[name]) for name in names}
    return frozenset(name for name, t in found.items() if id(t) in tensors)


def checked_filters(given: Sequence[GradientFilter] | None) -> tuple[GradientFilter, ...]:
    """The filters; raises if something else was given."""
    if given is None:
        return ()
    if isinstance(given, Sequence) and all(isinstance(one, GradientFilter) for one in given):
        methods = [name for name in vars(GradientFilter) if not name.startswith("_")]
        for one in given:
            for name in methods:
                takes = list(inspect.signature(getattr(GradientFilter, name)).parameters)[1:]
                if why := misfit(getattr(one, name), *takes):
                    called = f"{name}({', '.join(takes)})"
                    raise MisuseError(
                        f"with_bagua: the filter {type(one).__name__} is called as {called}: {why}"
                    )
            if all(getattr(type(one), name) is getattr(GradientFilter, name) for name in methods):
                logs.warning(
                    f"with_bagua: the filter {type(one).__name__} has none of the methods that are called "
                    f"({', '.join(methods)}), so it does nothing"
                )
        return tuple(given)
    raise MisuseError(
        f"with_bagua: filters={given!r} must be a sequence of objects of subclasses of "
        "trigram.averaging.GradientFilter, such as [MyFilter()]"
    )
