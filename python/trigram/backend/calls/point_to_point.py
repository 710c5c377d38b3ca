"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from trigram.backend.calls import tensors
from trigram.backend.calls.arguments import listed, only
from trigram.backend.calls.starting import OnDevice, Starting
from trigram.backend.handles.callbacks import _threads as callback_threads
from trigram.backend.handles.work import Work
from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import device, routes
from trigram.observe import profiling
from trigram.runtime import engine_codes
from trigram.runtime.group import Group

_REAL = {dtype: code for dtype, code in engine_codes.DTYPES.items() if not dtype.is_complex}
MESSAGES = ("send", "recv", "recvAnySource")
"""The names of messages between two ranks, as their handles have them."""


class PointToPoint(Starting):
    """The part of a process group that sends and receives."""

    def send(self, given: Any, dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank of the group."""
        return self._message(True, given, dst, tag)

    def recv(self, given: Any, src: int, tag: int = 0) -> Work:
        """Receives the next message of a rank with this tag."""
        return self._message(False, given, src, tag)

    def recv_anysource(self, given: Any, tag: int = 0) -> Work:
        """Receives the message with this tag that comes first, of any rank of the group."""
        return self._message(False, given, None, tag)

    def _message(self, sends: bool, given: Any, peer: int | None, tag: int) -> Work:
        what = "send" if sends else "recv" if peer is not None else "recvAnySource"
        group = self.trigram_group if self._aborted is None and not callback_threads else self._group()
        if not 0 <= tag < 1 << 31 or (peer is not None and not 0 <= peer < group.size):
            self._refuse(what, peer, tag)
        flat = code = finish = None
        try:
            (t,) = given  # the way of most messages: one contiguous tensor
            if (
                type(t) is torch.Tensor
                and t.is_cpu
                and t.is_contiguous()
                and not t.requires_grad
                and not t.is_neg()
            ):
                code, flat = _REAL[t.dtype], t
        except (KeyError, RuntimeError, ValueError):
            pass
        if code is None or flat is None:
            t = tensors.check(only(listed(given), what), what)
            flat, finish = _memory(t, sends)
            code = engine_codes.DTYPES[flat.dtype]
        event = profiling.begin(what, [t]) if profiling.enabled() else None
        call: Any
        if not t.is_cpu or "cpu" in device.kinds:
            if peer is None:
                raise UnsupportedError("recv: src is None, which only CPU tensors can have; name the sender")
            limit = group.timeout
            with self._job.here():
                call = OnDevice(routes.message(group, sends, peer, tag, flat, code, limit), flat.device)
        else:
            call, _ = group.core.message(
                sends, peer, tag, code, flat.numel(), flat.data_ptr(), True, not sends, group.timeout
            )
        work = self._handle(what, call, flat, () if sends else (t,), finish, event)
        if peer is None:
            work._sender = partial(_place, call, group)
        else:
            work._peer = group.rank if sends else peer
        return work

    def _refuse(self, what: str, peer: int | None, tag: int) -> NoReturn:
        if not 0 <= tag < 1 << 31:
            raise MisuseError(f"{what}: tag {tag} is invalid; it must be from 0 to 2**31 - 1")
        raise MisuseError(
            f"{what}: rank {peer} is not in the group, which has ranks 0 to {self.trigram_group.size - 1}"
        )


def _memory(t: torch.Tensor, sends: bool) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The memory of a message, and what remains to do when it has arrived there."""
    if sends:
        return tensors.moved(tensors.source(t)), None
    if t.requires_grad:
        torch.autograd.graph.increment_version(t)
    target = tensors.Target([t], filled=True)  # a shorter message leaves the rest as it is
    return tensors.moved(target.flat), target.finish


def _place(call: Any, group: Group) -> int:
    """The group rank of the message that a receive has taken; -1 if it has taken none."""
    sender = call.sender()
    return -1 if sender is None else group.ranks.index(sender)
