"""Gradients of which each rank holds a part, as tensors that parameters can have as ``grad``.

They know what training loops do between backward and the optimizer's step: norms, factors, clamps, the check
of a GradScaler. Each is carried out on this rank's part, with the all-reduce that it needs, so all ranks do
the same. Everything else raises an error instead of computing with a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trigram import collectives
from trigram.errors import MisuseError
from trigram.runtime.group import Group

_aten: Any = torch.ops.aten
_IN_PLACE: set[Any] = {
    getattr(getattr(_aten, name), overload)
    for name, overloads in {
        "mul_": ("Tensor", "Scalar"),
        "div_": ("Tensor", "Scalar"),
        "clamp_": ("default", "Tensor"),
        "clamp_min_": ("default", "Tensor"),
        "clamp_max_": ("default", "Tensor"),
        "nan_to_num_": ("default",),
        "neg_": ("default",),
        "zero_": ("default",),
    }.items()
    for overload in overloads
}
"""Operations that change each value by itself; other arguments are numbers or tensors of one value."""
_IN_PLACE_LISTS: set[Any] = {
    getattr(getattr(_aten, f"_foreach_{name}_"), overload)
    for name, overloads in {
        "mul": ("Tensor", "Scalar"),
        "div": ("Tensor", "Scalar"),
        "clamp_min": ("Scalar",),
        "clamp_max": ("Scalar",),
        "neg": ("default",),
        "zero": ("default",),
    }.items()
    for overload in overloads
}
_ZEROS = (_aten.zero_.default, _aten._foreach_zero_.default)
_OF_MEMORY = {
    getattr(torch.Tensor, name, None)  # ``const_data_ptr`` is of torch 2.13
    for name in (
        *("numpy", "tolist", "data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage"),
        *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"),
    )
}
"""Methods that read a tensor's memory or hand it on, and are no operations that torch dispatches."""


class ShardedGradient(torch.Tensor):
    """The mean gradient of a parameter, of which this rank holds a part.

    Attributes:
        part: This rank's values, one-dimensional, as the parameter lies in memory; None: it holds none.
        group: The ranks that hold the parts.
        reset: Whether it was set to 0 since the backward pass.
        used: Whether an optimizer has used it in backward, so that no rank has values.
        added: What backward passes have added since then, on this rank only; None: nothing.
    """

    part: torch.Tensor | None
    group: Group
    reset: bool
    used: bool
    added: torch.Tensor | None

    @staticmethod
    def __new__(cls, param: torch.Tensor, part: torch.Tensor | None, group: Group) -> ShardedGradient:
        """A gradient of this parameter."""
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            storage_size=0,  # torch would read as much from the null pointer
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.part, made.group = part, group
        made.begin()
        return made

    def begin(self) -> None:
        """The part is a new mean."""
        self.reset, self.used, self.added = False, False, None

    def of_this_rank(self) -> torch.Tensor:
        """What this rank adds to the next mean, after a reset in place.

        Raises:
            MisuseError: It was not reset.
        """
        if not self.reset:
            raise MisuseError(
                f"{_option(self)}: a second backward pass before zero_grad, and parameters that only the "
                f"first has reached; reset gradients before each pass, or use {_instead(self)}"
            )
        if self.added is not None:
            return self.added
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = 0 if self.part is None else self.part.numel()
        return f"ShardedGradient(shape={tuple(self.shape)}, {held} of {self.numel()} values on this rank)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what would read memory: there is none. ``share_memory_``, which ``nn.Module.share_memory``
        calls on the gradients too, has nothing to move."""
        if func is torch.Tensor.share_memory_:
            return args[0]
        if func in _OF_MEMORY:
            _refuse(func.__name__, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the module."""
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]
        if func in _IN_PLACE or func in _IN_PLACE_LISTS:
            return _change(func, args, kwargs)
        if func is _aten.linalg_vector_norm.default and len(args) < 3 and not kwargs:
            return norms([args[0]], *args[1:])[0]
        if func is _aten._foreach_norm.Scalar:
            return norms(*args)
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if func is _aten.add_.Tensor and isinstance(args[0], ShardedGradient):  # autograd does it
            if args[0].reset and not isinstance(args[1], ShardedGradient) and len(args) == 2 and not kwargs:
                added = args[0].added
                args[0].added = args[1].clone() if added is None else added.add_(args[1])
                return args[0]
            raise MisuseError(
                f"{_option(args[0])}: a second backward pass adds to gradients that were reduced and "
                "divided, or used; reset gradients after each update, and run all passes before an update "
                f"but the last under trigram.no_sync, or use {_instead(args[0])}"
            )
        _refuse(func, (args, kwargs))


def drop(params: Iterable[torch.Tensor]) -> None:
    """Takes gradients of which a rank has a part, or that were used, away from parameters."""
    for p in params:
        if isinstance(p.grad, ShardedGradient):
            p.grad = None


def _refuse(func: Any, given: Any) -> NoReturn:
    """Raises for something that these gradients do not know."""
    for gradient in pytree.tree_leaves(given):
        if isinstance(gradient, ShardedGradient):
            _part(gradient)
    raise MisuseError(
        f"gradients='shards': {func} on a gradient of which each rank holds a part; possible are norms, "
        "clipping, factors and a GradScaler. Use gradients='full' where the script needs whole gradients"
    )


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Changes the parts in place."""
    first, rest = args[0], args[1:]
    many = func in _IN_PLACE_LISTS
    if any(isinstance(a, ShardedGradient) or (isinstance(a, torch.Tensor) and a.numel() != 1) for a in rest):
        raise MisuseError(f"gradients='shards': {func} with a tensor of several values; use gradients='full'")
    for g in first if many else [first]:
        if isinstance(g, ShardedGradient) and func in _ZEROS:
            g.reset, g.added = True, None
    if many:
        mine = _parts(first)
        if mine:
            func(mine, *rest, **kwargs)
        return None
    for part in _parts([first]):
        func(part, *rest, **kwargs)
    return first


def _option(gradient: ShardedGradient) -> str:
    return "fused=True" if gradient.used else "gradients='shards'"


def _instead(gradient: ShardedGradient) -> str:
    return "fused=False" if gradient.used else "gradients='full'"


def _parts(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of them; plain tensors are whole on all ranks."""
    return [part for part in map(_part, gradients) if part is not None]


def _part(gradient: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(gradient, ShardedGradient):
        return gradient
    if gradient.used and not gradient.reset:
        raise MisuseError(
            "fused=True: this gradient was used in backward, when it was complete; what reads or changes "
            "gradients between backward() and step() (clipping, GradScaler, norms) needs fused=False"
        )
    if gradient.added is not None:
        raise MisuseError(
            "gradients='shards': this gradient is of this rank only, because the last backward pass ran "
            "under trigram.no_sync; run the last pass before an update outside of it"
        )
    return gradient.part


def norms(gradients: Sequence[torch.Tensor], order: float = 2, *_: Any) -> list[torch.Tensor]:
    """The norm of each gradient, as ``torch.linalg.vector_norm``, in one all-reduce; all ranks call it."""
    if order <= 0 and not math.isinf(order):
        raise MisuseError(f"gradients='shards': a norm of order {order} is not supported; use 1, 2 or inf")
    zero = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
    largest = math.isinf(order)
    mine = []
    for g in gradients:
        part = _part(g)
        norm = zero if part is None else torch.linalg.vector_norm(part, order)
        mine.append(norm if largest else norm.double() ** order)
    stacked = torch.stack(mine)
    sharded = next(g for g in gradients if isinstance(g, ShardedGradient))
    whole = [k for k, g in enumerate(gradients) if not isinstance(g, ShardedGradient)]
    kept = stacked[whole]
    collectives.all_reduce(stacked, "max" if largest else "sum", None, sharded.group)
    stacked[whole] = kept
    found = stacked if largest else stacked ** (1 / order)
    return [norm.to(g.dtype) for norm, g in zip(found.unbind(), gradients, strict=True)]


def _unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Unscales the parts; if one rank finds an infinite value, all do."""
    mine = _parts(gradients)
    if mine:
        torch._amp_foreach_non_finite_check_and_unscale_(mine, found, factor)
    sharded = next(g for g in gradients if isinstance(g, ShardedGradient))
    collectives.all_reduce(found, "max", None, sharded.group)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips gradients as ``torch.nn.utils.clip_grad_norm_``; with ``gradients="shards"``, in one all-reduce.

    All ranks call it, after backward. For all other gradients it is torch's function.

    Args:
        parameters: A module, or parameters.
        max_norm: The largest norm of all gradients together.
        norm_type: The order of the norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: Raise a ``RuntimeError`` on all ranks if the norm is NaN or infinite.

    Returns:
        The norm before clipping.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    params = [given] if isinstance(given, torch.Tensor) else list(given)
    gradients = [p.grad for p in params if p.grad is not None]
    if not any(isinstance(g, ShardedGradient) for g in gradients):
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    total = torch.linalg.vector_norm(torch.stack(norms(gradients, norm_type)), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {total.item()}, so they were not clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in _parts(gradients):
        part.mul_(factor.to(part.device))
    return total
