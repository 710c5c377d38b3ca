"""What the members of an elastic job that reach each other know together when they change the membership.

Each tells one row of numbers; all of them get the table, and so come to the same answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigram.elastic.replicas import Replicas

LOSS_KINDS = ("", "left", "dead", "silent", "refused", "evicted")
STATELESS = 8
"""Added to the loss kind of a rank that has no training state yet."""
_NEWCOMER, _COMMITS, _BOUNDARY, _COMPLETE, _RENEW, _ASKED = range(6)
_LOSSES = 6
"""The column with the loss of rank 0; the others follow."""


def row(
    newcomer: bool,
    commits: int,
    position: Sequence[bool],
    losses: dict[int, str],
    stateless: Collection[int],
    slots: int,
) -> torch.Tensor:
    """What one rank tells: int64 of shape (6 + slots,).

    Args:
        newcomer: It has joined and not taken part in a step yet.
        commits: Backward passes that it knows all members to have completed.
        position: The first three arguments of ``change_membership``, and whether it was asked to leave.
        losses: The kind of the loss of each rank that it has lost, one of :data:`LOSS_KINDS`.
        stateless: Ranks that have no training state yet, as far as it knows.
        slots: One more than the largest rank that has ever been a member.
    """
    kinds = [LOSS_KINDS.index(losses.get(r, "")) + STATELESS * (r in stateless) for r in range(slots)]
    return torch.tensor([newcomer, commits, *position, *kinds], dtype=torch.int64, device="cpu")


def quorum(members: Sequence[int], reachable: Sequence[int], unreachable: Sequence[int]) -> bool:
    """Whether the ranks ``reachable`` may continue the job.

    They may if they are more than the ranks they cannot reach. Of two equal halves, the one with the lowest
    rank may. So two separated parts never both continue. Ranks known to have ended do not count.

    Args:
        members: All ranks of the epoch.
        reachable: Ranks that reach each other.
        unreachable: Ranks that they cannot reach and that may still run.
    """
    assert set(reachable) <= set(members) and set(unreachable) <= set(members)
    if len(reachable) != len(unreachable):
        return len(reachable) > len(unreachable)
    return min(reachable) < min(unreachable)


@dataclass(frozen=True)
class Knowledge:
    """The table, int64 of shape (reachable ranks, 6 + slots), and whose it is.

    Attributes:
        table: A :func:`row` of each reachable rank.
        members: All ranks of the epoch, ascending.
        reachable: Those that reach each other, ascending.
        replicas: Which ranks come and leave together.
    """

    table: torch.Tensor
    members: Sequence[int]
    reachable: Sequence[int]
    replicas: Replicas

    def _those(self, column: int) -> list[int]:
        return [r for r, each in zip(self.reachable, self.table[:, column], strict=True) if each]

    @property
    def commits(self) -> int:
        """The most backward passes that a rank knows to be completed."""
        return int(self.table[:, _COMMITS].max())

    @property
    def behind(self) -> bool:
        """Whether some ranks have yet to come to what all do together before a pass: they were in a pass that
        others had completed, or they come from between two steps, where others have begun the next."""
        return self._in_earlier_pass or bool(self.table[:, _BOUNDARY].any())

    @property
    def _in_earlier_pass(self) -> bool:
        return int(self.table[:, _COMMITS].min()) < self.commits

    @property
    def completed(self) -> int:
        """Backward passes of which each rank has all results. The one under way counts if each has counted it
        or has its results."""
        return int((self.table[:, _COMMITS] + self.table[:, _COMPLETE]).min())

    @property
    def between_steps(self) -> bool:
        """Whether all are between the same two steps."""
        here = self.table[:, _BOUNDARY].all() and not self.table[:, _COMPLETE].any()
        return bool(here) and not self._in_earlier_pass

    @property
    def renew(self) -> bool:
        """Whether a rank asks for a new epoch also if nobody is lost, joins or leaves."""
        return bool(self.table[:, _RENEW].any())

    @property
    def together(self) -> bool:
        """Whether all ask for that, after the same pass."""
        return bool(self.table[:, _RENEW].all()) and not self._in_earlier_pass

    @property
    def newcomers(self) -> list[int]:
        """The reachable ranks of replicas without the training state, ascending."""
        touched = self.replicas.touched(self._those(_NEWCOMER))
        return [r for r in self.reachable if r in touched]

    @property
    def asked(self) -> list[int]:
        """The reachable ranks that were asked to leave, or one of their replica was, ascending."""
        touched = self.replicas.touched(self._those(_ASKED))
        return [r for r in self.reachable if r in touched]

    def lost(self, *kinds: str) -> set[int]:
        """The members that a rank knows to be lost in one of these ways, of :data:`LOSS_KINDS`."""
        return {
            r
            for r in self.members
            if any(LOSS_KINDS[int(k) % STATELESS] in kinds for k in self.table[:, _LOSSES + r])
        }

    @property
    def stateless(self) -> set[int]:
        """The members without the training state. A rank has it as soon as one rank knows that it has."""
        return {r for r in self.members if bool((self.table[:, _LOSSES + r] >= STATELESS).all())}

    def alive(self) -> list[int]:
        """The members that are not reached and may still run, and whose voice counts."""
        # What is left of a replica leaves as well.
        ended = self.replicas.touched(self.lost("left", "dead", "evicted"))
        return [r for r in self.members if r not in self.reachable and r not in ended | self.stateless]

    def outvote(self, others: Sequence[int]) -> bool:
        """Whether the reachable ranks may go on without others that may run; see :func:`quorum`."""
        voters = [r for r in self.reachable if r not in self.stateless]
        return not others or (bool(voters) and quorum(self.members, voters, others))

    def leaving(self) -> list[int]:
        """Of those that are not reached and may run: whom a rank has not lost. One whose replica has lost
        another leaves."""
        lost = self.lost(*LOSS_KINDS[1:])
        return [r for r in self.alive() if r not in lost]

    def cut_off(self, hosts: Sequence[Any]) -> list[int]:
        """The missing members of whose end only broken connections tell: a network may have reset them.

        Args:
            hosts: The host of each rank. The kernel of a host knows which of its processes have ended.
        """
        near = {hosts[r] for r in self.reachable}
        gone = self.stateless | self.lost("left", "evicted")
        return [r for r in self.members if r not in self.reachable and r not in gone and hosts[r] not in near]
