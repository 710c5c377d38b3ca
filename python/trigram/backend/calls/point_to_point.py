"""Messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch

from trigram.backend.calls import profiling, tensors
from trigram.backend.calls.arguments import listed, only
from trigram.backend.calls.starting import Starting
from trigram.backend.handles.work import Work
from trigram.errors import MisuseError
from trigram.gpu import routes
from trigram.runtime import engine_codes


class PointToPoint(Starting):
    """The part of a process group that sends and receives."""

    def send(self, given: Any, dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank of the group."""
        return self._message(True, given, dst, tag)

    def recv(self, given: Any, src: int, tag: int = 0) -> Work:
        """Receives the next message of a rank with this tag."""
        return self._message(False, given, src, tag)

    def _message(self, sends: bool, given: Any, peer: int, tag: int) -> Work:
        what = "send" if sends else "recv"
        t = only(listed(given), what)
        tensors.check(t, what)
        group = self._group()
        self._check_message(what, peer, tag)
        event = profiling.begin(what, [t]) if profiling.enabled() else None
        finish = None
        if sends:
            memory = tensors.in_place(t)
            if memory is None:
                memory = tensors.source(t)
        else:
            if t.requires_grad:
                torch.autograd.graph.increment_version(t)
            memory = tensors.in_place(t)
            if memory is None:
                target = tensors.Target([t])
                memory, finish = target.flat, target.finish
        flat = tensors.moved(memory)
        code = engine_codes.DTYPES[flat.dtype]
        call: Any
        if not t.is_cpu:
            call = routes.message(group, sends, peer, tag, flat, code)
        else:
            call = group.core.message(
                sends, peer, tag, code, flat.numel(), flat.data_ptr(), True, group.timeout
            )
        work = self._handle(what, call, flat, () if sends else (t,), finish, event)
        work._peer = self.trigram_group.rank if sends else peer
        return work

    def _check_message(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= tag < 1 << 31:
            raise MisuseError(f"{what}: tag {tag} is invalid; it must be from 0 to 2**31 - 1")
        if not 0 <= peer < self.trigram_group.size:
            raise MisuseError(
                f"{what}: rank {peer} is not in the group, which has ranks 0 to {self.trigram_group.size - 1}"
            )
