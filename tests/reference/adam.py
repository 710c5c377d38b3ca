"""Adam whose second moment is that of the mean gradient of several ranks, written down in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PLAIN = 10  # steps in which it is Adam


class MeanAdam(torch.optim.Optimizer):
    """Adam; after `plain` steps the second moment averages g^2/n + (1 - 1/n) max(g m, 0), m the first moment
    before the step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, ranks: int, plain: int = PLAIN) -> None:
        super().__init__(params, {})
        self.lr, self.ranks, self.plain, self.t = lr, ranks, max(plain, PLAIN), 0
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.t += 1
        t, n = self.t, self.ranks
        for p in self.param_groups[0]["params"]:
            g = p.grad
            m, v = self.moments.get(p, (torch.zeros_like(p), torch.zeros_like(p)))
            before = m / (1 - 0.9 ** (t - 1)) if t > 1 else m
            m = 0.9 * m + 0.1 * g
            used = 0.999 * v + 0.001 * g * g
            p.sub_(self.lr * (m / (1 - 0.9**t)) / ((used / (1 - 0.999**t)).sqrt() + 1e-8))
            q = g * g if t <= self.plain else g * g / n + (1 - 1 / n) * (g * before).clamp(min=0)
            self.moments[p] = m, 0.999 * v + 0.001 * q
