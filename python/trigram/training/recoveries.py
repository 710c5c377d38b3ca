"""How training goes on when the members of an elastic job change: where gradients are averaged, and where
weights are."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import coalesced
from trigram.errors import TrigramError
from trigram.gradients.gradient_sync import GradientSync
from trigram.runtime.group import Group
from trigram.steps.step_hooks import StepHooks
from trigram.steps.step_recovery import Arrival, SharedState, StepRecovery
from trigram.training.weight_sync import WeightSync


class GradientRecovery(StepRecovery[GradientSync]):
    """The pass in which a rank is lost is repeated, see :meth:`GradientSync.again`; here is what all agree on
    before that."""

    @property
    def warming(self) -> bool:
        """See :class:`StepRecovery`."""
        return self._hooks.warmup_end.is_ahead

    @property
    def shared(self) -> SharedState:
        """See :class:`StepRecovery`."""
        return self._hooks.updates.shared

    def meta(self) -> dict[str, Any]:
        """What a joining rank must know before its first step."""
        sync = self._hooks
        return {"order": sync.buckets.order, "steps": sync.steps, "since": sync.since}

    def follow(self, meta: dict[str, Any], part: Arrival) -> None:
        """Continues after the ranks have changed, with residuals of 0."""
        sync = self._hooks
        if part.newcomer:
            sync.steps, sync.since = meta["steps"], meta["since"]
        for bucket in sync.buckets:
            with contextlib.suppress(TrigramError):
                bucket.average.await_end()
        sync.order.build(meta["order"], keep_residuals=False)
        sync.order.is_known(meta["order"])
        sync.updates.follow(part)


class WeightRecovery(StepRecovery[WeightSync]):
    """Nothing is repeated: what ranks have trained since the last averaging step is in the mean."""

    takes_mean = True

    @property
    def keeps_weights(self) -> bool:
        """Backward needs the weights of the forward pass."""
        return self._hooks.tracker.begun

    def meta(self) -> dict[str, Any]:
        """See :class:`StepRecovery`."""
        sync = self._hooks
        return {"steps": sync.steps, "pieces": sync.pieces, "last": sync.tracker.last}

    def follow(self, meta: dict[str, Any], part: Arrival) -> None:
        """Continues after the ranks have changed, from the mean of the weights of all ranks that have some.

        If one rank has made a boundary, perhaps with an averaging step that was lost, the other ranks skip
        that boundary, so that the next averaging step has all ranks. A joining rank starts at the step of the
        rank whose state it gets, and which its script has then; of an asynchronous algorithm, at the smallest
        of all ranks, so that it misses no collective of the script.
        """
        sync = self._hooks
        last, groups = sync.tracker.last, sync.groups
        position = torch.tensor([-1, -(1 << 62)] if part.newcomer else [last, -last], device="cpu")
        collectives.all_reduce(position, "max", None, part.everyone)
        sync.boundaries.skip_until = int(position[0])
        sync.pieces = meta["pieces"]
        self._take_mean(groups.control, groups.size - len(part.newcomers), part.is_new)
        # After that call, so that only the joining rank waits for the rest of the state.
        if part.newcomer and (sent := part.receive()) is not None:
            step = -int(position[1]) if sync.times.asynchronous else sent["last"]
            sync.tracker.start_at(step, step)
        part.has_state()
        sync.begin_again()

    @torch.no_grad()
    def _take_mean(self, group: Group, contributing: int, is_new: bool = False) -> None:
        """Replaces the weights by their mean over the ranks of a group that are not new."""
        model = self._hooks.model()
        assert model is not None  # the other ranks make these calls too, and would wait for this one
        weights = (coalesced.as_real(p.detach()) for p in self._hooks.groups.averaged(model))
        for same in coalesced.alike(w for w in weights if w.is_floating_point()):
            averaged = coalesced.Coalesced(same)
            if not is_new:
                averaged.pack()
            collectives.all_reduce(averaged.memory, "avg", None, group)
            averaged.memory.mul_(group.size / contributing)
            averaged.unpack()

    def hand_over(self, group: Group) -> None:
        """See :class:`StepRecovery`: what these ranks have learned since the last averaging step."""
        self._take_mean(group, group.size)

    def leave(self) -> None:
        """See :class:`StepRecovery`."""
        self._hooks.running.remove(self._hooks)


def recovery_of(hooks: StepHooks) -> StepRecovery[Any]:
    """How these steps go on when the members of an elastic job change."""
    if isinstance(hooks, GradientSync):
        return GradientRecovery(hooks)
    assert isinstance(hooks, WeightSync)
    return WeightRecovery(hooks)
