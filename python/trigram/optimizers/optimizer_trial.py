"""What an optimizer can be given, found by trying: small parameters are trained with a copy of it, whole,
in pieces and each in a step of its own.

No attribute of an optimizer tells whether its update of a value depends on other values: a trust ratio takes
the norm of a parameter, a factored moment the shape of a matrix, a clipping option the gradients of all
parameters. In pieces such an update is another one, and no error tells.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.collectives import serialization
from trigram.errors import UnsupportedError
from trigram.optimizers import optimizer_hooks
from trigram.optimizers.group_values import GroupValues

_STEPS = 40
"""Some optimizers begin with another update: RAdam for 5 steps, Shampoo of some libraries for 25."""
_SMALL, _LARGE = 6, 130
"""The longest dimension of small parameters, and of a large one: Adafactor factors from 128 on."""
_PIECE = 61
_LR = 0.01
"""Instead of the optimizer's, which a warm-up may have set to 0."""
_TOLERANCE = 1e-3
"""Of the way that the values have gone."""

_Piece = tuple[int, int, int]  # a parameter, the first and the last of its values
_Cut = list[list[_Piece]]  # the pieces of each group that one copy of the optimizer has


@dataclass(frozen=True)
class Found:
    """What a trial has found.

    Attributes:
        values: Whether an optimizer of pieces of parameters makes the same update as one of all parameters.
        whole: Whether one of some whole parameters does.
        fused: Whether a step for each parameter does.
        sent: Whether its state can be sent to other ranks.
    """

    values: bool
    whole: bool
    fused: bool
    sent: bool


def found(optimizer: Optimizer) -> Found | None:
    """Tries an optimizer, without a change of it or of its parameters.

    Returns:
        What was found; None: its steps cannot be repeated (they need a closure, or random numbers).
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _Trial(optimizer).found()
    except Exception:
        return None


class _Trial:
    """Trains copies of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.shapes: list[tuple[torch.Size, torch.Tensor]] = []
        self.groups: list[list[int]] = []
        self.by_value = self.sent = True
        kinds: set[tuple[str, int]] = set()
        for group, options in zip(optimizer.param_groups, GroupValues(optimizer).plain(), strict=True):
            chosen: dict[int, torch.Tensor] = {}
            # Groups that differ in numbers only, such as a learning rate for each layer, are alike.
            options.pop("param_names", None)
            kind = repr({k: v != 0 if isinstance(v, float) else v for k, v in sorted(options.items())})
            for p in group["params"]:
                if p.numel() and (kind, p.dim()) not in kinds:
                    chosen.setdefault(p.dim(), p)
            kinds |= {(kind, dim) for dim in chosen}
            self.groups.append([])
            for k, p in enumerate(2 * list(chosen.values())):
                self.groups[-1].append(len(self.shapes))
                shape = torch.Size(min(n, max(_SMALL - k, 2)) for n in p.shape)
                self.shapes.append((shape, p))

    def found(self) -> Found | None:
        """See :func:`found`."""
        all_of = [[self._piece(k) for k in group] for group in self.groups]
        expected = self._trained([all_of], 0)
        if expected is None or not _near(expected, self._trained([all_of], 1)):
            return None
        pieces = self._among_three(lambda k: [self._cut(k, 0), self._cut(k, 1), []])
        parameters = self._among_three(
            lambda k: [[self._piece(k)] if k % 2 == rank else [] for rank in range(3)]
        )
        values = self.by_value and _near(expected, self._tried(pieces)) and self._large_is_alike()
        whole = _near(expected, self._tried(parameters))
        fused = whole and _near(expected, self._tried([all_of], each=True))
        return Found(values, whole, fused, self.sent)

    def _tried(self, cuts: list[_Cut], each: bool = False) -> list[torch.Tensor] | None:
        try:
            return self._trained(cuts, 0, each)
        except Exception:
            return None

    def _piece(self, k: int) -> _Piece:
        return k, 0, self.shapes[k][0].numel()

    def _cut(self, k: int, part: int) -> list[_Piece]:
        n = self.shapes[k][0].numel()
        lo, hi = ((0, n // 3), (n // 3, n))[part]
        return [(k, lo, hi)] if lo < hi else []

    def _among_three(self, parts: Callable[[int], list[list[_Piece]]]) -> list[_Cut]:
        """Three copies, each with its part of each parameter; one has nothing, as a rank may."""
        return [
            [[piece for k in group for piece in parts(k)[copy]] for group in self.groups] for copy in range(3)
        ]

    def _large_is_alike(self) -> bool:
        """Whether pieces of a large parameter are updated as the whole: small ones may differ."""
        matrices = [
            (g, p)
            for g, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if p.dim() > 1 and p.numel()
        ]
        if not matrices:
            return True
        g, large = max(matrices, key=lambda m: min(*m[1].shape[:2], _LARGE))
        kept = self.shapes, self.groups
        shape = torch.Size(
            [*(min(n, _LARGE) for n in large.shape[:2]), *(min(n, 2) for n in large.shape[2:])]
        )
        self.shapes, self.groups = [(shape, large)], [[0] if k == g else [] for k in range(len(self.groups))]
        n = shape.numel()
        cuts = [(0, at, min(at + _PIECE, n)) for at in range(0, n, _PIECE)]
        whole = self._trained([[[self._piece(k) for k in group] for group in self.groups]], 0, steps=2)
        cut = self._trained([[cuts if group else [] for group in self.groups]], 0, steps=2)
        self.shapes, self.groups = kept
        return whole is not None and _near(whole, cut)

    def _copy(self, params: Sequence[list[torch.Tensor]]) -> Optimizer:
        """The optimizer with other parameters and no state."""
        o = self.optimizer
        replaced: dict[int, Any] = {
            id(group["params"]): mine for group, mine in zip(o.param_groups, params, strict=True)
        } | {id(o.state): defaultdict(dict)}
        attributes = {k: v for k, v in vars(o).items() if not k.startswith("_optimizer_") and k != "step"}
        made: Optimizer = object.__new__(type(o))
        vars(made).update(copy.deepcopy(attributes, replaced))
        for name in vars(o):
            if name.startswith("_optimizer_"):
                vars(made)[name] = OrderedDict()
        if callable(train := getattr(made, "train", None)):
            train()
        for group in made.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(_LR)
            elif isinstance(group.get("lr"), float):
                group["lr"] = _LR
        return made

    def _trained(
        self, cuts: list[_Cut], seed: int, each: bool = False, steps: int = _STEPS
    ) -> list[torch.Tensor] | None:
        """How far the values of the parameters have gone after some steps; None: copies count otherwise.

        Args:
            cuts: What each copy has.
            seed: Of the optimizer's own random numbers.
            each: A step for each parameter.
            steps: The number of steps.
        """
        numbers = torch.Generator().manual_seed(5)
        values = [_normal(shape, like, numbers) for shape, like in self.shapes]
        start = [v.clone() for v in values]
        torch.default_generator.manual_seed(seed)
        copies: list[tuple[Optimizer, list[list[tuple[_Piece, torch.Tensor]]]]] = []
        for cut in cuts:
            mine = [[(piece, self._parameter(values, piece)) for piece in group] for group in cut]
            copies.append((self._copy([[p for _, p in group] for group in mine]), mine))
        for step in range(steps):
            gradients = [_normal(s, like, numbers) * 10 ** (step % 3 - 1) for s, like in self.shapes]
            for o, groups in copies:
                for group in groups:
                    for (k, lo, hi), p in group:
                        p.grad = gradients[k].flatten()[lo:hi].view(p.shape).clone()
                _step(o, each)
        states = [(p, s) for o, _ in copies for p, s in o.state.items() if isinstance(p, torch.Tensor)]
        self.by_value &= all(_is_by_value(value, p) for p, state in states for value in state.values())
        self.sent &= all(_can_be_sent(state) for _, state in states)
        counted = [GroupValues(o).plain() for o, _ in copies]
        return (
            [v - s for v, s in zip(values, start, strict=True)]
            if counted == counted[:1] * len(copies)
            else None
        )

    def _parameter(self, values: list[torch.Tensor], piece: _Piece) -> torch.Tensor:
        k, lo, hi = piece
        value = values[k].flatten()[lo:hi]
        return nn.Parameter(value.view(values[k].shape) if value.numel() == values[k].numel() else value)


def _step(optimizer: Optimizer, each: bool) -> None:
    if not each:
        optimizer_hooks.step_unheard(optimizer)
        return
    params = [list(group["params"]) for group in optimizer.param_groups]
    before = GroupValues(optimizer)
    for g, group in enumerate(params):
        for p in group:
            before.put_back()
            for other, shown in enumerate(optimizer.param_groups):
                shown["params"] = [p] if other == g else []
            optimizer_hooks.step_unheard(optimizer)
    for shown, mine in zip(optimizer.param_groups, params, strict=True):
        shown["params"] = mine


def _is_by_value(state: Any, param: torch.Tensor) -> bool:
    """Whether state is a number, or one for each value of the parameter. Other state, such as matrices, may
    begin to count after many steps."""
    if isinstance(state, torch.Tensor):
        return state.numel() <= 1 or state.shape == param.shape
    return state is None or isinstance(state, (bool, int, float, str))


def _can_be_sent(state: Any) -> bool:
    try:
        serialization.pack(state, "")
    except UnsupportedError:
        return False
    return True


def _normal(shape: torch.Size, like: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32  # fewer bits hide small steps
    return torch.randn(shape, generator=numbers, dtype=dtype, device="cpu").to(like.device)


def _near(expected: list[torch.Tensor], actual: list[torch.Tensor] | None) -> bool:
    """Whether two trainings have the same result, up to the order of sums."""
    return actual is not None and all(
        bool((a - e).norm() <= _TOLERANCE * e.norm()) for a, e in zip(actual, expected, strict=True)
    )
