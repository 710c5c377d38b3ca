"""Collectives on GPU tensors: which way they take.

Three ways, chosen once for a group, by all of its ranks together:

* ``nccl``: NCCL carries the data. The engine compares what ranks call and watches who is alive, so
  errors are those of CPU tensors (``rust/engine/src/device``).
* ``host``: through pinned host memory and the engine, for GPUs with no NCCL between them.
* ``hierarchical``: as ``host``, but for AllReduce, which NCCL does inside each host, so that only a
  share of the data leaves each GPU (``trigram/staging.py``).

``TRIGRAM_GPU_TRANSPORT`` names one. ``auto``: NCCL inside one host, and between hosts that all have
InfiniBand; else hierarchical, since on Ethernet balanced rates are worth more; ``host`` where a rank
finds no NCCL.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trigram import _core
from trigram.errors import ConfigError, MisuseError, TrigramError, UnsupportedError
from trigram.runtime import engine_codes as codes
from trigram.runtime import world
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.world import Group, current

if TYPE_CHECKING:
    from trigram.gpu.host import Staged

_WAYS = ("auto", "nccl", "hierarchical", "host")
_RECORD = 512
"""Bytes by which ranks agree on a way: flags, and what is wrong; or NCCL's id."""
_WRONG = 255
_PRIORITY = -1
"""Communication goes before the computation that it runs beside."""

Parcel = tuple[bool, int, torch.Tensor, int]
"""Whether it is sent, the peer's place, the tensor, its dtype's code."""


class Call(Protocol):
    """Something under way, as a :class:`trigram.Work` holds it."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; false if the timeout came first."""

    def order(self) -> None:
        """What the current stream is given from now on comes after it."""


class Device(Protocol):
    """What a kind of device has to offer."""

    index: int

    def stream(self) -> int:
        """The current stream's handle."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""

    def keep(self, t: torch.Tensor, stream: int) -> None:
        """Tells the allocator that another stream uses a tensor."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Registered host memory that the device copies to and from without help."""

    def fetch(self, host: torch.Tensor, t: torch.Tensor) -> Callable[[], None]:
        """Begins a copy to the host, after the current stream; what comes back waits for its end."""

    def mark(self) -> Callable[[], bool]:
        """A point in the current stream; what comes back says whether it has been reached."""

    def here(self) -> Callable[[], None]:
        """A point in the current stream; what comes back lets the stream that is current then wait for it."""


class Cuda:
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.side = torch.cuda.Stream(device, priority=_PRIORITY)

    def stream(self) -> int:
        """See :class:`Device`."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capturing(self) -> bool:
        """See :class:`Device`."""
        return torch.cuda.is_current_stream_capturing()

    def keep(self, t: torch.Tensor, stream: int) -> None:
        """See :class:`Device`."""
        t.record_stream(torch.cuda.ExternalStream(stream, self.device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See :class:`Device`."""
        from trigram.collectives import calls as collectives

        host = collectives.empty(nbytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostRegister(host.data_ptr(), nbytes, 0))
        if code != 0:  # Copies work all the same, through a buffer of the driver's.
            print(f"trigram: {nbytes} bytes could not be pinned (CUDA error {code})", file=sys.stderr)
            with contextlib.suppress(RuntimeError):  # or the next to ask would be told of this error
                torch.zeros(1, device=self.device)
        else:
            at = host.data_ptr()
            weakref.finalize(host, runtime.cudaHostUnregister, at).atexit = False
        return host

    def fetch(self, host: torch.Tensor, t: torch.Tensor) -> Callable[[], None]:
        """See :class:`Device`."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            host.copy_(t, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self.side)
        t.record_stream(self.side)
        return event.synchronize

    def mark(self) -> Callable[[], bool]:
        """See :class:`Device`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query

    def here(self) -> Callable[[], None]:
        """See :class:`Device`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)


kinds: dict[str, Callable[[torch.device], Device]] = {"cuda": Cuda}
"""Devices by the type that torch gives them."""
_devices: dict[torch.device, Device] = {}


def capturing() -> bool:
    """Whether a graph is being captured, so that nothing may be asked of events."""
    return any(device.capturing() for device in _devices.values())


def handles(t: torch.Tensor) -> bool:
    """Whether a tensor goes this way, and not the engine's."""
    return t.device.type in kinds


def find(device: torch.device) -> Device:
    """The device of a tensor."""
    if device not in _devices:
        _devices[device] = kinds[device.type](device)
    return _devices[device]


class _OnStream:
    """A call of NCCL's, and the device that it is on."""

    __slots__ = ("_call", "_captured", "_device", "_way")

    def __init__(self, call: _core.DeviceCall, device: Device, way: ByNccl) -> None:
        self._call, self._device, self._way = call, device, way
        # In a graph there is only an order: nothing has happened yet.
        self._captured = device.capturing()

    def is_completed(self) -> bool:
        """See :class:`Call`."""
        return self._captured or self._call.is_completed()

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Call`."""
        if self._captured or (timeout is None and os.environ.get("TRIGRAM_GPU_WAIT") == "stream"):
            self.order()
            return True
        try:
            return self._call.wait(timeout)
        except TrigramError:
            self._way.broken = True
            raise

    def order(self) -> None:
        """See :class:`Call`."""
        try:
            self._call.order(self._device.stream())
        except TrigramError:
            self._way.broken = True
            raise


class _Failed:
    """A call that failed before it began, as its group had: the error is told where it is waited for."""

    def __init__(self, error: TrigramError, way: ByNccl) -> None:
        self._error, self._way = error, way

    def is_completed(self) -> bool:
        """See :class:`Call`."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Call`."""
        self._way.broken = True
        raise self._error

    def order(self) -> None:
        """See :class:`Call`."""
        self.wait()


class ByNccl:
    """NCCL carries the data, between hosts too.

    Args:
        group: The ranks.
        alarm: The same ranks; nobody calls it any more.
        device: This rank's.
        nccl: The library.
        id: What the communicator's ranks meet by.
    """

    two_levels = False

    def __init__(self, group: Group, alarm: Group, device: Device, nccl: _core.Nccl, id: bytes) -> None:
        self.device = device
        self.broken = False
        self.core = _core.DeviceGroup(
            group.core, alarm.core, nccl, device.index, id, _PRIORITY, group.timeout
        )

    def start(
        self,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """Begins a collective, after what the current stream was given."""
        given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
        wanted = (0, 0) if target is None else (target.data_ptr(), target.nbytes)
        witnessed = not self.device.capturing()
        return self._begin(
            lambda caller: self.core.start(asked, given + wanted, caller, witnessed, timeout, splits),
            [t for t in (source, target) if t is not None],
        )

    def exchange(self, parcels: Sequence[Parcel]) -> Call:
        """Begins messages that travel together."""
        flat = [(sends, peer, t.data_ptr(), t.numel(), code) for sends, peer, t, code in parcels]
        return self._begin(lambda caller: self.core.exchange(flat, caller), [t for _, _, t, _ in parcels])

    def give_up(self, why: str) -> None:
        """What is under way ends, here; the next call begins anew."""
        self.broken = True
        self.core.abort(why)

    def _begin(self, make: Callable[[int], _core.DeviceCall], tensors: list[torch.Tensor]) -> Call:
        try:
            call = make(self.device.stream())
        except (UnsupportedError, MisuseError):
            raise  # nothing was begun
        except TrigramError as e:
            return _Failed(e, self)
        for t in tensors:
            self.device.keep(t, self.core.stream)
        return _OnStream(call, self.device, self)


class Way(Protocol):
    """How a group's GPU tensors travel."""

    broken: bool
    two_levels: bool

    def start(
        self,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """Begins a collective."""

    def exchange(self, parcels: Sequence[Parcel]) -> Call:
        """Begins messages that travel together."""

    def give_up(self, why: str) -> None:
        """What is under way ends, well or not; the next call begins anew, on all ranks."""


_mail: dict[torch.device, Staged] = {}
_agreed: weakref.WeakSet[Group] = weakref.WeakSet()
"""Groups that have a way."""


def way(group: Group, device: torch.device) -> Way:
    """How tensors of a device travel in a group: agreed on the first time, and after a failure."""
    found: Way | None = group.ways.get(device)
    if found is None or found.broken:
        found = group.ways[device] = _agree(group, find(device))
        _agreed.add(group)
    return found


def is_hierarchical(group: Group, device: torch.device) -> bool:
    """Whether tensors of a device are combined inside of hosts first."""
    return bool(way(group, device).two_levels)


def give_up(group: Group, why: str) -> None:
    """All ranks give up what is under way on GPUs in a group; all call it, after their calls were aborted."""
    for way in group.ways.values():
        way.give_up(why)


def start(
    group: Group, asked: Asked, source: torch.Tensor | None, target: torch.Tensor | None, splits: Splits
) -> Call:
    """Begins a collective on tensors of one device."""
    t = source if source is not None else target
    assert t is not None
    return way(group, t.device).start(asked, source, target, splits, group.timeout)


def message(group: Group, sends: bool, peer: int, tag: int, t: torch.Tensor, code: int) -> Call:
    """Begins a message: through the host, where tags are known."""
    if t.device not in _mail:
        from trigram.gpu.host import Staged

        _mail[t.device] = Staged(group, group, find(t.device), inside=False)
    return _mail[t.device].message(group, sends, peer, tag, t, code)


def exchange(group: Group, parcels: Sequence[Parcel]) -> Call:
    """Begins messages that travel together, of tensors on one device, among those that they are between."""
    return way(group, parcels[0][2].device).exchange(parcels)


def library() -> _core.Nccl:
    """NCCL: the copy that torch has loaded, or whatever is installed.

    Raises:
        UnsupportedError: There is none; the message says where it was looked for.
    """
    return _core.Nccl([*site.getsitepackages(), site.getusersitepackages(), *sys.path])


def _agree(group: Group, device: Device) -> Way:
    """Ranks tell each other what they have, and take one way.

    Raises:
        UnsupportedError: A rank lacks what was asked for; the message names it, on all ranks.
        ConfigError: Ranks ask for different ways, or for one that there is not.
    """
    asked = os.environ.get("TRIGRAM_GPU_TRANSPORT", "auto")
    wrong = "" if asked in _WAYS else f"TRIGRAM_GPU_TRANSPORT={asked}: there are {', '.join(_WAYS)}"
    alarm = _derive(group, "on GPUs")
    nccl = None
    try:
        nccl = library() if asked != "host" and not wrong else None
    except TrigramError as e:
        wrong = str(e) if asked == "nccl" else ""
    fabric = any(Path("/sys/class/infiniband").glob("*"))
    flags = bytes([_WAYS.index(asked) if not wrong else _WRONG, nccl is not None, fabric])
    records = _gather(alarm, flags + wrong.encode())
    for place, record in enumerate(records):
        if record[0] == _WRONG:
            raise _error(group.ranks[place], record[3:])
        if record[0] != records[0][0]:
            raise ConfigError(
                f"TRIGRAM_GPU_TRANSPORT is {_WAYS[records[0][0]]} on rank {group.ranks[0]} and "
                f"{_WAYS[record[0]]} on rank {group.ranks[place]}; set it alike everywhere"
            )
    hosts = group.hosts()
    if asked in ("auto", "hierarchical"):
        fast = len(hosts) == 1 or (asked == "auto" and all(r[2] for r in records))
        asked = "hierarchical" if not fast else "nccl" if all(r[1] for r in records) else "host"
    if asked == "nccl":
        assert nccl is not None
        return ByNccl(group, alarm, device, nccl, _meeting(group, alarm, nccl))
    from trigram.gpu.host import Staged

    return Staged(group, _derive(group, "through the host"), device, inside=asked == "hierarchical")


def _meeting(group: Group, alarm: Group, nccl: _core.Nccl) -> bytes:
    """The id by which NCCL's ranks meet: the first rank's, told to all."""
    mine = b"\0"
    if group.rank == 0:
        try:
            mine += nccl.unique_id()
        except TrigramError as e:  # no network interface, say
            mine = bytes([_WRONG]) + str(e).encode()
    first = _gather(alarm, mine)[0]
    if first[0] == _WRONG:
        raise _error(group.ranks[0], first[1:])
    return first[1:129]


def _error(rank: int, text: bytes) -> TrigramError:
    said = text.rstrip(b"\0").decode(errors="replace")
    kind = ConfigError if "TRIGRAM_GPU_TRANSPORT" in said else UnsupportedError
    return kind(f"rank {rank}: {said}")


def _derive(group: Group, name: str) -> Group:
    return current().derive(group, f"{group.name}, {name}", group.ranks)


def _gather(group: Group, mine: bytes) -> list[bytes]:
    """Everybody's record, filled up with zeros."""
    mine = mine[:_RECORD].ljust(_RECORD, b"\0")
    inp = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    out = torch.empty(group.size * len(mine), dtype=torch.uint8)
    memory = (inp.data_ptr(), inp.nbytes, out.data_ptr(), out.nbytes)
    group.core.run((codes.ALL_GATHER, codes.DTYPES[torch.uint8], len(mine), 0, 0, 0), memory, group.timeout)
    data = bytes(out.tolist())
    return [data[i : i + len(mine)] for i in range(0, len(data), len(mine))]


def _forget() -> None:
    """Communicators and pinned memory do not outlive the world; while it lasts, NCCL's end well."""
    from trigram.collectives import calls as collectives

    for work in [w for w in collectives._in_flight if w.is_completed()]:
        collectives._in_flight.discard(work)
    _mail.clear()
    for group in list(_agreed):
        group.ways.clear()


world.at_exit.append(_forget)
