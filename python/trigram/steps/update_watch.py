"""Whether weights have moved and gradients were reset since a backward pass.

Loops update weights in other ways than by an optimizer's ``step``, and skip updates; these snapshots, taken
when a backward pass has ended, tell what has happened since. They keep references to no memory of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from trigram.errors import MisuseError

_SAMPLED = 8
"""Parameters of which a snapshot keeps values."""
_VALUES = 512
"""Values of each that it keeps."""


class WeightsSnapshot:
    """The weights when a backward pass had ended.

    It compares versions and addresses of all parameters. In-place operations on ``param.data`` change
    neither, so it also compares values: of a few parameters, the smallest that have gradients, since small
    ones (biases) change in nearly every update.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._marks = self._marks_of(params)
        used = sorted(
            (i for i, p in enumerate(params) if p.grad is not None and p.numel()),
            key=lambda i: params[i].numel(),
        )
        if len(used) > _SAMPLED:  # half of them the smallest, and half spread over all others
            half = _SAMPLED // 2
            rest = used[half:]
            used = used[:half] + rest[:: max(len(rest) // half, 1)][:half]
        self._kept = [(i, _sample(params[i])) for i in used]

    @staticmethod
    def _marks_of(params: Sequence[torch.Tensor]) -> list[int]:
        # Not as pairs: objects that refer to others, as many as parameters, are work for Python's collector.
        return [p.data_ptr() for p in params] + [p._version for p in params]

    @torch.no_grad()
    def moved(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the weights differ from those of the snapshot."""
        if self._marks != self._marks_of(params):
            return True
        return any(not torch.equal(_sample(params[i]), kept) for i, kept in self._kept)


class ValuesSnapshot:
    """Some values of each tensor, to tell whether ``load_state_dict`` has changed any."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kept = [_sample(t) for t in tensors]

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors have the values of the snapshot."""
        return len(tensors) == len(self._kept) and all(
            torch.equal(_sample(t), kept) for t, kept in zip(tensors, self._kept, strict=True)
        )


class UntrainedPasses:
    """Forward passes that find other weights than the one before, while no backward pass tells of a training
    step: a script that uses ``torch.autograd.grad`` and changes weights by hand trains apart from the others.

    Args:
        what: Names the weights, for the error.
        advice: Follows "without a backward pass" there.
    """

    MOST = 20
    """So many passes are an error."""
    _ORDINARY = 3
    """As many forward passes belong to one training step in many scripts, and are not looked at."""

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        self.clear(-1)

    def clear(self, steps: int) -> None:
        """Begins anew, with this number of training steps."""
        self._steps = steps
        self.passes = self.changes = 0
        self._before: ValuesSnapshot | None = None

    def forward(self, steps: int, params: Sequence[torch.Tensor]) -> None:
        """A forward pass begins, after ``steps`` training steps.

        Raises:
            MisuseError: Too many have found other weights.
        """
        if steps != self._steps:
            self.clear(steps)
        self.passes += 1
        if self.passes >= self._ORDINARY:
            self.changes += self._before is not None and not self._before.same(params)
            self._before = ValuesSnapshot(params)
        if self.changes >= self.MOST:
            raise MisuseError(
                f"{self._what} were changed {self.changes} times without a backward pass{self._advice}"
            )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _VALUES, 1)].clone()


class GradientsSnapshot:
    """The gradients when a backward pass had ended: which tensors they are, and their versions."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        grads = [p.grad for p in params]
        self._kept = [None if g is None else weakref.ref(g) for g in grads]
        self._versions = [0 if g is None else g._version for g in grads]
        self._sparse = [g is not None and bool(g.is_sparse) for g in grads]

    @torch.no_grad()
    def reset(self, params: Sequence[torch.Tensor], but: int | None = None) -> bool:
        """Whether gradients were set to None or 0 since the snapshot.

        Args:
            params: The parameters.
            but: The index of a parameter that has received a new gradient already.
        """
        changed = []
        for i, (p, kept) in enumerate(zip(params, self._kept, strict=True)):
            if kept is None or i == but:
                continue
            grad = p.grad
            if grad is None:
                return True
            if grad is kept() and grad._version != self._versions[i] and not self._sparse[i]:
                changed.append(grad)
        # Clipping changes gradients in place too, but leaves some that are not 0.
        return bool(changed) and not any(bool(g.count_nonzero()) for g in changed)

    def has(self, index: int, grad: torch.Tensor) -> bool:
        """Whether the parameter of this index had this gradient."""
        kept = self._kept[index] if index < len(self._kept) else None
        return kept is not None and kept() is grad

    def foreign(self, params: Sequence[torch.Tensor], ids: set[int]) -> list[torch.Tensor]:
        """Those of the parameters with these ``id()`` whose gradients are other tensors than in the snapshot,
        so that a script has assigned them."""
        return [
            p
            for p, kept in zip(params, self._kept, strict=True)
            if id(p) in ids and p.grad is not None and (kept is None or p.grad is not kept())
        ]


class UsedGradients:
    """The gradients with which optimizers have updated parameters, to tell whether a script has written other
    values into the same tensors since (``p.grad.copy_``, or backward passes in ``no_sync``)."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.ref[torch.Tensor]] = {}
        self._versions: dict[int, int] = {}

    def clear(self) -> None:
        """Forgets them: a backward pass has computed new ones."""
        self._versions.clear()

    def keep(self, params: Sequence[torch.Tensor], ids: set[int]) -> None:
        """Remembers the gradients of the parameters with these ``id()``."""
        for p in params:
            if id(p) in ids and (grad := p.grad) is not None:
                kept = self._kept.get(id(p))
                if kept is None or kept() is not grad:  # most are the same tensors in every step
                    self._kept[id(p)] = weakref.ref(grad)
                self._versions[id(p)] = grad._version

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """The gradients have moved to other tensors, as they are."""
        self.keep(params, set(self._versions))

    def rewritten(self, params: Sequence[torch.Tensor], ids: set[int]) -> set[int]:
        """``id()`` of those of the parameters with these ``id()`` whose gradients have changed in place."""
        found = set()
        for p in params if self._versions else ():
            version = self._versions.get(id(p)) if id(p) in ids else None
            grad = p.grad
            if (
                version is not None
                and grad is not None
                and grad is self._kept[id(p)]()
                and grad._version != version
            ):
                found.add(id(p))
        return found
