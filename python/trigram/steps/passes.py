"""The beginning and the end of each backward pass of a model, whatever the loop looks like.

A *pass* begins when autograd adds the first gradient to a parameter that trains, and ends when the backward
pass is over. Nobody needs to call the root module for that; ``torch.autograd.grad`` adds no gradient and
makes no pass. What all ranks do together before a pass (buffers, checks, new ranks) they do once per pass: in
the forward pass of the root module if there is one, else when the pass begins. docs/adr/0022 says why.

This is the file that knows autograd, and what forward passes of modules tell.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from trigram import _core
from trigram.errors import MisuseError, TrigramError
from trigram.observe import steps
from trigram.optimizers import optimizer_hooks
from trigram.runtime import dynamo, job
from trigram.runtime.job import Stay
from trigram.runtime.weak_hook import WeakHook


class Indexed(optimizer_hooks.Watched, Protocol):
    """The parameters of a model.

    Attributes:
        index: By ``id()``, their places in the model.
    """

    index: dict[int, int]


class PassMethod(optimizer_hooks.Updated, Protocol):
    """Who is told of passes: the algorithm of a model.

    Attributes:
        params: The model's parameters.
        sync: False inside ``no_sync``.
        join: The block of ``trigram.join`` that the model is in, or None.
        pipeline: Which gradients of the pass are there. In a pass that it has begun with, only those enter
            Python after which there is something to do.
    """

    params: list[torch.Tensor]
    sync: bool
    join: Any
    pipeline: _core.Pipeline

    @property
    def parameters(self) -> Indexed:
        """The model's parameters."""

    @property
    def passes(self) -> Passes:
        """Its passes."""

    def forward_begins(self, model: nn.Module) -> None:
        """The forward pass of the root module begins, outside of backward passes and of updates."""

    def before_pass(self, model: nn.Module, in_backward: bool) -> None:
        """A pass is prepared: what all ranks do together before it.

        Args:
            model: The module.
            in_backward: The pass has begun: this is the first gradient, so weights and buffers must not
                change before the pass ends.
        """

    def begin(self, param: int | None) -> None:
        """A pass begins with the gradient of parameter ``param``, an index; None: without inputs, or with
        gradients that a script has assigned."""

    def gradient(self, i: int, param: torch.Tensor) -> None:
        """Parameter ``i`` has its gradient of this pass. Called only where there may be something to do, see
        ``pipeline``."""

    def local_gradient(self, param: torch.Tensor) -> None:
        """A gradient has been added to the parameter inside ``no_sync``."""

    def end(self) -> None:
        """The backward pass has ended on this rank."""

    def abort_pass(self) -> None:
        """Aborts the last backward pass if it is still active, because it raised an exception."""

    def abort_failed(self, timeout: float | None = None) -> None:
        """Aborts a pass that has failed, and what else has."""

    def end_warmup(self, trains: bool = True) -> PassMethod | None:
        """Makes the hooks that follow, if the warm-up is over: between an update and the next pass.

        Args:
            trains: The model is in training mode, or has just been updated.
        """


@dataclass(frozen=True)
class _Backward:
    """One call of autograd's engine.

    Attributes:
        number: Its number, as torch counts.
        callback: The callback at its end. The engine drops it when the call is over, also if it has failed
            and never called it.
    """

    number: int
    callback: weakref.ref[WeakHook]

    @property
    def running(self) -> bool:
        """Whether the call is not over."""
        return self.callback() is not None


class _Told(WeakHook):
    """Tells the hooks of a model that a parameter has its gradient: the engine's hooks call it where there is
    something to do (``rust/python/src/gradients.rs``).

    These are hooks on the nodes of autograd's graph that add gradients, as DistributedDataParallel's are. So
    they are called when all hooks on the parameter have returned, also those that a script registers later:
    these may write into the gradient or replace it, and what they leave is averaged.
    """

    def __init__(self, owner: Passes) -> None:
        super().__init__(owner, "_on_gradient")

    @dynamo.disable
    def __call__(self, param: torch.Tensor) -> None:
        """See the class."""
        owner = self._owner()
        if owner is None:
            return
        if owner.method.model() is None:  # other ranks may wait for its hooks, see `RunningModels`
            _DroppedModel("of an asynchronous algorithm", owner.made_in)(param)
        elif torch.is_grad_enabled():  # ``create_graph=True``
            with torch.no_grad():
                self._in_job(owner._on_gradient, param)
        else:
            self._in_job(owner._on_gradient, param)


class _DroppedModel:
    """A hook on a parameter that trains, although the wrapped model that it was in was dropped: raises.

    Args:
        name: The parameter's name.
        stay: In the job in which the model was wrapped.
    """

    def __init__(self, name: str, stay: Stay) -> None:
        self._name, self._stay = name, stay

    def __call__(self, param: torch.Tensor) -> None:
        """See the class."""
        if not self._stay.over and not optimizer_hooks.has_listener(param):
            raise MisuseError(
                f"with_bagua: parameter {self._name} is trained, but the wrapped model that it is in was "
                "dropped, so its gradients are not averaged; keep a reference to the model as long as its "
                "parameters train, or call trigram.unwrap before it is dropped"
            )

    @staticmethod
    def watch(params: Sequence[torch.Tensor], names: Sequence[str], stay: Stay) -> None:
        """Hooks all parameters: their model's hooks do not exist any more."""
        for p, name in zip(params, names, strict=True):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_DroppedModel(name, stay))


class Passes:
    """The backward passes of one model.

    Attributes:
        active: Whether one is under way, or has raised an exception.
        prepared: Whether the next one has been prepared.
        handles: What removes the hooks.
    """

    def __init__(self, method: PassMethod) -> None:
        self._method = weakref.ref(method)
        self.made_in = job.here().stay
        self.active = self.prepared = False
        self.handles: list[Any] = []
        self._late: Callable[[], None] | None = None
        self._late_end: _Backward | None = None
        self._told = _Told(self)
        self._nodes: dict[int, Any] = {}  # by `id()` of a parameter, where autograd adds its gradient
        self._dropped: weakref.finalize[..., Passes] | None = None
        self._handled: int | None = None
        self._handled_by = 0
        self._outermost: _Backward | None = None
        self._backward: _Backward | None = None

    @property
    def method(self) -> PassMethod:
        """Who is told."""
        method = self._method()
        assert method is not None
        return method

    # Hooks.

    def watch(self, model: nn.Module, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Installs the hooks on the model and its parameters."""
        self.unhook()
        self.handles = [
            model.register_forward_pre_hook(WeakHook(self, "before_forward")),
            model.register_forward_hook(WeakHook(self, "after_forward"), always_call=True),
        ]
        self.watch_parameters()
        self._dropped = weakref.finalize(self, _DroppedModel.watch, params, names, self.made_in)
        self._dropped.atexit = False

    def watch_parameters(self) -> None:
        """Hooks the parameters that train and have no hook yet."""
        method = self.method
        for p in method.params:
            if p.requires_grad and id(p) not in self._nodes:
                # A node exists as long as somebody refers to it.
                node = self._nodes[id(p)] = get_gradient_edge(p).node
                hook = _core.GradientHook(method.pipeline, p, self._told, torch._C._current_graph_task_id)
                self.handles.append(node.register_hook(hook))

    def unhook(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._nodes = {}
        if self._dropped is not None:
            self._dropped.detach()

    @dynamo.disable
    def before_forward(self, model: nn.Module, args: Any) -> None:
        """The forward pass of the root module begins."""
        method = self.method
        self._handled = id(sys.exc_info()[1])  # the call may be in an except clause of the script
        if not torch.is_grad_enabled() or inside_backward() or _is_traced():
            return  # an evaluation, a forward pass that checkpointing repeats, or no training at all
        if any(not isinstance(p, nn.Parameter) for p in model.parameters()):
            return  # torch.func.functional_call with other tensors: not the weights that train
        method.times.enter(steps.FORWARD)
        method.abort_failed()
        self._abort_others()
        optimizer_hooks.forget_failed(method)
        if not method.updating and (following := method.end_warmup(model.training)) is not None:
            following.passes.before_forward(model, args)
            return
        if not method.updating:
            self.watch_parameters()
            with torch.no_grad(), _outside_of_transforms():
                method.forward_begins(model)
        # In evaluation mode (and for fine-tuning in it) the pass is prepared when it begins.
        if model.training and not self.prepared and (method.sync or method.join is None):
            self._prepare_pass(model, in_backward=False)

    def _prepare_pass(self, model: nn.Module, in_backward: bool) -> None:
        method = self.method
        self.prepared = True
        before = method.times.enter(steps.WAIT)
        try:
            with torch.no_grad(), _outside_of_transforms():
                method.before_pass(model, in_backward)
        except BaseException:
            self.prepared = False
            raise
        finally:
            method.times.enter(before)

    @dynamo.disable
    def after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        """It has ended, or raised an exception."""
        method = self.method
        if method.times.phase == steps.FORWARD:
            method.times.enter(steps.OTHER)
        if not (torch.is_grad_enabled() and method.sync) or not self.handles or _is_traced():
            return
        raised = sys.exc_info()[1]
        if output is None and raised is not None and id(raised) != self._handled:
            if not isinstance(raised, TrigramError):
                self._forward_failed(_model)
            return
        # These hooks run in the outermost backward pass: gradients that arrive in a pass inside it (reentrant
        # checkpointing) belong to it.
        for t in pytree.tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                t.register_hook(WeakHook(self, "_on_outermost"))

    def _on_outermost(self, _grad: torch.Tensor) -> None:
        method = self.method
        task = torch._C._current_graph_task_id()
        method.times.enter(steps.BACKWARD)
        if self._outermost is None or self._outermost.number != task:
            self._outermost = self._new_backward(task)

    def _new_backward(self, task: int) -> _Backward:
        hook = WeakHook(self, "_backward_ends", task)
        torch.autograd.Variable._execution_engine.queue_callback(hook)
        return _Backward(task, weakref.ref(hook))

    @torch.no_grad()
    def _backward_ends(self, task: int) -> None:
        method = self.method
        outermost = self._outermost is not None and self._outermost.number == task
        if outermost and self._late is not None:
            self._requeue(task)
        if outermost:
            self._outermost = None
        if self.active and self._backward is not None and self._backward.number == task:
            self.end()
        if method.times.phase == steps.BACKWARD and self._outermost is None:
            method.times.enter(steps.OTHER)

    def end_late(self, late: Callable[[], None]) -> None:
        """Others write gradients in the backward pass that is running, where no node adds them: ``late``,
        which makes a pass, is called once when that is over, after all callbacks of others."""
        self._late = late
        task = torch._C._current_graph_task_id()
        outside = self._outermost is None or not self._outermost.running  # else its callback sees to it
        if outside and (self._late_end is None or self._late_end.number != task):
            first = WeakHook(self, "_requeue", task)
            torch.autograd.Variable._execution_engine.queue_callback(first)
            self._late_end = _Backward(task, weakref.ref(first))

    def _requeue(self, task: int) -> None:
        """Callbacks that were queued meanwhile come first. If one raises, the last one is never called."""
        last = WeakHook(self, "_late_ends")
        torch.autograd.Variable._execution_engine.queue_callback(last)
        self._late_end = _Backward(task, weakref.ref(last))

    def _late_ends(self) -> None:
        method, late = self.method, self._late
        self._late = self._late_end = None
        if late is not None:
            late()
        if method.times.phase == steps.BACKWARD:
            method.times.enter(steps.OTHER)

    def _on_gradient(self, param: torch.Tensor) -> None:
        method = self.method
        i = method.parameters.index.get(id(param))
        if i is None:
            return  # the script has taken it out of the model
        if not method.sync:
            if method.times.phase != steps.BACKWARD:
                self._new_backward(torch._C._current_graph_task_id())  # tells when it ends
                method.times.enter(steps.BACKWARD)
            method.local_gradient(param)
            return
        if not self.in_backward:
            method.abort_failed()
            self.begin_in_backward(i)
            i = method.parameters.index[id(param)]
        method.gradient(i, param)

    def begin_in_backward(self, param: int | None) -> None:
        """Begins a pass in the backward pass that is running, with the gradient of parameter ``param``, if it
        has not begun, and is not one of this rank only."""
        method = self.method
        if method.sync and not self.active:
            method.times.enter(steps.BACKWARD)
            # Queued first: what follows may raise, and a failed pass is known by its callback.
            self._backward = self._outermost or self._new_backward(torch._C._current_graph_task_id())
            self.begin(param)

    def begin(self, param: int | None) -> None:
        """Begins a pass; see :meth:`PassMethod.begin`."""
        method = self.method
        if not self.prepared:
            model = method.model()
            assert model is not None
            self._prepare_pass(model, in_backward=True)
        with self._handling():
            self.active = True
            method.begin(param)

    @property
    def task(self) -> int | None:
        """The number of autograd's call that the pass is in; None: it is in none."""
        return None if self._backward is None else self._backward.number

    def end(self) -> None:
        """Ends it."""
        method = self.method
        with self._handling():
            self.prepared = False
            self._backward = None
            method.pipeline.end()
            method.end()
        method.times.end_pass()

    @contextlib.contextmanager
    def _handling(self) -> Iterator[None]:
        """While a thread is here the pass has not failed, whatever another thread sees of it."""
        self._handled_by += 1
        try:
            yield
        finally:
            self._handled_by -= 1

    # Passes that raise an exception.

    @property
    def in_backward(self) -> bool:
        """Whether the active pass is still running."""
        running = self._backward is not None and self._backward.running
        return self.active and (running or self._handled_by > 0)

    def abort_failed(self) -> None:
        """Aborts, on all ranks, a backward pass that has raised an exception on this one."""
        method = self.method
        if self.active and not self.in_backward:
            method.abort_pass()
        elif not self.active and any(
            call is not None and not call.running for call in (self._outermost, self._late_end)
        ):
            # It failed before the first gradient; the other ranks may be in the pass and wait.
            self._outermost = self._late = self._late_end = None
            if method.sync:
                self.begin(None)
                method.abort_pass()

    def _abort_others(self) -> None:
        """Aborts failed passes of other models: the other ranks wait in them, and would wait for this one
        while it waits for them in this model."""
        for other in optimizer_hooks.listeners():
            theirs: Passes | None = getattr(other, "passes", None)
            if theirs is None or theirs is self or theirs.made_in is not self.made_in:
                continue
            if other.model() is not None:
                theirs.method.abort_failed()

    def _forward_failed(self, model: nn.Module) -> None:
        """The forward pass of a training step has raised an exception: the pass fails on all ranks, for a
        script that goes on with its next batch would be one step behind the other ranks."""
        method = self.method
        if not model.training or method.updating or self.active or inside_backward():
            return
        self.begin(None)
        method.abort_pass()

    def clear(self) -> None:
        """No pass is under way any more: it has raised an exception."""
        method = self.method
        self.active = self.prepared = False
        self._backward = self._outermost = self._late = self._late_end = None
        method.pipeline.end()


def inside_backward() -> bool:
    """Whether this thread is in a backward pass, of whichever model."""
    return torch._C._current_graph_task_id() != -1


def _is_traced() -> bool:
    """Whether ``torch.jit.trace`` or ``torch.export`` calls the model, perhaps on one rank."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """A block in which tensors are what they are: the model may be called inside ``torch.func.jvp`` or
    ``vmap``, which wrap also those that are made there."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
