"""Steps of models that ``with_bagua`` does not train: DistributedDataParallel, FSDP2, or a script's own calls
over the backend. The report, ``trigram top``, metrics and timelines know them as they know others.

A step ends with an optimizer of ``torch.optim``. When one updates parameters for the first time, the
outermost module that has them is found among the objects of the process and is given hooks. That takes some
tens of milliseconds, so it is done only if somebody looks (:data:`ASKED`, or :func:`watch`).
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from trigram.observe import steps
from trigram.runtime import dynamo, job, world
from trigram.runtime.job import Part
from trigram.runtime.weak_hook import WeakHook

ASKED = ("TRIGRAM_REPORT", "TRIGRAM_TOP", "TRIGRAM_METRICS", "TRIGRAM_TIMELINE")
"""Any of these variables asks for the steps."""

_models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
_optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[nn.Module], ...]] = (
    weakref.WeakKeyDictionary()
)
_handles: list[Any] = []
_registering = threading.Lock()


def watch() -> None:
    """From now on counts the steps of all models."""
    with _registering:
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))


@job.told
class _Asked(Part):
    """Counts steps if a variable asks for them."""

    def begin(self) -> None:
        """See the class."""
        if any(os.environ.get(name, "0") not in ("", "0") for name in ASKED):
            watch()


class _Model:
    """The hooks of one model, which say what begins.

    Args:
        module: The outermost module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.times = steps.StepTimes(_name(module), module.parameters())
        present = world.present()
        self.times.group = None if present is None else present.group
        self.times.trained_by = _trained_by(module)
        self._backward: int | None = None  # the number of the backward pass under way
        self._passed = False  # a pass was seen since the last update
        self._updated_by: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since the last pass
        if not isinstance(module, torch.jit.ScriptModule):  # which has no hooks: only updates are seen
            # First of all hooks: that of FSDP2 waits for parameters.
            module.register_forward_pre_hook(WeakHook(self, "_forward_begins"), prepend=True)
            module.register_forward_hook(WeakHook(self, "_forward_ends"), always_call=True)
        weakref.finalize(module, self.times.close).atexit = False

    def _forward_begins(self, *_: Any) -> None:
        if (
            not torch.compiler.is_compiling()
        ):  # in a graph nothing is timed, and fullgraph=True allows no break
            self._begin_forward()

    def _forward_ends(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._end_forward(output)

    @dynamo.disable
    def _begin_forward(self) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            self._passed = True
            self.times.enter(steps.FORWARD)

    @dynamo.disable
    def _end_forward(self, output: Any) -> None:
        if self.times.phase == steps.FORWARD and not _in_backward():
            self.times.enter(steps.OTHER)
        if torch.is_grad_enabled():
            for t in pytree.tree_leaves(output):
                if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                    t.register_hook(WeakHook(self, "_backward_begins"))

    def _backward_begins(self, _grad: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():  # compiled autograd traces this, and allows no callbacks
            self._begin_backward()

    @dynamo.disable
    def _begin_backward(self) -> None:
        self._passed = True
        task = torch._C._current_graph_task_id()
        self.times.enter(steps.BACKWARD)
        if self._backward != task:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(WeakHook(self, "_computed"))

    def _computed(self) -> None:
        """Gradients are computed. DistributedDataParallel waits for its buckets in a callback that it has
        queued meanwhile; what is queued now runs after it."""
        self.times.enter(steps.WAIT)
        torch.autograd.Variable._execution_engine.queue_callback(WeakHook(self, "_backward_ends"))

    def _backward_ends(self) -> None:
        self._backward = None
        self.times.end_pass()
        self.times.enter(steps.OTHER)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer of the model steps. If it has stepped since the last pass that was seen, passes are
        not seen: a function that torch.compile has made of the whole step calls no hooks."""
        if self._passed:
            self._updated_by.clear()
        elif optimizer in self._updated_by:
            self.times.step_unseen()
            self._updated_by.clear()
        self._passed = False
        self._updated_by.add(optimizer)
        self.times.enter(steps.OPTIMIZER)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _name(module: nn.Module) -> str:
    """The class that a user knows: of what wrappers of torch hold, and that ``fully_shard`` was given."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    name = type(module).__name__
    return name.removeprefix("FSDP") if _is_fsdp(module) else name


def _wrapped(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module
    if isinstance(module, torch.jit.ScriptModule):  # its dictionary of modules is another one
        return None
    inner = module._modules.get("_orig_mod")  # torch.compile
    return inner


def _is_fsdp(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _trained_by(module: nn.Module) -> str:
    """How its ranks come together, for the advice of the report."""
    for of in module.modules():
        if isinstance(of, nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel"
        if _is_fsdp(of):
            return "FSDP2"
    return "torch.distributed"


def _outermost(params: set[int]) -> list[nn.Module]:
    """The modules of this process that have some of the parameters, and that no other module holds."""
    holds = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and _holds(o, params)]
    inside = {id(child) for m in holds for child in m.modules() if child is not m}
    outer = [m for m in holds if id(m) not in inside]
    # The parts of a module that was traced or scripted are other objects than those that it names.
    theirs = [params & {id(p) for p in m.parameters()} for m in outer]
    return [m for m, mine in zip(outer, theirs, strict=True) if not any(mine < other for other in theirs)]


def _holds(module: nn.Module, params: set[int]) -> bool:
    try:
        return any(id(p) in params for p in module.parameters())
    except Exception:
        return False  # an unfinished module somewhere in the process, which must not end a training


def _found(optimizer: Optimizer) -> list[_Model]:
    """The models that an optimizer updates; none while ``with_bagua`` trains one, which says more."""
    if steps.with_bagua_trains():
        return []
    if optimizer not in _optimizers:
        modules = _outermost({id(p) for group in optimizer.param_groups for p in group["params"]})
        _optimizers[optimizer] = tuple(weakref.ref(m) for m in modules)
        for module in modules:
            if module not in _models:
                _models[module] = _Model(module)
    return [_models[m] for ref in _optimizers[optimizer] if (m := ref()) is not None and m in _models]


@dynamo.disable
def _before(optimizer: Optimizer, *_: Any) -> None:
    for model in _found(optimizer):
        model.update_begins(optimizer)


@dynamo.disable
def _after(optimizer: Optimizer, *_: Any) -> None:
    for model in _found(optimizer):
        model.times.enter(steps.INPUT)
