"""The mean of uncompressed values: one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups


class FullAverage:
    """An :class:`~trigram.averaging.average.Average` by one all-reduce; it has no state."""

    calls = 0
    name = "all_reduce"

    def __init__(self, memory: torch.Tensor, groups: ModelGroups) -> None:
        self.memory = memory
        self.groups = groups
        # What a bandwidth-optimal all-reduce sends.
        self.sent = 2 * (groups.size - 1) * memory.nbytes // groups.size
        self.work: collectives.Work | None = None

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """No state."""

    def settle(self, unused: Sequence[bool]) -> None:
        """No state."""

    def start(self, step: int) -> None:
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
        """No state."""
        return [{} for _ in views]

    def fold(self) -> None:
        """No state."""

    def state(self) -> dict[str, torch.Tensor]:
        """No state."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """No state."""
