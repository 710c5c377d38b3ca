"""``TRIGRAM_GRADIENTS=N``: every N steps, what averages lose and gain on this training's own values.

For algorithms that average gradients: the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162;
from the norms of own and mean gradients as AdaptDL does), and the relative error of codecs on this rank's
gradients. For those that average weights every so many steps: the consensus distance, of a sample of the
weights. It reads gradients twice more and encodes a part of them, and ranks exchange a few numbers; so it is
only done where it is asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from trigram import codecs, collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import tell_all_floats
from trigram.errors import ConfigError

VARIABLE = "TRIGRAM_GRADIENTS"
CODECS = ("bf16", "f16", "int8", "sign", "topk:0.01")
"""Whose errors are measured, without error feedback, which makes up for most of those of the last two; and
whose costs a plan measures."""
_CODED = 1 << 18
"""Values of a bucket that are encoded."""
_SAMPLED = 1 << 16
"""Weights of which the consensus distance is computed."""
_KEEP = 0.9
"""Weight of the past in the running means."""


def every() -> int:
    """Steps between two looks; 0: nobody has asked.

    Raises:
        ConfigError: The variable is no number of steps.
    """
    text = os.environ.get(VARIABLE, "0") or "0"
    if not text.isdigit():
        raise ConfigError(f"{VARIABLE}={text!r} is invalid; set it to a number of steps, or 0")
    return int(text)


def noise(own: float, mean: float, ranks: int) -> tuple[float, float]:
    """The squared norm of the true gradient, and the variance of one rank's gradient, unbiased.

    Args:
        own: The mean over ranks of the squared norm of a rank's gradient.
        mean: The squared norm of the mean gradient.
        ranks: Number of ranks, 2 or more.
    """
    return (ranks * mean - own) / (ranks - 1), ranks * (own - mean) / (ranks - 1)


class Fidelity:
    """What one model's averages are like.

    Args:
        groups: The model's process groups.
        steps: Steps between two looks.
    """

    def __init__(self, groups: ModelGroups, steps: int) -> None:
        self.groups, self.steps = groups, steps
        self.looks = 0
        self.looking = False
        self._own = self._mean = 0.0
        self._errors: dict[str, list[float]] = {}
        self._running: dict[str, float] = {}

    def begin(self, step: int, comparable: bool) -> None:
        """A pass begins. ``comparable``: all ranks have inputs and weigh the same."""
        self.looking = comparable and step > 0 and step % self.steps == 0
        self._own = self._mean = 0.0
        self._errors = {name: [0.0, 0.0] for name in CODECS}

    def own(self, values: torch.Tensor) -> None:
        """The gradients of a bucket are complete, of this rank only: one-dimensional."""
        if not self.looking:
            return
        self._own += square(values)
        if not values.is_cpu or values.dtype != torch.float32:
            return
        part = values[:_CODED]
        out, length = torch.empty_like(part), square(part)
        for name, found in self._errors.items():
            codec = codecs.find(name)
            codec.decode(codec.encode(part), out)
            found[0] += square(out.sub_(part))
            found[1] += length

    def mean(self, values: torch.Tensor, divided: bool) -> None:
        """The average of a bucket, or this rank's part of it if it is divided."""
        if self.looking:
            self._mean += square(values) * (self.groups.size if divided else 1)

    def end(self) -> None:
        """The pass has ended on all ranks: they exchange what they have seen."""
        if not self.looking:
            return
        self.looking = False
        errors = [of[0] / of[1] if of[1] > 0 else 0.0 for of in self._errors.values()]
        own, mean, *errors = self._means([self._own, self._mean, *errors])
        sqr, var = noise(own, mean, self.groups.size)
        self.looks += 1
        for name, value in zip(("square", "variance", *CODECS), (sqr, var, *errors), strict=True):
            self._note(name, value)

    def weights(self, step: int, params: Sequence[torch.Tensor]) -> None:
        """A boundary of training step ``step``, at which all ranks are, before weights are averaged."""
        if step % self.steps:
            return
        total = sum(p.numel() for p in params)
        stride = max(1, math.ceil(total / _SAMPLED))
        mine = torch.cat([p.detach().flatten()[::stride].float().cpu() for p in params])
        mean = mine.clone()
        collectives.all_reduce(mean, "avg", None, self.groups.control)
        [apart] = self._means([square(mine - mean)])
        self.looks += 1
        length = square(mean)
        self._note("distance", math.sqrt(apart / length) if length > 0 else 0.0)

    def _note(self, name: str, value: float) -> None:
        before = self._running.get(name)
        if math.isfinite(value):
            self._running[name] = value if before is None else _KEEP * before + (1 - _KEEP) * value

    def _means(self, values: list[float]) -> list[float]:
        """The means over all ranks."""
        everyone = tell_all_floats(values, self.groups.control)
        return [sum(column) / len(column) for column in zip(*everyone, strict=True)]

    def summary(self) -> dict[str, Any]:
        """``looks``; ``noise_scale``, in batches of one rank (None: no estimate yet), and
        ``codec_errors``, ``|Q(g) - g|^2 / |g|^2`` by codec; or ``consensus_distance``, the root mean square
        distance of a rank's weights from their mean over the length of the mean."""
        found: dict[str, Any] = {"looks": self.looks}
        running = self._running
        if "square" in running:
            usable = running["square"] > 0 and running["variance"] >= 0
            found["noise_scale"] = running["variance"] / running["square"] if usable else None
            found["codec_errors"] = {name: running[name] for name in CODECS if name in running}
        if "distance" in running:
            found["consensus_distance"] = running["distance"]
        return found


def square(values: torch.Tensor) -> float:
    """The squared norm of a tensor."""
    flat = values.flatten()
    return (
        float(torch.dot(flat, flat)) if flat.dtype == torch.float32 else float(flat.double().square().sum())
    )


def asked(groups: ModelGroups) -> Fidelity | None:
    """What the environment asks for; None: nothing."""
    steps = every()
    return Fidelity(groups, steps) if steps and groups.size > 1 else None
