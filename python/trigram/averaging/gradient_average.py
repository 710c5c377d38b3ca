"""The base class of averages of gradients that a script registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram.averaging.average import Average
from trigram.averaging.gradient_filter import Views
from trigram.averaging.groups import ModelGroups
from trigram.averaging.held_residual import positions
from trigram.errors import MisuseError


class GradientAverage(Average):
    """Averages the gradients of one bucket, in place, once in each training step. An algorithm is a subclass
    with :meth:`phases`, registered with ``trigram.register(name, trigram.Trigram(), average=TheClass)``; see
    docs/extending.md.

    Args:
        memory: The gradients: one-dimensional, of the parameters' dtype and device. It ends with zeros, so
            that it divides into a shard for each rank (``memory.view(groups.size, -1)``).
        views: The gradient of each parameter, as a view into ``memory``.
        groups: The model's process groups.
        **options: A subclass has the options that it was registered with.

    Attributes:
        sent: Bytes that this rank sends in one averaging step, for ``trigram.stats``; set it where it is not
            that of an all-reduce of ``memory``.
        is_made: The constructor has returned.
    """

    name = "registered average"

    def __init__(self, memory: torch.Tensor, views: Sequence[torch.Tensor], groups: ModelGroups) -> None:
        self.memory, self.views, self.groups = memory, Views(views), groups
        self.sent = 2 * (groups.size - 1) * memory.nbytes // groups.size
        self.is_made = False
        self._kept: dict[str, torch.Tensor] = {}
        self._before: list[tuple[slice, dict[str, torch.Tensor]]] = []

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("memory", "views") and self.__dict__.get(name, value) is not value:
            raise MisuseError(
                f"{type(self).__name__}: self.{name} cannot be replaced, for another tensor would not be "
                "averaged; write into it in place, as in self.memory.copy_(...)"
            )
        super().__setattr__(name, value)

    def start(self, step: int) -> None:
        """See :class:`Exchange`."""
        super().start(step)
        silent = self._pending is None and self._left == self.calls and self.groups.size > 1
        if silent and bool(self.memory.any()):  # zeros are no gradients of its own: it waits for a later step
            raise MisuseError(
                f"{type(self).__name__}.phases: it yielded no call in step {step} and left gradients, so "
                "every rank would train on its own; yield what it starts, such as "
                "trigram.all_reduce(self.memory, 'avg', group=self.groups.main, async_op=True)"
            )

    def keep(self, name: str) -> torch.Tensor:
        """What this rank keeps of each gradient from one averaging step to the next: a residual, a momentum.
        The constructor calls it.

        It moves with the parameters when buckets are made anew, and is part of checkpoints. Where no rank has
        used a parameter in a step, it stays as it was before that step.

        Args:
            name: Its name.

        Returns:
            A tensor of float32, as long as ``memory``; zero at first. Write into it in place.

        Raises:
            MisuseError: It is new, and the constructor has returned.
        """
        if name not in self._kept:
            if self.is_made:
                raise MisuseError(
                    f"{type(self).__name__}.keep({name!r}) is called for the first time after __init__, so "
                    "what was kept under this name is lost when buckets are made anew; call it in __init__"
                )
            self._kept[name] = torch.zeros(
                self.memory.numel(), dtype=torch.float32, device=self.memory.device
            )
        return self._kept[name]

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """See :class:`Average`."""
        self._before = [
            (at, {name: kept[at].clone() for name, kept in self._kept.items()})
            for at in positions(views, self.memory)
        ]

    def settle(self, unused: Sequence[bool]) -> None:
        """See :class:`Average`."""
        for (at, before), by_all in zip(self._before, unused, strict=True):
            for name, kept in self._kept.items() if by_all else ():
                kept[at] = before.get(name, 0.0)

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What :meth:`keep` gave, of each parameter."""
        return [{name: kept[at] for name, kept in self._kept.items()} for at in positions(views, self.memory)]

    def state(self) -> dict[str, torch.Tensor]:
        """What :meth:`keep` gave."""
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        for name, kept in state.items():
            self.keep(name).copy_(kept)
