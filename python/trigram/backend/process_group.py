"""The process group, and how one is made and left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trigram.backend import out_variants, stand_in
from trigram.backend.calls.barriers import Barriers
from trigram.backend.calls.reductions import Reductions
from trigram.backend.calls.transfers import Transfers
from trigram.backend.handles.futures import Future
from trigram.backend.handles.timeouts import seconds
from trigram.backend.handles.work import Work
from trigram.backend.identity import Identity, Options
from trigram.errors import UnsupportedError
from trigram.runtime import dynamo, job, world
from trigram.runtime.group import Group


class ProcessGroup(Reductions, Transfers, Barriers, Identity, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of ``torch.distributed`` whose calls the engine carries.

    Calls return a handle, ``handles/work.py``. With ``asyncOp=False`` in their options they run in the
    caller's thread, and the handle that they return has finished.

    Args:
        group: The ranks.
        store: The store that torch made for the group.
        timeout: Of calls that set none.
        options: The ``pg_options`` of the caller, which are kept.
        owns: Whether the job ends with this group.
    """

    def __init__(self, group: Group, store: Any, timeout: Any, options: Any, owns: bool) -> None:
        # With a store as well, torch 2.13 answers that the class is no alias of its own.
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg,arg-type]
        self._start_with(group)
        self._awaited = {}
        self._store, self._owns = store, owns
        self._job, self._stay = job.here(), job.here().stay
        self._options = options if options is not None else Options(timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A process group of some ranks of this one, which ``torch.distributed.split_group`` asks for.

        Args:
            ranks: Their ranks in this group; all of them call it.
            timeout: Of calls that set none; None: that of this group.
            opts: The options of the caller, which are kept.
            group_name: Its name in torch's registry.
            group_desc: What it is for.
            device_types: Ignored: a group serves all devices.

        Returns:
            None on ranks that are not in it.
        """
        del device_types
        if self._aborted is not None:
            self._group()
        with self._job.here():
            group = world.torch_group([self.trigram_group.ranks[place] for place in ranks])
            if group.rank < 0:
                return None
            group.timeout = self.trigram_group.timeout if timeout is None else seconds(timeout)
            store = dist.PrefixStore(f"{group_name}/", self._store)
            made = ProcessGroup(group, store, timeout or self._options._timeout, opts, False)
            made.setGroupName(group_name or group.name)
            made.setGroupDesc(group_desc or f"{self.getGroupDesc()}, split")
            stand_in.register(made)
            return made

    def abort(self) -> None:
        """Aborts the calls in flight, on all ranks of the group; later calls of this group raise too."""
        self._abort("abort was called")

    def _abort(self, why: str) -> None:
        self._aborted = why
        if self._stay.over or (present := self._job.world) is None:
            return
        for group in (self.trigram_group, *self._beside.values()):
            group.core.abort_all(f"{why} on rank {present.rank}")
        if self._owns:
            self.shutdown()

    def shutdown(self) -> None:
        """Ends the group; the default group leaves the job."""
        self._end(patient=True)

    def leave_at_once(self) -> None:
        """As :meth:`shutdown`, but does not wait until the other ranks have all that this one has sent."""
        self._end(patient=False)

    def _end(self, patient: bool) -> None:
        if self._aborted is None:
            self._aborted = "it was destroyed"
        if self._owns and not self._stay.over:
            self._job.leave(patient)
        self._beside.clear()
        self._callbacks.close()  # last: calls that fail by it have futures that complete there


dynamo.skip(*(kind for kind in ProcessGroup.__mro__ if kind.__module__.startswith("trigram.")), Work, Future)


def create(asked: Any, options: Any) -> ProcessGroup:
    """See :func:`trigram.backend.registration.create`."""
    out_variants.reach_out_variants()
    ranks = list(asked.global_ranks_in_group)
    timeout = seconds(asked.timeout)
    owns = False
    if ranks and not world.is_initialized():
        everyone = dist.is_initialized() and len(ranks) == dist.get_world_size()
        if not everyone:
            raise UnsupportedError(
                f"new_group: ranks {ranks} are not all ranks, and the default process group has another "
                'backend; call init_process_group("trigram"), or make a group of all ranks first'
            )
    if not world.is_initialized():
        owns = not ranks
        world.init(
            asked.store, asked.group_rank, asked.group_size, init_timeout=timeout or 300.0, op_timeout=timeout
        )
    if ranks:
        group = world.torch_group(ranks)
    else:
        group = world.current().group
        if (group.rank, group.size) != (asked.group_rank, asked.group_size):
            raise UnsupportedError(
                f"init_process_group: trigram.init has made this rank {group.rank} of {group.size}, and "
                f"torch asks for rank {asked.group_rank} of {asked.group_size}; call trigram.shutdown() "
                "before"
            )
    group.timeout = timeout
    made = ProcessGroup(group, asked.store, asked.timeout, options, owns)
    stand_in.register(made)
    return made
