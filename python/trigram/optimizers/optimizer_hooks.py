"""Tells models when an optimizer updates their parameters, through torch's global optimizer step hooks.

The hooks see every subclass of ``torch.optim.Optimizer``, whoever calls its ``step``: a script, a
GradScaler, a Trainer. An optimizer that calls another one (SAM, Lookahead) counts as one update, from the
beginning of the outer ``step`` to its end.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trigram.observe import steps
from trigram.runtime import dynamo
from trigram.runtime.weak import copied


class Watched(Protocol):
    """The parameters of a model."""

    @property
    def ids(self) -> set[int]:
        """``id()`` of each that trains."""


class Updated(Protocol):
    """Who is told of updates.

    Attributes:
        model: A weak reference to the model.
        waits_for_closure: A closure given to ``step`` is called first, and then :meth:`before_update`: the
            closure may have gradients of this rank completed by a backward pass.
    """

    model: weakref.ref[torch.nn.Module]
    waits_for_closure: bool

    @property
    def updating(self) -> list[weakref.ref[Optimizer]]:
        """The optimizers whose ``step`` is running, outermost first."""

    @property
    def times(self) -> steps.StepTimes:
        """Where the model's steps go."""

    @property
    def parameters(self) -> Watched:
        """The model's parameters; it wants to know of updates of those that train."""

    def before_update(self, mine: set[int]) -> None:
        """An optimizer is about to update the parameters with these ``id()``."""

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """An optimizer of this class has updated them without calling the closure that it was given."""

    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """The optimizer has updated the parameters with these ``id()``."""

    def update_skipped(self, mine: set[int]) -> None:
        """A ``GradScaler`` has left out the update of the parameters with these ``id()``, on this rank."""


_listeners: weakref.WeakSet[Updated] = weakref.WeakSet()
_handles: list[Any] = []
_registering = threading.Lock()
_TORCH = Optimizer.step.__code__.co_filename
_unheard: set[int] = set()
_stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_order = itertools.count(1)


def step_unheard(optimizer: Optimizer) -> None:
    """Steps the optimizer with what its groups hold; calls no hook, and tells nobody."""
    step = type(optimizer).step
    if getattr(step, "hooked", None):
        step = step.__wrapped__  # type: ignore[attr-defined]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    _unheard.add(id(optimizer))
    try:
        step(optimizer)
    finally:
        _unheard.discard(id(optimizer))
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def listen(listener: Updated) -> None:
    """From now on tells ``listener`` of updates, as long as it exists and until :func:`leave`."""
    _listeners.add(listener)
    with _registering:
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
            _handles.append(_hear_scalers())


def _hear_scalers() -> Callable[..., Any]:
    """From now on tells the listeners of updates that a ``GradScaler`` leaves out, perhaps on this rank only:
    torch has no hook for that. Returns torch's function."""
    step: Callable[..., Any] = torch.amp.GradScaler.step

    @functools.wraps(step)
    def heard(scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = next(_order)
        value = step(scaler, optimizer, *args, **kwargs)
        concerned = _concerned(optimizer) if hasattr(optimizer, "param_groups") else []
        # An optimizer inside of this one may have stepped.
        stepped = (
            [parameters_of(o) for o, number in copied(_stepped.items) if number > before] if concerned else []
        )
        for listener, mine in concerned:
            if not any(mine & theirs for theirs in stepped):
                listener.update_skipped(mine)
        return value

    torch.amp.GradScaler.step = heard  # type: ignore[method-assign, assignment]
    return step


def leave(listener: Updated) -> None:
    """Tells ``listener`` of no more updates."""
    _listeners.discard(listener)


def listeners() -> list[Updated]:
    """Who is told of updates now."""
    return copied(_listeners.__iter__)


def has_listener(param: torch.Tensor) -> bool:
    """Whether a model that still exists is told of updates of the parameter."""
    return any(id(param) in each.parameters.ids and each.model() is not None for each in listeners())


def parameters_of(optimizer: Optimizer) -> set[int]:
    """``id()`` of each parameter of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def optimizers_of(param_ids: set[int]) -> list[Optimizer]:
    """The optimizers that have some of the parameters. It looks at all objects of the process, so it is for
    rare cases, such as that weights change and no optimizer has stepped."""
    found = [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and hasattr(o, "param_groups")]
    return [o for o in found if parameters_of(o) & param_ids]


def last_step(optimizer: Optimizer) -> int:
    """A number that is larger for optimizers that have stepped later; 0: it has not."""
    return _stepped.get(optimizer, 0)


def forget_failed(listener: Updated) -> None:
    """Forgets the optimizers whose ``step`` has raised an exception: no hook is called then."""
    if not listener.updating:
        return
    inside = _steps_on_stack()
    listener.updating[:] = [o for o in listener.updating if o() is not None and id(o()) in inside]


def _steps_on_stack() -> list[int]:
    """``id()`` of each optimizer whose ``step`` has not returned: torch's function around it, which calls the
    hooks, is on the stack."""
    frame, found = sys._getframe(), []
    while frame is not None:
        if frame.f_code.co_name.endswith("wrapper") and frame.f_code.co_filename == _TORCH:
            found.append(id(frame.f_locals.get("self")))
        frame = frame.f_back  # type: ignore[assignment]
    return found


class _Closure:
    """A script's closure, after which the listeners are told."""

    def __init__(self, closure: Callable[[], Any], waiting: list[tuple[Updated, set[int]]]) -> None:
        self.closure, self.waiting, self.called = closure, waiting, False

    def __call__(self) -> Any:
        self.called = True
        value = self.closure()
        for listener, mine in self.waiting:
            listener.before_update(mine)
            listener.times.enter(steps.OPTIMIZER)
        return value


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("closure")


@dynamo.disable
def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_inner(optimizer):
        return None
    closure = _closure(args, kwargs)
    waiting: list[tuple[Updated, set[int]]] = []
    for listener, mine in _concerned(optimizer):
        forget_failed(listener)
        running = [o() for o in listener.updating]
        if optimizer in running:  # it has left that step by an exception
            del listener.updating[running.index(optimizer) :]
        listener.updating.append(weakref.ref(optimizer))
        if listener.waits_for_closure and callable(closure):
            waiting.append((listener, mine))
            continue
        try:
            listener.before_update(mine)
        except BaseException:
            listener.updating.pop()
            raise
        listener.times.enter(steps.OPTIMIZER)
    if not waiting:
        return None
    checked = _Closure(closure, waiting)
    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


@dynamo.disable
def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _is_inner(optimizer):
        return
    closure = _closure(args, kwargs)
    ignored = isinstance(closure, _Closure) and not closure.called
    _stepped[optimizer] = next(_order)
    for listener, mine in _concerned(optimizer):
        if ignored and listener.waits_for_closure:
            listener.closure_ignored(mine, type(optimizer).__name__)
        running = [o() for o in listener.updating]
        if optimizer in running:
            del listener.updating[running.index(optimizer) :]
        listener.after_update(mine, optimizer)
        if not listener.updating:
            listener.times.enter(steps.INPUT)


def _is_inner(optimizer: Optimizer) -> bool:
    """Whether this ``step`` is that of a parent class, called by the optimizer's own ``step``. torch
    wraps both, and calls the hooks for each; the outer one is the update."""
    return _steps_on_stack().count(id(optimizer)) > 1


def _concerned(optimizer: Optimizer) -> list[tuple[Updated, set[int]]]:
    """The listeners that have parameters of the optimizer, and these parameters."""
    if not _listeners or id(optimizer) in _unheard:
        return []
    params = parameters_of(optimizer)
    # The same order on all ranks: that in which the models were wrapped.
    found = [(listener, mine) for listener in listeners() if (mine := params & listener.parameters.ids)]
    return sorted(found, key=lambda each: getattr(each[0], "number", 0))
