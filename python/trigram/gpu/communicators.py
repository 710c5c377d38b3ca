"""Makes the communicators of NCCL: by a new unique id, or from one that has lost ranks.

With ``TRIGRAM_GPU_SHRINK=1`` the ranks of an elastic job that are left after a loss make their next
communicator from the last one (``ncclCommRevoke`` and ``ncclCommShrink``, NCCL 2.28.7) instead of aborting
it. They can if the new group has the same name and some of the same ranks, in the same order. If one of them
cannot, because NCCL's network has seen an error for example, all take a new id.

A communicator is kept for as long as its group can be used, and then until the next epoch of the job has made
its communicators: after that nobody asks for it.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass

import torch

from trigram import _core
from trigram.errors import AbortedError, ConfigError, PeerLostError, TrigramError, UnsupportedError
from trigram.gpu.device import PRIORITY, Device
from trigram.runtime import job, logs
from trigram.runtime.group import Group
from trigram.runtime.job import World
from trigram.runtime.records import all_gather_bytes
from trigram.runtime.world import current

WRONG = 255
"""The first byte of a record that holds an error message."""
_SHRINKING = 30.0
"""Seconds that the ranks which are left may take to shrink a communicator."""
_ANOTHER = "another rank could not"
"""What a rank says that gave up because another could not shrink."""
_REVOKING = 5.0
"""Seconds that a rank may take to end what was under way."""
_ID = 128


@dataclass
class _Made:
    """A communicator of a group by that name: what a later group of fewer ranks can be made from.

    Attributes:
        core: The communicator.
        label: What all its ranks know it by: its unique id, and how often it was shrunk.
        place: This rank's place in it.
        size: The number of its ranks.
        group: The group.
        world: The epoch of the job that it belongs to.
    """

    core: _core.DeviceGroup
    label: bytes
    place: int
    size: int
    group: weakref.ref[Group]
    world: World


class _Kept:
    """The communicators of this rank that later groups can be made from.

    Attributes:
        made: The last of a group of that name on a device.
        epochs: The last two epochs of the job in which a communicator was made.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[torch.device, str], _Made] = {}
        self.epochs: list[World] = []


def _kept() -> _Kept:
    return job.here().part(_Kept)


def shrinks(nccl: _core.Nccl | None) -> bool:
    """Whether this rank's communicators are kept for the ranks that are left after a loss."""
    wanted = os.environ.get("TRIGRAM_GPU_SHRINK") == "1"
    return wanted and nccl is not None and nccl.can_shrink and current().elastic is not None


def make(
    group: Group, alarm: Group, device: torch.device, found: Device, nccl: _core.Nccl, shrink: bool
) -> _core.DeviceGroup:
    """A communicator of the group's ranks; all of them make it.

    Args:
        group: The group.
        alarm: A group of the same ranks without calls; the engine reports failures through it.
        device: This rank's device, as torch names it.
        found: This rank's device.
        nccl: The NCCL library.
        shrink: Whether all ranks keep their communicators.

    Raises:
        UnsupportedError: NCCL cannot make an id; all ranks raise it.
        TrigramError: The ranks could not be connected.
    """
    former = release(group, device)
    _drop_old()
    if not shrink:
        del former  # a rank that came later cannot shrink: aborts it, which frees the GPU's memory
        id = _unique_id(group, alarm, nccl)
        return _core.DeviceGroup(
            group.core, alarm.core, nccl, found.index, id, PRIORITY, False, group.timeout
        )
    if former is not None and former.world is current():
        former = None  # its ranks may be in use: another group has the same name, or a call has failed
    made = _shrunk(group, alarm, former)
    if made is None:
        del former  # aborts it, which frees the GPU's memory
        id = _unique_id(group, alarm, nccl)
        core = _core.DeviceGroup(group.core, alarm.core, nccl, found.index, id, PRIORITY, True, group.timeout)
        made = _Made(core, id, group.rank, group.size, weakref.ref(group), current())
    _kept().made[_key(group, device)] = made
    return made.core


def release(group: Group, device: torch.device) -> _Made | None:
    """Takes the last communicator that a group of that name had; it ends when the caller forgets it."""
    return _kept().made.pop(_key(group, device), None)


def _key(group: Group, device: torch.device) -> tuple[torch.device, str]:
    """What a group and the one that follows it in the next epoch have in common."""
    return device, "world" if group is current().group else group.name


def _drop_old() -> None:
    """Ends communicators that no later group can be made from."""
    kept = _kept()
    if not kept.epochs or kept.epochs[-1] is not current():
        kept.epochs.append(current())
        del kept.epochs[:-2]
    for key, made in list(kept.made.items()):
        if made.world not in kept.epochs or (made.world is current() and made.group() is None):
            del kept.made[key]


def _shrunk(group: Group, alarm: Group, former: _Made | None) -> _Made | None:
    """The former communicator without the ranks that are gone; None, on all ranks, if a rank cannot."""
    mine = b""
    if former is not None:
        try:
            former.core.revoke(_REVOKING)
            mine = struct.pack("<II", former.place, former.size) + former.label
        except TrigramError as e:  # the others learn of it before they wait for this rank
            logs.info(f"rank {current().rank}: group {group.name} needs a new communicator: {e}")
    records = all_gather_bytes(alarm, mine)
    places = [struct.unpack_from("<I", r)[0] for r in records if r]
    same = bool(mine) and all(r and r[4:] == mine[4:] for r in records)
    if not same or former is None or places != sorted(set(places)) or len(places) >= former.size:
        return None
    lost = sorted(set(range(former.size)) - set(places))
    attempt = current().derive(alarm, f"{group.name}, shrinking", group.ranks)
    core, why = None, ""
    try:
        core = former.core.shrink(group.core, alarm.core, attempt.core, lost, _SHRINKING)
    except PeerLostError:
        raise  # another rank is lost: the job changes its membership again
    except AbortedError:
        why = _ANOTHER
    except TrigramError as e:
        why = str(e)
        attempt.core.abort(1, f"rank {current().rank} could not shrink the communicator")
    except BaseException as e:  # Ctrl-C: the others wait in NCCL, and then for this rank's outcome
        for each in (attempt, alarm):
            each.core.abort(each.core.next() + 1, f"rank {current().rank}: {type(e).__name__}")
        raise
    outcomes = all_gather_bytes(alarm, why.encode())
    texts = [outcome.decode(errors="replace") for outcome in outcomes]
    for rank, text in zip(group.ranks, texts, strict=True):
        if text and text != _ANOTHER:
            logs.warning(
                f"group {group.name}: rank {rank} could not shrink the communicator ({text}); "
                "the ranks make a new one"
            )
    if any(texts):
        return None
    assert core is not None
    return _Made(
        core,
        former.label + struct.pack(f"<{len(lost)}I", *lost) + b"|",
        group.rank,
        group.size,
        weakref.ref(group),
        current(),
    )


def _unique_id(group: Group, alarm: Group, nccl: _core.Nccl) -> bytes:
    """The unique id of a new NCCL communicator, which the first rank creates and all ranks receive."""
    mine = b"\0"
    if group.rank == 0:
        try:
            mine += nccl.unique_id()
        except TrigramError as e:  # for example: no network interface
            mine = bytes([WRONG]) + str(e).encode()
    first = all_gather_bytes(alarm, mine)[0]
    if first[0] == WRONG:
        raise error(group.ranks[0], first[1:])
    return first[1 : 1 + _ID]


def error(rank: int, text: bytes) -> TrigramError:
    """The error that a rank has told the others."""
    message = text.decode(errors="replace")
    kind = ConfigError if "TRIGRAM_GPU_TRANSPORT" in message else UnsupportedError
    return kind(f"rank {rank}: {message}")


def forget() -> None:
    """Ends the communicators that were kept, while the engine still runs."""
    kept = _kept()
    kept.made.clear()
    kept.epochs.clear()
