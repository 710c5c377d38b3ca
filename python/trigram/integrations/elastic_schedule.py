"""Learning rates of an elastic job: they follow the share of the training that is done.

With fewer ranks an epoch has more steps. A schedule of so many steps as were planned at the start would end
too early, so each step of the job is as much of the plan as it is of what is left of the training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

_ROUNDING = 1e-6


@dataclass
class Plan:
    """How far the training is.

    Attributes:
        planned: The steps that it would have with the ranks of its start, by which rates are scheduled.
        at: Of those, as many as are the share of the training that is done.
        share: Of this epoch, what is done.
    """

    planned: int = 0
    at: float = 0.0
    share: float = 0.0

    def ahead(self, left: int, later: float, steps: int) -> int:
        """Steps until the end of the training, with the one that is just made; before :meth:`step`.

        Args:
            left: Steps of this epoch after it.
            later: Epochs after this one; less than 0: of this one, a part is made only.
            steps: Of an epoch, with the ranks of now.
        """
        this = left
        if later < 0 and left:
            share = self.share + (1 - self.share) / (1 + left)
            this = max(0, _whole((1 + later - share) / (1 - share) * left))
        return 1 + this + max(0, _whole(later * steps))

    def step(self, left: int, ahead: int) -> None:
        """A step is made, with ``left`` of this epoch after it, and ``ahead`` until the end, with it."""
        self.share = self.share + (1 - self.share) / (1 + left) if left else 1.0
        self.at += (self.planned - self.at) / max(1, ahead)

    def go_on(self, done: float) -> None:
        """So much of the training is done, from 0 to 1, where it goes on from a checkpoint."""
        self.at = self.planned * min(1.0, done)
        if abs(self.at - round(self.at)) < _ROUNDING:
            self.at = float(round(self.at))

    @property
    def whole(self) -> int:
        """The steps of the plan that are done."""
        return math.floor(self.at + _ROUNDING)


class Paced:
    """A scheduler that counts steps: it makes those of the plan, of which a step of the job may be a part.

    Attributes:
        due: So many does the next call of ``step`` make.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self.due = scheduler, 1

    def step(self) -> None:
        """Makes the steps that are due."""
        for _ in range(self.due):
            self._scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def move(scheduler: LambdaLR, at: float) -> None:
    """Moves a function of the steps to this place, which need not be a whole number."""
    scheduler.last_epoch = place(at)
    rates = [
        base * rate(scheduler.last_epoch)
        for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def place(at: float) -> Any:
    """As schedulers count it, who compare it with integers."""
    return int(at) if at == int(at) else at


def _whole(steps: float) -> int:
    """Rounded up, but for what is an error of rounding."""
    return math.ceil(steps - _ROUNDING)
