"""What a sharded optimizer asks of the job: who holds which part, and what follows when a rank is lost.

:class:`Recovery` is for ranks that are fixed. In an elastic job others keep copies: ``elastic``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from trigram.errors import TrigramError
from trigram.sharded.agreement import agree, agree_on_options, explained
from trigram.sharded.state import ShardedState
from trigram.sharded.weights.divided_weights import Parts
from trigram.sharded.weights.weight_buckets import Layout
from trigram.steps.step_recovery import Arrival, SharedState


class Recovery(SharedState):
    """Ranks that are fixed: the loss of one is an error, and its part is lost.

    Attributes:
        state: The state that is divided.
    """

    state: ShardedState

    def serve(self, state: ShardedState) -> None:
        """This is the recovery of this state."""
        self.state = state

    def parts(self) -> Parts:
        """Which parts this rank holds."""
        groups = self.state.sync.groups
        return Parts(groups.size, groups.rank)

    def check_options(self) -> None:
        """A step begins: raises on all ranks if their optimizers have other options. Rarely, for it is a
        call: in steps 1, 2, 4, and so on."""
        if self.state.count.bit_count() == 1:
            agree_on_options(self.state.sync.groups, self.state.optimizer)

    def agree(self, wanted: Sequence[Layout]) -> None:
        """Raises on all ranks if they would divide parameters in other ways; all ranks call it."""
        outline = self.state.weights.shards.outline()
        agree(self.state.sync.groups, "optimizer.step()", f"{wanted}\n{outline}")

    def gather(self, updated: set[int]) -> None:
        """See :meth:`ShardedState.gather`; calls it."""
        self.state.gather(updated)

    @torch.no_grad()
    def collect(self) -> None:
        """Collects the weights from the parts, which others than the optimizer have changed, and waits for
        them; all ranks call it."""
        self.state.owed = False
        for bucket in self.state.weights.shards.buckets:
            for p in bucket.params:
                increment_version(p)
        self.gather(set())
        self.state.drain()

    def check_lending(self) -> None:
        """Raises if parts cannot be lent."""

    # The state of whole parameters.

    def whole_state(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The state of whole parameters, on all ranks. Its first call meets the next average of a rank that
        does not make it, and all raise."""
        groups = self.state.sync.groups
        try:
            return self.state.weights.shards.gathered(groups.main)
        except TrigramError as e:
            raise explained(e, groups.name, "optimizer.state_dict()") from e

    def gives_whole_state(self) -> bool:
        """Whether a ``state_dict`` that begins is one of all ranks."""
        return True

    def before_load(self) -> None:
        """The script is about to load a state that is divided."""
        self.state.stay.check("optimizer.load_state_dict()")
        self.state.between_steps("load_state_dict()")

    def after_load(self) -> None:
        """The script has loaded a state of whole parameters. A checkpoint ends a failure."""
        state = self.state
        state.failed.broken = False
        shards = state.weights.shards
        if shards.places:
            agree(state.sync.groups, "optimizer.load_state_dict()", shards.outline(loaded=True))
            shards.cut()

    # Elastic jobs; see `Updates`.

    def follow(self, part: Arrival) -> None:
        """See :class:`Updates`."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        return {}
