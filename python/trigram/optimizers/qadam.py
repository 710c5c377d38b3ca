"""The optimizer of ``qadam``: Adam whose momentum is averaged with 1 or 8 bits after a warm-up.

With 1 bit the variance is frozen then (1-bit Adam, arXiv 2102.02888). With 8 bits it goes on: all ranks know
the averaged momenta of two steps, and so the mean gradient between them, to the codec's error. A value that
gets its first gradient late, such as a rare row of an embedding, has no variance when it is frozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from trigram.errors import MisuseError, UnsupportedError

_FLOOR = 0.01
"""The root of the frozen variance is at least this fraction of its root mean square over the tensor.
Otherwise a parameter with almost no gradient in the warm-up would turn a small encoding error into a huge
step."""


class Averager(Protocol):
    """Who averages the first moments of an optimizer.

    Attributes:
        optimizer: The optimizer.
    """

    optimizer: QAdam


class QAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, for ``with_bagua(model, "qadam", optimizer=this)``.

    During the warm-up it is ``torch.optim.AdamW``, and again when the model's algorithm is ``qadam`` no
    longer. After the warm-up ``p.grad`` holds the averaged first moment m, and a step is
    ``p -= lr (m / (1 - b1^t) / (v + eps) + weight_decay p)``. With 8 bits v is the root of the bias-corrected
    variance, which goes on with the gradient ``(m - b1 m_before) / (1 - b1)``; with 1 bit the floored root of
    the variance as it was at the end of the warm-up. Weight decay continues.

    Args:
        params: As for any optimizer.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the variance.
        weight_decay: Fraction of the weight that a step subtracts, times ``lr`` (decoupled, as in AdamW).
    """

    _averager: weakref.ref[Averager] | None = None
    _follows = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise MisuseError(
                f"QAdam: lr={lr}, eps={eps} and weight_decay={weight_decay} must be 0 or more, and "
                f"betas={betas} must be in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _of(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @property
    def frozen(self) -> bool:
        """Whether ``p.grad`` must hold averaged first moments: after the warm-up of ``qadam``."""
        averager = None if self._averager is None else self._averager()
        return averager is not None and averager.optimizer is self  # not so in a copy of the optimizer

    @torch.no_grad()
    def freeze(self, averager: Averager, follows: bool) -> None:
        """Ends the warm-up: from now on ``p.grad`` must hold the averaged first moment.

        Args:
            averager: Who averages them, until :meth:`thaw`.
            follows: The variance goes on with the gradients that the first moments imply; otherwise it is
                frozen.
        """
        self._averager, self._follows = weakref.ref(averager), follows
        if follows:
            return
        for group in self.param_groups:
            for p in group["params"]:
                self._root(p, group)

    def thaw(self, averager: Averager) -> None:
        """From now on ``p.grad`` holds gradients, unless another averager has begun."""
        if self._averager is not None and self._averager() is averager:
            self._averager = None

    @staticmethod
    def _unfreeze_variance(state: dict[str, Any], beta2: float) -> None:
        """Goes on with a variance that was frozen, as if it were that of the last step."""
        root = state.pop("root", None)
        if root is not None:
            variance = root.square().masked_fill_(root.isinf(), 0.0)
            state["exp_avg_sq"].copy_(variance.mul_(1 - beta2 ** state["step"]))

    def _root(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The floored root of the frozen variance; infinite where it is 0, so that these values do not
        change."""
        state = self._of(p)
        if "root" not in state:
            correction = 1 - group["betas"][1] ** max(state["step"], 1)
            root = (state["exp_avg_sq"] / correction).sqrt()
            floor = root.square().mean().sqrt() * _FLOOR
            state["root"] = torch.where(root > 0, root.clamp(min=float(floor)), torch.inf)
        root = state["root"]
        assert isinstance(root, torch.Tensor)
        return root

    @torch.no_grad()
    def to_momentum(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Replaces a gradient in place by the first moment that follows from it; 0 where a frozen variance is
        0."""
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                beta = group["betas"][0]
                grad.mul_(1 - beta).add_(self._of(p)["exp_avg"], alpha=beta)
                if not self._follows:
                    grad.masked_fill_(self._root(p, group).isinf(), 0.0)
                return

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; see :class:`torch.optim.Optimizer`."""
        if self._is_scaled():
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        averaged = self.frozen
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._of(p)
                m = state["exp_avg"]
                if averaged and not self._follows:
                    state["step"] += 1
                    m.copy_(p.grad)
                    root = self._root(p, group)
                else:
                    self._unfreeze_variance(state, beta2)
                    state["step"] += 1
                    grad = p.grad
                    if averaged:
                        grad = m.mul(-beta1).add_(p.grad).div_(1 - beta1)
                        m.copy_(p.grad)
                    else:
                        m.mul_(beta1).add_(grad, alpha=1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] / (1 - beta1 ** state["step"])
                p.addcdiv_(m, root + group["eps"], value=-rate)
        return loss

    # GradScaler passes its scale to an optimizer with this attribute, which then unscales the gradients.
    _step_supports_amp_scaling = True

    def _is_scaled(self) -> bool:
        """Unscales the gradients if there is a GradScaler; True if it found infinity, so that the step is
        skipped."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if self.frozen:
            raise UnsupportedError(
                "qadam does not support GradScaler after its warm-up: it averages the momentum, of which "
                "only the newest gradient has the scale; use autocast with bfloat16, which needs no "
                "GradScaler"
            )
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale)
        return bool(found)
