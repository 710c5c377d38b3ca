"""Which route the GPU tensors of a group take.

There are three, chosen once for a group, by all of its ranks together:

* ``nccl``: NCCL carries the data. The engine compares what ranks call and watches who is alive, so
  errors are those of CPU tensors (``rust/engine/src/device``).
* ``host``: through pinned host memory and the engine, for GPUs with no NCCL between them.
* ``hierarchical``: as ``host``, but for AllReduce, which NCCL does inside each host, so that only a
  share of the data leaves each GPU (``host.py``).

``TRIGRAM_GPU_TRANSPORT`` names one. ``auto``: NCCL inside one host, and between hosts that all have
InfiniBand; else hierarchical, since on Ethernet balanced rates are worth more; ``host`` where a rank
finds no NCCL.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from trigram import _core
from trigram.errors import ConfigError, TrigramError, UnsupportedError
from trigram.gpu.device import Call, Device, Parcel, Route, find
from trigram.gpu.host import HostRoute
from trigram.gpu.nccl import NcclRoute, library
from trigram.runtime import world
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group
from trigram.runtime.records import all_gather_bytes
from trigram.runtime.world import current

_ROUTES = ("auto", "nccl", "hierarchical", "host")
_WRONG = 255

_mail: dict[torch.device, HostRoute] = {}
"""By device, the route of messages with tags."""
_agreed: weakref.WeakSet[Group] = weakref.WeakSet()
"""Groups that have agreed on a route."""


def route(group: Group, device: torch.device) -> Route:
    """How tensors of a device travel in a group: agreed on the first time, and after a failure."""
    found = cast(Route | None, group.routes.get(device))
    if found is None or found.broken:
        found = group.routes[device] = _agree(group, find(device))
        _agreed.add(group)
    return found


def is_hierarchical(group: Group, device: torch.device) -> bool:
    """Whether tensors of a device are combined inside of hosts first."""
    return bool(route(group, device).two_levels)


def abort(group: Group, why: str) -> None:
    """All ranks give up what is under route on GPUs in a group; all call it, after their calls were aborted."""
    for found in group.routes.values():
        cast(Route, found).abort(why)


def start(
    group: Group, asked: Asked, source: torch.Tensor | None, target: torch.Tensor | None, splits: Splits
) -> Call:
    """Begins a collective on tensors of one device."""
    t = source if source is not None else target
    assert t is not None
    return route(group, t.device).start(asked, source, target, splits, group.timeout)


def message(group: Group, sends: bool, peer: int, tag: int, t: torch.Tensor, code: int) -> Call:
    """Begins a message: through the host, where tags are known."""
    if t.device not in _mail:
        _mail[t.device] = HostRoute(group, group, find(t.device), None)
    return _mail[t.device].message(group, sends, peer, tag, t, code)


def exchange(group: Group, parcels: Sequence[Parcel]) -> Call:
    """Begins messages that travel together, of tensors on one device, among those that they are between."""
    return route(group, parcels[0][2].device).exchange(parcels)


def _agree(group: Group, device: Device) -> Route:
    """Ranks tell each other what they have, and take one route.

    Raises:
        UnsupportedError: A rank lacks what was asked for; the message names it, on all ranks.
        ConfigError: Ranks ask for different routes, or for one that there is not.
    """
    asked = os.environ.get("TRIGRAM_GPU_TRANSPORT", "auto")
    wrong = (
        ""
        if asked in _ROUTES
        else f"TRIGRAM_GPU_TRANSPORT={asked!r} is invalid; set it to one of {', '.join(_ROUTES)}"
    )
    alarm = _derive(group, "on GPUs")
    nccl = None
    try:
        nccl = library() if asked != "host" and not wrong else None
    except TrigramError as e:
        wrong = str(e) if asked == "nccl" else ""
    fabric = any(Path("/sys/class/infiniband").glob("*"))
    flags = bytes([_ROUTES.index(asked) if not wrong else _WRONG, nccl is not None, fabric])
    records = all_gather_bytes(alarm, flags + wrong.encode())
    for place, record in enumerate(records):
        if record[0] == _WRONG:
            raise _error(group.ranks[place], record[3:])
        if record[0] != records[0][0]:
            raise ConfigError(
                f"TRIGRAM_GPU_TRANSPORT is {_ROUTES[records[0][0]]} on rank {group.ranks[0]} and "
                f"{_ROUTES[record[0]]} on rank {group.ranks[place]}; set it to the same value on all ranks"
            )
    hosts = group.hosts()
    if asked in ("auto", "hierarchical"):
        fast = len(hosts) == 1 or (asked == "auto" and all(r[2] for r in records))
        asked = "hierarchical" if not fast else "nccl" if all(r[1] for r in records) else "host"
    if asked == "nccl":
        assert nccl is not None
        return NcclRoute(group, alarm, device, nccl, _meeting(group, alarm, nccl))
    inside = start if asked == "hierarchical" else None
    return HostRoute(group, _derive(group, "through the host"), device, inside)


def _meeting(group: Group, alarm: Group, nccl: _core.Nccl) -> bytes:
    """The id by which NCCL's ranks meet: the first rank's, told to all."""
    mine = b"\0"
    if group.rank == 0:
        try:
            mine += nccl.unique_id()
        except TrigramError as e:  # no network interface, say
            mine = bytes([_WRONG]) + str(e).encode()
    first = all_gather_bytes(alarm, mine)[0]
    if first[0] == _WRONG:
        raise _error(group.ranks[0], first[1:])
    return first[1:129]


def _error(rank: int, text: bytes) -> TrigramError:
    said = text.decode(errors="replace")
    kind = ConfigError if "TRIGRAM_GPU_TRANSPORT" in said else UnsupportedError
    return kind(f"rank {rank}: {said}")


def _derive(group: Group, name: str) -> Group:
    return current().derive(group, f"{group.name}, {name}", group.ranks)


def _end() -> None:
    """Communicators and pinned memory do not outlive the world; while it lasts, NCCL's end well."""
    _mail.clear()
    for group in list(_agreed):
        group.routes.clear()


world.at_exit.append(_end)
