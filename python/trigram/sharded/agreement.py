"""Finds ranks that call a sharded optimizer differently: where others do not, with other values, or in a job
that has ended."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.collectives.consistency import listed, ranks_unlike_first
from trigram.errors import MismatchError, MisuseError, TrigramError
from trigram.optimizers.group_values import KERNELS, GroupValues
from trigram.runtime import dynamo, job


def agree(groups: ModelGroups, call: str, text: str) -> None:
    """Raises on all ranks if they hold different texts, or if some ranks do not make this call: it meets
    their next average."""
    if other := _ranks_unlike_first(groups, call, text):
        raise MismatchError(
            f"{groups.name}: {call}: rank(s) {listed(other)} have another optimizer state, other "
            "parameters in the optimizer, or parameters in another memory format than rank "
            f"{groups.main.ranks[0]}; load the same checkpoint and make the same changes on all "
            "ranks"
        )


def agree_on_options(groups: ModelGroups, optimizer: Optimizer) -> None:
    """Raises on all ranks if they update their parts with different options."""
    if other := _ranks_unlike_first(groups, "optimizer.step()", plain_options(optimizer)):
        raise MismatchError(
            f"{groups.name}: optimizer.step(): rank(s) {listed(other)} have other options in the "
            f"optimizer's groups (lr, ...) than rank {groups.main.ranks[0]}, and would update their "
            "part of the weights with these; give schedulers the same values on all ranks, such as the "
            "mean of the loss"
        )


def plain_options(optimizer: Optimizer) -> str:
    """The options in the optimizer's groups that are plain values."""
    plain = (bool, int, float, str, tuple, type(None))
    groups = GroupValues(optimizer).plain()
    return repr([{k: v for k, v in o.items() if isinstance(v, plain) and k not in KERNELS} for o in groups])


def _ranks_unlike_first(groups: ModelGroups, call: str, text: str) -> list[int]:
    try:
        return ranks_unlike_first(text, groups.main)
    except TrigramError as e:
        raise explained(e, groups.name, call) from e


def explained(error: TrigramError, name: str, call: str) -> TrigramError:
    """If ranks made different calls: what a script may have done."""
    if not isinstance(error, MismatchError):
        return error
    return MismatchError(
        f"{name}: {call} of a sharded optimizer is a call of all ranks, and some of them are elsewhere in "
        f"the script; make it on all ranks, and save its result on one ({error})"
    )


class StayCheck:
    """The job in which an optimizer is sharded. As a hook before a step: raises if it has ended."""

    def __init__(self) -> None:
        self._stay = job.here().stay

    @dynamo.disable
    def __call__(self, *_: Any) -> None:
        """See the class."""
        self.check("optimizer.step()")

    @property
    def has_ended(self) -> bool:
        """Whether ``trigram.shutdown`` has ended it."""
        return self._stay.over

    def check(self, call: str) -> None:
        """Raises if the job has ended."""
        if self.has_ended:
            raise MisuseError(
                f"sharded: {call}: trigram.shutdown has ended the job whose ranks hold the other parts of "
                "this optimizer's state; save optimizer.state_dict() before, or call trigram.unwrap(model) "
                "on all ranks"
            )
