"""``BalancedBatchSampler``: batches that take all ranks the same time."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from trigram.data import plan
from trigram.errors import MismatchError, MisuseError
from trigram.runtime import job, world
from trigram.runtime.group import Group
from trigram.runtime.records import all_gather_bytes


class _Keys:
    """Numbers the samplers of this rank, alike on all ranks: a number identifies the group of a sampler among
    the groups beside the same ranks."""

    def __init__(self) -> None:
        self.next = itertools.count(1 << 40).__next__


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of samples of unequal cost, such as sentences, that take all ranks the same time in each step.

    Pass it to ``DataLoader(dataset, batch_sampler=...)`` and call :meth:`set_epoch` before each epoch, on all
    ranks. Every rank plans the batches of all ranks from the same arguments, without communication, and has
    the same number of batches. Samples of one step cost about the same, so padding is little too.

    Args:
        costs: The cost of each sample, in any unit: its length, or what a step with it takes. A tensor of one
            dimension or a sequence, without negative and non-finite values.
        batch_size: Samples in a batch; with unequal ``speeds`` their mean over the ranks of a step.
        max_cost: In place of ``batch_size``: the most that a batch costs.
        window: Samples that are sorted together. The larger it is, the more equal and the less random are the
            samples of a step.
        speeds: A positive number for each rank, relative to the others; a slow rank gets less. "measured":
            they are measured in each epoch, from the time between batches that the rank did not wait for
            others, and agreed in ``set_epoch``, which is a collective then. None: all are as fast. Batches of
            a step then differ in their number of samples: pass ``sample_weight=sampler.sample_weight`` to
            :func:`trigram.with_bagua`.
        seed: Of the order; the same on all ranks.
        padded: Whether a batch costs as much as its dearest sample times their number, as sentences that are
            padded do. False: the sum of its samples' costs.
        drop_last: Whether samples are left out that do not fill a step: fewer than ``batch_size`` for each
            rank, or, with ``max_cost``, fewer than ranks. False: they are a smaller last step; if they are
            fewer than ranks, some samples are repeated, so that each rank has one.
        rank: This rank's index; None: its group rank.
        num_replicas: The number of ranks; None: the group's.
        group: The ranks; None: all.

    Attributes:
        speeds: The relative speeds in use, one for each rank.
        epoch: The epoch of the plan.

    Raises:
        MisuseError: An argument is wrong; the message names it.
    """

    def __init__(
        self,
        costs: torch.Tensor | Sequence[float],
        *,
        batch_size: int | None = None,
        max_cost: float | None = None,
        window: int = 2048,
        speeds: Sequence[float] | Literal["measured"] | None = None,
        seed: int = 0,
        padded: bool = False,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
        group: world.AnyGroup = None,
    ) -> None:
        self._costs = _checked_costs(costs)
        self._limits = plan.Limits(batch_size, max_cost, window, padded, drop_last)
        _check_limits(self._limits, self._costs)
        if (rank is None) != (num_replicas is None):
            raise MisuseError("BalancedBatchSampler: pass both rank and num_replicas, or neither")
        self._group: Group | None = None
        self._fixed = rank, num_replicas
        if rank is None or num_replicas is None:
            self._group = world.resolve(group)
        elif not 0 <= rank < num_replicas:
            raise MisuseError(
                f"BalancedBatchSampler: rank={rank} is not one of {num_replicas} ranks, numbered from 0"
            )
        self._measured = isinstance(speeds, str)
        if self._measured and (speeds != "measured" or self._group is None):
            raise MisuseError(
                f"BalancedBatchSampler: speeds={speeds!r}: pass a number for each rank, None, or 'measured', "
                "which takes the ranks from group= and not from rank= and num_replicas="
            )
        self._key = job.here().part(_Keys).next() if self._measured else 0
        self._beside: tuple[Any, Group] | None = None
        self.seed = int(seed)
        self.epoch = 0
        self.speeds = [1.0] * self._size() if speeds is None or self._measured else list(map(float, speeds))
        self._parts: list[tuple[list[float], int]] = []  # earlier plans of this epoch and the steps done
        self._start = self._given = self._weighed = 0
        self._seconds: list[float] = []
        self._sizes: list[int] = []
        self._cached: tuple[Any, list[plan.Step]] | None = None
        self._check_speeds()

    def _rank(self) -> int:
        if self._group is None:
            return int(self._fixed[0] or 0)
        # A spare has the batches of a rank that counts.
        return self._group.rank if self._is_fixed() else world.rank() % world.world_size()

    def _size(self) -> int:
        if self._group is None:
            return int(self._fixed[1] or 0)
        return self._group.size if self._is_fixed() else world.world_size()

    def _is_fixed(self) -> bool:
        """Whether all ranks of the group have batches of their own: not so if it is an elastic job's."""
        present = world.present()
        elastic = present is not None and present.elastic is not None and self._group is present.group
        return not elastic or world.rank() < 0

    def _check_speeds(self) -> None:
        right = all(0 < s < math.inf for s in self.speeds)
        if not right or len(self.speeds) != self._size():
            raise MisuseError(
                f"BalancedBatchSampler: speeds={self.speeds} must be {self._size()} positive numbers, one "
                "for each rank"
            )

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with another order of the samples. All ranks call it, before each epoch.

        With ``speeds="measured"`` the ranks agree on their speeds here: it is a collective call. A resumed
        epoch, see :meth:`load_state_dict`, goes on as it was planned.

        Raises:
            MismatchError: With ``speeds="measured"``: ranks have different costs or arguments.
        """
        if epoch == self.epoch and (self._start or self._parts):
            return
        self.epoch, self._parts, self._start, self._given = int(epoch), [], 0, 0
        if self._measured:
            self._agree()
        elif len(self.speeds) != self._size() and len(set(self.speeds)) == 1:
            self.speeds = [1.0] * self._size()  # an elastic job has changed
        self._check_speeds()

    def _agree(self) -> None:
        """Gathers what each rank has measured, and derives the speeds from it."""
        group = self._group
        assert group is not None
        made_for = job.here().stay, tuple(group.ranks)
        if self._beside is None or self._beside[0] != made_for:
            self._beside = made_for, world.current().beside(group, "batch sampler", self._key)
        mine = self._arguments() + struct.pack("<d", self._speed())
        everyone = all_gather_bytes(self._beside[1], mine)
        others = [group.ranks[r] for r, theirs in enumerate(everyone) if theirs[:-8] != everyone[0][:-8]]
        if others:
            raise MismatchError(
                f"BalancedBatchSampler: ranks {others} have other costs, arguments or epochs than rank "
                f"{group.ranks[0]}; pass the same on all ranks"
            )
        found = [struct.unpack("<d", theirs[-8:])[0] for theirs in everyone]
        if not self._is_fixed():
            counting = world.training()
            found = [s for rank, s in zip(group.ranks, found, strict=True) if rank in counting]
        if len(self.speeds) != self._size():
            self.speeds = [1.0] * self._size()
        if all(0 < s < math.inf for s in found):
            self.speeds = [s * self._size() / math.fsum(found) for s in found]

    def _speed(self) -> float:
        """Cost per second of this rank in the last epoch; NaN: there is too little to tell."""
        seconds, self._seconds = self._seconds, []
        most = max(seconds, default=0.0)
        # A DataLoader asks for the first batches, which it fetches ahead, all at once.
        busy = list(itertools.dropwhile(lambda s: s < 0.05 * most, seconds))[1:]
        if len(busy) < 3 or self._cached is None:
            return math.nan
        mine = [step[self._rank()] for step in self._cached[1]]
        cost = math.fsum(plan.cost_of(batch, self._costs, self._limits.padded) for batch in mine)
        median = statistics.median(busy)
        return cost / len(mine) / median if median > 0 and cost > 0 else math.nan

    def _arguments(self) -> bytes:
        """A hash of all that the plan depends on, except for the speeds."""
        text = f"{self._limits} {self.seed} {self.epoch} {len(self._costs)}"
        numbers = struct.pack(f"<{len(self._costs)}d", *self._costs)
        return hashlib.blake2b(text.encode() + numbers, digest_size=16).digest()

    def _plan(self) -> list[plan.Step]:
        """The steps of this epoch that come after those of earlier plans."""
        key = self.epoch, self.seed, tuple(self.speeds), str(self._parts)
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
        order: list[int] = torch.randperm(len(self._costs), generator=generator, device="cpu").tolist()
        for speeds, count in self._parts:
            done = {i for step in self._steps(order, speeds)[:count] for batch in step for i in batch}
            order = [i for i in order if i not in done]
        planned = self._steps(order, self.speeds)
        self._cached = key, planned
        return planned

    def _steps(self, order: list[int], speeds: list[float]) -> list[plan.Step]:
        """The steps in random order; a smaller one stays the last."""
        planned = plan.steps(order, self._costs, speeds, self._limits)
        mixed = len(planned) - 1
        if mixed < 1:
            return planned
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + ~self.epoch) % (1 << 63))
        shuffled = torch.randperm(mixed, generator=generator, device="cpu").tolist()
        return [*(planned[i] for i in shuffled), planned[-1]]

    def __len__(self) -> int:
        """The number of batches that an iteration gives: those that are left, in a resumed epoch."""
        return len(self._plan()) - self._start

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's batches."""
        planned, rank, start = self._plan(), self._rank(), self._start
        self._start, self._seconds = 0, []
        self._given = self._weighed = start
        self._sizes = [len(step[rank]) for step in planned]
        last: tuple[float, float] | None = None
        for step in planned[start:]:
            if self._measured:
                now = time.perf_counter(), self._waited()
                if last is not None:
                    self._seconds.append(max(now[0] - last[0] - (now[1] - last[1]), 0.0))
                last = now
            self._given += 1
            yield list(step[rank])

    def _waited(self) -> float:
        """Seconds that this rank has waited for others so far."""
        waited = world.current().engine.counters()["waited_for"]
        assert isinstance(waited, list)
        return math.fsum(waited)

    def sample_weight(self) -> float:
        """The number of samples in the batch that this rank trains on, for
        ``with_bagua(sample_weight=sampler.sample_weight)``.

        It counts its calls, of which a backward pass makes one: each batch has one backward pass, and its
        loss is a mean over samples. In other loops pass a function of your own.

        Raises:
            MisuseError: There were more backward passes than batches.
        """
        if self._weighed >= self._given:
            raise MisuseError(
                f"BalancedBatchSampler: sample_weight was asked for batch {self._weighed} of this epoch, and "
                f"{self._given} were handed out: a batch had more than one backward pass; pass a function of "
                "your own to with_bagua(sample_weight=)"
            )
        self._weighed += 1
        return float(self._sizes[self._weighed - 1])

    def state_dict(self, trained: int | None = None) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on in the middle of an epoch; the same on all ranks.

        Args:
            trained: The batches of this epoch that were trained on, which a ``DataLoader`` with workers runs
                ahead of. None: those that were handed out.
        """
        done = self._given if trained is None else int(trained)
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "samples": len(self._costs),
            "parts": [(list(speeds), count) for speeds, count in self._parts],
            "speeds": list(self.speeds),
            "trained": done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the batches of a :meth:`state_dict`, on as many ranks or on another number of them.

        Raises:
            MisuseError: The state belongs to other data.
        """
        if state["samples"] != len(self._costs):
            raise MisuseError(
                f"BalancedBatchSampler: the state is of {state['samples']} samples, and the costs are of "
                f"{len(self._costs)}; load it with the same costs"
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        speeds, trained = list(state["speeds"]), state["trained"]
        self._parts = [(list(s), count) for s, count in state["parts"]]
        if self._measured and len(speeds) == self._size():
            self.speeds = speeds
        if speeds == self.speeds:
            self._start = self._given = trained
        else:
            self._parts.append((speeds, trained))
            self._start = self._given = 0


def _checked_costs(costs: torch.Tensor | Sequence[float]) -> list[float]:
    """The costs as numbers."""
    try:
        values = torch.as_tensor(costs, dtype=torch.float64, device="cpu").detach().cpu()
    except (TypeError, ValueError) as e:
        raise MisuseError(
            f"BalancedBatchSampler: costs are not numbers: {e}; pass one for each sample"
        ) from e
    if values.dim() != 1 or not len(values):
        raise MisuseError(
            f"BalancedBatchSampler: costs has shape {tuple(values.shape)}; pass one number for each sample"
        )
    wrong = (~torch.isfinite(values) | (values < 0)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise MisuseError(
            f"BalancedBatchSampler: costs[{at}] is {values[at].item()}; a cost must be 0 or a positive "
            "finite number"
        )
    listed: list[float] = values.tolist()
    return listed


def _check_limits(limits: plan.Limits, costs: list[float]) -> None:
    """Raises if batches cannot be made."""
    if (limits.batch_size is None) == (limits.max_cost is None):
        raise MisuseError("BalancedBatchSampler: pass either batch_size or max_cost")
    if limits.batch_size is not None and limits.batch_size < 1:
        raise MisuseError(
            f"BalancedBatchSampler: batch_size={limits.batch_size} is invalid; it must be at least 1"
        )
    if limits.window < 1:
        raise MisuseError(f"BalancedBatchSampler: window={limits.window} is invalid; it must be at least 1")
    dearest = max(range(len(costs)), key=costs.__getitem__)
    if limits.max_cost is not None and not costs[dearest] <= limits.max_cost < math.inf:
        raise MisuseError(
            f"BalancedBatchSampler: max_cost={limits.max_cost} must be a finite number of at least "
            f"costs[{dearest}], which is {costs[dearest]}; raise it, or leave such samples out"
        )
