"""A device's streams, events and pinned memory, and the protocols of calls and routes on it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trigram.errors import TrigramError
from trigram.runtime import logs
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group
from trigram.runtime.memory import empty
from trigram.runtime.world import current

PRIORITY = -1
"""The priority of communication streams: above that of the computation that runs at the same time."""

Message = tuple[bool, int, torch.Tensor, int]
"""Whether this rank sends it, the peer's group rank, the tensor, the code of its dtype."""


class Call(Protocol):
    """An operation in flight, as :class:`trigram.Work` holds it."""

    def is_completed(self) -> bool:
        """Whether it has finished or failed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has finished; False: ``timeout`` seconds have passed before.

        Raises:
            TrigramError: It has failed.
        """

    def order(self) -> None:
        """Makes later work on the current stream wait for it."""


class FailedCall:
    """A call that could not start; waiting for it raises the error."""

    __slots__ = ("_error",)

    def __init__(self, error: TrigramError) -> None:
        self._error = error

    def is_completed(self) -> bool:
        """See :class:`Call`."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Call`."""
        raise self._error

    def order(self) -> None:
        """See :class:`Call`."""
        self.wait()


class Device(Protocol):
    """A device, as the routes use it."""

    index: int

    def stream(self) -> int:
        """The current stream's handle."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""

    def keep(self, t: torch.Tensor, stream: int) -> None:
        """Tells the allocator that the stream with this handle uses a tensor."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Registered host memory (uint8) that is pinned, so that the device copies to and from it
        directly."""

    def fetch(self, host: torch.Tensor, t: torch.Tensor) -> Callable[[], None]:
        """Starts copying ``t`` to the host, after the work on the current stream.

        Returns:
            A function that blocks until the copy has finished.
        """

    def behind(self) -> AbstractContextManager[object]:
        """A block in which a stream of its own is current, for results; it ends when they are there."""

    def mark(self) -> Callable[[], bool]:
        """Records an event on the current stream.

        Returns:
            A function that tells whether the stream has reached the event.
        """

    def here(self) -> Callable[[], None]:
        """Records an event on the current stream.

        Returns:
            A function that makes the stream which is current when it is called wait for the event.
        """


class Cuda:
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.side = torch.cuda.Stream(device, priority=PRIORITY)
        self.results = torch.cuda.Stream(device, priority=PRIORITY)

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
        if code != 0:  # Copies still work, through a buffer of the driver.
            logs.warning(
                f"rank {current().rank}: could not pin {nbytes} bytes of host memory for GPU copies (CUDA "
                f"error {code}); copies still work, but are slower"
            )
            with contextlib.suppress(
                RuntimeError
            ):  # clears the error, which the next CUDA call would report otherwise
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

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """See :class:`Device`."""
        with torch.cuda.stream(self.results):
            yield
            self.results.synchronize()  # the caller's tensors may be freed then

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
"""Device classes, by ``torch.device.type``."""
_devices: dict[torch.device, Device] = {}


def capturing() -> bool:
    """Whether a CUDA graph is being captured: no event may be queried meanwhile."""
    return any(device.capturing() for device in _devices.values())


def handles(t: torch.Tensor) -> bool:
    """Whether a tensor is on a device of ``kinds``, so that its collectives use :mod:`trigram.gpu.routes`."""
    return t.device.type in kinds


def find(device: torch.device) -> Device:
    """The :class:`Device` of a torch device, created at the first use."""
    if device not in _devices:
        _devices[device] = kinds[device.type](device)
    return _devices[device]


class StartCall(Protocol):
    """Starts a collective on GPU tensors of a group; :func:`trigram.gpu.routes.start` is one."""

    def __call__(
        self,
        group: Group,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """Starts the call ``asked``, which reads ``source`` and writes ``target``."""


class Route(Protocol):
    """How the data of a group's GPU tensors reach the other ranks.

    Attributes:
        broken: A call has failed; before the next call the ranks create a new route.
        two_levels: AllReduce first sums inside each host.
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
        """Starts the collective ``asked``, which reads ``source`` and writes ``target``."""

    def follow(self, call: Call) -> None:
        """The next collective reads what this call writes: it sends nothing if the call fails."""

    def batch_send_recv(self, messages: Sequence[Message], timeout: float | None) -> Call:
        """Starts sending and receiving several messages at once."""

    def abort(self, why: str) -> None:
        """Aborts the calls in flight; before the next call all ranks create a new route."""
