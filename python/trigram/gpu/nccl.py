"""The NCCL route: NCCL transfers the data; the engine compares the ranks' calls and detects dead ranks."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Callable, Sequence

import torch

from trigram import _core
from trigram.errors import MisuseError, TrigramError, UnsupportedError
from trigram.gpu.device import Call, Device, FailedCall, Message
from trigram.runtime.engine_codes import Asked, Splits


class _OnStream:
    """A call of NCCL in flight."""

    __slots__ = ("_call", "_captured", "_device", "_route")

    def __init__(self, call: _core.DeviceCall, device: Device, route: NcclRoute) -> None:
        self._call, self._device, self._route = call, device, route
        # Capturing a graph only records the call: there is nothing to wait for.
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


class _Failed(FailedCall):
    """A call that could not start, because its group had failed."""

    __slots__ = ("_route",)

    def __init__(self, error: TrigramError, route: NcclRoute) -> None:
        super().__init__(error)
        self._route = route

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Call`."""
        self._route.broken = True
        return super().wait(timeout)


class NcclRoute:
    """The NCCL route, inside hosts and between them.

    Args:
        device: This rank's device.
        core: The communicator.
    """

    two_levels = False

    def __init__(self, device: Device, core: _core.DeviceGroup) -> None:
        self.device, self.core = device, core
        self.broken = False

    def start(
        self,
        asked: Asked,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        splits: Splits,
        timeout: float | None,
    ) -> Call:
        """See :class:`trigram.gpu.device.Route`; it reads ``source`` after the work on the current stream."""
        given = (0, 0) if source is None else (source.data_ptr(), source.nbytes)
        wanted = (0, 0) if target is None else (target.data_ptr(), target.nbytes)
        checked = not self.device.capturing()
        return self._begin(
            lambda caller: self.core.start(asked, given + wanted, caller, checked, timeout, splits),
            [t for t in (source, target) if t is not None],
        )

    def follow(self, call: Call) -> None:
        """See :class:`trigram.gpu.device.Route`: it may be a call of another communicator."""
        call.wait()

    def batch_send_recv(self, messages: Sequence[Message], timeout: float | None) -> Call:
        """See :class:`trigram.gpu.device.Route`."""
        records = [(sends, peer, t.data_ptr(), t.numel(), code) for sends, peer, t, code in messages]
        return self._begin(
            lambda caller: self.core.send_and_receive(records, caller, timeout),
            [t for _, _, t, _ in messages],
        )

    def abort(self, why: str) -> None:
        """See :class:`trigram.gpu.device.Route`; aborts on this rank."""
        self.broken = True
        self.core.abort(why)

    def _begin(self, make: Callable[[int], _core.DeviceCall], tensors: list[torch.Tensor]) -> Call:
        try:
            call = make(self.device.stream())
        except (UnsupportedError, MisuseError):
            raise  # nothing has started
        except TrigramError as e:
            return _Failed(e, self)
        for t in tensors:
            self.device.keep(t, self.core.stream)
        return _OnStream(call, self.device, self)


def library() -> _core.Nccl:
    """The NCCL library: the copy that torch has loaded, or an installed one.

    Raises:
        UnsupportedError: There is none; the message lists where it was searched for.
    """
    return _core.Nccl([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
