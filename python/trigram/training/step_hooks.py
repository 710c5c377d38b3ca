"""The hooks that find the beginning and the end of each backward pass of a model, whatever the loop looks
like; the base class of all algorithms.

A *pass* begins when autograd adds the first gradient to a parameter that trains, and ends when the backward
pass is over. Nobody needs to call the root module for that; ``torch.autograd.grad`` adds no gradient and
makes no pass. What all ranks do together before a pass (buffers, checks, new ranks) they do once per pass: in
the forward pass of the root module if there is one, else when the pass begins.

:class:`StepHooks` calls, in this order: :meth:`StepHooks.before_pass`, :meth:`StepHooks.begin` and
:meth:`StepHooks.end`; and :meth:`StepHooks.before_update` and :meth:`StepHooks.after_update` around the steps
of optimizers. Subclasses average gradients or weights there. docs/adr/0022 says why.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from trigram import _core
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all
from trigram.elastic.recovery import ElasticModel, Stateful
from trigram.errors import MismatchError, MisuseError, TrigramError, UnsupportedError
from trigram.gpu import device
from trigram.observe import steps
from trigram.runtime import dynamo, job, logs
from trigram.runtime.group import Group
from trigram.runtime.job import Stay
from trigram.runtime.weak_hook import WeakHook
from trigram.training import fidelity, optimizer_hooks
from trigram.training.elasticity import Elasticity, FixedRanks
from trigram.training.tensor_check import check_tensors
from trigram.training.uneven_inputs import UnevenInputs
from trigram.training.update_watch import ValuesSnapshot

_numbers = itertools.count()


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

    def __init__(self, owner: StepHooks) -> None:
        super().__init__(owner, "_on_gradient")

    @dynamo.disable
    def __call__(self, param: torch.Tensor) -> None:
        """See the class."""
        owner = self._owner()
        if owner is None:
            return
        if owner.model() is None:  # other ranks may wait for its hooks, see `RunningModels`
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


class StepHooks:
    """The hooks on one model; counts its steps.

    Args:
        model: The module. The constructor broadcasts the parameters and buffers of the group's first rank.
        groups: The model's process groups.

    Attributes:
        steps: Steps of training; each algorithm says what it counts.
        idle_steps: Those of them that this rank made without inputs, inside ``trigram.join``.
        sync: False inside ``no_sync``.
        active: Whether a backward pass is under way, or has raised an exception.
        prepared: Whether the next pass has been prepared.
        weights_differ: Whether ranks may hold different weights.
        in_step: Whether all ranks make the same step at a time.
        waits_for_closure: See :class:`trigram.training.optimizer_hooks.Updated`.
        join: The block of ``trigram.join`` that the model is in, or None.
        pipeline: Which gradients of the pass are there. In a pass that it has begun with, only those enter
            Python after which there is something to do.
        limit, successor: After ``limit`` steps (the warm-up), ``successor()`` makes the hooks that follow.
        number: The order in which hooks were made.
        times: Where the steps go.
        fidelity: What averages lose; None: nobody has asked.
    """

    weights_differ = False
    in_step = True
    waits_for_closure = False

    def __init__(self, model: nn.Module, groups: ModelGroups) -> None:
        self.model = weakref.ref(model)
        self.pipeline = _core.Pipeline()
        self._told_of_gradient = _Told(self)
        self.groups = groups
        self.times = steps.StepTimes(type(model).__name__, model.parameters())
        self.times.group = groups.main
        weakref.finalize(self, self.times.close).atexit = False  # a script may drop its model without unwrap
        self.number = next(_numbers)
        self.sync = True
        self.join: UnevenInputs | None = None
        self.active = self.prepared = False
        self._handled: int | None = None
        self._handled_by = 0
        self._before_loading: ValuesSnapshot | None = None
        self.steps = self.idle_steps = 0
        self.has_failed = False  # the last pass
        self.bytes = 0
        self.waited = 0.0
        self.limit = 0
        self.told = False
        self.successor: Callable[[], StepHooks] | None = None
        self.handles: list[Any] = []
        self.made_in = job.here().stay
        self._nodes: dict[int, Any] = {}  # by `id()` of a parameter, where autograd adds its gradient
        self._dropped: weakref.finalize[..., StepHooks] | None = None
        self.updating: list[weakref.ref[Optimizer]] = []
        self.elastic: Elasticity = FixedRanks()
        self.fidelity = fidelity.asked(groups)
        if self.fidelity is not None:
            self.times.fidelity = self.fidelity.summary
        self._outermost: _Backward | None = None
        self._backward: _Backward | None = None
        check_tensors(model, None if groups.joining else groups.control, groups.ignored)
        self.find_parameters(model)
        if not groups.joining:
            _agree_on(self.tensors(model), groups.control)
            coalesced.broadcast([t for _, t in self.tensors(model)], 0, groups.control)
        self.watch(model)

    # Subclasses override these.

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

    def end(self) -> None:
        """The backward pass has ended on this rank."""

    def gradient(self, i: int, param: torch.Tensor) -> None:
        """Parameter ``i`` has its gradient of this pass. Called only where there may be something to do, see
        ``pipeline``."""

    def local_gradient(self, param: torch.Tensor) -> None:
        """A gradient has been added to the parameter inside ``no_sync``."""

    def forward_begins(self, model: nn.Module) -> None:
        """The forward pass of the root module begins, outside of backward passes and of updates."""

    def before_update(self, mine: set[int]) -> None:
        """An optimizer is about to update the parameters with these ``id()``."""

    def closure_ignored(self, mine: set[int], optimizer: str) -> None:
        """An optimizer of this class has updated them without calling the closure that it was given."""

    def after_update(self, mine: set[int], optimizer: Optimizer) -> None:
        """The optimizer has updated the parameters with these ``id()``."""

    def update_skipped(self, mine: set[int]) -> None:
        """A ``GradScaler`` has left out the update of the parameters with these ``id()``, on this rank."""

    def user_step(self) -> None:
        """The script says that a training step is over (:func:`trigram.step`)."""

    def abort_pass(self) -> None:
        """Aborts the last backward pass if it is still active, because it raised an exception."""

    def leave_join(self) -> None:
        """The block of ``trigram.join`` is over on all ranks."""
        self.join = None

    def share_optimizers(self, model: nn.Module, longest: int) -> None:
        """Some ranks have made fewer updates in ``trigram.join``: all get the optimizers of a group rank."""

    def inputs_end(self) -> None:
        """This rank has no inputs left, inside ``trigram.join``."""
        self.abort_failed()

    def skip_boundary(self) -> None:
        """Counts a step that the other ranks have begun and that no rank completes."""

    def step_without_inputs(self, model: nn.Module, src: int) -> None:
        """A whole step of a rank that has no inputs left; ``src``: the group rank whose buffers all get."""
        raise NotImplementedError

    def drain(self, timeout: float | None = None, *, between_steps: bool = False) -> None:
        """Ends the averaging steps under way, on all ranks, and applies them."""

    def release(self) -> None:
        """The algorithm ends, between steps: gives the script back what it has changed; all ranks call it."""

    def close_without_calls(self) -> None:
        """The job has ended: removes what can be removed without a call."""
        self.close()

    def state(self) -> dict[str, Any]:
        """The state between steps, for a checkpoint."""
        return {"steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.steps = state["steps"]
        self._before_loading = None  # it was saved together with the weights that were loaded

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        more = {} if self.fidelity is None else {"fidelity": self.fidelity.summary()}
        return {
            "steps": self.steps,
            "bytes_per_step": self.bytes // self.steps if self.steps else 0,
            "bytes": self.bytes,
            "wait_seconds": self.waited,
            **more,
        }

    # Elastic jobs.

    def state_sources(self, states: Sequence[Stateful]) -> list[Stateful]:
        """What gives, of each of these objects, the state that every rank has: usually the object."""
        return list(states)

    def fingerprint(self) -> int:
        """A number of at most 62 bits that all ranks must have alike when a pass counts."""
        return 0

    def fingerprints_differ(self) -> TrigramError:
        """The error if they do not."""
        raise NotImplementedError

    def meta(self) -> dict[str, Any]:
        """What all ranks must know to continue in the same way after the ranks have changed."""
        return {"steps": self.steps}

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Continues after the ranks have changed; all ranks call it."""
        raise NotImplementedError

    # Parameters.

    def tensors(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The parameters and buffers of the model with their names, without the ignored ones."""
        named = [*model.named_parameters(), *model.named_buffers()]
        return [(n, t) for n, t in named if n not in self.groups.ignored]

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train."""
        named = [(n, p) for n, p in model.named_parameters() if n not in self.groups.ignored]
        self.names = [n for n, _ in named]
        self.params = [p for _, p in named]
        self.index = {id(p): i for i, p in enumerate(self.params)}
        self.trains = [self.is_trained(p) for p in self.params]
        trained = [p for p, trains in zip(self.params, self.trains, strict=True) if trains]
        for (name, p), trains in zip(named, self.trains, strict=True):
            if not trains:
                continue
            if p.device != trained[0].device:
                raise UnsupportedError(
                    f"with_bagua: parameter {name} is on {p.device}, but other parameters are on "
                    f"{trained[0].device}; move the whole model to one device"
                )
            if not p.is_cpu and p.device.type not in device.kinds:
                raise UnsupportedError(
                    f"with_bagua: parameter {name} is on {p.device}; move the model to the CPU or to a GPU"
                )
            if not (p.is_floating_point() or p.is_complex()):
                raise UnsupportedError(
                    f"with_bagua: parameter {name} has dtype {p.dtype}, but only floating-point and complex "
                    "parameters can be trained; set requires_grad=False on it"
                )
        if not trained:
            raise MisuseError(
                "with_bagua: the model has no parameter that requires a gradient; set requires_grad=True on "
                "at least one"
            )
        self.param_ids = {id(p) for p in trained}
        self.groups.trained |= self.param_ids
        self._layouts = [_layout(p) for p in self.params]
        self.pipeline.assign([id(p) for p in self.params], [])

    def is_trained(self, param: torch.Tensor) -> bool:
        """Whether the script trains the parameter now."""
        return param.requires_grad

    def has_other_parameters(self, model: nn.Module) -> bool:
        """Whether parameters were added, removed or replaced since they were found, or have another dtype,
        shape, device or memory format."""
        now = [p for n, p in model.named_parameters() if n not in self.groups.ignored]
        return (
            len(now) != len(self.params)
            or any(p is not q for p, q in zip(now, self.params, strict=True))
            or any(_layout(p) != layout for p, layout in zip(now, self._layouts, strict=True))
        )

    def has_other_training(self) -> bool:
        """Whether the script trains other parameters than when they were found."""
        return [self.is_trained(p) for p in self.params] != self.trains

    # Hooks.

    def watch(self, model: nn.Module) -> None:
        """Installs the hooks on the model and its parameters."""
        self._unhook()
        self.handles = [
            model.register_forward_pre_hook(WeakHook(self, "_before_forward")),
            model.register_forward_hook(WeakHook(self, "_after_forward"), always_call=True),
        ]
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it has no such hooks; a parent's are called too when the whole model is loaded
            self.handles.append(module.register_load_state_dict_pre_hook(WeakHook(self, "_before_load")))
        self._watch_parameters()
        self._dropped = weakref.finalize(self, _DroppedModel.watch, self.params, self.names, self.made_in)
        self._dropped.atexit = False
        optimizer_hooks.listen(self)

    def _watch_parameters(self) -> None:
        """Hooks the parameters that train and have no hook yet."""
        for p in self.params:
            if p.requires_grad and id(p) not in self._nodes:
                # A node exists as long as somebody refers to it.
                node = self._nodes[id(p)] = get_gradient_edge(p).node
                hook = _core.GradientHook(
                    self.pipeline, p, self._told_of_gradient, torch._C._current_graph_task_id
                )
                self.handles.append(node.register_hook(hook))

    def close(self) -> None:
        """Removes the hooks; the model's steps are over."""
        self._unhook()
        self.times.close()

    def _unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._nodes = {}
        if self._dropped is not None:
            self._dropped.detach()
        optimizer_hooks.leave(self)

    def _before_load(self, *_: Any) -> None:
        if self._before_loading is None:
            self._before_loading = ValuesSnapshot(self.params)

    def was_loaded(self) -> bool:
        """Whether ``load_state_dict`` has changed parameters since the last call. A script may load other
        weights on one rank, and then those it had."""
        before, self._before_loading = self._before_loading, None
        # After a pass that failed on some ranks only, their weights may be those that all load.
        return before is not None and (self.has_failed or not before.same(self.params))

    @dynamo.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        self._handled = id(sys.exc_info()[1])  # the call may be in an except clause of the script
        if not torch.is_grad_enabled() or self.inside_backward() or _is_traced():
            return  # an evaluation, a forward pass that checkpointing repeats, or no training at all
        if any(not isinstance(p, nn.Parameter) for p in model.parameters()):
            return  # torch.func.functional_call with other tensors: not the weights that train
        self.times.enter(steps.FORWARD)
        self.abort_failed()
        self._abort_others()
        optimizer_hooks.forget_failed(self)
        if not self.updating and (following := self.end_warmup()) is not None:
            following._before_forward(model, args)
            return
        if not self.updating:
            self._watch_parameters()
            with torch.no_grad(), _outside_of_transforms():
                self.forward_begins(model)
        # In evaluation mode (and for fine-tuning in it) the pass is prepared when it begins.
        if model.training and not self.prepared and (self.sync or self.join is None):
            self._prepare_pass(model, in_backward=False)

    def _prepare_pass(self, model: nn.Module, in_backward: bool) -> None:
        self.prepared = True
        before = self.times.enter(steps.WAIT)
        try:
            with torch.no_grad(), _outside_of_transforms():
                self.before_pass(model, in_backward)
        except BaseException:
            self.prepared = False
            raise
        finally:
            self.times.enter(before)

    @dynamo.disable
    def _after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if self.times.phase == steps.FORWARD:
            self.times.enter(steps.OTHER)
        if not (torch.is_grad_enabled() and self.sync) or not self.handles or _is_traced():
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
        task = torch._C._current_graph_task_id()
        self.times.enter(steps.BACKWARD)
        if self._outermost is None or self._outermost.number != task:
            self._outermost = self._new_backward(task)

    def _new_backward(self, task: int) -> _Backward:
        hook = WeakHook(self, "_backward_ends", task)
        torch.autograd.Variable._execution_engine.queue_callback(hook)
        return _Backward(task, weakref.ref(hook))

    @torch.no_grad()
    def _backward_ends(self, task: int) -> None:
        if self._outermost is not None and self._outermost.number == task:
            self._outermost = None
        if self.active and self._backward is not None and self._backward.number == task:
            self._end_pass()
        if self.times.phase == steps.BACKWARD and self._outermost is None:
            self.times.enter(steps.OTHER)

    def _on_gradient(self, param: torch.Tensor) -> None:
        i = self.index.get(id(param))
        if i is None:
            return  # the script has taken it out of the model
        if not self.sync:
            if self.times.phase != steps.BACKWARD:
                self._new_backward(torch._C._current_graph_task_id())  # tells when it ends
                self.times.enter(steps.BACKWARD)
            self.local_gradient(param)
            return
        if not self.in_backward:
            self.abort_failed()
            self.begin_in_backward(i)
            i = self.index[id(param)]
        self.gradient(i, param)

    def begin_in_backward(self, param: int | None) -> None:
        """Begins a pass in the backward pass that is running, with the gradient of parameter ``param``, if it
        has not begun, and is not one of this rank only."""
        if self.sync and not self.active:
            self.times.enter(steps.BACKWARD)
            # Queued first: what follows may raise, and a failed pass is known by its callback.
            self._backward = self._outermost or self._new_backward(torch._C._current_graph_task_id())
            self.begin_pass(param)

    def begin_pass(self, param: int | None) -> None:
        """Begins a pass; see :meth:`begin`."""
        if not self.prepared:
            model = self.model()
            assert model is not None
            self._prepare_pass(model, in_backward=True)
        with self._handling():
            self.active = True
            self.begin(param)

    @property
    def task(self) -> int | None:
        """The number of autograd's call that the pass is in; None: it is in none."""
        return None if self._backward is None else self._backward.number

    def _end_pass(self) -> None:
        with self._handling():
            self.prepared = False
            self._backward = None
            self.pipeline.end()
            self.end()
        self.times.end_pass()

    @contextlib.contextmanager
    def _handling(self) -> Iterator[None]:
        """While a thread is here the pass has not failed, whatever another thread sees of it."""
        self._handled_by += 1
        try:
            yield
        finally:
            self._handled_by -= 1

    def end_warmup(self) -> StepHooks | None:
        """Makes the hooks that follow, if the warm-up is over: between an update and the next pass."""
        if self.successor is None or self.steps < self.limit or self.active:
            return None
        if not any(p.requires_grad for p in self.params):
            return None  # frozen while another model trains: what follows begins with its next step
        if self.join is not None:  # ranks without inputs follow the others' passes as they are
            if not self.told and self.groups.rank == 0:
                self.told = True
                logs.warning(
                    f"{self.groups.name}: the warm-up of {self.limit} steps ends when trigram.join does"
                )
            return None
        return self.successor()

    @staticmethod
    def inside_backward() -> bool:
        """Whether this thread is in a backward pass, of whichever model."""
        return torch._C._current_graph_task_id() != -1

    # Passes that raise an exception.

    @property
    def in_backward(self) -> bool:
        """Whether the active pass is still running."""
        running = self._backward is not None and self._backward.running
        return self.active and (running or self._handled_by > 0)

    def abort_failed(self, timeout: float | None = None) -> None:
        """Aborts, on all ranks, a backward pass that has raised an exception on this one.

        Args:
            timeout: Seconds to wait for what a step has begun; None: as long as its calls may take.
        """
        if self.active and not self.in_backward:
            self.abort_pass()
        elif not self.active and self._outermost is not None and not self._outermost.running:
            # It failed before the first gradient; the other ranks may be in the pass and wait.
            self._outermost = None
            if self.sync:
                self.begin_pass(None)
                self.abort_pass()

    def _abort_others(self) -> None:
        """Aborts failed passes of other models: the other ranks wait in them, and would wait for this one
        while it waits for them in this model."""
        for other in optimizer_hooks.listeners():
            if not isinstance(other, StepHooks) or other is self or other.made_in is not self.made_in:
                continue
            if other.model() is not None:
                other.abort_failed()

    def _forward_failed(self, model: nn.Module) -> None:
        """The forward pass of a training step has raised an exception: the pass fails on all ranks, for a
        script that goes on with its next batch would be one step behind the other ranks."""
        if not model.training or self.updating or self.active or self.inside_backward():
            return
        self.begin_pass(None)
        self.abort_pass()

    def clear_pass(self) -> None:
        """No pass is under way any more: it has raised an exception."""
        self.active = self.prepared = False
        self._backward = self._outermost = None
        self.pipeline.end()


def _is_traced() -> bool:
    """Whether ``torch.jit.trace`` or ``torch.export`` calls the model, perhaps on one rank."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """A block in which tensors are what they are: the model may be called inside ``torch.func.jvp`` or
    ``vmap``, which wrap also those that are made there."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()


def _layout(p: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, torch.device, bool]:
    # The address tells of `torch.utils.swap_tensors`: the same object of Python, another node of the graph.
    return p._cdata, p.dtype, p.shape, p.device, coalesced.is_channels_last(p)


def agree_on_algorithm(text: str, groups: ModelGroups) -> None:
    """Raises a ``MismatchError`` on all ranks if they use different algorithms or options."""
    other = ranks_unlike_first(text, groups.control)
    if other:
        raise MismatchError(
            f"with_bagua: rank(s) {listed(other)} use a different algorithm or different options than rank "
            f"{groups.control.ranks[0]}; {groups.name} uses {text}. Pass the same arguments on all ranks, "
            "and set the same TRIGRAM_ALGORITHM"
        )


def _agree_on(tensors: list[tuple[str, torch.Tensor]], group: Group) -> None:
    """Raises a ``MismatchError`` on all ranks if the models differ, before any weight is changed."""
    lines = [
        f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad} {coalesced.expanded_dimensions(t)} "
        f"{coalesced.is_channels_last(t)}"
        for n, t in tensors
    ]
    other = ranks_unlike_first("\n".join(lines), group)
    if other:
        first = tell_all([len(lines)], group)[0][0]
        raise MismatchError(
            f"with_bagua: the model of rank(s) {listed(other)} differs from that of rank {group.ranks[0]} "
            "in the names, shapes, dtypes, requires_grad, memory formats or expanded dimensions of its "
            f"parameters and buffers ({first} tensors on rank {group.ranks[0]}, {len(lines)} on rank "
            f"{group.ranks[group.rank]}); build the same "
            "model on all ranks"
        )
