"""The hooks on a model that an algorithm has: the base class of all algorithms.

:class:`~trigram.steps.passes.Passes` tells them of backward passes, and
:mod:`~trigram.optimizers.optimizer_hooks` of the steps of optimizers. They are called in this order:
:meth:`StepHooks.before_pass`, :meth:`StepHooks.begin` and :meth:`StepHooks.end`; and
:meth:`StepHooks.before_update` and :meth:`StepHooks.after_update` around the steps of optimizers. Subclasses
average gradients or weights there. docs/adr/0022 says why.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram import _core
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed, ranks_unlike_first, tell_all
from trigram.errors import MismatchError
from trigram.observe import steps
from trigram.optimizers import optimizer_hooks
from trigram.runtime.group import Group
from trigram.runtime.weak_hook import WeakHook
from trigram.steps import fidelity
from trigram.steps.elasticity import Elasticity, FixedRanks
from trigram.steps.parameters import Parameters
from trigram.steps.passes import Passes, PassMethod
from trigram.steps.tensor_check import check_tensors
from trigram.steps.uneven_inputs import UnevenInputs

_numbers = itertools.count()


class StepHooks:
    """The hooks on one model; counts its steps.

    Args:
        model: The module. The constructor broadcasts the parameters and buffers of the group's first rank.
        groups: The model's process groups.
        parameters: The model's parameters, to be found here; None: those that train are those that require
            gradients.

    Attributes:
        params: All of them, in the model's order.
        steps: Steps of training; each algorithm says what it counts.
        idle_steps: Those of them that this rank made without inputs, inside ``trigram.join``.
        sync: False inside ``no_sync``.
        passes: The model's backward passes.
        weights_differ: Whether ranks may hold different weights.
        in_step: Whether all ranks make the same step at a time.
        waits_for_closure: See :class:`trigram.optimizers.optimizer_hooks.Updated`.
        join: The block of ``trigram.join`` that the model is in, or None.
        pipeline: Which gradients of the pass are there. In a pass that it has begun with, only those enter
            Python after which there is something to do.
        number: The order in which hooks were made.
        times: Where the steps go.
        fidelity: What averages lose; None: nobody has asked.
    """

    weights_differ = False
    in_step = True
    waits_for_closure = False

    def __init__(self, model: nn.Module, groups: ModelGroups, parameters: Parameters | None = None) -> None:
        self.model = weakref.ref(model)
        self.parameters = parameters or Parameters(groups)
        self.params: list[torch.Tensor] = []
        self.pipeline = _core.Pipeline()
        self.passes = Passes(self)
        self.groups = groups
        self.times = steps.StepTimes(type(model).__name__, model.parameters())
        self.times.group = groups.main
        weakref.finalize(self, self.times.close).atexit = False  # a script may drop its model without unwrap
        self.number = next(_numbers)
        self.sync = True
        self.join: UnevenInputs | None = None
        self.steps = self.idle_steps = 0
        self.has_failed = False  # the last pass
        self.bytes = 0
        self.waited = 0.0
        self.updating: list[weakref.ref[Optimizer]] = []
        self.elastic: Elasticity = FixedRanks()
        self.fidelity = fidelity.asked(groups)
        if self.fidelity is not None:
            self.times.fidelity = self.fidelity.summary
        check_tensors(model, None if groups.joining else groups.control, groups.ignored)
        self.find_parameters(model)
        if not groups.joining:
            _agree_on(self.parameters.tensors(model), groups.control)
            tensors = [t for _, t in self.parameters.tensors(model)]
            coalesced.broadcast(tensors, groups.source(), groups.control)
        self.watch(model)

    # Subclasses override these.

    def before_pass(self, model: nn.Module, in_backward: bool) -> None:
        """See :class:`~trigram.steps.passes.PassMethod`, which this class is."""

    def begin(self, param: int | None) -> None:
        """See there."""

    def end(self) -> None:
        """See there."""

    def gradient(self, i: int, param: torch.Tensor) -> None:
        """See there."""

    def local_gradient(self, param: torch.Tensor) -> None:
        """See there."""

    def forward_begins(self, model: nn.Module) -> None:
        """See there."""

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
        self.parameters.forget_loading()

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

    def between_steps(self) -> None:
        """The script begins a step outside of this model, whose parameters are shards of another."""
        self.abort_failed()
        self.elastic.between_steps()

    # Parameters.

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train."""
        self.parameters.find(model)
        self.params = self.parameters.all
        self.pipeline.assign([id(p) for p in self.params], [])

    # Hooks.

    def watch(self, model: nn.Module) -> None:
        """Installs the hooks on the model and its parameters."""
        optimizer_hooks.leave(self)
        self.passes.watch(model, self.params, self.parameters.names)
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it has no such hooks; a parent's are called too when the whole model is loaded
            handle = module.register_load_state_dict_pre_hook(WeakHook(self, "_before_load"))
            self.passes.handles.append(handle)
        optimizer_hooks.listen(self)

    def close(self) -> None:
        """Removes the hooks; the model's steps are over."""
        self.passes.unhook()
        optimizer_hooks.leave(self)
        self.times.close()

    def _before_load(self, *_: Any) -> None:
        self.parameters.before_load()

    def end_warmup(self, trains: bool = True) -> PassMethod | None:
        """See :class:`~trigram.steps.passes.PassMethod`."""
        return None

    # Passes that raise an exception.

    def abort_failed(self, timeout: float | None = None) -> None:
        """Aborts, on all ranks, a backward pass that has raised an exception on this one.

        Args:
            timeout: Seconds to wait for what a step has begun; None: as long as its calls may take.
        """
        self.passes.abort_failed()


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
