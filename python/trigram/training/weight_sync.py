"""WeightSync carried in rounds: what the optimizer did stays each rank's own until a round shares it.

StepSchedule begin at *boundaries*: the forward pass after a backward pass, when nobody else uses the
weights. StepSchedule count backward passes, so a rank whose scaler skips its optimizer keeps nobody
waiting, and a rank whose pass fails has taken part all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.averaging.mean import mean_of
from trigram.collectives import coalesced
from trigram.elastic.recovery import ElasticModel
from trigram.errors import TimeoutError, TrigramError, UnsupportedError
from trigram.training.schedule import EverySteps, StepSchedule
from trigram.training.step_hooks import StepHooks

running: dict[WeightSync, nn.Module | None] = {}
"""Carriers whose ranks are not in step, in the order in which they were made. They are kept until
they have ended well, even where the script lets go of the model; in an elastic job the model too, for
who is through may have to give its state to one who comes."""


class WeightSync(StepHooks):
    """Carries the weights of one model.

    Args:
        model: The module.
        groups: Where to talk.
        make: From the parameters, by dtype, to rounds; called again when layers are thawed or frozen.
        in_step: Whether all ranks make rounds at the same steps.
    """

    replicas = True

    def __init__(
        self,
        model: nn.Module,
        groups: ModelGroups,
        make: Callable[[list[list[torch.Tensor]]], StepSchedule],
        in_step: bool = True,
    ) -> None:
        self.make = make
        self.in_step = in_step
        self.seen = 0
        self.skip = -1
        super().__init__(model, groups)
        if not groups.joining:
            self._prepare()

    def _prepare(self) -> None:
        trained = [p for p, trains in zip(self.params, self.trains, strict=True) if trains]
        with torch.no_grad():
            self.rounds = self.make(list(coalesced.alike(p.detach() for p in trained)))

    @torch.no_grad()
    def before_step(self, model: nn.Module, src: int) -> None:
        """A boundary, if a backward pass has been since the last."""
        if self.has_changed(model):
            if self in running:
                raise UnsupportedError(
                    f"{self.groups.name}: parameters were frozen, unfrozen or added while an asynchronous "
                    "algorithm trains the model; call trigram.switch(model, ...) on all ranks to apply the "
                    "change"
                )
            self.average(model)  # what is remembered of them begins anew, where all are equal
            self.find_parameters(model)
            self._prepare()
        if self.steps > self.seen:
            self.seen = self.steps
            self.elastic.boundary(self._boundary)

    def _boundary(self) -> bool:
        """A boundary; whether all ranks are at the same."""
        if isinstance(self.rounds, EverySteps) and self.steps <= self.skip:
            return False
        self.rounds.boundary(self.steps)
        return isinstance(self.rounds, EverySteps) and self.steps % self.rounds.every == 0

    def begin(self) -> None:
        """A step's samples count in the next round."""
        if self.groups.sample_weight is not None:
            self.groups.sample_weight.add_backward()

    @torch.no_grad()
    def end(self) -> None:
        """Backward is over: what went on beside it is applied, before the optimizer acts."""
        self.active = False
        with self.elastic.forgiving():
            self.rounds.backward_over()
        self.steps += 1

    def follow(self, meta: dict[str, Any], part: ElasticModel) -> None:
        """Goes on in a new world, where all begin with the mean of the weights of those who have any.

        A boundary at which anybody was, in a round that was lost perhaps, is not made by who was not yet
        there: the next round is one of all. Who enters is where the slowest is, so that no call of the script
        lies behind it.
        """
        stands = torch.tensor([-1, -(1 << 62)] if part.newcomer else [self.seen, -self.steps])
        collectives.all_reduce(stands, "max", None, self.groups.control)
        self.skip = int(stands[0])
        if part.newcomer:
            self.steps = self.seen = -int(stands[1])
            part.receive()
        model = part.model()
        assert model is not None
        old = self.groups.size - len(part.newcomers)
        with torch.no_grad():
            for same in coalesced.alike(p.detach() for p in model.parameters() if p.is_floating_point()):
                all_ = coalesced.Coalesced(same)
                if not part.is_new:
                    all_.pack()
                collectives.all_reduce(all_.memory, "avg", None, self.groups.control)
                all_.memory.mul_(self.groups.size / old)
                all_.unpack()
        part.has_state()
        self._prepare()

    def abort_pass(self) -> None:
        """A pass that failed counts as one that did not: the neighbours have had their round."""
        if self.active:
            with torch.no_grad():
                self.end()

    def shadow_step(self) -> None:
        """A step without an optimizer."""
        self.end()

    @torch.no_grad()
    def drain(self, timeout: float | None = None) -> None:
        """Waits for all ranks, doing meanwhile what those still training need; then ends all rounds."""
        self.abort_pass()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if self._meet(timeout, end):
                    self.rounds.drain(timeout)
                    return
            except TrigramError as e:
                if not self.elastic.is_loss(e):
                    raise
                self.elastic.regroup()

    def _meet(self, timeout: float | None, end: float | None) -> bool:
        """Waits for all ranks; false if the world was made anew meanwhile."""
        settle = getattr(self.rounds, "settle", None)
        while settle is not None and not settle():
            if self._regroups():
                return False
            self._serve()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"{self.groups.name}: waited {timeout} s for neighbours to finish their averaging steps; "
                    "check that all ranks make this call, or pass a longer timeout"
                )
            time.sleep(0.001)
        side = self.groups.control
        before, side.timeout = side.timeout, timeout if timeout is not None else side.timeout
        try:
            here = collectives.barrier(side, async_op=True)
        finally:
            side.timeout = before
        assert here is not None
        while running and not here.is_completed():
            if self._regroups(here):
                return False
            if not self._serve():
                time.sleep(0.001)
        here.wait()
        return True

    def _regroups(self, here: collectives.Work | None = None) -> bool:
        """Comes together with the others: to let a rank in, or to go on without one.

        Not if all have come ``here`` before that one left.
        """
        if not self.elastic.is_called():
            return False
        if here is not None and here.is_completed():
            return False
        self.elastic.regroup()
        return True

    def _serve(self) -> bool:
        """While this rank waits, nobody else shall wait for it: in any of its models."""
        served = [hooks.rounds.serve() for hooks in running]  # type: ignore[attr-defined]
        return any(served)

    def average(self, model: nn.Module, timeout: float | None = None) -> None:
        """Gives all ranks the mean of the weights."""
        self.drain(timeout)
        with torch.no_grad():
            mean_of([p.detach() for p in model.parameters()], self.groups)

    def state(self) -> dict[str, Any]:
        """Steps and rounds."""
        return {**super().state(), "seen": self.seen, "rounds": self.rounds.state()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See :meth:`state`."""
        super().load(state)
        self.seen = state["seen"]
        self.rounds.load(state["rounds"])

    def stats(self) -> dict[str, Any]:
        """Counters, see :func:`trigram.stats`."""
        self.bytes, self.waited = self.rounds.sent(), self.rounds.waited
        return {**super().stats(), "rounds": self.rounds.rounds, "waits": self.rounds.waits}
