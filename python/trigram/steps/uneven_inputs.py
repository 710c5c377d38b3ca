"""Ranks with unequal numbers of inputs: what :func:`trigram.join` does.

Inside the block, all ranks that still have inputs tell all ranks before each step (``announce``) which model
makes it. A rank without inputs follows: it takes part in that step with gradients of 0, or with the weights
it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed, tell_all
from trigram.errors import MisuseError
from trigram.runtime import serving
from trigram.steps.without_inputs import Joinable, WithoutInputs


class UnevenInputs:
    """One block of :func:`trigram.join`, on one or more models of the same ranks.

    Args:
        models: The models, in the same order on all ranks.
        throw: All ranks raise as soon as one of them has no inputs left.
    """

    def __init__(
        self,
        models: Sequence[WithoutInputs[Any]],
        throw: bool,
    ) -> None:
        self.models = list(models)
        self.throw = throw
        self.control = models[0].hooks.groups.control
        self.present = list(range(self.control.size))
        self.at_start = [m.hooks.steps - m.hooks.idle_steps for m in models]

    @property
    def is_uneven(self) -> bool:
        """Whether a rank has no inputs left, as far as all know."""
        return len(self.present) < self.control.size

    def announce(self, hooks: Joinable | None) -> list[int]:
        """Tells all ranks that this one makes a step of a model, or has no inputs left (None).

        Returns:
            The group ranks that still have inputs.

        Raises:
            MisuseError: Ranks are at steps of different models; or ``throw``, and a rank has no inputs left.
        """
        if hooks is not None and self.is_uneven:
            self._check_apart(hooks)
        number = next((k for k, other in enumerate(self.models) if other.hooks is hooks), -1)
        told = self._tell_all(number)
        self.present = [group_rank for group_rank, theirs in enumerate(told) if theirs >= 0]
        self.number = max(told)
        absent = [r for r, theirs in zip(self.control.ranks, told, strict=True) if theirs < 0]
        if self.throw and absent and self.present:
            if hooks is None:
                self.models[self.number].skip_boundary()
            raise MisuseError(
                f"join: rank(s) {listed(absent)} have no more inputs, and throw_on_early_termination=True "
                "ends the training of all ranks then"
            )
        if len({theirs for theirs in told if theirs >= 0}) > 1:
            raise MisuseError(
                "join: ranks are at steps of different models; inside join(a, b) all ranks call the models "
                "in the same order"
            )
        return self.present

    def _tell_all(self, number: int) -> list[int]:
        """Each rank's number."""
        told = torch.empty(self.control.size, dtype=torch.int64, device="cpu")
        mine = torch.tensor([number], device="cpu")
        work = collectives.all_gather(told, mine, self.control, async_op=True)
        assert work is not None
        if number < 0:  # it trains no more: averages in the background are applied, others wait for the next
            serving.rest(work)
        work.wait()
        return [int(theirs) for theirs in told]

    def _check_apart(self, hooks: Joinable) -> None:
        """Raises if a pass of another model has been met, and is not over: a rank without inputs waits in it
        until it is aborted."""
        under_way = [m.hooks for m in self.models if m.hooks is not hooks and m.hooks.passes.prepared]
        for other in under_way:
            other.passes.begin(None)
            other.abort_pass()
        if under_way:
            raise MisuseError(
                "join: a forward pass of one model begins before the backward pass of another is over, and a "
                "rank has no inputs left: it takes part in one pass after the other; call backward() of the "
                "first before the second, or make both models one module and wrap that"
            )

    @torch.no_grad()
    def run_without_inputs(self) -> None:
        """Takes part in the steps of the other ranks, until no rank has inputs left."""
        for trained in self.models:
            trained.inputs_end()
        while self.announce(None):
            self.models[self.number].step(max(self.present))
        for trained, before in zip(self.models, self.at_start, strict=True):
            trained.hooks.drain()
            if not trained.hooks.weights_differ:
                self._share_longest(trained, before)

    def _share_longest(self, trained: WithoutInputs[Any], before: int) -> None:
        """All ranks get weights, buffers and optimizers of the rank that trained longest; of several, the
        last."""
        model, hooks = trained.model, trained.hooks
        made = hooks.steps - hooks.idle_steps - before
        counts = [count for (count,) in tell_all([made], hooks.groups.control)]
        longest = max(group_rank for group_rank, count in enumerate(counts) if count == max(counts))
        named = [*model.named_parameters(), *model.named_buffers()]
        kept = [t for name, t in named if name not in hooks.groups.ignored]
        coalesced.broadcast(kept, longest, hooks.groups.control)
        if min(counts) < max(counts):
            trained.share_optimizers(longest)
