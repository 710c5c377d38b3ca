"""The NCCL route: NCCL carries the data; the engine compares what ranks call and watches who is alive."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Callable, Sequence

import torch

from trigram import _core
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.gpu.device import PRIORITY, Call, Device, Parcel
from trigram.runtime.engine_codes import Asked, Splits
from trigram.runtime.group import Group


class _OnStream:
    """A call of NCCL's, and the device that it is on."""

    __slots__ = ("_call", "_captured", "_device", "_route")

    def __init__(self, call: _core.DeviceCall, device: Device, route: NcclRoute) -> None:
        self._call, self._device, self._route = call, device, route
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
            self._route.broken = True
            raise

    def order(self) -> None:
        """See :class:`Call`."""
        try:
            self._call.order(self._device.stream())
        except TrigramError:
            self._route.broken = True
            raise


class _Failed:
    """A call that failed before it began, as its group had: the error is told where it is waited for."""

    def __init__(self, error: TrigramError, route: NcclRoute) -> None:
        self._error, self._route = error, route

    def is_completed(self) -> bool:
        """See :class:`Call`."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Call`."""
        self._route.broken = True
        raise self._error

    def order(self) -> None:
        """See :class:`Call`."""
        self.wait()


class NcclRoute:
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
        self.core = _core.DeviceGroup(group.core, alarm.core, nccl, device.index, id, PRIORITY, group.timeout)

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

    def abort(self, why: str) -> None:
        """What is under route ends, here; the next call begins anew."""
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


def library() -> _core.Nccl:
    """NCCL: the copy that torch has loaded, or whatever is installed.

    Raises:
        UnsupportedError: There is none; the message says where it was looked for.
    """
    return _core.Nccl([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
