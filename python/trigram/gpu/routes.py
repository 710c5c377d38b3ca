"""Which route the GPU tensors of a group take.

There are three. The ranks of a group choose one together, at the first call:

* ``nccl``: NCCL transfers the data. The engine compares the ranks' calls and detects dead ranks, so that
errors
  are the same as on CPU tensors (``rust/engine/src/device``).
* ``host``: through pinned host memory and the engine, for GPUs without NCCL.
* ``hierarchical``: as ``host``, except for AllReduce: NCCL sums inside each host, and each GPU sends only a
shard to
  the other hosts (``host.py``).

``TRIGRAM_GPU_TRANSPORT`` selects one. ``auto``, the default, selects ``nccl`` on one host, and between hosts
that all have InfiniBand; otherwise ``hierarchical``, because on Ethernet the engine's shards by link rate
gain more; and ``host`` if a rank finds no NCCL.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from trigram.errors import ConfigError, TrigramError
from trigram.gpu.communicators import WRONG, error, forget, make, release, shrinks
from trigram.gpu.device import Call, FailedCall, Message, Route, find
from trigram.gpu.host import HostRoute
from trigram.gpu.nccl import NcclRoute, library
from trigram.runtime import job
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group
from trigram.runtime.job import Part
from trigram.runtime.records import all_gather_bytes
from trigram.runtime.world import current

_ROUTES = ("auto", "nccl", "hierarchical", "host")


@job.told
class _Routes(Part):
    """What this rank's calls on GPUs share.

    Attributes:
        messages: By device, the route of messages with tags.
        followed: By group, the call whose result its next collective reads.
        agreed: Groups that have agreed on a route.
    """

    def __init__(self) -> None:
        self.messages: dict[torch.device, HostRoute] = {}
        self.agreed: weakref.WeakSet[Group] = weakref.WeakSet()
        self.followed: weakref.WeakKeyDictionary[Group, Call] = weakref.WeakKeyDictionary()

    def finish(self) -> None:
        """Frees communicators and pinned memory while the engine still runs: NCCL can then finalise them
        cleanly."""
        self.messages.clear()
        for group in list(self.agreed):
            group.routes.clear()
        forget()


def _routes() -> _Routes:
    return job.here().part(_Routes)


def route(group: Group, device: torch.device) -> Route:
    """The route of a group's tensors on a device; its ranks agree on it at the first call, and after a
    failure."""
    found = _usable(group, device)
    if found is None:
        found = group.routes[device] = _agree(group, device)
        _routes().agreed.add(group)
    return found


def _usable(group: Group, device: torch.device) -> Route | None:
    found = cast(Route | None, group.routes.get(device))
    return None if found is None or found.broken else found


def is_hierarchical(group: Group, device: torch.device) -> bool:
    """Whether AllReduce on a device first sums inside each host."""
    return bool(route(group, device).two_levels)


def abort(group: Group, why: str) -> None:
    """Aborts a group's calls in flight on GPUs. All ranks call it, after their calls in the engine were
    aborted."""
    for found in group.routes.values():
        cast(Route, found).abort(why)


def start(
    group: Group,
    asked: Asked,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    splits: Splits,
    timeout: float | None,
) -> Call:
    """Starts the collective ``asked`` on tensors of one device."""
    t = source if source is not None else target
    assert t is not None
    before = _routes().followed.pop(group, None)
    if _usable(group, t.device) is None:
        # The ranks agree on a route in a group of their own. A rank that makes another call instead, such as
        # barrier, would not be compared with them there, and all would wait.
        try:
            group.core.check_consistency(asked, timeout, splits).wait()
        except TrigramError as e:
            return FailedCall(e)
    found = route(group, t.device)
    if before is not None:
        found.follow(before)
    return found.start(asked, source, target, splits, timeout)


def follow(group: Group, call: Call) -> None:
    """The group's next collective reads what this call writes: it sends nothing if the call fails."""
    _routes().followed[group] = call


def message(
    group: Group, sends: bool, peer: int, tag: int, t: torch.Tensor, code: int, timeout: float | None
) -> Call:
    """Starts sending or receiving a message, through the host: NCCL has no tags."""
    messages = _routes().messages
    if t.device not in messages:
        messages[t.device] = HostRoute(group, group, find(t.device), None)
    return messages[t.device].message(group, sends, peer, tag, t, code, timeout)


def batch_send_recv(group: Group, messages: Sequence[Message]) -> Call:
    """Starts sending and receiving several messages at once, with tensors on one device."""
    return route(group, messages[0][2].device).batch_send_recv(messages, group.timeout)


def _agree(group: Group, t: torch.device) -> Route:
    """Gathers what each rank has, and creates the route that all can use.

    Raises:
        UnsupportedError: NCCL is requested, and a rank has none; all ranks raise it, and it names the rank.
        ConfigError: Ranks request different routes, or an unknown one.
    """
    device = find(t)
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
    known = _ROUTES.index(asked) if not wrong else WRONG
    flags = bytes([known, nccl is not None, fabric, shrinks(nccl)])
    records = all_gather_bytes(alarm, flags + wrong.encode())
    for place, record in enumerate(records):
        if record[0] == WRONG:
            raise error(group.ranks[place], record[4:])
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
        shrink = all(r[3] for r in records)
        return NcclRoute(device, make(group, alarm, t, device, nccl, shrink))
    release(group, t)
    inside = start if asked == "hierarchical" else None
    return HostRoute(group, _derive(group, "through the host"), device, inside)


def _derive(group: Group, name: str) -> Group:
    return current().derive(group, f"{group.name}, {name}", group.ranks)
