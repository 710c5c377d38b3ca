"""The job, its ranks, and sets of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

import trigram
from trigram.errors import MisuseError, UnsupportedError
from trigram.runtime.group import Group
from trigram.runtime.job import Part, here
from trigram.runtime.world import AnyGroup


class ProcessSet:
    """Some of the job's ranks.

    Args:
        ranks: Their numbers.

    Attributes:
        ranks: As above, sorted.
        process_set_id: A number; None: the set was not added to the job, or removed.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if any(not isinstance(r, int) for r in ranks):
            raise ValueError("ProcessSet: give a list of ranks; communicators of MPI are not supported")
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self._group: Group | None = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def size(self) -> int | None:
        """How many ranks it has; None: see ``process_set_id``."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's place in it; None: it has none, or see ``process_set_id``."""
        mine = rank()
        return self.ranks.index(mine) if self.process_set_id is not None and mine in self.ranks else None

    def included(self) -> bool:
        """Whether this rank is in it."""
        return rank() in self.ranks

    @property
    def group(self) -> AnyGroup:
        """The ranks, as Trigram's calls take them.

        Raises:
            MisuseError: The set was not added to the job.
        """
        if self.process_set_id is None:
            raise MisuseError(f"{self} is not in the job: give it to hvd.init or hvd.add_process_set")
        return self._group


class _AllRanks(ProcessSet):
    """The ranks of the job that asks, once it has begun."""

    def __init__(self) -> None:
        self._group = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All."""
        return list(range(trigram.world_size())) if trigram.is_initialized() else []

    @property
    def process_set_id(self) -> int | None:  # type: ignore[override]
        """0, as in Horovod."""
        return 0 if trigram.is_initialized() else None


global_process_set = _AllRanks()
"""All ranks."""


class _Sets(Part):
    """The process sets of a job, by number."""

    def __init__(self) -> None:
        self.known: dict[int, ProcessSet] = {}
        self.next = 1


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job, as :func:`trigram.init`.

    Args:
        comm: None; communicators of MPI are not supported.
        process_sets: Sets of ranks, the same on all ranks; or ``dynamic``, which they always are.
    """
    if comm:
        raise UnsupportedError("hvd.init: comm= is not supported; pass process_sets=[hvd.ProcessSet(ranks)]")
    if not trigram.is_initialized():
        trigram.init()
    for one in process_sets if isinstance(process_sets, list | tuple) else ():
        if one.process_set_id is None:  # else an earlier call has added it
            add_process_set(one)


def shutdown() -> None:
    """Leaves the job, as :func:`trigram.shutdown`."""
    for one in here().part(_Sets).known.values():
        one.process_set_id = None
    here().part(_Sets).known.clear()
    trigram.shutdown()


def is_initialized() -> bool:
    """Whether :func:`init` was called."""
    return trigram.is_initialized()


def _initialized() -> None:
    if not trigram.is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def rank() -> int:
    """This rank's number in the job."""
    _initialized()
    return trigram.rank()


def size() -> int:
    """How many ranks the job has."""
    _initialized()
    return trigram.world_size()


def local_rank() -> int:
    """This rank's number on its host, as the launcher says."""
    _initialized()
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """How many ranks its host has, as the launcher says."""
    _initialized()
    return int(os.environ.get("LOCAL_WORLD_SIZE") or size())


def cross_rank() -> int:
    """The host's number."""
    return int(os.environ.get("GROUP_RANK") or rank() // local_size())


def cross_size() -> int:
    """How many hosts there are."""
    return -(-size() // local_size())


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks, as far as their number tells."""
    return size() % local_size() == 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a set to the job; all ranks call it.

    Raises:
        ValueError: There is one of these ranks already.
    """
    _initialized()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    sets = here().part(_Sets)
    if added.ranks == global_process_set.ranks or any(s.ranks == added.ranks for s in sets.known.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    added._group = trigram.new_group(added.ranks)
    added.process_set_id, sets.next = sets.next, sets.next + 1
    sets.known[added.process_set_id] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; False: it was none of the job, or the one of all ranks."""
    found = here().part(_Sets).known.pop(process_set.process_set_id or 0, None)
    if found is None:
        return False
    process_set.process_set_id = None
    return True


def mpi_threads_supported() -> bool:
    """False: there is no MPI."""
    return False


mpi_enabled = mpi_built = gloo_enabled = ddl_built = ccl_built = rocm_built = mpi_threads_supported


def gloo_built() -> bool:
    """True: ranks need no launcher of MPI. Bytes travel by Trigram's own engine."""
    return True


def cuda_built() -> bool:
    """Whether tensors on GPUs can be sent: PyTorch has a GPU."""
    return torch.cuda.is_available()


nccl_built = cuda_built
