"""The mean of the numbers themselves: AllReduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups


class FullAverage:
    """The numbers themselves: AllReduce."""

    calls = 0

    def __init__(self, memory: torch.Tensor, groups: ModelGroups) -> None:
        self.memory = memory
        self.groups = groups
        # What a bandwidth-optimal AllReduce sends.
        self.sent = 2 * (groups.size - 1) * memory.nbytes // groups.size
        self.work: collectives.Work | None = None

    def start(self, round: int) -> None:
        """See :class:`Average`."""
        self.work = collectives.all_reduce(self.memory, "avg", None, self.groups.main, async_op=True)

    def advance(self) -> bool:
        """See :class:`Average`."""
        return True

    def ready(self) -> bool:
        """See :class:`Average`."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """See :class:`Average`."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()

    def await_end(self) -> None:
        """See :class:`Average`."""
        self.wait()

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Nothing."""
        return [{} for _ in views]

    def fold(self) -> None:
        """Nothing."""

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Nothing."""
