"""What every algorithm does beside a training loop: knows where its steps begin and end.

A :class:`Carrier` hooks a model and calls, in this order: :meth:`Carrier.before_step` before the
forward pass of a step, :meth:`Carrier.begin` when its backward pass begins, :meth:`Carrier.end`
when it is over. What is carried, gradients or weights, is the subclasses' matter.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trigram.averaging.non_finite import Suspects
from trigram.collectives import calls as collectives
from trigram.collectives import coalesced as flat
from trigram.errors import AbortedError, MismatchError, UnsupportedError
from trigram.gpu import device
from trigram.runtime.world import Group, aided_group, internal_group
from trigram.training.weak_hook import Hook

if TYPE_CHECKING:
    from trigram.elastic.recovery import Part


class Channels:
    """The groups of one model. Calls of a group are made in the same order on all ranks, so what
    has an order of its own has a group of its own.

    Attributes:
        first: The calls that begin in the order of buckets; messages between neighbours.
        second: The second leg of those that have two.
        side: Weights, buffers, roll calls.
        group: The ranks.
        rule: What stands in the place of means: trigram/rules.py; None: they are means.
        share: This rank's weight in averages: trigram/share.py; None: all weigh alike.
        check_replicas: Steps between two looks at whether all ranks hold the same weights; 0: nobody looks.
        finite: Looks at what leaves: trigram/finite.py; None: nobody does.
        suspects: Who sent what a robust rule left out.
    """

    def __init__(self, group: Group) -> None:
        self._aided: Group | None = None
        self.levels: Any = None  # of averages in two levels: trigram/hierarchy.py
        self.interrupted: Callable[[], bool] | None = None  # whether waiting for neighbours is in vain
        self.entering = False  # this rank takes the weights from an elastic job that it enters
        self.rule: Any = None
        self.share: Any = None
        self.finite: Any = None
        self.check_replicas = 0
        self.suspects = Suspects()
        self.renew(group)

    def renew(self, group: Group) -> None:
        """New groups in the place of those so far."""
        self.first = self._plain = internal_group(group, "gradients")
        self.group = group
        self.side = internal_group(group, "weights and buffers")
        self.second = internal_group(group, "second leg")
        self.size = group.size
        self.rank = group.rank
        if self.share is not None:
            self.share.renew(group)
        if self.finite is not None:
            self.finite.group = self.side

    def aid(self, wanted: bool) -> None:
        """From now on ``first`` is the group with helpers, if one is free: it offers AllReduce only."""
        if wanted and self._aided is None:
            self._aided = aided_group(self.group)
        self.first = self._aided if wanted and self._aided is not None else self._plain

    def wait(self, work: collectives.Work) -> None:
        """Waits for a message; in an elastic job its sender may have gone to meet the others instead.

        Raises:
            AbortedError: This rank is to meet them too.
        """
        while self.interrupted is not None:
            try:
                work.wait(0.05)
                return
            except TimeoutError:
                if self.interrupted():
                    raise AbortedError(f"{self.name}: a message: the ranks come together") from None
        work.wait()

    @property
    def name(self) -> str:
        """This rank, as errors name it."""
        return f"rank {self.side.ranks[self.rank]}"


class Carrier:
    """The hooks on one model, and the counting of steps.

    Args:
        model: The module; its parameters and buffers become those of the group's first rank.
        channels: The groups it talks in.

    Attributes:
        steps: Backward passes that synchronised.
        sync: False inside ``no_sync``.
        replicas: Whether ranks may hold different weights.
        in_step: Whether all ranks make the same step at a time.
    """

    replicas = False
    in_step = True

    def __init__(self, model: nn.Module, channels: Channels) -> None:
        self.model = weakref.ref(model)
        self.channels = channels
        self.sync = True
        self.joining = False
        self.forwards = 0
        self.active = False
        self.steps = 0
        self.bytes = 0
        self.waited = 0.0
        self.limit = 0
        self.successor: Callable[[], Carrier] | None = None
        self.handles: list[Any] = []
        self.elastic: Part | None = None
        self.find_parameters(model)
        if not channels.entering:
            _agree_on(model, channels.side)
            flat.broadcast([*model.parameters(), *model.buffers()], 0, channels.side)
        self.watch(model)

    # What subclasses do.

    def before_step(self, model: nn.Module, src: int) -> None:
        """A forward pass of a step begins; ``src`` is the place whose buffers count."""

    def begin(self) -> None:
        """The backward pass of a step begins."""

    def end(self) -> None:
        """It is over on this rank."""

    def abandon(self) -> None:
        """The last backward pass ended with an exception, if it is still active."""

    def shadow_step(self) -> None:
        """A whole step of a rank that has no inputs left."""
        raise NotImplementedError

    def drain(self, timeout: float | None = None) -> None:
        """Ends what is under way, on all ranks, and applies it."""

    def state(self) -> dict[str, Any]:
        """All that must be remembered, between steps."""
        return {"steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave."""
        self.steps = state["steps"]

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        return {
            "steps": self.steps,
            "bytes_per_step": self.bytes // self.steps if self.steps else 0,
            "bytes": self.bytes,
            "wait_seconds": self.waited,
        }

    # Elastic jobs.

    def meta(self) -> dict[str, Any]:
        """What all must know to go on alike in a new world."""
        return {"steps": self.steps}

    def follow(self, meta: dict[str, Any], part: Part) -> None:
        """Goes on in a new world."""
        raise NotImplementedError

    # Hooks.

    def find_parameters(self, model: nn.Module) -> None:
        """Finds the parameters that train."""
        named = list(model.named_parameters())
        self.names = [n for n, _ in named]
        self.params = [p for _, p in named]
        trained = [p for p in self.params if p.requires_grad]
        for name, p in named:
            if p.requires_grad and p.device != trained[0].device:
                raise UnsupportedError(
                    f"with_bagua: {name} is on {p.device}, others on {trained[0].device}; a rank trains on "
                    "one device"
                )
            if p.requires_grad and not p.is_cpu and p.device.type not in device.kinds:
                raise UnsupportedError(
                    f"with_bagua: {name} is on {p.device}; models are on the CPU or on a GPU"
                )
            if p.requires_grad and not torch.is_floating_point(p):
                raise UnsupportedError(
                    f"with_bagua: {name} is {p.dtype}; parameters that train are real floats"
                )
        self.trains = [p.requires_grad for p in self.params]

    def has_changed(self, model: nn.Module) -> bool:
        """Whether a layer was frozen, thawed or added since the parameters were found."""
        return [p.requires_grad for p in self.params] != self.trains or len(self.params) != sum(
            1 for _ in model.parameters()
        )

    def watch(self, model: nn.Module) -> None:
        """Hooks the model."""
        self.close()
        self.handles = [
            model.register_forward_pre_hook(Hook(self, "_before_forward")),
            model.register_forward_hook(Hook(self, "_after_forward")),
        ]

    def close(self) -> None:
        """Leaves the model alone from now on."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not (torch.is_grad_enabled() and model.training):
            return
        self.abandon()
        if self.successor is not None and self.steps >= self.limit and not self.joining:
            self.successor()._before_forward(model, args)
            return
        # As DistributedDataParallel: buffers follow rank 0, among uneven inputs the last rank
        # that still has any.
        src = max(self._roll_call(present=True)[0]) if self.joining else 0
        self.before_step(model, src)
        self.forwards += 1

    @torch.compiler.disable
    def _after_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and self.sync) or not self.handles:
            return
        # The outermost backward pass begins here: a pass inside of it (reentrant checkpointing)
        # must not be taken for the whole.
        for t in pytree.tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(Hook(self, "_on_backward"))

    def _on_backward(self, _grad: torch.Tensor) -> None:
        if self.sync and not self.active:
            self.enter()

    def enter(self) -> None:
        """Backward begins; its end will be told."""
        self.active = True
        self.begin()
        torch.autograd.Variable._execution_engine.queue_callback(Hook(self, "_on_end"))

    @torch.no_grad()
    def _on_end(self) -> None:
        if self.active:
            self.end()

    # Uneven inputs.

    def _roll_call(self, present: bool) -> tuple[list[int], bool]:
        """The places that still have inputs, and whether they synchronise this step."""
        mine = torch.tensor([present, present and self.sync])
        everyone = torch.empty(self.channels.size, 2, dtype=torch.bool)
        collectives.all_gather(everyone, mine, self.channels.side)
        return everyone[:, 0].nonzero().flatten().tolist(), bool(everyone[:, 1].any())

    @torch.no_grad()
    def shadow(self, model: nn.Module) -> None:
        """Does what the others need of a rank that has run out of inputs, until all have."""
        self.abandon()
        while True:
            here, syncing = self._roll_call(present=False)
            if not here:
                break
            self.sync = syncing
            self.before_step(model, max(here))
            if syncing:
                self.shadow_step()
            self.sync = True
        self.drain()
        if self.replicas:
            return
        # The rank that trained longest has the model that counts; the last, if several did.
        side = self.channels.side
        counts = torch.empty(side.size, dtype=torch.int64)
        collectives.all_gather(counts, torch.tensor([self.forwards]), side)
        longest = int((counts == counts.max()).nonzero().max())
        flat.broadcast([*model.parameters(), *model.buffers()], longest, side)


def _digest(group: Group, text: str, count: int = 0) -> tuple[list[int], list[int]]:
    """World ranks whose text differs from the first rank's, and everybody's count."""
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:7], "big"), int.from_bytes(digest[7:14], "big"), count])
    everyone = torch.empty(group.size, 3, dtype=torch.int64)
    collectives.all_gather(everyone, mine, group)
    other = [group.ranks[r] for r in range(group.size) if not torch.equal(everyone[r, :2], everyone[0, :2])]
    return other, everyone[:, 2].tolist()


def agree_on_algorithm(text: str, channels: Channels) -> None:
    """Refuses ranks that ask for different algorithms, before they wait for each other."""
    other, _ = _digest(channels.side, text)
    if other:
        raise MismatchError(
            f"with_bagua: rank(s) {', '.join(map(str, other))} ask for another algorithm, or other options, "
            f"than rank {channels.side.ranks[0]}; {channels.name} asks for {text}"
        )


def _agree_on(model: nn.Module, group: Group) -> None:
    """Refuses models that differ between ranks before a number of them is touched."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in tensors]
    other, counts = _digest(group, "\n".join(lines), len(lines))
    if other:
        raise MismatchError(
            f"with_bagua: the model of rank(s) {', '.join(map(str, other))} differs from that of rank "
            f"{group.ranks[0]} in the names, shapes, dtypes or requires_grad of its parameters and buffers "
            f"({counts[0]} tensors on rank {group.ranks[0]}, {len(lines)} here)"
        )
