"""A script's optimizer whose state is divided among the ranks.

While its ``step`` runs, this rank's slices take the place of the parameters in its ``param_groups``; its
state is keyed by slices. At all other times the groups hold the parameters, as the script has made them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram import collectives
from trigram.collectives import serialization
from trigram.collectives.consistency import tell_all
from trigram.errors import UnsupportedError
from trigram.gradients.in_parts import ShardedGradient
from trigram.gradients.updating.shown_params import ShownParams
from trigram.runtime.group import Group
from trigram.sharded.weights.other_methods import DividedState
from trigram.sharded.weights.weight_buckets import WeightBucket, flat

_SCALARS = ("step", "mu_product", "eta", "mu")
"""Names of state that belongs to a parameter as a whole, of whatever shape the parameter is."""


@dataclass
class Slice:
    """A piece of a parameter that this rank updates.

    Attributes:
        param: The parameter.
        view: The parameter's place in its bucket.
        value: The piece, one-dimensional, in that memory; the parameter itself if it is whole.
        start, stop: Its place among the parameter's values, as they lie in the bucket.
        part: The part of the bucket that it is in.
    """

    param: torch.Tensor
    view: torch.Tensor
    value: torch.Tensor
    start: int
    stop: int
    part: int

    @property
    def whole(self) -> bool:
        """Whether it is the parameter itself."""
        return self.value is self.param

    @property
    def gradient(self) -> torch.Tensor | None:
        """Of the parameter's gradient, what belongs to the piece, of its shape; None: it has none."""
        grad = self.param.grad
        if isinstance(grad, ShardedGradient):
            part = grad.part
            if part is None or not self.whole:
                return part
            return part.as_strided(self.view.shape, self.view.stride())
        if grad is None or self.whole:
            return grad
        return flat(grad, self.view)[self.start : self.stop]


class ShardedOptimizer:
    """The optimizer, the buckets of its weights and this rank's slices.

    Args:
        optimizer: The script's optimizer.
        whole: Whether it needs whole parameters.

    Attributes:
        buckets: The weights.
        places: By ``id()``, the parameters in them, each with its bucket and its position there.
        slices: By ``id()`` of a parameter, this rank's slice of it; absent if it has none.
        copies: The same of other ranks' parts, which this rank updates too, so that it can take their place.
    """

    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self.optimizer, self.whole = optimizer, whole
        self.buckets: list[WeightBucket] = []
        self.places: dict[int, tuple[torch.Tensor, WeightBucket, int]] = {}
        self.slices: dict[int, Slice] = {}
        self.copies: dict[int, list[Slice]] = {}
        self.shown = ShownParams(optimizer)
        self._kept: list[tuple[torch.Tensor, Any]] | None = None
        # A key of the state on ranks without slices too: torch.distributed.checkpoint steps an optimizer that
        # has no state, which would be a step of these ranks only.
        self._key = nn.Parameter(torch.empty(0, device="cpu"), False)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters in the optimizer's groups."""
        assert not self.entered
        return (p for g in self.optimizer.param_groups for p in g["params"])

    # Slices.

    def add(self, bucket: WeightBucket, part: int, copies: Sequence[int] = ()) -> None:
        """Adds the parameters of a bucket, with this rank's part, and the parts of which it keeps copies."""
        self.buckets.append(bucket)
        for k, param in enumerate(bucket.params):
            self.places[id(param)] = param, bucket, k
        for piece in self._pieces(bucket, part):
            self.slices[id(piece.param)] = piece
        for copy in copies:
            for piece in self._pieces(bucket, copy):
                self.copies.setdefault(id(piece.param), []).append(piece)

    def _pieces(self, bucket: WeightBucket, part: int) -> Iterator[Slice]:
        for k, start, stop in bucket.layout.pieces(part):
            param, at = bucket.params[k], bucket.layout.offsets[k]
            value = param if self.whole else nn.Parameter(bucket.memory[at + start : at + stop])
            yield Slice(param, bucket.views[k], value, start, stop, part)

    def held(self, param: torch.Tensor) -> list[Slice]:
        """The slices of a parameter that this rank updates: its own, and copies."""
        own = self.slices.get(id(param))
        return [*([] if own is None else [own]), *self.copies.get(id(param), [])]

    def clear(self) -> None:
        """Drops all buckets and slices with their state; the parameters stay where they are."""
        self.forget()
        self.buckets, self.places, self.slices, self.copies = [], {}, {}, {}

    def hold(self, names: dict[int, str]) -> None:
        """Moves parameters whose memory a script has replaced back into their buckets.

        Raises:
            UnsupportedError: A parameter has another shape, dtype or device.
        """
        for key, (param, bucket, k) in self.places.items():
            view = bucket.views[k]
            if param.data_ptr() == view.data_ptr() and param.stride() == view.stride():
                continue
            if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise UnsupportedError(
                    f"sharded: parameter {names.get(key, '')} was {view.dtype} of shape {tuple(view.shape)} "
                    f"on {view.device} and is {param.dtype} of shape {tuple(param.shape)} on {param.device}; "
                    "change parameters before with_bagua, or call trigram.unwrap before and with_bagua "
                    "after it"
                )
            bucket.hold(param, k)

    def enter(
        self,
        wanted: Callable[[torch.Tensor], bool],
        given: Sequence[Sequence[torch.Tensor]] | None = None,
        gradients: bool = True,
    ) -> None:
        """Puts this rank's slices into the groups.

        Args:
            wanted: Whether a parameter is updated now.
            given: Only these parameters of each group; None: all.
            gradients: Whether the slices have gradients.
        """

        def choose(p: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
            if not wanted(p):
                return []
            if id(p) not in self.places:
                if isinstance(p.grad, ShardedGradient) and p.grad.reset:  # frozen since
                    p.grad = p.grad.of_this_rank()
                return [(p, p.grad)]
            pieces = self.held(p)
            for piece in pieces:
                piece.value.requires_grad_(p.requires_grad)
                if not piece.whole and (attributes := vars(p)):
                    vars(piece.value).update(attributes)  # an optimizer may read them, as p.lr_scale
            return [(piece.value, piece.gradient if gradients else None) for piece in pieces]

        self.shown.show(choose, given)

    @property
    def entered(self) -> bool:
        """Whether slices are in the groups."""
        return self.shown.active

    def leave(self) -> None:
        """Puts the parameters back into the groups."""
        self.shown.restore()

    # State.

    @torch.no_grad()
    def cut(self) -> None:
        """Replaces the state of whole parameters by that of this rank's slices."""
        state = self.optimizer.state
        if not isinstance(state, DividedState) or state.divider() is not self:
            state = self.optimizer.state = DividedState(state, self)
        state[self._key] = {}
        for p, _, _ in self.places.values():
            pieces = self.held(p)
            if any(piece.whole for piece in pieces):
                continue
            whole = state.pop(p, None)
            for piece in pieces if whole else ():
                # Each has tensors of its own, also of what belongs to the whole parameter: it counts steps.
                state[piece.value] = {
                    name: flat(v, piece.view)[piece.start : piece.stop].clone()
                    if is_cut(name, v, p)
                    else v.clone()
                    if isinstance(v, torch.Tensor) and piece is not pieces[0]
                    else v
                    for name, v in whole.items()
                }

    @torch.no_grad()
    def gathered(self, group: Group) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The state of the optimizer's parameters that have some, put together from all ranks; all ranks call
        it."""
        found: dict[int, dict[str, Any]] = {}
        for bucket in self.buckets:
            mine: dict[int, Any] = {}
            keys = [id(p) for p in bucket.params]
            for k, key in enumerate(keys):
                piece = self.slices.get(key)
                state = self.optimizer.state.get(piece.value) if piece is not None else None
                if piece is not None and state:
                    cut = {n: not piece.whole and is_cut(n, v, piece.value) for n, v in state.items()}
                    mine[k] = (piece.start, piece.stop, cut, dict(state))
            for theirs in _gather_objects(mine, group):
                for k, (start, stop, cut, state) in theirs.items():
                    p = bucket.views[k]
                    whole = found.setdefault(keys[k], {})
                    for name, value in state.items():
                        if cut[name]:
                            if name not in whole:
                                whole[name] = torch.zeros_like(p, dtype=value.dtype)
                            flat(whole[name], p)[start:stop] = value
                        elif name not in whole:
                            own = self.slices.get(keys[k])
                            here = self.optimizer.state.get(own.value, {}) if own is not None else {}
                            whole[name] = as_here(value, here.get(name), p)
        return [(p, found[id(p)]) for p in self.parameters() if id(p) in found]

    def join(self, whole: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Replaces the state of slices by what :meth:`gathered` has returned, for a ``state_dict``."""
        self._kept = self.forget()
        self.optimizer.state.update(whole)

    def keep_joined(self) -> None:
        """What :meth:`join` has made stays."""
        self._kept = None

    def separate(self) -> None:
        """Ends what :meth:`join` began."""
        kept, self._kept = self._kept, None
        if kept is not None:
            for p, _, _ in self.places.values():
                self.optimizer.state.pop(p, None)
            for value, state in kept:
                self.optimizer.state[value] = state

    def forget(self) -> list[tuple[torch.Tensor, Any]]:
        """Removes the state of slices, and returns it."""
        state = self.optimizer.state
        copies = (s for pieces in self.copies.values() for s in pieces)
        values = [self._key, *(s.value for s in [*self.slices.values(), *copies])]
        return [(value, state.pop(value)) for value in values if value in state]

    def has_elsewhere(self, param: torch.Tensor) -> bool:
        """Whether other ranks have state of the parameter; in a step nobody asks for it."""
        return id(param) in self.places and not self.entered

    def release(self) -> None:
        """The state is a plain one again."""
        if isinstance(self.optimizer.state, DividedState):
            self.optimizer.state = defaultdict(dict, self.optimizer.state)

    def outline(self, loaded: bool = False) -> str:
        """What must be the same on all ranks: which parameters have state, its names and scalars.

        Args:
            loaded: All ranks have the state of parameters in buckets too.
        """
        lines = []
        for k, p in enumerate(self.parameters()):
            state = self.optimizer.state.get(p)
            if state and (loaded or id(p) not in self.places):
                values = {n: v for n, v in state.items() if not (isinstance(v, torch.Tensor) and v.dim())}
                lines.append(f"{k} {sorted(state)} { {n: _plain(v) for n, v in sorted(values.items())} }")
        return "\n".join(lines)


def as_here(value: Any, here: Any, param: torch.Tensor) -> Any:
    """State that was received: on the device of this rank's, in memory as the parameter is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == param.shape and value.dim():
        return torch.empty_like(param, dtype=value.dtype).copy_(value)
    if isinstance(here, torch.Tensor):
        return value.to(here.device)
    return value.to(param.device) if value.dim() else value  # `step` is on the CPU unless it is capturable


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def is_cut(name: str, value: Any, like: torch.Tensor) -> bool:
    """Whether state has one value for each value of ``like``, a parameter or a slice."""
    return isinstance(value, torch.Tensor) and name not in _SCALARS and value.shape == like.shape


def _gather_objects(mine: Any, group: Group) -> list[Any]:
    """Collects a nested container of tensors and numbers from all ranks; indexed by group rank."""
    data = serialization.pack(mine, "optimizer.state_dict")
    lengths = [length for (length,) in tell_all([data.numel()], group)]
    everything = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
    collectives.all_gather(everything, data, group, splits=lengths)
    parts = everything.split(lengths)
    return [serialization.unpack(part, rank) for part, rank in zip(parts, group.ranks, strict=True)]
