"""``DistributedOptimizer``: an optimizer whose gradients are averaged over all ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trigram.averaging.gradient_filter import GradientBucket, GradientFilter
from trigram.averaging.sparse import sparse_parameters
from trigram.compat.horovod.basics import ProcessSet, global_process_set
from trigram.compat.horovod.calls import Adasum, Average, Sum
from trigram.compat.horovod.compression import Compression
from trigram.errors import UnsupportedError
from trigram.gradients.gradient_sync import GradientSync
from trigram.model.with_bagua import with_bagua
from trigram.model.wrapped import wrapped_models
from trigram.steps.step_hooks import StepHooks

_ALGORITHMS = {Compression.none: None, Compression.fp16: "central/f16/sync"}


class _Parameters(nn.Module):
    """The parameters of an optimizer, by the names that the script gave them. It is never called.

    Args:
        named: The parameters with their names.
        sparse: Those of them that get sparse gradients.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], sparse: list[nn.Parameter]) -> None:
        super().__init__()
        self._named = named
        self._tables = [_table(p) for p in sparse]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        yield from self._named

    def modules(self, *_: Any, **__: Any) -> Iterator[nn.Module]:
        """This one, and a table for each parameter with sparse gradients: by these they are known."""
        yield self
        yield from self._tables


def _table(param: nn.Parameter) -> nn.Module:
    """A module that has the parameter, and says that its gradients are sparse."""
    table = nn.Embedding(1, 1, sparse=True)
    table.weight = param
    return table


class _Sums(GradientFilter):
    """Makes sums of the averages."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def averaged(self, buckets: Any) -> None:
        """The averages are there."""
        for bucket in buckets:
            mean: torch.Tensor = bucket.mean
            mean.mul_(self.ranks)

    def before(self, bucket: GradientBucket) -> None:
        """Nothing: gradients are averaged as they are."""


class _Distributed:
    """What is added to the class of an optimizer. Averages are made in ``backward()``; what Horovod does in
    ``synchronize`` and ``step`` has been done by then, unless fewer passes were made than are accumulated."""

    _hvd_parameters: _Parameters
    _hvd_passes: int
    _hvd_counts: dict[int, int]
    _hvd_synchronized: bool
    _hvd_should: bool
    _hvd_dense: bool
    _parameter_names: dict[torch.Tensor, str]

    def _hvd_hooks(self) -> StepHooks | None:
        wrapped = wrapped_models.get(self._hvd_parameters)
        return None if wrapped is None else wrapped.hooks

    def _hvd_begin(self) -> None:
        """The gradients of the next passes are accumulated up to the last."""
        self._hvd_counts.clear()
        if (hooks := self._hvd_hooks()) is not None:
            hooks.sync = self._hvd_passes == 1

    def _hvd_came(self, param: torch.Tensor) -> None:
        """A gradient was added to a parameter; hooks of its model are called after this one."""
        if self._hvd_dense and param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        count = self._hvd_counts[id(param)] = self._hvd_counts.get(id(param), 0) + 1
        if count > self._hvd_passes > 1:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if count == self._hvd_passes and (hooks := self._hvd_hooks()) is not None:
            hooks.sync = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, so many backward passes are accumulated."""
        self._hvd_passes = passes
        self._hvd_begin()

    def synchronize(self) -> None:
        """Averages gradients that no backward pass has averaged; the rest is averaged already."""
        if isinstance(hooks := self._hvd_hooks(), GradientSync):
            hooks.sync = True
            hooks.before_update(hooks.parameters.ids)
        self._hvd_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block in which ``step`` does not average: ``synchronize`` was called."""
        self._hvd_should = False
        try:
            yield
        finally:
            self._hvd_should = True

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step."""
        if self._hvd_should and self._hvd_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown.",
                stacklevel=2,
            )
        self._hvd_synchronized = False
        if (hooks := self._hvd_hooks()) is not None:
            hooks.sync = True
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            self._hvd_begin()

    def add_param_group(self, _: Any) -> None:
        """Raises: nothing would average the gradients of these parameters."""
        raise UnsupportedError(
            "DistributedOptimizer: add_param_group is not supported, because the new parameters would not be "
            "averaged; add all parameters before hvd.DistributedOptimizer"
        )


def DistributedOptimizer(  # Horovod's name
    optimizer: Any,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    algorithm: str | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Averages the gradients of an optimizer's parameters over all ranks. All ranks of the set call it, and
    get the parameters of its first rank.

    Args:
        optimizer: The optimizer. It is changed, and returned.
        named_parameters: Names of all its parameters, for errors; None: numbers.
        compression: ``Compression.none`` or ``Compression.fp16``.
        backward_passes_per_step: So many backward passes are accumulated before their sum is averaged.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: Of no effect: averages are rounded once.
        num_groups: Of no effect: gradients are averaged in buckets.
        groups: The same.
        sparse_as_dense: Sparse gradients become dense ones; of no effect with ``SparseAdam``.
        process_set: The ranks.
        algorithm: One of Trigram's, such as ``decentralized``, with ``options``; None: as ``compression``
            says. See :func:`trigram.with_bagua`.
        model: The model, if it has modules with ``sparse=True``; those of ``SparseAdam`` are known.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: Names are missing, or there twice.
        UnsupportedError: Adasum, or another compression.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = (
        [(f"noname.{k}", p) for k, p in enumerate(params)]
        if named_parameters is None
        else list(named_parameters)
    )
    _check_names(named, params)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op == Adasum or op not in (Average, Sum):
        raise UnsupportedError(f"DistributedOptimizer: op={op} is not supported; use Average or Sum")
    if algorithm is None and compression not in _ALGORITHMS:
        raise UnsupportedError(
            "DistributedOptimizer: a compression of the script's own is not supported; use algorithm=, or "
            "register a codec (docs/extending.md)"
        )
    if not process_set.included():
        return optimizer
    mine = {id(p) for p in params}
    sparse: list[Any] = params if isinstance(optimizer, torch.optim.SparseAdam) else []
    sparse_as_dense = sparse_as_dense and not sparse
    if model is not None:
        sparse = list(sparse_parameters(model))
    container = _Parameters(
        [(name, p) for name, p in named if id(p) in mine], [] if sparse_as_dense else sparse
    )
    filters = [_Sums(process_set.size() or 1)] if op == Sum else []
    chosen = algorithm if algorithm is not None else _ALGORITHMS[compression]
    if filters:  # last: the script's own see averages
        options["filters"] = [*options.get("filters", ()), *filters]
    with_bagua(container, chosen, group=process_set.group, **options)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer._hvd_parameters, optimizer._hvd_passes = container, backward_passes_per_step
    optimizer._hvd_dense, optimizer._parameter_names = sparse_as_dense, {p: name for name, p in named}
    optimizer._hvd_counts, optimizer._hvd_synchronized, optimizer._hvd_should = {}, False, True
    came = weakref.WeakMethod(optimizer._hvd_came)
    for p in params:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda param: (told := came()) and told(param))
    optimizer._hvd_begin()
    return optimizer


def _check_names(named: list[Any], params: list[torch.Tensor]) -> None:
    """Raises as Horovod does."""
    if any(not isinstance(one, tuple) for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    known = {id(p) for _, p in named}
    missing = sum(id(p) not in known for p in params)
    if missing:
        raise ValueError(
            f"named_parameters was specified, but {missing} parameters of the optimizer were not named"
        )
