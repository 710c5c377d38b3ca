"""What a GPU has to offer: streams, events, pinned memory. And what a call on it looks like."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from trigram.runtime import logs
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group
from trigram.runtime.memory import empty
from trigram.runtime.world import current

PRIORITY = -1
"""Of streams: communication goes before the computation that it runs beside."""

Parcel = tuple[bool, int, torch.Tensor, int]
"""Whether it is sent, the peer's place, the tensor, its dtype's code."""


class Call(Protocol):
    """Something under route, as a :class:`trigram.Work` holds it."""

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
        self.side = torch.cuda.Stream(device, priority=PRIORITY)

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
        host = empty(nbytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostRegister(host.data_ptr(), nbytes, 0))
        if code != 0:  # Copies work all the same, through a buffer of the driver's.
            logs.warning(
                f"rank {current().rank}: could not pin {nbytes} bytes of host memory for GPU copies (CUDA "
                f"error {code}); copies still work, but are slower"
            )
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
    """Whether a tensor is on a GPU, so that its calls take a route of this room."""
    return t.device.type in kinds


def find(device: torch.device) -> Device:
    """The device of a tensor."""
    if device not in _devices:
        _devices[device] = kinds[device.type](device)
    return _devices[device]


class StartCall(Protocol):
    """Begins a collective on GPU tensors of a group; see ``routes.start``."""

    def __call__(
        self,
        group: Group,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
    ) -> Call:
        """From what was asked, and what is read and written."""


class Route(Protocol):
    """How a group's GPU tensors travel.

    Attributes:
        broken: A call has failed: the group agrees on a route anew.
        two_levels: AllReduce sums inside of hosts first.
    """

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

    def abort(self, why: str) -> None:
        """What is under route ends, well or not; the next call begins anew, on all ranks."""
